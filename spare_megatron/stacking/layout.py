"""Ids of groups, shards and state partitions, position of ranks inside groups and on nodes, parts of pipelines."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, NewType

GroupId = NewType("GroupId", int)
"""Index of a data-parallel group. Never reused within a run."""


class Member(NamedTuple):
    """A group in one incarnation: 0 at first, then ever higher. Votes, fences and admissions name members."""

    group: GroupId
    incarnation: int = 0


ShardId = NewType("ShardId", int)
"""Index of a shard of every global batch. There are as many shards as home groups."""

PartitionId = NewType("PartitionId", int)
"""Index of a state partition, a part of a rank position's flat parameter space. There are as many as home groups."""

PlaceId = NewType("PlaceId", int)
"""A node index of the layout, 0 to num_nodes - 1."""

MachineId = NewType("MachineId", int)
"""A machine, for as long as the run lasts: those of the start have the id of their first place, further ones follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions. A group has tensor x context x data x pipeline ranks, the first varying
    fastest; `data_parallel` is the number of its lanes, the replicas of the model inside it.
    """

    num_groups: int
    data_parallel: int = 1
    expert_parallel: int = 1
    """Consecutive lanes that divide the experts among them."""
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    num_nodes: int = 1
    """Machines; each holds an equal block of consecutive ranks."""
    num_further: int = 0
    """Of the groups the last ones, which host no shard and do not take part before they are asked to."""
    least_pipeline_parallel: int | None = None
    """Stages of a group that lacks machines, at least; None if every group has `pipeline_parallel`."""

    @property
    def num_home_groups(self) -> int:
        """Groups that are the home of a shard each; the run begins with these."""
        return self.num_groups - self.num_further

    @property
    def further_groups(self) -> frozenset[GroupId]:
        return frozenset(map(GroupId, range(self.num_home_groups, self.num_groups)))

    @property
    def ranks_per_group(self) -> int:
        return self.ranks_per_stage * self.pipeline_parallel

    @property
    def ranks_per_stage(self) -> int:
        return self.tensor_parallel * self.context_parallel * self.data_parallel

    @property
    def lengths(self) -> tuple[int, ...]:
        """Stages that a group may have, most first: all of them, and fewer where these fill whole machines.

        >>> Layout(num_groups=2, pipeline_parallel=8, least_pipeline_parallel=3, num_nodes=8).lengths
        (8, 6, 4)
        """
        fewer = range(self.pipeline_parallel - 1, (self.least_pipeline_parallel or self.pipeline_parallel) - 1, -1)
        fitting = (stages for stages in fewer if not stages * self.ranks_per_stage % self.ranks_per_node)
        return (self.pipeline_parallel, *fitting)

    def lane_of(self, rank: int) -> int:
        """The lane of a rank inside its group.

        >>> layout = Layout(num_groups=1, data_parallel=2, tensor_parallel=2, pipeline_parallel=2)
        >>> [layout.lane_of(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        return rank % self.ranks_per_stage // (self.tensor_parallel * self.context_parallel)

    def beside(self, rank: int) -> list[int]:
        """The ranks of a group, itself included, that hold the same part of the model as this one, by lane.

        >>> Layout(num_groups=1, data_parallel=2, tensor_parallel=2, pipeline_parallel=2).beside(5)
        [5, 7]
        """
        width = self.tensor_parallel * self.context_parallel
        first = rank - self.lane_of(rank) * width
        return list(range(first, first + self.data_parallel * width, width))

    @property
    def num_ranks(self) -> int:
        return self.num_groups * self.ranks_per_group

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    def ranks_on(self, node: int) -> list[tuple[GroupId, int]]:
        """Ranks of a node as (group, rank inside the group), ascending.

        >>> Layout(num_groups=2, pipeline_parallel=2, num_nodes=2).ranks_on(1)
        [(1, 0), (1, 1)]
        """
        first = node * self.ranks_per_node
        ids = range(first, first + self.ranks_per_node)
        return [(GroupId(index // self.ranks_per_group), index % self.ranks_per_group) for index in ids]

    def node_of(self, group: GroupId, rank: int) -> int:
        return (group * self.ranks_per_group + rank) // self.ranks_per_node

    def is_first_on_node(self, group: GroupId, rank: int) -> bool:
        """Whether no lower rank of the group is on the same node.

        >>> layout = Layout(num_groups=1, pipeline_parallel=4, num_nodes=2)
        >>> [layout.is_first_on_node(GroupId(0), rank) for rank in range(4)]
        [True, False, True, False]
        """
        return rank == 0 or self.node_of(group, rank) != self.node_of(group, rank - 1)

    def nodes_of(self, group: GroupId, stages: int | None = None) -> list[int]:
        """Nodes that hold a rank of the group, ascending: of these first stages, or of all.

        >>> layout = Layout(num_groups=2, pipeline_parallel=4, num_nodes=4)
        >>> layout.nodes_of(GroupId(1)), layout.nodes_of(GroupId(1), stages=2)
        ([2, 3], [2])
        """
        num_ranks = self.ranks_per_group if stages is None else stages * self.ranks_per_stage
        return sorted({self.node_of(group, rank) for rank in range(num_ranks)})

    @property
    def most_peers_on_node(self) -> int:
        """Most groups that have their rank of one position on the same node: members of one communicator.

        >>> [Layout(num_groups=4, tensor_parallel=2, num_nodes=nodes).most_peers_on_node for nodes in (1, 2, 4, 8)]
        [4, 2, 1, 1]
        """
        ranks = range(self.num_ranks)
        return max(Counter((rank // self.ranks_per_node, rank % self.ranks_per_group) for rank in ranks).values())

    def groups_on(self, node: int) -> list[GroupId]:
        return sorted({group for group, _ in self.ranks_on(node)})


@dataclass(frozen=True, slots=True)
class Slabs:
    """The coarsest cut of layers by which every stage of a pipeline of `lengths[i]` stages is a run of whole slabs.

    Stage i of P has the layers from i L / P to (i + 1) L / P, rounded down: as even as layers allow. Lengths P and P'
    make at most P + P' - gcd(P, P') slabs; with one length slabs are stages.

    >>> [(slab.start, slab.stop) for slab in Slabs(12, (4, 3)).layers]
    [(0, 3), (3, 4), (4, 6), (6, 8), (8, 9), (9, 12)]
    """

    num_layers: int
    lengths: tuple[int, ...]

    @property
    def layers(self) -> tuple[range, ...]:
        """Of each slab."""
        edges = sorted({self._edge(stage, length) for length in self.lengths for stage in range(length + 1)})
        return tuple(map(range, edges, edges[1:]))

    def of_stage(self, stage: int, length: int) -> range:
        """The slabs of a stage in a pipeline of one of the lengths.

        >>> [list(Slabs(12, (4, 3)).of_stage(stage, 3)) for stage in range(3)]
        [[0, 1], [2, 3], [4, 5]]
        """
        firsts = [slab.start for slab in self.layers]
        return range(*(bisect_left(firsts, self._edge(one, length)) for one in (stage, stage + 1)))

    def pace(self, length: int) -> int:
        """That of a pipeline of so many stages, in thousandths of that of the longest: by the most layers of a stage.

        >>> Slabs(12, (4, 3)).pace(3)
        1333
        """
        most, of_longest = (-(-self.num_layers // stages) for stages in (length, self.lengths[0]))
        return 1000 * most // of_longest

    def holder_of(self, position: int, length: int, ranks_per_stage: int) -> int:
        """The rank that has a slab in a pipeline of one of the lengths, by its rank if each slab were a stage.

        >>> [Slabs(12, (4, 3)).holder_of(position, 3, ranks_per_stage=2) for position in range(12)]
        [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
        """
        slab, place = divmod(position, ranks_per_stage)
        stage = next(stage for stage in range(length) if slab in self.of_stage(stage, length))
        return stage * ranks_per_stage + place

    def _edge(self, stage: int, length: int) -> int:
        return stage * self.num_layers // length
