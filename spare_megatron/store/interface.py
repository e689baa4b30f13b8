"""What the runtime needs of a control store."""

from collections.abc import Sequence
from typing import Any, Protocol


class StoreTimeout(Exception):
    """A key did not appear in time."""


class StoreLost(Exception):
    """The control store does not answer any more, or refuses to."""


class ControlStore(Protocol):
    """A small key-value store with compare-and-set.

    Every method may raise `StoreLost`. An object is one connection: it serves one thread at a time, and a
    blocking `wait` holds it. Only `rendezvous` may be called from another thread meanwhile.
    """

    def put_if_absent(self, key: str, value: str) -> str:
        """Writes the value unless the key has one; returns the value that stands."""

    def put(self, key: str, value: str) -> None:
        """Writes the value."""

    def put_counted(self, key: str, value: str, counter: str, weight: int = 1, forget: Sequence[str] = ()) -> int:
        """Writes the value of a key that nobody else writes, and counts it.

        Args:
            key: It has no value so far.
            value: The value.
            counter: Name of the counter; an absent one is 0.
            weight: What is added to the counter, at least 1.
            forget: Keys to remove in the same go.

        Returns:
            The counter: the sum of what has been counted in it.
        """

    def counted(self, counter: str) -> int:
        """What has been counted in it so far, by somebody who has."""

    def delete(self, keys: Sequence[str]) -> None:
        """Removes those of the keys and counters that are there."""

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        """Writes the value of a key that only this connection writes, as a sign of life.

        A store with leases removes the key ttl_s seconds after the last beat. Whoever judges by its absence asks
        such a store; in any other the value tells by not changing any more.
        """

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """The values of the keys, None where there is none, without waiting.

        The keys are neighbours: few others lie between the first and the last of them in the order of their text.
        """

    def exists(self, key: str) -> bool:
        """Whether the key has a value: what a rank in a reduction asks again and again.

        True is true; False may be late, by the latency of a message, and in bad times by some seconds.
        """

    def wait(self, key: str, timeout_s: float) -> str:
        """The value of the key, as soon as there is one.

        Raises:
            StoreTimeout: There was none within timeout_s seconds.
        """

    def rendezvous(self, prefix: str, rank: int, timeout_s: float, former: tuple[str, int] | None = None) -> Any:
        """A new torch.distributed store for building one communicator, on a connection of its own.

        Args:
            prefix: Name of the communicator; never used twice.
            rank: This process's rank in it; all ranks from 0 on call this.
            timeout_s: Longest wait of the new store for the other ranks.
            former: The name of one that nobody is at any more, and this process's rank in it: what it has left there
                is removed.
        """

    def local_host(self) -> str:
        """The IP address of this machine by which it reaches the store, and is reached by whoever reaches the store."""

    def clear(self) -> None:
        """Removes everything that the run has written, when nobody needs it any more."""
