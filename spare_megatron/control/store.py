"""What the decision log needs of a control store."""

from collections.abc import Sequence
from typing import Any, Protocol


class StoreTimeout(Exception):
    """A key did not appear in time."""


class StoreLost(Exception):
    """The control store does not answer any more."""


class ControlStore(Protocol):
    """A small key-value store with compare-and-set.

    Every method may raise `StoreLost`. An object is one connection: it serves one thread at a time, and a
    blocking `wait` holds it.
    """

    def put_if_absent(self, key: str, value: str) -> str:
        """Writes the value unless the key has one; returns the value that stands."""

    def put(self, key: str, value: str) -> None:
        """Writes the value."""

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """The values of the keys, None where there is none, without waiting."""

    def exists(self, key: str) -> bool:
        """Whether the key has a value."""

    def wait(self, key: str, timeout_s: float) -> str:
        """The value of the key, as soon as there is one.

        Raises:
            StoreTimeout: There was none within timeout_s seconds.
        """

    def count_up(self, key: str) -> int:
        """Adds 1 to the counter and returns it; an absent counter is 0."""

    def delete(self, key: str) -> None:
        """Removes the key if it is there."""

    def rendezvous(self, prefix: str) -> Any:
        """A new torch.distributed store under the prefix, on a connection of its own, for building a communicator."""
