"""What slow groups cost, and what dealing work by pace is worth.

Symbols: N = num_groups, and as many shards; m = num_microbatches per shard; each group turns slow after I seconds on
average and stays so for D, so that a share q = D / (I + D) of the groups is slow; f = factor, the time per microbatch
of a slow group. Hosts do not limit who computes what, as is nearly so from r = 3 on.
"""

from dataclasses import dataclass
from math import ceil, exp, floor, inf, sqrt

from scipy import stats

from spare_megatron.core.slow_machines import slow_machine_policy as policy
from spare_megatron.core.slow_machines.culprit import Cause
from spare_megatron.stacking.layout import MachineId
from spare_megatron.stacking.pace_evidence import STEPS_TO_ACT
from spare_megatron.stacking.paces import dealt_stacks
from spare_megatron.tools.plan.overhead import StepTimes

_MANY = 10**9
"""Steps, more than any rule asks for."""
_SPREAD = 8.0
"""Standard deviations of the number of slow groups that are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRate:
    """Each group, or link of a group, turns slow after an exponential time, and is as fast as before after another one.

    ValueError if a value is out of its range.
    """

    group_interval_s: float | None = None
    """Mean seconds until a given group turns slow; None: none ever does."""
    duration_s: float = 3600.0
    """Mean seconds for which it is slow."""
    factor: float = 2.0
    """Its time per microbatch, or for a sum over groups, in times that of the others."""

    def __post_init__(self) -> None:
        for name in ("group_interval_s", "duration_s", "factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name}={value} of slow groups or links has to be above 0, and finite")

    @property
    def cycle_s(self) -> float:
        """I + D, mean seconds from one time that a given group turns slow to the next; infinite if none ever does."""
        return inf if self.group_interval_s is None else self.group_interval_s + self.duration_s

    @property
    def share(self) -> float:
        """q, the share of time in which a given group is slow.

        >>> SlowRate(group_interval_s=9000.0, duration_s=1000.0).share
        0.1
        """
        return self.duration_s / self.cycle_s


NAMED_AFTER = 12
"""Slow steps until a group is named as what holds the run back: windows of 4 steps, of which 3 have to agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCost:
    """Mean step, in steps without slow groups: with the same work for all, and dealt by pace."""

    even_ratio: float
    dealt_ratio: float
    replaced_ratio: float | None = None
    """Dealt by pace, and with machines of a group each that are drained and replaced; None: none would be."""


def replaced_ratio(
    num_groups: int, num_microbatches: int, times: StepTimes, rate: SlowRate, *, join_s: float | None, has_spare: bool
) -> float | None:
    """The mean step, in steps without slow groups, if the rule of runs drains them, one at a time; None if it never
    does. `join_s`: of an admission; None: not measured.

    A group that turns slow while another machine is in quarantine, a share b = a D / (1 + a D) of all with a = N / (I +
    D), waits for half of D. Others are dealt work until they have cost as much as the change, by then n steps.
    """
    stacks, away_s = dealt_stacks(num_groups, num_microbatches, 1, rate.factor), rate.duration_s
    dealt_s, slow_s = (times.reduce_s + times.shard_s * one for one in (stacks, rate.factor))
    decision = policy.decide(
        policy.Situation(
            machine=MachineId(0),
            cause=Cause.COMPUTE,
            excess_s=slow_s - times.step_s,
            mended_ratio=stacks,
            step_s=dealt_s,
            lost_steps=_MANY,
            steps_left=_MANY,
            num_members=num_groups,
            num_leaving=1,
            least_hosts=None,
            replacement="machine" if has_spare else "none",
            admission_s=policy.ADMISSION_STEPS * dealt_s if join_s is None else join_s,
        )
    )
    if decision.rule != "drain":
        return None
    until_s = (NAMED_AFTER + ceil(decision.cost_s / decision.gain_s)) * dealt_s
    lost, drained = 1 - times.step_s / dealt_s, exp(-until_s / away_s)
    fewer_s = times.reduce_s + times.shard_s * ceil(num_groups * num_microbatches / (num_groups - 1)) / num_microbatches
    change_s = decision.cost_s + (0.0 if has_spare else away_s * (1 - times.step_s / fewer_s))
    at_once_s = away_s * (1 - drained) * lost + drained * change_s
    onsets_per_s = num_groups / rate.cycle_s
    busy = onsets_per_s * away_s / (1 + onsets_per_s * away_s)
    late_s = away_s / 2 * lost + change_s / 2
    share = onsets_per_s * (STEPS_TO_ACT * (slow_s - dealt_s) + (1 - busy) * at_once_s + busy * late_s)
    return 1 / (1 - share) if share < 1 else inf


def slow_cost(num_groups: int, num_microbatches: int, times: StepTimes, rate: SlowRate) -> SlowCost:
    """The cost of slow groups. A group is dealt work by its pace after `STEPS_TO_ACT` slow steps.

    Shares of time weigh steps per second, so means of steps are harmonic. Each onset, N / (I + D) of them a second,
    adds STEPS_TO_ACT times what an undealt step takes more.

    >>> times = StepTimes(shard_s=10.0, reduce_s=0.0, loss_interval_s=1e9)
    >>> found = slow_cost(8, 16, times, SlowRate(group_interval_s=1e7, duration_s=1e6, factor=2.0))
    >>> round(found.even_ratio, 2), round(found.dealt_ratio, 3)
    (1.36, 1.073)
    """
    none_slow = (1 - rate.share) ** num_groups
    even_s = 1 / (none_slow / times.step_s + (1 - none_slow) / (times.reduce_s + times.shard_s * rate.factor))
    number = stats.binom(num_groups, rate.share)
    spread = _SPREAD * sqrt(number.var()) + 1
    slow = range(max(0, floor(number.mean() - spread)), min(num_groups, ceil(number.mean() + spread)) + 1)
    stacks = [dealt_stacks(num_groups, num_microbatches, k, rate.factor) for k in slow]
    rates = [
        weight / (times.reduce_s + times.shard_s * one) for weight, one in zip(number.pmf(slow), stacks, strict=True)
    ]
    dealt_s = 1 / float(sum(rates))
    onsets_per_s = num_groups / rate.cycle_s
    unknown = onsets_per_s * STEPS_TO_ACT * (times.reduce_s + times.shard_s * rate.factor - dealt_s)
    dealt_s = min(dealt_s / (1 - max(unknown, 0.0)), even_s) if unknown < 1 else even_s
    return SlowCost(even_ratio=even_s / times.step_s, dealt_ratio=dealt_s / times.step_s)
