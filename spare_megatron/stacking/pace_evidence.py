"""Which groups compute slower or faster than their like: evidence that every fold of the log counts.

The leader that commits compares the measured paces and names the groups that deviate from the pace by which work is
dealt to them (`exceptions`); everything else follows from the log. Integers alone, so that all ranks agree.

A deviation z, in units of the mean deviation so far, has the tail probability u of Student's t with 3 degrees of
freedom, but at least the share of far deviations so far. Its evidence is the log likelihood ratio ln(a u^(a - 1)) of a
density that favours small u (Beta(a, 1)). Sums of it over steps, never below 0, exceed h in quiet once in e^h steps at
most (Lorden 1971). docs/protocol_dealing.md derives the threshold.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import NamedTuple

from spare_megatron.stacking import slowness
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.paces import LIKE

LEAST_EXCEPTION = 50
"""Deviation, in thousandths, from which a pace is an exception."""
STEPS_TO_ACT = 3
"""Slow steps before the pace of a group changes, at least."""
REST_STEPS = 8
"""Steps from one change of a group's pace to its next, at least."""
PROBE_STEPS = 32
"""Steps without work after which a group gets some, so that it is measured; doubled by each such step."""

_USUAL = 25
"""Deviation that counts for a group without an exception."""
_FIRST_SCALE, _FIRST_STEPS, _MOST_STEPS = 100, 8, 64
"""The mean deviation before the first step, its weight in steps, and the steps that the mean covers later."""
_CLIP = 4
"""A deviation counts in the mean as at most so many means."""
_FAR = 12
"""Means from which a deviation is far."""
_FIRST_FAR = 4000
"""Measurements, one of them far, that are assumed before the first step; five times as many are remembered."""
_MOST_DOUBLINGS = 3
REVERSAL_STEPS = 32
"""A change that takes an earlier one of the same group back within so many steps has followed a mood of the machine."""
_MOST_REVERSALS = 8
"""Each reversal raises the evidence that is needed by a half of what it is at first."""

_MOST_PACES = 32
"""Paces of a group that are kept to estimate its pace."""
_UNIT = 1000
"""Evidence and the mean deviation are in thousandths."""

_QUIET_STEPS = 9211
"""ln(10,000), rounded up: steps in which quiet may lead to one change."""
_LN_2, _LN_2_LESS = 694, 693
"""ln 2, rounded up and down."""

_EVIDENCE = (
    (
        *(-867, -546, -163, 233, 611, 958, 1273, 1557, 1815, 2049, 2263, 2461, 2644, 2813, 2972, 3120, 3260),
        *(3392, 3516, 3635, 3747, 3855, 3957, 4055, 4150, 4240, 4327, 4411, 4491, 4570, 4645, 4718, 4789, 4857),
        *(4924, 4989, 5052, 5113, 5172, 5230, 5287, 5342, 5396, 5449, 5500, 5551, 5600, 5648, 5695),
    ),
    (
        *(-234, -63, 142, 353, 554, 739, 907, 1059, 1196, 1321, 1435, 1541, 1638, 1729, 1813, 1892, 1967),
        *(2037, 2104, 2167, 2227, 2284, 2339, 2391, 2441, 2490, 2536, 2581, 2624, 2665, 2706, 2745, 2782, 2819),
        *(2854, 2889, 2922, 2955, 2987, 3018, 3048, 3078, 3106, 3134, 3162, 3189, 3215, 3241, 3266),
    ),
)
"""ln(a u^(a - 1)), rounded down, for a = 0.25 (large factors) and 0.6 (small ones), at 0, 1/2, 1, ... means."""
_NONE = (-1387, -511)
"""The same at u = 1, for a group without an exception."""
_SHARE = ((3, 4), (2, 5))
"""1 - a."""


class PaceException(NamedTuple):
    """A group's pace in one step, in thousandths of that of its like."""

    group: GroupId
    permille: int


