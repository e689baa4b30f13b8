"""A supervisor's connection to the driver: reports out, orders in."""

import contextlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import Full, Queue
from threading import Thread

from spare_megatron.process.processes import say
from spare_megatron.process.reports import DriverOrder, EndEarly, GoOn, LastReportAcknowledged, NodeReport, StopProcess

_MOST_UNREAD = 20_000
"""Most reports, some hundred bytes each, that may wait for a driver. One that is suspended reads none."""

_LAST_REPORT_S = 60.0
"""How long a driver on another machine may take to acknowledge the node's last report."""


class Stopped(Exception):
    """The node is to end: by order of the driver, with a driver that it needs, or because it is replaced."""


class DriverLink:
    """The connection, with a thread that sends. `is_needed`: the node ends when the driver is gone; else it goes on
    alone, and a thread calls `on_lost`. `listener`, which may change, gets every report, even if the driver is gone.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        is_needed: bool,
        listener: Callable[[NodeReport], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
        most_unread: int = _MOST_UNREAD,
        last_report_s: float = _LAST_REPORT_S,
    ) -> None:
        self._connection: Connection | None = connection
        self._is_needed = is_needed
        self.listener = listener
        self._on_lost = on_lost
        self._unread: Queue[bytes | None] = Queue(most_unread)
        self._last_report_s = last_report_s
        self._failure: OSError | None = None  # of the thread
        self._sender: Thread | None = None

    @property
    def is_there(self) -> bool:
        return self._connection is not None

    @property
    def pipes(self) -> list[Connection]:
        return [] if self._connection is None else [self._connection]

    def report(self, report: NodeReport) -> None:
        """Queues a report for the driver, if any. Stopped: a needed driver leaves too many reports unread."""
        self.listener(report)
        if self._connection is None or self._failure is not None:  # `next_order` will find its last order, or its end
            return
        try:
            self._unread.put_nowait(bytes(ForkingPickler.dumps(report)))  # now: what it refers to may change
        except Full:
            self._lose(TimeoutError(f"it has left {self._unread.maxsize} reports unread"))
            return
        if self._sender is None:
            self._sender = Thread(target=self._send, args=(self._connection,), name="driver-link", daemon=True)
            self._sender.start()

    def next_order(self) -> GoOn | EndEarly | None:
        """Receives an order. Returns None if there is none because the driver is gone. Stopped: the node is to end."""
        if self._connection is None:
            return None
        try:
            order: DriverOrder = self._connection.recv()
        except (EOFError, OSError) as error:
            self._lose(error)
            return None
        if isinstance(order, StopProcess):
            raise Stopped
        return order

    def close(self, last: NodeReport) -> None:
        """Sends the last report and waits until the driver has taken it: without limit for a needed driver, which may
        be suspended; another one must acknowledge within `last_report_s`. Stopped: a needed driver is gone.
        """
        self.report(last)
        if self._connection is None or self._sender is None:
            return
        timeout_s = None if self._is_needed else self._last_report_s
        with contextlib.suppress(Full):
            self._unread.put(None, timeout=timeout_s)
            self._sender.join(timeout_s)
        if self._sender.is_alive():
            self._lose(TimeoutError(f"it has not read all reports within {self._last_report_s:g} s"))
        elif self._failure is not None or not self._is_needed:
            self._await_receipt(self._connection)

    def _await_receipt(self, connection: Connection) -> None:
        """Waits for the acknowledgement, or the order to stop; otherwise the driver is gone."""
        end_s = time.monotonic() + self._last_report_s
        error: Exception = TimeoutError(f"it did not read the last report within {self._last_report_s:g} s")
        try:
            while connection.poll(max(0.0, end_s - time.monotonic())):
                if isinstance(connection.recv(), LastReportAcknowledged | StopProcess):
                    return
        except (EOFError, OSError) as failure:
            error = self._failure or failure
        self._lose(error)

    def _send(self, connection: Connection) -> None:
        while (report := self._unread.get()) is not None:
            try:
                connection.send_bytes(report)
            except OSError as error:
                self._failure = error
                return

    def _lose(self, error: Exception) -> None:
        with self._unread.mutex:
            self._unread.queue.clear()
            self._unread.queue.append(None)
            self._unread.not_empty.notify()
        if self._is_needed:
            raise Stopped from error
        say(f"the driver is gone ({error or type(error).__name__}); the node goes on without it")
        self._connection = None
        Thread(target=self._on_lost, name="driver-lost", daemon=True).start()
