"""What single slow steps and recoveries add to a run. Medians leave them out, and the time of a whole run has them."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from spare_megatron.simulator.measured import Disturbance, RecoveryTimes, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Seconds beyond the typical ones, on average.

    Attributes:
        step_s: Of a step without a loss, from the end of the one before.
        warm_up_s: Of a step of the warm-up after groups came back, from the end of the one before and beyond what
            taking them in takes.
        recovery_s: Of a recovery from a single loss in which the step was reduced again.
    """

    step_s: float = 0.0
    warm_up_s: float = 0.0
    recovery_s: float = 0.0


def scatter_of(
    committed: Sequence[StepTimes],
    recoveries: Sequence[RecoveryTimes],
    step_s: Callable[[StepTimes], float],
    recovery_s: Callable[[RecoveryTimes], float],
) -> Scatter:
    """The scatter of a run.

    Args:
        committed: Its steps.
        recoveries: Its recoveries.
        step_s: What a step without a loss takes by the typical costs, with the taking in of groups before it.
        recovery_s: What a recovery takes by them.
    """
    beyond_s: dict[Disturbance, list[float]] = defaultdict(list)
    for before, after in pairwise(committed):
        beyond_s[after.disturbance].append(after.ended_at_s - before.ended_at_s - step_s(after))
    retried = [
        times.recovery.total_s - recovery_s(times)
        for times in recoveries
        if times.is_retried and len(times.recovery.lost) == 1
    ]
    return Scatter(step_s=_mean(beyond_s[""]), warm_up_s=_mean(beyond_s["join"]), recovery_s=_mean(retried))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
