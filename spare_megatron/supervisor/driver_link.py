"""A supervisor's connection to the driver: reports go there, orders come from there."""

import contextlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import Full, Queue
from threading import Thread

from spare_megatron.process.processes import say
from spare_megatron.process.reports import NodeReport, Order

_MOST_UNREAD = 20_000
"""Reports, each of some hundred bytes, that a driver may leave unread. One that is stopped reads none."""

_LAST_WORD_S = 60.0
"""How long a driver elsewhere is given to take a node's last word."""


class Stopped(Exception):
    """The driver wants the node to end; or it is gone, and the node with it."""


class DriverLink:
    """The connection. A thread of its own sends, so that nobody here waits for a driver that does not read.

    Args:
        connection: The connection.
        is_needed: The node ends when the driver is gone. Otherwise it goes on for itself.
        listener: Told first of all that the driver is told, be it there or not.
    """

    def __init__(
        self, connection: Connection, *, is_needed: bool, listener: Callable[[NodeReport], None] = lambda _: None
    ) -> None:
        self._connection: Connection | None = connection
        self._is_needed = is_needed
        self._listener = listener
        self._unread: Queue[bytes | None] = Queue(_MOST_UNREAD)
        self._failure: OSError | None = None  # of the thread
        self._sender: Thread | None = None

    @property
    def is_there(self) -> bool:
        """Whether there is a driver, as far as is known."""
        return self._connection is not None

    @property
    def pipes(self) -> list[Connection]:
        """What becomes ready when there is an order."""
        return [] if self._connection is None else [self._connection]

    def tell(self, report: NodeReport) -> None:
        """Tells the driver, if there is one.

        Raises:
            Stopped: It has left too much unread.
        """
        self._listener(report)
        if self._connection is None or self._failure is not None:  # its last order, or its end, is yet to be heard
            return
        try:
            self._unread.put_nowait(bytes(ForkingPickler.dumps(report)))  # now: what it names may change
        except Full:
            self._lose(TimeoutError(f"it has left {_MOST_UNREAD} reports unread"))
            return
        if self._sender is None:
            self._sender = Thread(target=self._send, args=(self._connection,), name="driver-link", daemon=True)
            self._sender.start()

    def hear(self) -> Order | None:
        """An order that is ready; None if there is none, for the driver is gone.

        Raises:
            Stopped: It is to end.
        """
        if self._connection is None:
            return None
        try:
            order = self._connection.recv()
        except (EOFError, OSError) as error:
            self._lose(error)
            return None
        if not isinstance(order, Order):
            raise Stopped
        return order

    def close(self, last: NodeReport) -> None:
        """Tells the driver the last word, and waits until it has taken it.

        One that is needed is here: it may have been stopped by hand and be continued at any time, and if it ends the
        connection breaks. One elsewhere is not waited for longer than a minute, and has to say that it has it: what
        stands for it here may be there for a moment longer than itself.

        Raises:
            Stopped: It is gone.
        """
        self.tell(last)
        if self._connection is None or self._sender is None:
            return
        timeout_s = None if self._is_needed else _LAST_WORD_S
        with contextlib.suppress(Full):
            self._unread.put(None, timeout=timeout_s)
            self._sender.join(timeout_s)
        if self._sender.is_alive():
            self._lose(TimeoutError(f"it has not read all reports within {_LAST_WORD_S:g} s"))
        elif self._failure is not None or not self._is_needed:
            self._await_receipt(self._connection)

    def _await_receipt(self, connection: Connection) -> None:
        """Hears whether the last word is taken, or none was wanted any more; else the driver is gone."""
        end_s = time.monotonic() + _LAST_WORD_S
        error: Exception = TimeoutError(f"it has not taken the last word within {_LAST_WORD_S:g} s")
        try:
            while connection.poll(max(0.0, end_s - time.monotonic())):
                if not isinstance(connection.recv(), Order):
                    return
        except (EOFError, OSError) as failure:
            error = self._failure or failure
        self._lose(error)

    def _send(self, connection: Connection) -> None:
        """The thread's part."""
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
