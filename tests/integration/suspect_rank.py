"""Ranks with suspect losses: of unusual data, or of a group that computes wrongly. All else is as in any run."""

from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from spare_megatron.mcore.model.pipeline import Item
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import assembly, rank

FACTOR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoiled:
    """A loss that is `FACTOR` times what it is: on one group alone, and there only the first time, or for all."""

    step: int
    shard: int
    group: int | None = None
    is_transient: bool = False


def run_suspect_rank(spoiled: tuple[Spoiled, ...], spec: RankSpec, reports: Connection) -> None:
    left = [one for one in spoiled if one.group in (None, spec.group)]

    class Suspect(GroupTrainer):
        def _loss(self, terms: Any, item: Item) -> Tensor:
            for one in left:
                if (one.step, one.shard, 0) == (self._step, *item.microbatch.unit):
                    total, count = terms["loss"]
                    terms = {**terms, "loss": (total * FACTOR, count)}
                    if one.is_transient:
                        left.remove(one)
                    break
            return super()._loss(terms, item)

    assembly.GroupTrainer = Suspect
    rank.run_rank(spec, reports)


def suspect_ranks(*spoiled: Spoiled) -> Any:
    """For `start_run`."""
    return partial(run_suspect_rank, spoiled)
