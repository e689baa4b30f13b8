"""Resolves the configured faults: draws every open field from the seed, the same for equal configurations."""

from collections.abc import Sequence

import numpy as np

from spare_megatron.config.schema import FaultConfig, RunConfig
from spare_megatron.faults.kinds import KINDS
from spare_megatron.faults.points import (
    PHASES_OF_A_JOIN,
    PHASES_OF_A_LOAD,
    PHASES_OF_A_MICROBATCH,
    Fault,
    FaultPoint,
)
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import Placement

PHASES_AFTER_A_LOSS = PHASES_OF_A_JOIN | {
    FaultPoint.PATCH,
    FaultPoint.REBUILD,
    FaultPoint.REPAIR,
    FaultPoint.EVALUATION_PATCH,
}
"""Phases reached only after a loss: in its step, or any time later by a repair or a join."""

_WITH_THE_ONE_BEFORE = PHASES_AFTER_A_LOSS | PHASES_OF_A_LOAD
"""Phases whose open step is that of the preceding fault."""

_SURELY_FOUND_INTERVALS = 6


def groups_hit(config: RunConfig, fault: Fault) -> frozenset[GroupId]:
    """The groups that a fault is sure to cost the run, as it lasts longer than a loss may take to be found."""
    is_long = fault.seconds is None or fault.seconds >= _SURELY_FOUND_INTERVALS * config.control.heartbeat_interval_s
    kind = KINDS[fault.kind]
    if not (kind.is_sure_to_cost and (is_long or kind.duration == "lasts")):
        return frozenset()
    if kind.costs == "node":
        layout = config.parallel
        return frozenset(layout.groups_on(layout.node_of(fault.group, fault.rank)))
    return frozenset({fault.group})


def resolve_trace(config: RunConfig) -> tuple[Fault, ...]:
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
        Fault(
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
    if fault.phase not in PHASES_OF_A_MICROBATCH:
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
        elif fault.phase in PHASES_OF_A_LOAD:
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
