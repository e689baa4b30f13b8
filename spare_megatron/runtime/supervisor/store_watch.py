"""A supervisor's eye on the control store: whether it answers."""

from spare_megatron.runtime.process.reports import StoreAway, StoreBack
from spare_megatron.runtime.supervisor.store_link import StoreLink


class StoreWatch:
    """Judges how long the store has not answered.

    Args:
        node: The supervisor's node.
        link: Its connection.
        interval_s: The heartbeat interval, after which the store is away.
        limit_s: After which it is given up.

    Attributes:
        is_away: It does not answer.
        failure: Why it is given up; empty while it is not.
    """

    def __init__(self, node: int, link: StoreLink, interval_s: float, limit_s: float) -> None:
        self._node = node
        self._link = link
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._away_since_s: float | None = None
        self.failure = ""

    @property
    def is_away(self) -> bool:
        return self._away_since_s is not None

    def look(self, now_s: float) -> StoreAway | StoreBack | None:
        """What has changed, if anything, at this monotonic time."""
        silent_s = self._link.unanswered_s()
        if silent_s > self._limit_s:
            self.failure = (
                f"the control store did not answer for control.store_timeout_s={self._limit_s:g}; see why it does not, "
                "and whether it can be reached from here"
            )
        if silent_s > self._interval_s and self._away_since_s is None:
            self._away_since_s = now_s - silent_s
            return StoreAway(node=self._node, limit_s=self._limit_s)
        if silent_s <= self._interval_s and self._away_since_s is not None:
            away_s, self._away_since_s = now_s - self._away_since_s, None
            return StoreBack(node=self._node, away_s=away_s)
        return None
