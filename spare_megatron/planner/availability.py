"""The share of time that goes into steps that count, between saves, restarts and lost work."""

from spare_megatron.core.cadence import optimal_cadence_s


def availability(cadence_s: float, save_s: float, mean_time_to_failure_s: float, restart_s: float) -> float:
    """A(T_c) = (1 - T_s / T_c) * T_f / (T_f + T_r + T_c / 2).

    Args:
        cadence_s: T_c, seconds from save to save; T_s or more.
        save_s: T_s, seconds per save.
        mean_time_to_failure_s: T_f, mean seconds until a wipe-out, saves included; above 0.
        restart_s: T_r, seconds from a wipe-out to training again.

    Raises:
        ValueError: A time is out of its range.

    Notes:
        Form derived from arXiv 2603.00357 and 2410.18124. What is lost with a failure is T_c / 2 on average; that
        holds while T_c is short beside T_f. Against simulated saves and wipe-outs at the best cadence it
        is 2.3% high at T_f = 7 T_c, 0.5% at 14 T_c, 0.1% at 26 T_c (benchmarks/planner_formulas.py).

    >>> round(availability(3412.0, 60.0, 90000.0, 3600.0), 4)
    0.9277
    """
    if not 0 <= save_s <= cadence_s:
        raise ValueError(f"cadence_s={cadence_s} has to be at least save_s={save_s}, and that 0 or more")
    if not (mean_time_to_failure_s > 0 and restart_s >= 0):
        raise ValueError(
            f"mean_time_to_failure_s={mean_time_to_failure_s} has to be above 0 and restart_s={restart_s} 0 or more"
        )
    cycle_s = mean_time_to_failure_s + restart_s + cadence_s / 2
    return (1 - save_s / cadence_s) * mean_time_to_failure_s / cycle_s


def best_availability(save_s: float, mean_time_to_failure_s: float, restart_s: float) -> float:
    """A at the best cadence T_c*: A* = 2 T_f T_s / T_c*^2. Arguments and errors as for `optimal_cadence_s`.

    Notes:
        With T_f + T_r = (T_c*^2 - 2 T_c* T_s) / (2 T_s) the denominator of A is T_c* (T_c* - T_s) / (2 T_s).

    >>> round(best_availability(60.0, 90000.0, 3600.0), 4)
    0.9277
    """
    cadence_s = optimal_cadence_s(save_s, mean_time_to_failure_s, restart_s)
    return 2 * mean_time_to_failure_s * save_s / cadence_s**2
