"""What the forward and backward passes of a step take a rank by itself: how a slow one is told from one that waits."""

from collections.abc import Callable
from typing import Generic, TypeVar

Mark = TypeVar("Mark")


class PassTimes(Generic[Mark]):
    """Adds up the passes of a step. What a pass waits for its tensor-parallel neighbours is in it.

    Args:
        mark: A moment in what the device computes.
        between_s: Seconds between two of them, once both are past.
    """

    def __init__(self, mark: Callable[[], Mark], between_s: Callable[[Mark, Mark], float]) -> None:
        self._mark = mark
        self._between_s = between_s
        self._began: Mark | None = None
        self._passes: list[tuple[Mark, Mark]] = []

    def begin_step(self) -> None:
        """Nothing is computed yet."""
        self._began = None
        self._passes.clear()

    def begin(self) -> None:
        """A pass begins."""
        self._began = self._mark()

    def end(self) -> None:
        """It has ended, or raised."""
        if self._began is not None:
            self._passes.append((self._began, self._mark()))
            self._began = None

    def total_s(self) -> float:
        """Of the step so far."""
        return sum(self._between_s(began, ended) for began, ended in self._passes)
