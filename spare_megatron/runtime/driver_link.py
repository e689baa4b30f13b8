"""A supervisor's connection to the driver: reports go there, orders come from there."""

from collections.abc import Callable
from multiprocessing.connection import Connection

from spare_megatron.runtime.processes import say
from spare_megatron.runtime.reports import GoOn, NodeReport


class Stopped(Exception):
    """The driver wants the node to end; or it is gone, and the node with it."""


class DriverLink:
    """The connection.

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
            Stopped: It is gone.
        """
        self._listener(report)
        if self._connection is None:
            return
        try:
            self._connection.send(report)
        except OSError as error:
            self._lose(error)

    def hear(self) -> GoOn | None:
        """An order that is ready: to go on after a fault; None if there is none, for the driver is gone.

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
        if not isinstance(order, GoOn):
            raise Stopped
        return order

    def _lose(self, error: Exception) -> None:
        if self._is_needed:
            raise Stopped from error
        say(f"the driver is gone ({error or type(error).__name__}); the node goes on without it")
        self._connection = None
