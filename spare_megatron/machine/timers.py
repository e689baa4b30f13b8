"""Timers for an event loop: actions to run later."""

import time
from collections.abc import Callable


class Timers:
    """Actions, and the monotonic times at which they are due."""

    def __init__(self) -> None:
        self._items: list[tuple[float, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._items.append((time.monotonic() + seconds, action))

    def pause_s(self) -> float | None:
        """Seconds until an action is due; None if there is none."""
        if not self._items:
            return None
        return max(0.0, min(due_s for due_s, _ in self._items) - time.monotonic())

    def run_due(self) -> None:
        """Runs the due actions, the oldest first. Actions that they schedule wait for the next call."""
        now_s = time.monotonic()
        due = sorted((item for item in self._items if item[0] <= now_s), key=lambda item: item[0])
        self._items = [item for item in self._items if item[0] > now_s]
        for _, action in due:
            action()
