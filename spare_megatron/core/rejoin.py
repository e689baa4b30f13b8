"""When a lost group is started again."""


def restart_delay_s(num_restarts: int, most_restarts: int, interval_s: float) -> float | None:
    """Seconds from the fence of a group until it is started again; None if it is given up.

    At once after its first loss, then after longer and longer times: a group that keeps being lost costs the others a
    recovery and an admission each time.

    Args:
        num_restarts: Restarts of the group so far.
        most_restarts: How many a group gets.
        interval_s: The unit of the waits.

    >>> [restart_delay_s(n, 4, 1.0) for n in range(5)]
    [0.0, 1.0, 2.0, 4.0, None]
    """
    if num_restarts >= most_restarts:
        return None
    return 0.0 if num_restarts == 0 else interval_s * 2.0 ** (num_restarts - 1)
