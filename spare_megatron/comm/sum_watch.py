"""Ends sums on a GPU that nobody needs any more, where the rank's main thread cannot.

A kernel of NCCL that waits for a lost group may keep whatever is asked of the GPU after it from beginning, so that a
main thread that computes while buckets are on their way waits for the GPU and reads no log. A thread reads it then.
"""

import threading
import time
from collections.abc import Callable

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreLost

_INTERVAL_S = 0.25
"""A main thread that can reads the log many times in as long."""


class SumWatch:
    """The thread of one rank with a GPU.

    Args:
        communicator: The rank's.
        connect: Opens a connection to the control store, of which nothing is asked while sums come to their end.
        head: How many entries of the log the main thread has folded. Once the next one is written, nobody needs sums
            that are in flight.
    """

    def __init__(
        self, communicator: CrossGroupCommunicator, connect: Callable[[], ControlStore], head: Callable[[], int]
    ) -> None:
        self._communicator = communicator
        self._connect = connect
        self._head = head
        self._log: DecisionLog | None = None
        self._last: object | None = None
        """The first in flight at the last look."""
        self._in_vain_at: int | None = None
        """The head, where the next entry was written at the last look already."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="sum-watch", daemon=True).start()

    def look(self) -> None:
        """Ends what is in flight, where that was in flight and in vain at the last look already.

        Raises:
            StoreLost: The store does not answer.
        """
        first, head = self._communicator.first_in_flight(), self._head()
        is_same, self._last = first is not None and first is self._last, first
        was_in_vain_at, self._in_vain_at = self._in_vain_at, None
        if not is_same or not self._is_written(head):
            return
        if was_in_vain_at == head:
            assert first is not None
            self._communicator.end(first)
        else:
            self._in_vain_at = head

    def _is_written(self, index: int) -> bool:
        self._log = self._log or DecisionLog(self._connect())
        return self._log.has(index)

    def _run(self) -> None:
        try:
            while True:
                time.sleep(_INTERVAL_S)
                self.look()
        except StoreLost:
            return  # the main thread finds out by itself
