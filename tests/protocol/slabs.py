"""The gradients of a group by position: each of its ranks holds one slab or several, and sums them over the groups."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import fsum
from operator import add
from random import Random
from zlib import crc32

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import Action
from spare_megatron.core.log.events import VotesRead
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.plans import Microbatch
from tests.protocol.buckets import Buckets, Recipients
from tests.protocol.communicators import Sums
from tests.protocol.scene import Scene


class Gradients:
    """Those of one process.

    Attributes:
        slabs: Their buckets, by position.
        ranks: The positions of each rank, in the order in which it posts them.
        stops_at_unsound_sums: Whether a rank goes on to no other slab then.
    """

    stops_at_unsound_sums = False

    def __init__(self, slabs: Sequence[Buckets], held: Sequence[Sequence[int]], *, is_shorter: bool) -> None:
        """`held`: the positions of each rank; `is_shorter`: the group has the fewest stages of all."""
        self.slabs = slabs
        self.ranks = [positions[::-1] for positions in held]

    def spoil(self, random: Random) -> bool:
        return any(slab.spoil(random) for slab in self.slabs)

    def flip(self, what: str) -> None:
        for slab in self.slabs:
            slab.flip(what)

    def compute(self, work: Sequence[Microbatch]) -> None:
        for slab in self.slabs:
            slab.compute(work)

    def patch(self, work: Sequence[Microbatch]) -> None:
        for slab in self.slabs:
            slab.patch(work)

    def begin(self, attempt: int, kept: tuple[int, ...], to: Recipients) -> None:
        for position, slab in enumerate(self.slabs):
            slab.begin(attempt, kept[position : position + 1], to)

    @property
    def num_complete(self) -> tuple[int, ...]:
        return tuple(slab.window.num_complete for slab in self.slabs)

    @property
    def has_posted_unsound(self) -> bool:
        return any(slab.has_posted_unsound for slab in self.slabs)

    @property
    def has_wrong_sum(self) -> bool:
        return any(slab.has_wrong_sum for slab in self.slabs)

    def lacks(self, group: int, index: int) -> bool:
        return any(slab.lacks(group, index) for slab in self.slabs)

    def sums(self) -> list[Sums] | None:
        """The sums over groups of all buckets of all positions; None if some have not come."""
        found = [slab.sums() for slab in self.slabs]
        return None if None in found else [sums for slab in found for sums in slab or ()]

    def norm(self) -> float:
        """By that all groups clip. All slabs are rounded once, as `sum` rounds otherwise from Python 3.12 on."""
        return fsum(map(self._square, range(len(self.slabs))))

    def _square(self, position: int) -> float:
        return crc32(repr([sorted(sums.items()) for sums in self.slabs[position].sums() or ()]).encode()) / 3


class KeepsByRank(Gradients):
    """Takes the counts of kept buckets for those of ranks."""

    @property
    def num_complete(self) -> tuple[int, ...]:
        return tuple(min(self.slabs[position].window.num_complete for position in rank) for rank in self.ranks)

    def begin(self, attempt: int, kept: tuple[int, ...], to: Recipients) -> None:
        for number, rank in enumerate(self.ranks):
            for position in rank:
                self.slabs[position].begin(attempt, kept[number : number + 1], to)


class AddsTheNormByRank(Gradients):
    """Adds the squares of each rank first, and then those of all ranks."""

    def norm(self) -> float:
        return reduce(add, (reduce(add, map(self._square, rank)) for rank in self.ranks))


class PostsFirstSlabsFirst(Gradients):
    """Posts the slabs of a rank in ascending order where the group has the fewest stages."""

    def __init__(self, slabs: Sequence[Buckets], held: Sequence[Sequence[int]], *, is_shorter: bool) -> None:
        super().__init__(slabs, held, is_shorter=is_shorter)
        self.ranks = list(held) if is_shorter else self.ranks


class StopsAtUnsoundSums(Gradients):
    """Sums no further slab after an unsound sum, for which ranks may wait that hold it alone."""

    stops_at_unsound_sums = True


class RemembersTheLost(Controller):
    """Takes a group that comes back for one with the stages that it had before."""

    _earlier: Mapping[GroupId, int] = {}

    def _set_voters(self, voters: Iterable[Member]) -> None:
        self._earlier = {**self._earlier, **self.stages}
        super()._set_voters(voters)
        self.stages = {group: number for group, number in self._earlier.items() if group in self.members}


class AdmitsAllAsWhole(Controller):
    """Leaves the stages of those that wait out of its entries."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        return super()._decide(replace(event, stages={}), now_s)


class DealsByItsOwnPipeline(Controller):
    """Takes the fill of the pipeline of its own group for that of whole ones."""

    num_started = 0

    def __init__(self, setup: ControllerSetup) -> None:
        DealsByItsOwnPipeline.num_started += 1
        assert setup.rounds is not None, "shapes are dealt work by pace"
        fill = setup.rounds.fill + self.num_started % 2
        super().__init__(replace(setup, rounds=replace(setup.rounds, fill=fill)))


def draw_shapes(random: Random) -> Scene:
    """A scene of some kind in which groups that come back may have fewer stages, and buckets of slabs are kept."""
    kinds = (Scene.draw, Scene.draw_drains, Scene.draw_pauses, Scene.draw_unsound, Scene.draw_slow)
    kinds = (*kinds, Scene.draw_wipe_outs, Scene.draw_audits)
    return with_shapes(random.choice(kinds)(random), random)


def draw_unsound_shapes(random: Random) -> Scene:
    return with_shapes(Scene.draw_unsound(random), random)


def with_shapes(scene: Scene, random: Random) -> Scene:
    budget = scene.fault_budget
    return replace(
        scene,
        lengths=random.choice(((3, 2), (4, 3), (4, 3, 2))),
        partition_redundancy=0,
        num_buckets=random.choice((1, 2)),
        fault_moves=3 * scene.fault_moves,
        fault_budget={**budget, "replace": random.randint(2, 5), "break": random.choice((0, 1, 2)), "outage": 0},
    )
