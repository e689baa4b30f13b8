"""What slow groups cost, and what dealing work by pace is worth.

Symbols: N = num_groups, and as many shards; m = num_microbatches per shard; each group turns slow after I seconds on
average and stays so for D, so that a share q = D / (I + D) of the groups is slow; f = factor, the time per microbatch
of a slow group. Hosts do not limit who computes what, as is nearly so from r = 3 on.
"""

from dataclasses import dataclass
from math import ceil, floor, inf, sqrt

from scipy import stats

from spare_megatron.stacking.pace_evidence import STEPS_TO_ACT
from spare_megatron.stacking.paces import dealt_stacks
from spare_megatron.tools.plan.overhead import StepTimes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCost:
    """Mean step, in steps without slow groups: with the same work for all, and dealt by pace."""

    even_ratio: float
    dealt_ratio: float


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
