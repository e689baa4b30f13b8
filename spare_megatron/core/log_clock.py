"""The clock of the log: seconds since the run began, the same for everybody who has read the same entries.

Every commit says the time by its writer's clock, and everybody sets theirs by it. So the time is known to a group that
has only just read the log, and needs no wall clock. Between a wipe-out and the first commit after it the clock goes on
for those who know when the wipe-out was found.
"""


class LogClock:
    """One process's reading.

    Attributes:
        at_s: The time of the last commit.
    """

    def __init__(self) -> None:
        self.at_s = 0.0
        self._ahead_s = 0.0

    def begin(self, now_s: float) -> None:
        """The run begins, at this time of the process's own monotonic clock."""
        self._ahead_s = -now_s

    def set_by(self, at_s: float, now_s: float) -> None:
        """A commit of this time has been read. The sooner it was, the less of its way is in the difference."""
        self.at_s = at_s
        self._ahead_s = max(self._ahead_s, at_s - now_s)

    def read_s(self, now_s: float) -> float:
        """The time, never before the last commit.

        >>> clock = LogClock()
        >>> clock.begin(100.0)
        >>> clock.set_by(8.0, 105.0)
        >>> clock.read_s(106.0)
        9.0
        """
        return max(self.at_s, now_s + self._ahead_s)
