"""How the lanes of a group divide a rank's flat gradient space.

The space is cut into scatter ranges, each shared by lanes that hold the same parameters. A range is divided into one
strip per lane, which that lane sums over groups and updates: the rank's own strips. With one lane a range is its strip.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spare_megatron.core.log.bucket_window import cut


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterRange:
    """A range of the flat space that is summed over `num_lanes` ranks as a unit, and this rank's number among them."""

    start: int
    stop: int
    lane: int = 0
    num_lanes: int = 1

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def strip_length(self) -> int:
        """Elements of every strip but the last ones, which may be shorter or empty."""
        return -(-len(self) // self.num_lanes)

    def strip(self, lane: int) -> range:
        """The strip of a lane, in the flat space.

        >>> [list(ScatterRange(start=10, stop=15, num_lanes=3).strip(lane)) for lane in range(3)]
        [[10, 11], [12, 13], [14]]
        """
        first = min(self.start + lane * self.strip_length, self.stop)
        return range(first, min(first + self.strip_length, self.stop))

    @property
    def own(self) -> range:
        """This rank's own strip."""
        return self.strip(self.lane)


def scatter_ranges(shared: Sequence[ScatterRange], strip_elements: int) -> tuple[ScatterRange, ...]:
    """The ranges that the same lanes share, cut so that strips have at most `strip_elements`, ascending without gaps.

    `shared` are adjacent and ascending. Where no other lane shares any of them, a range may go on into the next.
    """
    if all(one.num_lanes == 1 for one in shared):
        shared = [ScatterRange(start=shared[0].start, stop=shared[-1].stop)]
    return tuple(
        replace(one, start=one.start + part.start, stop=one.start + part.stop)
        for one in shared
        for part in cut(len(one), one.num_lanes * strip_elements)
    )
