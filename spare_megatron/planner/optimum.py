"""The redundancy that SPARe's own model calls best: closed form and numeric minimum."""

from dataclasses import dataclass
from math import floor, log, log2

import numpy as np

from spare_megatron.planner.availability import best_availability
from spare_megatron.planner.endurance import asymptotic_endured_losses
from spare_megatron.planner.overhead import StepTimes, mean_overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTimes:
    """What saves and restarts take.

    Attributes:
        save_s: T_s, seconds that training stands still for a save; above 0.
        restart_s: T_r, seconds from a wipe-out to training again.
    """

    save_s: float
    restart_s: float


def closed_form_redundancy(num_groups: int) -> int:
    """r* = floor(log2 N + g / ln 2), g = 0.5772 Euler's constant, so floor(log2 N + 0.833); from 1 to N.

    Notes:
        arXiv 2603.00357; where it comes from is our derivation. c(k) jumps from 2 to 3 at k = N / 2, so r pays until
        mu = N / 2. With x = 1 / r, mu / N = Gamma(1 + x) N^-x, and Gamma(1 + x) ~ exp(-g x) for small x: 1/2 is reached
        at (g + ln N) / r = ln 2.

    >>> [closed_form_redundancy(n) for n in (200, 600, 1000)]
    [8, 10, 10]
    """
    return min(max(floor(log2(num_groups) + float(np.euler_gamma) / log(2)), 1), num_groups)


def time_to_train(
    num_groups: int,
    redundancy: int,
    loss_interval_s: float,
    checkpoint: CheckpointTimes,
    times: StepTimes | None = None,
) -> float:
    """J(r) = S_bar / A*(mu m), time to train over the time without failures as SPARe estimates it.

    S_bar is `mean_overhead`, A* is `best_availability` at T_f = mu m: losses come every m seconds, mu are endured.

    Args:
        num_groups: N.
        redundancy: r.
        loss_interval_s: m, mean seconds between two losses anywhere.
        checkpoint: T_s and T_r.
        times: For the patch term of S_bar; left out without.

    Notes:
        arXiv 2603.00357. `planner.plan` has the estimate that weighs time rightly and fits simulations.

    >>> round(time_to_train(600, 10, 300.0, CheckpointTimes(save_s=60.0, restart_s=3600.0)), 3)
    2.152
    """
    time_to_failure_s = asymptotic_endured_losses(num_groups, redundancy) * loss_interval_s
    up = best_availability(checkpoint.save_s, time_to_failure_s, checkpoint.restart_s)
    return mean_overhead(num_groups, redundancy, times) / up


def numeric_redundancy(
    num_groups: int, loss_interval_s: float, checkpoint: CheckpointTimes, times: StepTimes | None = None
) -> int:
    """The r of least J(r); the lowest of several. Arguments as for `time_to_train`.

    >>> numeric_redundancy(600, 300.0, CheckpointTimes(save_s=60.0, restart_s=3600.0))
    10
    """
    candidates = range(1, min(num_groups, 4 * closed_form_redundancy(num_groups)) + 1)
    return min(candidates, key=lambda r: time_to_train(num_groups, r, loss_interval_s, checkpoint, times))
