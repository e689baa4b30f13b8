"""Slabs: the parts that the stages of a pipeline are made of, if groups may have pipelines of several lengths."""

from bisect import bisect_left
from dataclasses import dataclass


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
