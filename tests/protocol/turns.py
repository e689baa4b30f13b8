"""Machines that work by turns: each request to the store is carried out when it is that machine's turn again."""

import threading
from collections.abc import Callable
from typing import Any

from tests.unit.memory_store import MemoryStore


class Lost(BaseException):
    """The machine is gone, in the middle of what it did."""


class Turns:
    """Lets a function go on from one request to the store to the next, in a thread of its own that never runs beside
    its caller's.
    """

    def __init__(self) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_lost = False
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, work: Callable[[], None]) -> None:
        self._work = work

    def go_on(self) -> bool:
        """Returns False once the work is done. What it raises is raised here."""
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._work is not None

    def end(self) -> None:
        """The machine is lost: what it does ends where it is."""
        self._is_lost = True
        self._go.release()

    def wait(self) -> None:
        """For the work: it goes on when it is its turn again."""
        self._back.release()
        self._go.acquire()
        if self._is_lost:
            raise Lost

    def _run(self) -> None:
        self._go.acquire()
        while not self._is_lost:
            assert self._work is not None, "nothing to do"
            try:
                self._work()
            except Lost:
                return
            except BaseException as error:  # noqa: BLE001  (for the thread that chose this turn)
                self._error = error
            self._work = None
            self._back.release()
            self._go.acquire()


class Requests:
    """The store as one machine reaches it: each request is carried out in a later turn."""

    def __init__(self, store: MemoryStore, turns: Turns) -> None:
        self._store, self._turns = store, turns

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        carry_out = getattr(self._store, operation)

        def ask(*arguments: Any, **named: Any) -> Any:
            self._turns.wait()
            return carry_out(*arguments, **named)

        return ask
