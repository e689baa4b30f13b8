"""Names what holds a run back: a machine or rank, and whether it computes, reads, communicates or is hosted slowly.

Rank j of every group does the same work, so each rank is compared with its like: the median of rank j over the other
groups, or its own earlier median where fewer than two others compute. Excesses over that are compared in seconds of a
step. Cost of a window: O(R G) for R ranks in G groups.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median

from spare_megatron.stacking import slowness
from spare_megatron.stacking.layout import GroupId, MachineId
from spare_megatron.stacking.slowness import excess

_SCATTER_FACTOR = 3 * 1.4826
"""Three standard deviations of normal values, in median absolute deviations."""
_LEAST_FOR_SCATTER = 3
_LEAST_ANSWER_S = 0.01
"""A request to the control store that takes longer, and so many times longer than elsewhere, shows a slow link."""
_LEAST_RETRANSMITTED = 5.0
"""Segments a second that were sent again, likewise."""
_LEAST_SWAPPED = 10.0
"""Pages a second, in or out."""
_SHARED_BY = 0.5
"""Share of the greatest excess from which others of the machine share the cause."""
_NUM_WINDOWS, _NUM_AGREEING = 4, 3
"""Latest windows of which so many must agree before a culprit is named. It is gone when none of them finds it."""
_NUM_PAST = 32


class Cause(StrEnum):
    """What is slow."""

    COMPUTE = "compute"
    DATA = "data"
    LINK = "link"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What a rank did in a window of some steps, in seconds over the window."""

    machine: MachineId
    group: GroupId
    rank: int
    num_steps: int
    num_passes: int
    pass_s: float
    """Own forward and backward passes, waits for tensor-parallel peers included."""
    data_s: float
    """Reading samples."""
    transfer_s: float
    """Transfers inside the group, waits for peers included."""
    reduce_s: float
    """Sums over groups, waits for groups that arrive later included."""
    wait_s: float
    """Agreement inside the group, votes and the log."""
    starved_s: float
    """Its main thread was ready to run without a processor."""
    throttled_s: float = 0.0
    """The CPU controller kept its processes from running."""
    device: str = ""
    """What its GPU reports of a reduced clock; empty if nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSigns:
    """What a machine showed in a window: mean time of a request to the control store, TCP segments sent again and pages
    swapped per second, and the share of its processors that was busy.
    """

    answer_s: float
    retransmitted_per_s: float
    swapped_per_s: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some steps of all ranks that took part, and of their machines; a step took `step_s`. `shares_processors`: the
    machines are emulated on one computer and take its processors from each other, so that waiting for one says nothing.
    """

    step_s: float
    ranks: Sequence[RankTimes]
    machines: Mapping[MachineId, MachineSigns]
    shares_processors: bool = False

    def own_starved_s(self, times: RankTimes) -> float:
        """Of a step, waits for a processor that its own machine is to blame for."""
        return 0.0 if self.shares_processors else times.starved_s / times.num_steps

    def rest_s(self, times: RankTimes) -> float:
        """Of a step, what is left beside work and waits."""
        spent_s = times.pass_s + times.data_s + times.transfer_s + times.reduce_s + times.wait_s
        spent_s += times.starved_s if self.shares_processors else 0.0
        return max(0.0, self.step_s - spent_s / times.num_steps)

    @property
    def least_s(self) -> float:
        """The least excess that counts."""
        shared = [one.starved_s / one.num_steps for one in self.ranks if self.shares_processors and one.num_steps]
        return slowness.NAMED_SHARE * max(0.0, self.step_s - (median(shared) if shared else 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """What holds the run back."""

    machine: MachineId
    cause: Cause
    group: GroupId | None = None
    """None if the machine is meant as a whole."""
    rank: int | None = None
    """None if several ranks of the group on this machine look alike, as tensor-parallel peers do."""
    excess_s: float
    """Seconds by which it makes a step longer."""
    factor: float = 0.0
    """Its time over that of its like; 0 if there is no like to compare, or a host holds its ranks up beside passes."""
    detail: str = ""
    """Further signs, for people."""

    def is_same(self, other: "Culprit | None") -> bool:
        return other is not None and (self.machine, self.cause) == (other.machine, other.cause)


@dataclass(frozen=True, slots=True)
class _Excess:
    times: RankTimes
    seconds: float
    factor: float


@dataclass(slots=True)
class _EarlierTimes:
    """Earlier values of each rank, by quantity."""

    values: dict[tuple[str, GroupId, int], deque[float]] = field(default_factory=dict)

    def likes(self, key: tuple[str, GroupId, int]) -> Sequence[float]:
        values = self.values.get(key, ())
        return values if len(values) >= _NUM_WINDOWS else ()

    def add(self, key: tuple[str, GroupId, int], value: float) -> None:
        self.values.setdefault(key, deque(maxlen=_NUM_PAST)).append(value)


class CulpritWatch:
    """Judges windows one after the other. Equal windows give equal answers."""

    def __init__(self) -> None:
        self.named: Culprit | None = None
        self._recent: deque[Culprit | None] = deque(maxlen=_NUM_WINDOWS)
        self._past = _EarlierTimes()

    def add(self, window: Window) -> bool:
        """Counts a window; returns whether `named` has changed."""
        found = find_culprit(window, self._past)
        self._recent.append(found)
        before = self.named
        if found is not None and sum(found.is_same(one) for one in self._recent) >= _NUM_AGREEING:
            self.named = found
        elif before is not None and not any(before.is_same(one) for one in self._recent):
            self.named = None
        if self.named is None or before is None:
            return self.named is not before
        return not self.named.is_same(before)


def find_culprit(window: Window, past: _EarlierTimes | None = None) -> Culprit | None:
    """What makes the steps of this window longer than they need be; None if nothing does by much.

    The greatest excess counts: of reading, of passes, of time in which a host keeps its ranks from their work, so that
    they come late to sums, or of sums themselves, if one machine's link shows. Without one the transfers inside a group
    count, as far as all of its ranks take longer for them: they contain the waits for all that is slow.
    """
    past = _EarlierTimes() if past is None else past
    ranks = [times for times in window.ranks if times.num_steps and times.num_passes]
    least_s = window.least_s
    data = _excesses("data", ranks, past, lambda one: one.data_s / one.num_passes, _per_step)
    passes = _excesses("pass", ranks, past, lambda one: one.pass_s / one.num_passes, _per_step)
    kept = [
        *_excesses("kept", ranks, past, lambda one: window.own_starved_s(one) + one.throttled_s / one.num_steps, _once),
        *_excesses("rest", ranks, past, window.rest_s, _once),
    ]
    transfers = _excesses("transfer", ranks, past, lambda one: one.transfer_s / one.num_steps, _once)
    least_waits = _excesses("least", _least_transfers(ranks), past, lambda one: one.transfer_s / one.num_steps, _once)
    causes = {
        cause: one
        for cause, excesses in ((Cause.DATA, data), (Cause.COMPUTE, passes), (Cause.HOST, kept))
        if (one := _greatest(excesses, least_s)) is not None
    }
    most_s = max((one.seconds for one in causes.values()), default=0.0)
    in_sums_s = min((one.reduce_s / one.num_steps for one in ranks), default=0.0)  # of the last that comes to them
    slow_link = _slow_link(window)
    if slow_link is not None and in_sums_s >= max(least_s, most_s):
        return Culprit(machine=slow_link, cause=Cause.LINK, excess_s=in_sums_s)
    if not causes:
        return _slowest_transfer(_greatest(least_waits, least_s), transfers, slow_link)
    cause = max(causes, key=lambda cause: causes[cause].seconds)
    worst = causes[cause]
    machine = worst.times.machine
    if cause is not Cause.DATA and _is_host_at_fault(window, passes, kept, machine):
        return _slow_host(machine, worst.seconds, worst.factor if cause is Cause.COMPUTE else 0.0, window)
    alike = {
        one.times.rank
        for one in (data if cause is Cause.DATA else passes)
        if (one.times.group, one.times.machine) == (worst.times.group, machine)
        and one.seconds >= _SHARED_BY * worst.seconds
    }
    return Culprit(
        machine=machine,
        cause=cause,
        group=worst.times.group,
        rank=worst.times.rank if len(alike) == 1 else None,
        excess_s=worst.seconds,
        factor=worst.factor,
        detail=worst.times.device if cause is Cause.COMPUTE else "",
    )


def _per_step(times: RankTimes) -> float:
    return times.num_passes / times.num_steps


def _once(_: RankTimes) -> float:
    return 1.0


def _excesses(
    name: str,
    ranks: Sequence[RankTimes],
    past: _EarlierTimes,
    value_of: Callable[[RankTimes], float],
    times_per_step: Callable[[RankTimes], float],
) -> list[_Excess]:
    """Of each rank that stands out from its like, the excess of a step."""
    by_position: dict[int, list[RankTimes]] = defaultdict(list)
    for one in ranks:
        by_position[one.rank].append(one)
    found = []
    for one in ranks:
        key, value = (name, one.group, one.rank), value_of(one)
        others = [value_of(other) for other in by_position[one.rank] if other.group != one.group]
        likes = others if len(others) > 1 else past.likes(key)
        beyond = excess(value, likes or [value])
        scatter = median(abs(other - beyond.like) for other in others) if len(others) >= _LEAST_FOR_SCATTER else 0.0
        if beyond.exceeds(slowness.NAMED) and value - beyond.like > _SCATTER_FACTOR * scatter:
            found.append(_Excess(one, (value - beyond.like) * times_per_step(one), beyond.ratio))
        else:
            past.add(key, value)
    return found


def _greatest(excesses: Sequence[_Excess], least_s: float) -> _Excess | None:
    found = max(excesses, key=lambda one: one.seconds, default=None)
    return found if found is not None and found.seconds >= least_s else None


def _is_host_at_fault(window: Window, passes: Sequence[_Excess], kept: Sequence[_Excess], machine: MachineId) -> bool:
    """Whether the host keeps its ranks from computing: by its processors, by swapping, or all of its groups alike."""
    slow = [one for one in passes if one.times.machine == machine]
    greatest = max((one.seconds for one in slow), default=0.0)
    kept_s = max((one.seconds for one in kept if one.times.machine == machine), default=0.0)
    slow_groups = {one.times.group for one in slow if one.seconds >= _SHARED_BY * greatest}
    groups = {one.group for one in window.ranks if one.machine == machine}
    return (
        _is_swapping(window, machine) or kept_s >= _SHARED_BY * greatest or (len(groups) > 1 and slow_groups == groups)
    )


def _is_swapping(window: Window, machine: MachineId) -> bool:
    """Whether this machine swaps, and others do not."""
    swapped = {one: signs.swapped_per_s for one, signs in window.machines.items()}
    return len(swapped) > 1 and _outlier(swapped, _LEAST_SWAPPED) == machine


def _slow_host(machine: MachineId, excess_s: float, factor: float, window: Window) -> Culprit:
    signs, details = window.machines.get(machine), []
    if any(one.throttled_s for one in window.ranks if one.machine == machine):
        details.append("its ranks have used up a quota of processor time")
    if signs is not None and _is_swapping(window, machine):
        details.append(f"{signs.swapped_per_s:.0f} pages a second are swapped")
    if signs is not None:
        details.append(f"its processors are busy {signs.busy:.0%} of the time")
    detail = ", ".join(details)
    return Culprit(machine=machine, cause=Cause.HOST, excess_s=excess_s, factor=factor, detail=detail)


def _slow_link(window: Window) -> MachineId | None:
    """The machine whose requests to the store or TCP segments show that its link is slow, if one does."""
    answers = {machine: signs.answer_s for machine, signs in window.machines.items()}
    sent_again = {machine: signs.retransmitted_per_s for machine, signs in window.machines.items()}
    machine = _outlier(answers, _LEAST_ANSWER_S)
    return _outlier(sent_again, _LEAST_RETRANSMITTED) if machine is None else machine


def _least_transfers(ranks: Sequence[RankTimes]) -> list[RankTimes]:
    """Of each group the rank that spends least in transfers, in the place of rank 0."""
    least: dict[GroupId, RankTimes] = {}
    for one in ranks:
        least[one.group] = min(one, least.get(one.group, one), key=lambda one: one.transfer_s)
    return [replace(one, rank=0) for one in least.values()]


def _slowest_transfer(
    of_group: _Excess | None, transfers: Sequence[_Excess], slow_link: MachineId | None
) -> Culprit | None:
    """The rank of the group whose transfers exceed those of its like most; the machine `slow_link` if it has a part."""
    if of_group is None:
        return None
    transfers = [one for one in transfers if one.times.group == of_group.times.group] or [of_group]
    worst = max(transfers, key=lambda one: one.seconds)
    if any(one.times.machine == slow_link for one in transfers):
        assert slow_link is not None, "every rank has a machine"
        return Culprit(machine=slow_link, cause=Cause.LINK, excess_s=worst.seconds, factor=worst.factor)
    return Culprit(
        machine=worst.times.machine,
        cause=Cause.LINK,
        group=worst.times.group,
        rank=worst.times.rank,
        excess_s=worst.seconds,
        factor=worst.factor,
    )


def _outlier(values: Mapping[MachineId, float], least: float) -> MachineId | None:
    """The machine whose value is at least this, and many times the median of the others'."""
    if len(values) < 2:
        return None
    machine = max(sorted(values), key=lambda one: values[one])
    others = [value for one, value in values.items() if one != machine]
    return machine if excess(values[machine], others).exceeds(slowness.LINK, least) else None
