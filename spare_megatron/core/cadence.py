"""When to save: the one rule, for planning and for a run."""

from math import sqrt


def optimal_cadence_s(save_s: float, mean_time_to_failure_s: float, restart_s: float) -> float:
    """Seconds from the start of one save to the start of the next that leave the most time for training.

    T_c* = T_s + sqrt(T_s^2 + 2 T_s (T_f + T_r)), the maximum over T_c of the availability

        A(T_c) = (1 - T_s / T_c) * T_f / (T_f + T_r + T_c / 2):

    of every T_c seconds T_s go into the save, and every T_f seconds a restart takes T_r and half an interval is lost.
    Setting dA/dT_c = 0 gives T_c^2 - 2 T_s T_c - 2 T_s (T_f + T_r) = 0, whose positive root this is (SPARe, arXiv
    2603.00357, after arXiv 2410.18124).

    Args:
        save_s: T_s, seconds that training stands still for one save; above 0.
        mean_time_to_failure_s: T_f, mean seconds of training until only a checkpoint helps; above 0. A lost group is
            no failure in this sense, a wipe-out is.
        restart_s: T_r, seconds from such a failure to training again; 0 or more.

    Raises:
        ValueError: A time is out of its range.

    >>> round(optimal_cadence_s(60.0, 300.0 * 300, 3600.0), 1)
    3412.0
    """
    if not save_s > 0:
        raise ValueError(f"save_s={save_s} has to be above 0: with free saves there is no best interval")
    if not mean_time_to_failure_s > 0:
        raise ValueError(f"mean_time_to_failure_s={mean_time_to_failure_s} has to be above 0")
    if not restart_s >= 0:
        raise ValueError(f"restart_s={restart_s} has to be 0 or more")
    return save_s + sqrt(save_s * save_s + 2 * save_s * (mean_time_to_failure_s + restart_s))
