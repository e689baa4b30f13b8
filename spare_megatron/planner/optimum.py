"""The redundancy that SPARe calls best in closed form, and what saves and restarts take."""

from dataclasses import dataclass
from math import floor, log, log2

import numpy as np


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
