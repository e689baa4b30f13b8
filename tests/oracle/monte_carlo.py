"""Monte Carlo checks of the closed forms: random losses on real placements, and event-by-event simulation.

Functions take a generator and return samples, so that callers can distinguish error from noise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from spare_megatron.core.saves.survival import FloatArray
from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.order import initial_order
from spare_megatron.stacking.placement import Placement
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.stack_reorder import initial_order as initial_stacks
from spare_megatron.stacking.stack_reorder import reorder_stacks
from spare_megatron.tools.plan.domains import IntArray, LossIntervals
from spare_megatron.tools.plan.facts import CheckpointTimes
from spare_megatron.tools.plan.overhead import StepTimes
from spare_megatron.tools.plan.readmission import RejoinTimes
from spare_megatron.tools.plan.repair import RepairTimes

Generator = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Costs of a simulated run: step times, saves and restarts, and seconds from save to save."""

    times: StepTimes
    checkpoint: CheckpointTimes
    cadence_s: float


def endured_samples(hosts: IntArray, num_items: int, num_samples: int, rng: Generator) -> IntArray:
    """Losses endured before a wipe-out, for random orders in which each item is lost once.

    Items are groups or domains; `hosts` has, for each shard, the items of which it needs one.
    """
    return np.array([int(_ranks(num_items, rng)[hosts].max(axis=1).min()) for _ in range(num_samples)])


def depth_samples(placement: Placement, num_sequences: int, rng: Generator) -> list[IntArray]:
    """Depth of `stacking.stack_reorder` with 0, 1, 2, ... groups lost until wipe-out, for random orders of losses."""

    def depth_of() -> Callable[[frozenset[GroupId]], int]:
        order = initial_stacks(placement)

        def after(alive: frozenset[GroupId]) -> int:
            nonlocal order
            result = reorder_stacks(placement, alive, order)
            order = result.order
            return result.order.depth

        return after

    return [np.array(_until_wipe_out(placement, depth_of(), rng)) for _ in range(num_sequences)]


def makespan_samples(
    placement: Placement, num_microbatches: int, num_sequences: int, rng: Generator
) -> list[tuple[FloatArray, FloatArray]]:
    """Makespans of `stacking.reorder` and of the patch of the next loss, in stacks, for random orders of losses.

    Entry k of a pair is for k groups lost. The last makespan has no patch: the next loss is the wipe-out.
    """

    def one() -> tuple[FloatArray, FloatArray]:
        patches: list[int] = []
        order = initial_order(placement, num_microbatches, "microbatch")

        def after(alive: frozenset[GroupId]) -> int:
            nonlocal order
            is_lost = ~np.isin(order.work.owners, np.fromiter(alive, dtype=np.int32))
            orphans = [Microbatch(ShardId(s), k) for s, k in np.argwhere(is_lost).tolist()]
            if orphans:
                patches.append(order.patch(alive, orphans).makespan)
            order = order.for_groups(alive)
            return order.work.makespan

        makespans = _until_wipe_out(placement, after, rng)
        return np.array(makespans) / num_microbatches, np.array(patches) / num_microbatches

    return [one() for _ in range(num_sequences)]


def repair_samples_s(placement: Placement, repair: RepairTimes, num_samples: int, rng: Generator) -> FloatArray:
    """Seconds from all groups up to a wipe-out with groups that come back; all times exponential, event by event."""
    return np.array([_repaired_until_wipe_out_s(placement, repair, rng) for _ in range(num_samples)])


def spares_samples_s(
    placement: Placement, group_interval_s: float, rejoin: RejoinTimes, num_samples: int, rng: Generator
) -> tuple[FloatArray, FloatArray]:
    """Seconds from all groups up to each wipe-out with a pool of spares, and the absences of all lost groups.

    Repair times are exponential. Lost groups queue for hardware in the order of their losses.
    """
    found = [_with_spares_until_wipe_out(placement, group_interval_s, rejoin, rng) for _ in range(num_samples)]
    lived_s, absences_s = zip(*found, strict=True)
    return np.array(lived_s), np.concatenate(absences_s)


def domain_repair_samples_s(
    placement: Placement,
    domain_of: IntArray,
    intervals: LossIntervals,
    absence_s: float,
    samples: tuple[int, Generator],
) -> FloatArray:
    """Seconds from all groups up to a wipe-out with groups and domains that are lost and groups that come back.

    Each lost group comes back by itself after an exponential time of mean `absence_s`. `samples` is their number and
    the generator.
    """
    num_samples, rng = samples
    return np.array(
        [_domains_until_wipe_out_s(placement, domain_of, intervals, absence_s, rng) for _ in range(num_samples)]
    )


def domain_samples_s(
    placement: Placement, domain_of: IntArray, intervals: LossIntervals, num_samples: int, rng: Generator
) -> FloatArray:
    """Seconds from all groups up to a wipe-out with groups and whole domains that never come back."""
    num_domains = int(domain_of.max()) + 1
    group_s = rng.exponential(intervals.group_s, (num_samples, placement.num_groups))
    domain_s = rng.exponential(intervals.domain_s, (num_samples, num_domains))
    lost_s = np.minimum(group_s, domain_s[:, domain_of])
    return np.array([row[placement.host_array].max(axis=1).min() for row in lost_s])


def availability_sample(cadence_s: float, checkpoint: CheckpointTimes, wipe_out_times_s: FloatArray) -> float:
    """Share of time spent on saved work, over runs that each end with a wipe-out after one of these times.

    T_c - T_s seconds of work alternate with T_s of saving; work after the last finished save is lost.
    """
    num_saved = np.floor(wipe_out_times_s / cadence_s)
    worked_s = num_saved * (cadence_s - checkpoint.save_s)
    return float(worked_s.sum() / (wipe_out_times_s + checkpoint.restart_s).sum())


