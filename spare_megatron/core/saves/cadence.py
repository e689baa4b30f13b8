"""The optimal interval between saves, for planning and for a run."""

from math import expm1, sqrt

from scipy.optimize import brentq

_FEW = 1e-6
"""T_s / T_f below which the series is used: exact there, while the equation would suffer cancellation."""


def optimal_cadence_s(save_s: float, mean_time_to_failure_s: float) -> float:
    """Seconds from the start of one save to the start of the next that leave the most time for training.

    T_c* = t T_f with the one positive t for which t + exp(-t) = 1 + e, e = T_s / T_f: the maximum over T_c of the
    availability (T_c - T_s) / ((T_f + T_r) (exp(T_c / T_f) - 1)), whatever the restart time T_r is (J. T. Daly,
    Future Generation Computer Systems 22, 2006). For rare failures it is near sqrt(2 T_s T_f) (Young, 1974). With
    s = sqrt(2 e) the root is s + s^2/6 + s^3/36 + s^4/270 + O(s^5): exact to 1e-14 where it is used.

    T_s = `save_s` is the stall of a save and T_f = `mean_time_to_failure_s` the mean time to a wipe-out (not a mere
    lost group); ValueError unless both are above 0.

    >>> round(optimal_cadence_s(60.0, 300.0 * 300), 1)
    3306.5
    """
    if not save_s > 0:
        raise ValueError(f"save_s={save_s} has to be above 0: with free saves there is no best interval")
    if not mean_time_to_failure_s > 0:
        raise ValueError(f"mean_time_to_failure_s={mean_time_to_failure_s} has to be above 0")
    share = save_s / mean_time_to_failure_s
    if share < _FEW:
        s = sqrt(2 * share)
        return mean_time_to_failure_s * (s + s**2 / 6 + s**3 / 36 + s**4 / 270)
    found = brentq(lambda t: t + expm1(-t) - share, share, share + 2, xtol=1e-15, rtol=1e-12)
    return mean_time_to_failure_s * float(found)
