"""The faults of a run: those of its trace, with open fields drawn, and random ones that it is sure to survive."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from spare_megatron.config.checks.validate_faults import bits_of, survivable_kinds
from spare_megatron.config.schema import FaultConfig, RunConfig
from spare_megatron.core.machines.failure_detector import SHORT_STOP_S
from spare_megatron.core.machines.places import Places
from spare_megatron.core.machines.reforming import can_reform
from spare_megatron.faults import points
from spare_megatron.faults.kinds import KINDS, Kind
from spare_megatron.stacking.layout import GroupId, PlaceId
from spare_megatron.stacking.placement import Placement

PHASES_AFTER_A_LOSS = points.PHASES_OF_A_JOIN | {
    points.FaultPoint.PATCH,
    points.FaultPoint.REBUILD,
    points.FaultPoint.REPAIR,
    points.FaultPoint.EVALUATION_PATCH,
}
"""Phases reached only after a loss: in its step, or any time later by a repair or a join."""

_WITH_THE_ONE_BEFORE = PHASES_AFTER_A_LOSS | points.PHASES_OF_A_LOAD
"""Phases whose open step is that of the preceding fault."""

_SURELY_FOUND_INTERVALS = 6


def groups_hit(config: RunConfig, fault: points.Fault) -> frozenset[GroupId]:
    """The groups that a fault is sure to cost the run, as it lasts longer than a loss may take to be found."""
    is_long = fault.seconds is None or fault.seconds >= _SURELY_FOUND_INTERVALS * config.control.heartbeat_interval_s
    kind = KINDS[fault.kind]
    if not (kind.is_sure_to_cost and (is_long or kind.duration == "lasts")):
        return frozenset()
    if kind.costs == "node":
        layout = config.parallel
        return frozenset(layout.groups_on(layout.node_of(fault.group, fault.rank)))
    return frozenset({fault.group})


def resolve_trace(config: RunConfig) -> tuple[points.Fault, ...]:
    """The faults of a run in the order they are configured, for a configuration without problems. Open steps are spread
    over the run in that order; a fault that needs a loss takes the step of its predecessor. Groups are distinct, and no
    drawn group takes the last host of a shard. Each fault has its own random stream, so setting one field changes no
    other fault's rank, step or ordinal. ValueError: every group left to draw would wipe out a shard.
    """
    trace = config.faults.trace
    shares = [np.random.default_rng([config.faults.seed, index]).random(4) for index in range(len(trace))]
    steps = _choose_steps(trace, config.train.steps, [float(share[0]) for share in shares])
    groups = _choose_groups(config, [float(share[1]) for share in shares])
    return tuple(
        points.Fault(
            step=step,
            group=group,
            rank=_pick(config.parallel.ranks_per_group, share[2]) if fault.rank is None else fault.rank,
            phase=fault.phase,
            kind=fault.kind,
            seconds=fault.seconds,
            factor=fault.factor,
            bit=fault.bit,
            ordinal=_choose_ordinal(config, fault, step, share[3]),
        )
        for fault, step, group, share in zip(trace, steps, groups, shares, strict=True)
    )


def _pick(num_choices: int, share: float) -> int:
    return int(share * num_choices)


def _choose_ordinal(config: RunConfig, fault: FaultConfig, step: int, share: float) -> int:
    if fault.phase not in points.PHASES_OF_A_MICROBATCH:
        return 1
    return 1 + _pick(least_passes(config, step), share)


def least_passes(config: RunConfig, step: int) -> int:
    """Microbatches that each lane of a group computes at least in a step without failures."""
    return config.spare.ramp.at(step) // config.layout.data_parallel


def _choose_steps(trace: Sequence[FaultConfig], num_steps: int, shares: Sequence[float]) -> list[int]:
    """Draws each open step from an equal part of the steps between the stated ones around it."""
    steps: list[int] = []
    for index, fault in enumerate(trace):
        if fault.step is not None:
            steps.append(fault.step)
        elif fault.phase in _WITH_THE_ONE_BEFORE and steps:
            steps.append(steps[-1])
        elif fault.phase in points.PHASES_OF_A_LOAD:
            steps.append(0)
        else:
            first = steps[-1] + 1 if steps else 0
            num_open, end = _open_stretch(trace[index:], num_steps)
            # If stated steps leave no room, the fault takes the last step.
            offset = _pick(max(end - first, 0), shares[index] / num_open)
            steps.append(min(first + offset, num_steps - 1))
    return steps


def _open_stretch(rest: Sequence[FaultConfig], num_steps: int) -> tuple[int, int]:
    """Number of faults up to the next stated step that need a step of their own, and the end of that stretch."""
    num_open = 0
    for fault in rest:
        if fault.step is not None:
            return num_open, fault.step
        num_open += fault.phase not in _WITH_THE_ONE_BEFORE
    return max(num_open, 1), num_steps


def _choose_groups(config: RunConfig, shares: Sequence[float]) -> list[GroupId]:
    trace, num_groups, placement = config.faults.trace, config.layout.num_groups, config.placement
    lost = {GroupId(fault.group) for fault in trace if fault.group is not None}
    groups: list[GroupId] = []
    for index, (fault, share) in enumerate(zip(trace, shares, strict=True)):
        if fault.group is not None:
            groups.append(GroupId(fault.group))
            continue
        left = [GroupId(group) for group in range(num_groups) if group not in lost]
        has_last_resort = config.data.access == "shared" and len(left) > 1
        choices = [group for group in left if has_last_resort or _is_survivable(placement, lost, group)]
        if not choices:
            raise ValueError(
                f"faults.trace[{index}] leaves its group open, and with {len(lost)} groups lost to other faults every "
                f"further loss wipes out a shard of spare.redundancy={config.spare.redundancy} hosts; "
                f"remove the fault, name its group, or raise spare.redundancy"
            )
        groups.append(choices[_pick(len(choices), share)])
        lost.add(groups[-1])
    return groups


def _is_survivable(placement: Placement, lost: set[GroupId], group: GroupId) -> bool:
    alive = frozenset(GroupId(other) for other in range(placement.num_groups)) - lost
    return placement.uncovered(alive - {group}) == placement.uncovered(alive)


LLAMA3_INTERRUPTIONS: Mapping[str, tuple[int, tuple[str, ...]]] = MappingProxyType(
    {
        "gpu": (148, ("kill", "hang", "raise")),
        "hbm": (72, ("raise", "nan")),
        "software": (54, ("raise", "kill")),
        "switch_or_cable": (35, ("cut", "hang")),
        "host_maintenance": (32, ("kill_supervisor", "stop_node", "stop", "drain")),
        "sram": (19, ("nan", "raise")),
        "system_processor": (17, ("kill", "stop")),
        "nic": (7, ("cut", "hang", "slow_link")),
        "nccl_watchdog": (7, ("hang",)),
        "silent_data_corruption": (6, ("bit_flip", "param_flip")),
        "thermal": (6, ("slow",)),
        "ssd": (3, ("disk_full", "slow_data")),
        "psu": (3, ("kill_supervisor", "kill")),
        "cpu": (2, ("stop", "kill", "slow_host")),
        "chassis": (2, ("kill_supervisor", "kill")),
        "io_board": (2, ("cut", "kill")),
        "dependency": (2, ("stop_store", "raise")),
        "memory": (2, ("param_flip", "kill")),
    }
)
"""Cause -> unplanned interruptions of Llama 3 405B in 54 days on 16,384 GPUs (arXiv 2407.21783), and the kinds whose
effect on a run is most similar, an assumption of this project.
"""


def kind_weights(config: RunConfig) -> dict[points.FaultKind, float]:
    """Probability of each kind, summing to 1. With `faults.mix=llama3` the kinds allowed here share a cause equally.
    ValueError: none is left.
    """
    listed = config.faults.kinds or survivable_kinds(config)
    weights: dict[points.FaultKind, float] = dict.fromkeys(dict.fromkeys(listed), 0.0)
    if config.faults.mix == "listed":
        for kind in listed:
            weights[kind] += 1.0
    else:
        for count, kinds in LLAMA3_INTERRUPTIONS.values():
            like = [kind for kind in weights if kind in kinds]
            for kind in like:
                weights[kind] += count / len(like)
    total = sum(weights.values())
    if not total:
        raise ValueError(f"faults.mix=llama3 has none of faults.kinds={', '.join(listed)}; list others, or none")
    return {kind: weight / total for kind, weight in weights.items() if weight}


@dataclass(slots=True)
class PartitionLossBudget:
    """Counts the losses that state partitions must survive, as an upper bound on lost copies. The groups lost within
    `recovery_steps` must be fewer than the hosts of a partition, whichever partitions they host. `redundancy`: hosts of
    each partition, r_o. `recovery_steps`: steps to remake lost copies, and again to compare them.
    """

    redundancy: int
    recovery_steps: int
    losses: list[int] = field(default_factory=list)
    """Step of each loss that is not a flip."""
    flips: list[int] = field(default_factory=list)
    """Steps at which a group's state was corrupted, which costs the group."""

    def allows(self, step: int, num_lost: int, num_members: int, *, is_flip: bool) -> bool:
        """Whether every partition keeps enough hosts if `num_lost` of `num_members` groups are lost at this step. If
        one of h hosts is corrupt and k others are lost or hold a copy not compared since, the correct ones must be more
        than half: 2 (h - k - 1) > h. `is_flip` marks a loss by corruption.
        """
        hosts = min(self.redundancy, num_members)
        num_recent = sum(hit > step - self.recovery_steps for hit in (*self.losses, *self.flips))
        if num_recent + num_lost >= hosts:
            return False
        if is_flip:
            return self._confirms(hosts, step, 0)
        return all(self._confirms(hosts, flip, num_lost) for flip in self.flips if flip + self.recovery_steps > step)

    def hit(self, step: int, num_lost: int, *, is_flip: bool) -> None:
        (self.flips if is_flip else self.losses).extend([step] * num_lost)

    def changes(self) -> list[int]:
        hits = [*self.losses, *self.flips]
        return [step + times * self.recovery_steps for step in hits for times in (1, 2)]

    def _confirms(self, hosts: int, flip: int, num_more: int) -> bool:
        """Whether the corruption of one host at step `flip` is found with `num_more` further losses."""
        num_others = sum(hit > flip - 2 * self.recovery_steps for hit in self.losses)
        num_others += sum(hit > flip - 2 * self.recovery_steps and hit != flip for hit in self.flips)
        return 2 * (hosts - num_others - num_more - 1) > hosts


