"""The share of time that goes into steps that count, between saves, restarts and lost work."""

from math import exp, expm1

from spare_megatron.core.cadence import optimal_cadence_s

_LEAST = 1e-300


def availability(cadence_s: float, save_s: float, mean_time_to_failure_s: float, restart_s: float) -> float:
    """A(T_c) = (T_c - T_s) / ((T_f + T_r) (exp(T_c / T_f) - 1)).

    Args:
        cadence_s: T_c, seconds from the start of a save to the start of the next; above 0, and T_s or more.
        save_s: T_s, seconds per save.
        mean_time_to_failure_s: T_f, mean seconds of training and saving until a wipe-out; above 0.
        restart_s: T_r, seconds from a wipe-out to training again.

    Raises:
        ValueError: A time is out of its range.

    Notes:
        J. T. Daly, Future Generation Computer Systems 22 (2006), for restarts that are not struck themselves: wipe-outs
        are a Poisson process, so an interval of T_c is struck exp(T_c / T_f) - 1 times on average until it is through,
        and each time costs T_f + T_r less what the next try takes. Exact in that model, however long T_c is.

    >>> round(availability(3306.5, 60.0, 90000.0, 3600.0), 4)
    0.9269
    """
    if not (0 <= save_s <= cadence_s and cadence_s > 0):
        raise ValueError(f"cadence_s={cadence_s} has to be at least save_s={save_s} and above 0, and that 0 or more")
    if not (mean_time_to_failure_s > 0 and restart_s >= 0):
        raise ValueError(
            f"mean_time_to_failure_s={mean_time_to_failure_s} has to be above 0 and restart_s={restart_s} 0 or more"
        )
    t = cadence_s / mean_time_to_failure_s
    return (cadence_s - save_s) / (mean_time_to_failure_s + restart_s) * exp(-t) / -expm1(-t)


def best_availability(save_s: float, mean_time_to_failure_s: float, restart_s: float) -> float:
    """A at the best cadence T_c*: A* = T_f / (T_f + T_r) exp(-T_c* / T_f). Arguments and errors as for `availability`.

    Returns:
        At least 1e-300, so that a time to train that is over it stays finite.

    Notes:
        At the optimum T_c* - T_s = T_f (1 - exp(-T_c* / T_f)), by the equation in `core.cadence`.

    >>> round(best_availability(60.0, 90000.0, 3600.0), 4)
    0.9269
    """
    if not restart_s >= 0:
        raise ValueError(f"restart_s={restart_s} has to be 0 or more")
    share = exp(-optimal_cadence_s(save_s, mean_time_to_failure_s) / mean_time_to_failure_s)
    return max(mean_time_to_failure_s / (mean_time_to_failure_s + restart_s) * share, _LEAST)
