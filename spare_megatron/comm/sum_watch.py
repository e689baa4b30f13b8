"""Watches sums on a GPU for the rank's main thread: a NCCL kernel that waits for a lost group may block it."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.transfers import Transfer
from spare_megatron.devices import gpu
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreLost

_INTERVAL_S = 0.25
"""A main thread that is not blocked reads the log many times within this interval."""


@dataclass
class SumWatch:
    """The watch thread of one rank with a GPU, with a store connection of its own from `connect`. The log entry after
    `head`, those that the main thread has folded, makes the sums in flight obsolete.
    """

    communicator: CrossGroupCommunicator
    connect: Callable[[], ControlStore]
    head: Callable[[], int]
    _log: DecisionLog | None = None
    _last: Transfer | None = None
    """The oldest sum in flight at the last check."""
    _obsolete_at: int | None = None
    """The head at the last check, if the next entry had been written by then."""
    _failed: Transfer | None = None
    """The oldest sum in flight when the store last failed to answer."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="sum-watch", daemon=True).start()

    def poll(self) -> None:
        """Aborts the sums in flight if the oldest was obsolete at the previous check too, or if the store answered at
        neither, on a connection of its own each time: then nothing can be committed.
        """
        try:
            self._poll()
        except StoreLost:  # also of a connection that was idle for long
            self._log, failed, self._failed = None, self._failed, self._last
            if failed is not None and failed is self._last:
                self.communicator.abort_sum(failed, "the control store does not answer")

    def _poll(self) -> None:
        first, head = self.communicator.first_in_flight(), self.head()
        is_same, self._last = first is not None and first is self._last, first
        was_obsolete_at, self._obsolete_at = self._obsolete_at, None
        if not is_same or not self._is_written(head):
            return
        if was_obsolete_at == head:
            assert first is not None
            self.communicator.abort_sum(first)
        else:
            self._obsolete_at = head

    def _is_written(self, index: int) -> bool:
        self._log = self._log or DecisionLog(self.connect())
        is_written, self._failed = self._log.has(index), None
        return is_written

    def _run(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            self.poll()


@dataclass
class WaitWatch:
    """Calls `on_waiting` every `pause_s` while the device waits for other members: the oldest sum in flight is not
    complete, but all work before it is. Ends a sum after `timeout_s`. The sums of a rank that hangs complete, which
    tells it from those that it keeps waiting.
    """

    communicator: CrossGroupCommunicator
    on_waiting: Callable[[], None]
    pause_s: float
    timeout_s: float
    _begun: Transfer | None = None
    """The sum in flight that began last."""
    _since_s: float = 0.0

    def start(self, device: torch.device) -> None:
        threading.Thread(target=self._run, args=(device,), name="wait-watch", daemon=True).start()

    def poll(self, now_s: float) -> None:
        """Waits until the oldest sum in flight has begun, if that has not been seen; reports one that has."""
        first = self.communicator.first_waiting()
        if first is None:
            self._begun = None
        elif first is not self._begun:
            with contextlib.suppress(RuntimeError):  # the main thread raises it
                first.preceding.synchronize()
                self._begun, self._since_s = first, now_s
        elif now_s - self._since_s < self.timeout_s:
            self.on_waiting()
        else:
            self.communicator.abort_sum(first, f"no end within reduce.timeout_s={self.timeout_s:g}")

    def _run(self, device: torch.device) -> None:
        gpu.set_device(device)  # of this thread: CUDA would otherwise open a context on device 0
        while True:
            time.sleep(self.pause_s)
            self.poll(time.monotonic())
