"""What the lanes of a simulated group compute and bring into its sums, in microbatches of the batch."""

from collections.abc import Sequence
from random import Random

from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch, Numbered, StepPlan, share_of
from tests.protocol.scene import Scene


class Lanes:
    """The lanes of every group; those of a row compute one microbatch of it each."""

    def __init__(self, scene: Scene) -> None:
        self._num_lanes, self._row_size = scene.num_lanes, scene.row_size

    def compute(self, plan: StepPlan, work: Sequence[Microbatch], *, is_patch: bool) -> list[Microbatch]:
        units = plan.work.owners.shape[1]
        shares = [
            share_of(work, lane=lane, num_lanes=self._num_lanes, row_size=self._row_size, units_per_shard=units)
            for lane in range(self._num_lanes)
        ]
        size = units * self._row_size
        numbers = [one.number for share in self.brought(shares, is_patch=is_patch) for one in share]
        return [Microbatch(ShardId(number // size), number % size) for number in numbers]

    def brought(self, shares: list[list[Numbered]], *, is_patch: bool) -> list[list[Numbered]]:
        """What comes into the sums of the group."""
        return shares


class CountsHalfARow(Lanes):
    """The last lane counts a row that it has not computed."""

    def brought(self, shares: list[list[Numbered]], *, is_patch: bool) -> list[list[Numbered]]:
        return shares if is_patch else [*shares[:-1], shares[-1][:-1]]


class PatchesOnOneLane(Lanes):
    """The group votes with the patch of its first lane alone."""

    def brought(self, shares: list[list[Numbered]], *, is_patch: bool) -> list[list[Numbered]]:
        return shares[:1] if is_patch else shares


def draw_lanes(random: Random) -> Scene:
    """A scene whose groups have several lanes, with rows or without."""
    scene = Scene.draw(random)
    num_lanes = random.choice((2, 3, 4))
    return scene.with_lanes(num_lanes, random.choice([size for size in (1, 2, 3, 4) if num_lanes % size == 0]))
