"""Ids, and the position of a rank inside its group."""

from dataclasses import dataclass
from typing import NewType

GroupId = NewType("GroupId", int)
"""Index of a data-parallel group, 0 to num_groups - 1. Never reused within a run."""

ShardId = NewType("ShardId", int)
"""Index of a shard of every global batch. There are as many shards as groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions. A group is tensor x context x pipeline ranks."""

    num_groups: int
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def ranks_per_group(self) -> int:
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def num_ranks(self) -> int:
        return self.num_groups * self.ranks_per_group
