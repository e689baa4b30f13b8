"""SPARe's own model (arXiv 2603.00357): its availability, its cadence, and the redundancy that it calls best.

The lost half interval is counted as time beyond T_f here, so that the best interval grows with the time of a restart.
The planner counts it as part of T_f (`planner.plan`); for T_f well above T_r and T_c both are the same.
"""

from math import sqrt

from spare_megatron.planner.endurance import asymptotic_endured_losses
from spare_megatron.planner.facts import CheckpointTimes
from spare_megatron.planner.overhead import StepTimes, mean_overhead
from spare_megatron.planner.plan import closed_form_redundancy


def paper_cadence_s(time_to_failure_s: float, checkpoint: CheckpointTimes) -> float:
    """T_c* = T_s + sqrt(T_s^2 + 2 T_s (T_f + T_r)), at which `paper_availability` is highest.

    >>> round(paper_cadence_s(90000.0, CheckpointTimes(save_s=60.0, restart_s=3600.0)), 1)
    3412.0
    """
    save_s = checkpoint.save_s
    return save_s + sqrt(save_s**2 + 2 * save_s * (time_to_failure_s + checkpoint.restart_s))


def paper_availability(cadence_s: float, time_to_failure_s: float, checkpoint: CheckpointTimes) -> float:
    """A(T_c) = (1 - T_s / T_c) * T_f / (T_f + T_r + T_c / 2), derived from this paper and arXiv 2410.18124.

    >>> round(paper_availability(3412.0, 90000.0, CheckpointTimes(save_s=60.0, restart_s=3600.0)), 4)
    0.9277
    """
    cycle_s = time_to_failure_s + checkpoint.restart_s + cadence_s / 2
    return (1 - checkpoint.save_s / cadence_s) * time_to_failure_s / cycle_s


def paper_time_to_train(
    num_groups: int,
    redundancy: int,
    loss_interval_s: float,
    checkpoint: CheckpointTimes,
    times: StepTimes | None = None,
) -> float:
    """J(r) = S_bar / A*(mu m), time to train over the time without failures as SPARe estimates it.

    S_bar is `mean_overhead`, A* is the highest `paper_availability` at T_f = mu m: losses come every m seconds, mu are
    endured.

    Args:
        num_groups: N.
        redundancy: r.
        loss_interval_s: m, mean seconds between two losses anywhere.
        checkpoint: T_s and T_r.
        times: For the patch term of S_bar; left out without.

    >>> round(paper_time_to_train(600, 10, 300.0, CheckpointTimes(save_s=60.0, restart_s=3600.0)), 3)
    2.152
    """
    time_to_failure_s = asymptotic_endured_losses(num_groups, redundancy) * loss_interval_s
    up = paper_availability(paper_cadence_s(time_to_failure_s, checkpoint), time_to_failure_s, checkpoint)
    return mean_overhead(num_groups, redundancy, times) / up


def paper_redundancy(
    num_groups: int, loss_interval_s: float, checkpoint: CheckpointTimes, times: StepTimes | None = None
) -> int:
    """The r of least J(r); the lowest of several. Arguments as for `paper_time_to_train`.

    >>> paper_redundancy(600, 300.0, CheckpointTimes(save_s=60.0, restart_s=3600.0))
    10
    """
    candidates = range(1, min(num_groups, 4 * closed_form_redundancy(num_groups)) + 1)
    return min(candidates, key=lambda r: paper_time_to_train(num_groups, r, loss_interval_s, checkpoint, times))
