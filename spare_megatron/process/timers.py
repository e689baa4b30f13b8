"""Things to be done later, by a loop that waits for other things meanwhile."""

import time
from collections.abc import Callable


class Timers:
    """Actions with the monotonic times from which on they are due."""

    def __init__(self) -> None:
        self._items: list[tuple[float, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """The action is due in this many seconds."""
        self._items.append((time.monotonic() + seconds, action))

    def pause_s(self) -> float | None:
        """Seconds until something is due; None if nothing ever is."""
        if not self._items:
            return None
        return max(0.0, min(due_s for due_s, _ in self._items) - time.monotonic())

    def run_due(self) -> None:
        """Does what is due, the oldest first. What it puts on the agenda has its turn next time."""
        now_s = time.monotonic()
        due = sorted((item for item in self._items if item[0] <= now_s), key=lambda item: item[0])
        self._items = [item for item in self._items if item[0] > now_s]
        for _, action in due:
            action()
