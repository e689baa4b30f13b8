"""When to save: the one rule, for planning and for a run."""

from dataclasses import dataclass
from math import expm1, sqrt

from scipy.optimize import brentq


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """An interval between saves, and all that it follows from.

    Attributes:
        interval_s: Seconds from one save to the next.
        save_s: Seconds that training stands still for a save.
        group_interval_s: Mean seconds until a given group is lost.
        absence_s: Mean seconds until a lost group takes part again; None if none does.
        time_to_wipe_out_s: Mean seconds until some shard has no host, with the groups that are there now; 0 if one has
            none already: what is committed is saved before the wipe-out that follows.
        num_losses: Groups lost so far.
        exposure_s: Seconds that groups have taken part so far, over all of them.
        num_members: Groups that take part now.
    """

    interval_s: float
    save_s: float
    group_interval_s: float
    absence_s: float | None
    time_to_wipe_out_s: float
    num_losses: int
    exposure_s: float
    num_members: int


_FEW = 1e-6
"""Of T_s / T_f: below, the series is exact, and the equation would cancel to nothing."""


def optimal_cadence_s(save_s: float, mean_time_to_failure_s: float) -> float:
    """Seconds from the start of one save to the start of the next that leave the most time for training.

    T_c* = t T_f with the one positive t for which

        t + exp(-t) = 1 + e,   e = T_s / T_f:

    the maximum over T_c of the availability (T_c - T_s) / ((T_f + T_r) (exp(T_c / T_f) - 1)), whatever T_r is
    (`planner.plan`; J. T. Daly, Future Generation Computer Systems 22, 2006). By the Lambert function
    T_c* = T_s + T_f (1 + W0(-exp(-1 - e))). For rare failures that is near sqrt(2 T_s T_f) (Young, 1974).

    Args:
        save_s: T_s, seconds that training stands still for one save; above 0.
        mean_time_to_failure_s: T_f, mean seconds of training and saving until only a checkpoint helps; above 0. A lost
            group is no failure in this sense, a wipe-out is.

    Raises:
        ValueError: A time is out of its range.

    Notes:
        With s = sqrt(2 e) the root is s + s^2/6 + s^3/36 + s^4/270 + O(s^5): exact to 1e-14 where it is used.

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