def _ranks(num_items: int, rng: Generator) -> IntArray:
    """The number of items lost before each item."""
    ranks = np.empty(num_items, dtype=np.int64)
    ranks[rng.permutation(num_items)] = np.arange(num_items)
    return ranks


def _until_wipe_out(placement: Placement, after: Callable[[frozenset[GroupId]], int], rng: Generator) -> list[int]:
    ranks = _ranks(placement.num_groups, rng)
    endured = int(ranks[placement.host_array].max(axis=1).min())
    return [after(frozenset(map(GroupId, np.flatnonzero(ranks >= k).tolist()))) for k in range(endured + 1)]


def _repaired_until_wipe_out_s(placement: Placement, repair: RepairTimes, rng: Generator) -> float:
    is_up = np.ones(placement.num_groups, dtype=np.bool_)
    hosts, stacks = placement.host_array, placement.stack_array
    next_s = rng.exponential(repair.group_interval_s, placement.num_groups)
    while True:
        group = int(next_s.argmin())
        now_s = float(next_s[group])
        is_up[group] = not is_up[group]
        if not is_up[group] and not is_up[hosts[stacks[group]]].any(axis=1).all():
            return now_s
        next_s[group] += rng.exponential(repair.group_interval_s if is_up[group] else repair.repair_s)


def _with_spares_until_wipe_out(
    placement: Placement, group_interval_s: float, rejoin: RejoinTimes, rng: Generator
) -> tuple[float, FloatArray]:
    is_up = np.ones(placement.num_groups, dtype=np.bool_)
    hosts, stacks = placement.host_array, placement.stack_array
    next_s = rng.exponential(group_interval_s, placement.num_groups)
    hardware_s, absences_s = [0.0] * rejoin.num_spares, []
    while True:
        group = int(next_s.argmin())
        now_s = float(next_s[group])
        is_up[group] = not is_up[group]
        if is_up[group]:
            next_s[group] += rng.exponential(group_interval_s)
            continue
        heappush(hardware_s, now_s + rng.exponential(rejoin.repair_s))
        next_s[group] = max(heappop(hardware_s), now_s) + rejoin.transfer_s
        absences_s.append(float(next_s[group]) - now_s)
        if not is_up[hosts[stacks[group]]].any(axis=1).all():
            return now_s, np.array(absences_s)


def _domains_until_wipe_out_s(
    placement: Placement, domain_of: IntArray, intervals: LossIntervals, absence_s: float, rng: Generator
) -> float:
    is_up = np.ones(placement.num_groups, dtype=np.bool_)
    next_s = rng.exponential(intervals.group_s, placement.num_groups)
    domain_s = rng.exponential(intervals.domain_s, int(domain_of.max()) + 1)
    while True:
        group, domain = int(next_s.argmin()), int(domain_s.argmin())
        if domain_s[domain] < next_s[group]:
            now_s = float(domain_s[domain])
            lost = np.flatnonzero((domain_of == domain) & is_up)
            domain_s[domain] += rng.exponential(intervals.domain_s)
        else:
            now_s = float(next_s[group])
            lost = np.array([group] if is_up[group] else [], dtype=np.int64)
            if not is_up[group]:
                is_up[group] = True
                next_s[group] += rng.exponential(intervals.group_s)
        is_up[lost] = False
        next_s[lost] = now_s + rng.exponential(absence_s, len(lost))
        if len(lost) and not is_up[placement.host_array].any(axis=1).all():
            return now_s


def simulated_time_to_train(
    wipe_out_after: IntArray, makespans: FloatArray, patch: FloatArray, run: SimulatedRun, rng: Generator
) -> float:
    """Time to train over the time without losses and saves, over runs that each end with a wipe-out.

    `wipe_out_after` has the number of losses of each run, including the one that wipes out; losses come at a constant
    rate. `makespans` and `patch` are stacks per step and per round of patches, with k lost.
    """
    wall_s = num_saved = 0.0
    for num_losses in wipe_out_after.tolist():
        losses_s = np.cumsum(rng.exponential(run.times.loss_interval_s, num_losses)).tolist()
        num_saved += _steps_saved(losses_s, makespans.tolist(), patch.tolist(), run)
        wall_s += losses_s[-1] + run.checkpoint.restart_s
    return wall_s / (num_saved * run.times.step_s)


def _steps_saved(losses_s: list[float], makespans: list[float], patch: list[float], run: SimulatedRun) -> int:
    """Steps saved before the last loss; each step has rounds of patches as long as groups are lost."""
    now_s = last_save_s = 0.0
    num_lost = num_saved = num_unsaved = 0
    while True:
        while losses_s[num_lost] <= now_s:  # lost during a save: the next step is planned without them
            num_lost += 1
            if num_lost == len(losses_s):
                return num_saved
        end_s = now_s + makespans[num_lost] * run.times.shard_s + run.times.reduce_s
        while losses_s[num_lost] <= end_s:
            round_s = patch[num_lost] * run.times.shard_s
            while losses_s[num_lost] <= end_s:
                num_lost += 1
                if num_lost == len(losses_s):
                    return num_saved
            end_s += round_s
        now_s = end_s
        num_unsaved += 1
        if now_s - last_save_s >= run.cadence_s - run.checkpoint.save_s:
            now_s += run.checkpoint.save_s
            if losses_s[-1] > now_s:
                num_saved, num_unsaved, last_save_s = num_saved + num_unsaved, 0, now_s
