"""When a lost group is started again, and whether in processes that wait for that."""

LONG_LIFE_INTERVALS = 4.0
"""A group that was up for this many heartbeat intervals before it was lost has shown that it can be."""

_LONGEST_WAIT_INTERVALS = 64.0


def restart_delay_s(num_restarts: int, most_restarts: int, num_short_lives: int, interval_s: float) -> float | None:
    """Seconds from the fence of a group until it is started again; None if it is given up.

    At once if it was up for a while, then after longer and longer times: a group that is lost whenever it has come
    back costs the others a recovery and an admission each time.

    Args:
        num_restarts: Restarts of the group so far.
        most_restarts: How many a group gets.
        num_short_lives: Restarts in a row, up to now, after which it was lost within LONG_LIFE_INTERVALS.
        interval_s: The heartbeat interval.

    >>> [restart_delay_s(n, 5, n, 1.0) for n in range(6)]
    [0.0, 1.0, 2.0, 4.0, 8.0, None]
    >>> restart_delay_s(4, 5, 0, 1.0)
    0.0
    """
    if num_restarts >= most_restarts:
        return None
    wait_intervals = 0.0 if num_short_lives == 0 else min(2.0 ** (num_short_lives - 1), _LONGEST_WAIT_INTERVALS)
    return wait_intervals * interval_s


def takes_spares(num_short_lives: int) -> bool:
    """Whether a group that is started again may have the processes that wait for some group to be lost.

    A group that was lost soon after its last return has waited for longer than new processes take to start. It would
    use spares up that others need at once.

    >>> [takes_spares(num_short_lives) for num_short_lives in range(3)]
    [True, False, False]
    """
    return num_short_lives == 0