def exceptions(measured: Mapping[GroupId, int], dealt: Mapping[GroupId, int]) -> tuple[PaceException, ...]:
    """The groups whose measured pace, in any unit, deviates from the pace by which work is `dealt`.

    Their like is the median over the groups of measured over dealt pace.

    >>> exceptions({0: 51, 1: 49, 2: 100, 3: 50, 4: 50}, {})
    (PaceException(group=2, permille=2000),)
    >>> exceptions({0: 51, 1: 49, 2: 100, 3: 50, 4: 50}, {2: 2000})
    ()
    """
    normed = sorted(pace * LIKE // dealt.get(group, LIKE) for group, pace in measured.items())
    if len(normed) < 2:
        return ()
    like = max(_middle(normed), 1)
    paces = (PaceException(group, max(pace * LIKE // like, 1)) for group, pace in sorted(measured.items()))
    return tuple(one for one in paces if _deviation(one.permille, dealt.get(one.group, LIKE)) >= LEAST_EXCEPTION)


@dataclass(slots=True)
class _Evidence:
    """About one group: sums that it is slower, then that it is faster than dealt, each for large and small factors."""

    sums: list[int] = field(default_factory=lambda: [0] * 4)
    since: list[int] = field(default_factory=lambda: [0] * 4)
    """Steps since each sum was 0."""
    paces: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST_PACES))
    """The latest ones."""

    def add(self, permille: int, gains: Iterable[int]) -> None:
        self.paces.append(permille)
        for index, gain in enumerate(gains):
            self.sums[index] = max(self.sums[index] + gain, 0)
            self.since[index] = self.since[index] + 1 if self.sums[index] else 0

    def estimate(self) -> int:
        """The median pace since the greatest sum was 0."""
        greatest = max(range(4), key=lambda index: self.sums[index])
        paces = sorted(list(self.paces)[-max(self.since[greatest], 1) :])
        return (paces[(len(paces) - 1) // 2] + paces[len(paces) // 2]) // 2


class PaceEvidence:
    """Evidence about the groups' paces. Equal after the same entries. `dealt`: thousandths by group, if not `LIKE`."""

    def __init__(self) -> None:
        self.dealt: dict[GroupId, int] = {}
        self._about: dict[GroupId, _Evidence] = {}
        self._idle: dict[GroupId, int] = {}  # steps without work
        self._num_probes: dict[GroupId, int] = {}  # since it had work of its own
        self._scale = _FIRST_SCALE * _UNIT
        self._num_steps = self._num_far = self._num_measured = 0
        self._far: set[GroupId] = set()  # in the last step
        self._changed_in: dict[GroupId, tuple[int, int]] = {}  # number of the step, and the pace before
        self._reversals: dict[GroupId, tuple[int, int]] = {}  # their number, and the step of the last one

    def fold(self, found: Iterable[PaceException], members: Collection[GroupId], idle: Collection[GroupId]) -> bool:
        """Counts the exceptions of a committed step, in which the members in `idle` computed nothing; returns whether
        paces change. Cost: O(exceptions and groups with evidence).
        """
        of_step = {one.group: one.permille for one in found if one.group in members and one.group not in idle}
        self._count_idle(idle)
        threshold = _threshold(len(members))
        most = -(-threshold // STEPS_TO_ACT)
        for group in sorted(of_step.keys() | (self._about.keys() - set(idle))):
            dealt = self.dealt.get(group, LIKE)
            permille = of_step.get(group, dealt)
            about = self._about.setdefault(group, _Evidence())
            about.add(permille, self._gains(permille, dealt, most))
            if not any(about.sums):
                del self._about[group]
        self._measure(of_step, len(members) - len(idle))
        if not self._act(threshold):
            return False
        self._center(members)
        return True

    def keep(self, members: Collection[GroupId]) -> None:
        """Forgets groups that are gone: they come back as fast as their like."""
        for kept in (self.dealt, self._about, self._idle, self._num_probes, self._changed_in, self._reversals):
            for group in kept.keys() - set(members):
                del kept[group]

    def start_over(self) -> None:
        """Forgets all groups, but not how much their paces scatter."""
        self.keep(())

    @property
    def probe(self) -> GroupId | None:
        """The group to get work in the next step because it has been too slow for any."""
        return min((group for group in self._idle if self._is_due(group)), default=None)

    def _is_due(self, group: GroupId) -> bool:
        doublings = min(self._num_probes.get(group, 0), _MOST_DOUBLINGS)
        return self._idle[group] >= (1 if group in self._about else PROBE_STEPS << doublings)

    def _count_idle(self, idle: Collection[GroupId]) -> None:
        probed, counts = self.probe, {group: self._idle.get(group, 0) + 1 for group in sorted(idle)}
        numbers = {group: self._num_probes.get(group, 0) for group in counts}
        if probed is not None and probed not in counts:
            counts[probed], numbers[probed] = 0, self._num_probes.get(probed, 0) + 1
        self._idle, self._num_probes = counts, numbers

    def _gains(self, permille: int, dealt: int, most: int) -> list[int]:
        """The evidence of one measurement, for each of the four sums of `_Evidence`."""
        deviation = _deviation(permille, dealt)
        if deviation < LEAST_EXCEPTION:
            return [*_NONE, *_NONE]
        at = min(2 * _UNIT * deviation // self._scale, len(_EVIDENCE[0]) - 1)
        # u is at least half the share of far deviations: those to one side.
        inverse = 2 * (_FIRST_FAR + self._num_measured) // (1 + self._num_far)
        log_inverse = _LN_2_LESS * ((inverse**4).bit_length() - 1) // 4
        gains = [
            min(of_deviation[at], none + log_inverse * share // of, most)
            for of_deviation, none, (share, of) in zip(_EVIDENCE, _NONE, _SHARE, strict=True)
        ]
        return [*gains, *_NONE] if permille > dealt else [*_NONE, *gains]

    def _measure(self, of_step: Mapping[GroupId, int], num_measured: int) -> None:
        """Updates the mean deviation and the share of far ones."""
        if num_measured <= 0:
            return
        deviations = {group: _UNIT * _deviation(pace, self.dealt.get(group, LIKE)) for group, pace in of_step.items()}
        clipped = sum(min(deviation, _CLIP * self._scale) for deviation in deviations.values())
        mean = (clipped + (num_measured - len(deviations)) * _USUAL * _UNIT) // num_measured
        far = {group for group, deviation in deviations.items() if deviation >= _FAR * self._scale}
        self._num_far += len(far - self._far)  # a group that is slow for good counts once
        self._far = far
        self._num_measured += num_measured
        if self._num_measured > 5 * _FIRST_FAR:
            self._num_far, self._num_measured = self._num_far // 2, self._num_measured // 2
        weight = min(_FIRST_STEPS + self._num_steps, _MOST_STEPS)
        self._scale += (mean - self._scale) // weight
        self._num_steps += 1

    def _act(self, threshold: int) -> bool:
        """Changes the paces of all groups with half the evidence that is needed, if there is enough about one."""
        shares = {g: 2 * max(about.sums) // self._raised(g, threshold) for g, about in self._about.items()}
        likely = [group for group, share in shares.items() if share >= 1 and self._may_change(group)]
        if not any(shares[group] >= 2 for group in likely):
            return False
        for group in likely:
            estimate, dealt = self._about.pop(group).estimate(), self.dealt.pop(group, LIKE)
            if _deviation(estimate, LIKE) >= LEAST_EXCEPTION:
                self.dealt[group] = estimate
            self._note_change(group, dealt)
        return True

    def _center(self, members: Collection[GroupId]) -> None:
        """Divides all paces by that of their like, which a change moves: else all of them would grow by and by."""
        like = _middle(sorted(self.dealt.get(group, LIKE) for group in members))
        if _deviation(like, LIKE) < LEAST_EXCEPTION:
            return
        centered = {group: self.dealt.get(group, LIKE) * LIKE // like for group in sorted(members)}
        self.dealt = {group: pace for group, pace in centered.items() if _deviation(pace, LIKE) >= LEAST_EXCEPTION}
        for about in self._about.values():
            about.paces = deque((pace * LIKE // like for pace in about.paces), maxlen=_MOST_PACES)
        self._changed_in = {group: (step, pace * LIKE // like) for group, (step, pace) in self._changed_in.items()}

    def _note_change(self, group: GroupId, before: int) -> None:
        """Counts reversals of the group."""
        now = self.dealt.get(group, LIKE)
        changed_in, earlier = self._changed_in.get(group, (-REVERSAL_STEPS, before))
        is_reversal = self._num_steps - changed_in < REVERSAL_STEPS and (before - earlier) * (now - before) < 0
        if is_reversal:
            self._reversals[group] = min(self._num_reversals(group) + 1, _MOST_REVERSALS), self._num_steps
        self._changed_in[group] = self._num_steps, before

    def _num_reversals(self, group: GroupId) -> int:
        """One is forgotten after every `10 * REVERSAL_STEPS` without any."""
        number, last = self._reversals.get(group, (0, 0))
        return max(number - (self._num_steps - last) // (10 * REVERSAL_STEPS), 0)

    def _raised(self, group: GroupId, threshold: int) -> int:
        return threshold * (2 + self._num_reversals(group)) // 2

    def _may_change(self, group: GroupId) -> bool:
        rested = self._num_steps - self._changed_in.get(group, (-REST_STEPS, LIKE))[0] >= REST_STEPS
        return rested and _deviation(self._about[group].estimate(), self.dealt.get(group, LIKE)) >= _LEAST_CHANGE


def _middle(paces: Sequence[int]) -> int:
    """Of paces in ascending order: the median, or the geometric mean of the two in the middle."""
    return isqrt(paces[(len(paces) - 1) // 2] * paces[len(paces) // 2])


def _deviation(pace: int, other: int) -> int:
    """About the absolute logarithm of the ratio, in thousandths: 2 |a - b| / (a + b), which is never more."""
    return 2000 * abs(pace - other) // (pace + other)


_LEAST_CHANGE = _deviation(round(slowness.DEALT * LIKE), LIKE)
"""Deviation from which the pace by which work is dealt changes."""


def _threshold(num_groups: int) -> int:
    """The h that 4 sums of each group together exceed in quiet once in 10,000 steps at most: 4 N e^-h = 1e-4."""
    return _QUIET_STEPS + _LN_2 * ((num_groups - 1).bit_length() + 2)