FIRST_STEP = 3
"""Before it no step time is known, so that a hung rank is found only by a timeout."""


_STREAM = 1  # separate from the stream of the trace

_FACTORS = (1.5, 4.0)
"""Between these the factor of a slow fault is drawn."""

_NEVER_DRAWN = (
    points.PHASES_BETWEEN_STEPS
    | points.PHASES_OF_AN_EVALUATION
    | points.PHASES_WITH_PARTITIONS
    | points.PHASES_OF_A_BUCKET
)
_PHASES = tuple(phase for phase in points.FaultPoint if phase not in _NEVER_DRAWN)

_PHASES_WITH_PARTITIONS = (*_PHASES, points.FaultPoint.BEFORE_GATHER)
"""Without IN_GATHER, which is not reached if another group is lost in the same gather."""

_PHASES_OF_A_RECOVERY = (points.FaultPoint.PATCH, points.FaultPoint.REBUILD)

_NUM_MANTISSA_BITS = 23
"""A flip of a higher bit of a parameter may give every group that gathers it gradients that are not finite."""

_BEFORE_THE_SUM = (
    points.FaultPoint.FORWARD,
    points.FaultPoint.SEND,
    points.FaultPoint.RECEIVE,
    points.FaultPoint.BACKWARD,
    points.FaultPoint.BEFORE_REDUCE,
)
"""A group lost here is not in the sum, so others recompute its microbatches in the same step."""

_HARMLESS_INTERVALS = 0.5
"""A pause of this many heartbeat intervals costs no group, even on a busy machine; a stop must be shorter than
`SHORT_STOP_S`, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """A fault whose groups are not chosen yet."""

    kind: points.FaultKind
    phase: points.FaultPoint
    seconds: float | None
    seconds_else: float | None
    """Duration to use where a lasting fault is not allowed; None if it does not last or cannot pass."""
    factor: float | None
    bit: int | None
    is_of_domain: bool
    costs: bool
    """Whether it may cost its groups."""

    @property
    def row(self) -> Kind:
        return KINDS[self.kind]

    @property
    def is_for_good(self) -> bool:
        """Whether its groups stay lost even if others are started again."""
        return self.costs and self.row.costs == "node" and self.seconds is None

    @property
    def brings_patch(self) -> bool:
        """Whether survivors are sure to compute a patch in its step."""
        return self.row.is_sure_to_cost and self.seconds is None and self.phase in _BEFORE_THE_SUM


class _Machines:
    """Which places have lost their machine for good, and where the others have moved since, as supervisors decide it.

    For groups that fill several machines each, which come back as often as they are lost.
    """

    def __init__(self, config: RunConfig) -> None:
        self._layout = config.parallel
        self._groups_per_domain = config.spare.groups_per_domain
        self._times = config.pipeline_times
        self._places = Places(config.parallel)
        self._empty: set[PlaceId] = set()

    def made_whole_without(self, fault: points.Fault) -> list[GroupId]:
        """The groups that come back once this fault has taken the machine of its place."""
        broken = self._broken() | {fault.group}
        self._empty.add(PlaceId(self._layout.node_of(fault.group, fault.rank)))
        of_broken = [place for place in self._empty if not broken.isdisjoint(self._layout.groups_on(place))]
        # Faults are drawn so that no shard lacks a host.
        assignment = self._places.reform(of_broken, self._groups_per_domain, unhosted={}, times=self._times)
        for holding in assignment.holdings:
            left = self._places.held_by(holding.machine)
            assert left is not None, "no machine is idle"
            self._empty.add(left.place)
        self._places.apply(assignment)
        self._empty -= {holding.place for holding in assignment.holdings}
        return sorted(broken - self._broken())

    def _broken(self) -> set[GroupId]:
        held = ((place, group) for place in self._empty for group in self._layout.groups_on(place))
        return {group for place, group in held if place not in self._places.beyond(group)}


@dataclass(slots=True)
class _Condition:
    """Which groups may be hit at which step, given the faults drawn so far."""

    placement: Placement
    needs_majority: bool
    recovery_steps: int
    num_rejoins: int
    has_last_resort: bool
    partitions: PartitionLossBudget | None
    machines: "_Machines | None" = None
    hit_until: dict[GroupId, float] = field(default_factory=dict)
    lost_until: dict[GroupId, float] = field(default_factory=dict)
    gone_from: dict[GroupId, int] = field(default_factory=dict)
    num_losses: dict[GroupId, int] = field(default_factory=dict)
    corrupt_until: float = 0.0

    def allows(self, draw: _Draw, groups: frozenset[GroupId], step: int, targets: Set[frozenset[GroupId]]) -> bool:
        """Whether the run is sure to survive this fault in these groups, and all of them are present to be hit.
        `targets` has every set of groups that such a fault can strike at once.
        """
        if any(step < self.hit_until.get(group, 0) for group in groups):
            return False
        if draw.row.strikes == "device" and step < self.corrupt_until:
            return False
        if not draw.costs:
            return True
        lost = frozenset(group for group, until in self.lost_until.items() if step < until)
        all_groups = frozenset(GroupId(group) for group in range(self.placement.num_groups))
        left = all_groups - lost - groups
        num_members, is_flip = len(all_groups - lost), draw.row.corrupts_state
        if self.partitions is not None and not self.partitions.allows(step, len(groups), num_members, is_flip=is_flip):
            return False
        gone = {group for group in lost if self.gone_from.get(group, math.inf) <= step}
        if draw.is_for_good and self.num_rejoins:
            return all(self._is_enough(left - others, all_groups - gone - groups) for others in targets)
        return self._is_enough(left, all_groups - gone)

    def _is_enough(self, left: frozenset[GroupId], voters: frozenset[GroupId]) -> bool:
        if self.needs_majority and 2 * len(left) <= len(voters):
            return False
        return bool(left) and (self.has_last_resort or not self.placement.uncovered(left))

    def hit(self, draw: _Draw, groups: frozenset[GroupId], step: int, fault: points.Fault) -> None:
        until = step + self.recovery_steps
        for group in groups:
            self.hit_until[group] = until
            if draw.costs:
                self.num_losses[group] = self.num_losses.get(group, 0) + (draw.row.costs != "departure")
                is_last = draw.is_for_good or self.num_losses[group] > self.num_rejoins
                self.lost_until[group] = math.inf if is_last else until
                if is_last:
                    self.gone_from[group] = until
                self.hit_until[group] = self.lost_until[group]
        if draw.is_for_good and self.machines is not None:
            for group in self.machines.made_whole_without(fault):
                self.lost_until[group] = self.hit_until[group] = until
                del self.gone_from[group]
        if draw.row.strikes == "device":
            self.corrupt_until = until
        if draw.costs and self.partitions is not None:
            self.partitions.hit(step, len(groups), is_flip=draw.row.corrupts_state)

    def next_change(self, step: int) -> float:
        """The first later step at which more may be allowed; infinity if there is none."""
        of_partitions = self.partitions.changes() if self.partitions else ()
        changes = (*self.hit_until.values(), self.corrupt_until, *of_partitions)
        return min((change for change in changes if change > step), default=math.inf)


def draw_faults(config: RunConfig) -> tuple[points.Fault, ...]:
    """The random faults of a run, by step. The last `faults.recovery_steps` are spared: there they may be found too
    late.
    """
    faults = config.faults
    if faults.mean_steps is None:
        return ()
    weights, num_rejoins = kind_weights(config), config.spare.rejoins
    is_stacked = config.optimizer.sharding == "stacked"
    condition = _Condition(
        placement=config.placement,
        needs_majority=any(KINDS[kind].corrupts_state for kind in weights),
        recovery_steps=faults.recovery_steps,
        num_rejoins=num_rejoins,
        has_last_resort=config.data.access == "shared",
        partitions=PartitionLossBudget(config.optimizer.redundancy, faults.recovery_steps) if is_stacked else None,
        machines=_Machines(config) if num_rejoins and can_reform(config.parallel) else None,
    )
    end = config.train.steps - faults.recovery_steps
    at = float(FIRST_STEP)
    drawn: list[points.Fault] = []
    waiting: list[tuple[_Draw, np.random.Generator]] = []
    for gap, rng in _gaps(config):
        at += gap
        if at >= end:
            return tuple(drawn)
        draw = _draw(config, weights, rng)
        if draw.phase in _PHASES_OF_A_RECOVERY:
            waiting.append((draw, rng))
            continue
        found = _place(config, condition, draw, int(at), end, rng)
        if not found and draw.seconds_else is not None:
            draw = replace(draw, seconds=draw.seconds_else, costs=_may_cost(config, draw.kind, draw.seconds_else))
            found = _place(config, condition, draw, int(at), end, rng)
        drawn += found
        if not found:
            continue
        step = found[0].step
        at = max(at, float(step))
        for index, (late, its_rng) in enumerate(waiting if draw.brings_patch else ()):
            if in_recovery := _place(config, condition, late, step, step + 1, its_rng):
                drawn += in_recovery
                del waiting[index]
                break
    raise AssertionError("the gaps never end")


def _gaps(config: RunConfig) -> Iterator[tuple[float, np.random.Generator]]:
    faults = config.faults
    mean = faults.mean_steps or 0.0
    gaps = np.random.default_rng([faults.seed, _STREAM])
    for index in itertools.count():
        share = gaps.exponential()
        if faults.distribution == "weibull":
            # X^(1/shape) of an exponential X is Weibull, with mean Gamma(1 + 1/shape).
            share = share ** (1 / faults.shape) / math.gamma(1 + 1 / faults.shape)
        yield mean * share, np.random.default_rng([faults.seed, _STREAM, index])


def _draw(config: RunConfig, weights: dict[points.FaultKind, float], rng: np.random.Generator) -> _Draw:
    faults = config.faults
    kind = list(weights)[rng.choice(len(weights), p=list(weights.values()))]
    row = KINDS[kind]
    lasts = row.duration == "lasts" or (row.is_sure_to_cost and rng.random() < 0.5)
    passes_after_s = None if row.duration == "lasts" else float(faults.max_seconds * (1.0 - rng.random()))
    seconds = None if lasts else passes_after_s
    jump = -1.0 if kind == "clock_jump" and rng.random() < 0.5 else 1.0
    unreachable: set[points.FaultPoint] = (
        set() if config.layout.pipeline_parallel > 1 else {points.FaultPoint.SEND, points.FaultPoint.RECEIVE}
    )
    if not any(KINDS[other].is_sure_to_cost for other in weights):
        unreachable.update(_PHASES_OF_A_RECOVERY)
    is_stacked = config.optimizer.sharding == "stacked"
    anywhere = _PHASES_WITH_PARTITIONS if is_stacked else _PHASES
    if row.phases:
        unreachable |= set(points.FaultPoint).difference(row.phases) | {
            points.FaultPoint.SEND,
            points.FaultPoint.RECEIVE,
        }
    phases = [phase for phase in anywhere if phase not in unreachable]
    num_bits = _NUM_MANTISSA_BITS if is_stacked and row.corrupts_state else bits_of(config, kind)
    return _Draw(
        kind=kind,
        phase=phases[rng.integers(len(phases))],
        seconds=None if seconds is None else jump * seconds,
        seconds_else=passes_after_s if lasts else None,
        factor=float(rng.uniform(*_FACTORS)) if row.has_factor else None,
        bit=int(rng.integers(num_bits)) if row.flips else None,
        is_of_domain=lasts and row.costs == "group" and row.strikes == "rank" and rng.random() < faults.domain_share,
        costs=_may_cost(config, kind, seconds),
    )


def _may_cost(config: RunConfig, kind: points.FaultKind, seconds: float | None) -> bool:
    costs = KINDS[kind].costs
    if costs in ("nothing", "departure"):
        return costs == "departure"
    harmless_s = _HARMLESS_INTERVALS * config.control.heartbeat_interval_s
    limit_s = min(harmless_s, SHORT_STOP_S) if kind == "stop" else harmless_s
    return seconds is None or seconds > limit_s


def _place(
    config: RunConfig, condition: _Condition, draw: _Draw, step: int, end: int, rng: np.random.Generator
) -> list[points.Fault]:
    """The fault in each group it hits, at the first step in [step, end) that allows it; empty if there is none."""
    struck_by = {GroupId(aim): _groups_of(config, draw, GroupId(aim)) for aim in range(config.layout.num_groups)}
    targets = frozenset(struck_by.values())
    while step < end:
        allowed = [aim for aim, groups in struck_by.items() if condition.allows(draw, groups, step, targets)]
        if allowed:
            aim = allowed[rng.integers(len(allowed))]
            struck = struck_by[aim]
            victims = sorted(struck) if draw.is_of_domain else [aim]
            found = [_fault(config, draw, group, step, rng) for group in victims]
            condition.hit(draw, struck, step, found[0])
            return found
        later = condition.next_change(step)
        if math.isinf(later):
            return []
        step = math.ceil(later)
    return []


def _groups_of(config: RunConfig, draw: _Draw, group: GroupId) -> frozenset[GroupId]:
    if draw.is_of_domain:
        size = config.spare.groups_per_domain
        first = group - group % size
        members = range(first, min(first + size, config.layout.num_groups))
        return frozenset(GroupId(member) for member in members)
    if draw.row.costs == "node":
        layout = config.parallel
        nodes = {layout.node_of(group, rank) for rank in range(layout.ranks_per_group)}
        return frozenset(other for node in nodes for other in layout.groups_on(node))
    return frozenset({group})


def _fault(config: RunConfig, draw: _Draw, group: GroupId, step: int, rng: np.random.Generator) -> points.Fault:
    layout = config.parallel
    num_times = least_passes(config, step) if draw.phase in points.PHASES_OF_A_MICROBATCH else 1
    return points.Fault(
        step=step,
        group=group,
        rank=int(rng.integers(layout.lengths[-1] * layout.ranks_per_stage)),  # whatever stages the group has by then
        phase=draw.phase,
        kind=draw.kind,
        seconds=draw.seconds,
        factor=draw.factor,
        bit=draw.bit,
        ordinal=1 + int(rng.integers(num_times)),
    )
