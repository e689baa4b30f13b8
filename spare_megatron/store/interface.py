"""The `ControlStore` interface: the key-value store with compare-and-set that all processes of a run share."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from spare_megatron.formats.codec import decode, encode

T = TypeVar("T")


class StoreTimeout(Exception):
    """A key was not written within the timeout."""


class StoreLost(Exception):
    """The control store is unreachable or rejects the request."""


def lost_key(key: str) -> StoreLost:
    return StoreLost(
        f"the control store has lost {key}, which it had confirmed: it was emptied, restored from a backup, or the "
        f"keys of the run were removed"
    )


class ControlStore(Protocol):
    """A connection to the run's key-value store.

    Every method may raise `StoreLost`. A connection serves one thread at a time, also while it blocks in `wait`; only
    `rendezvous` and `break_off` may be called from another thread meanwhile.
    """

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        """Writes the value if the key has none; returns the value that is stored.

        Raises StoreLost, and writes nothing, if a store that can lose keys has lost the key `after`.
        """

    def put(self, key: str, value: str) -> None: ...

    def put_counted(self, key: str, value: str, counter: str, weight: int = 1, forget: Sequence[str] = ()) -> int:
        """Writes an absent key that only this process writes, adds `weight` to a counter, removes the keys to forget.

        Returns the new value of the counter, which is 0 while absent; `weight` is at least 1.
        """

    def counted(self, counter: str) -> int:
        """Value of the counter; only for processes that have counted in it, as the read may create an absent one."""

    def delete(self, keys: Sequence[str]) -> None:
        """Removes the given keys and counters; absent ones are ignored."""

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        """Writes a heartbeat to a key that only this connection writes.

        A store with leases removes the key ttl_s seconds after the last beat; in any other the value stops changing.
        """

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """The values of the keys, None for absent ones, without waiting; few keys lie between the first and last."""

    def exists(self, key: str) -> bool:
        """Whether the key has a value; the cheap poll of a rank in a reduction.

        True is reliable; False may lag by a message latency, or by seconds while the store is degraded.
        """

    def wait(self, key: str, timeout_s: float) -> str:
        """Blocks until the key has a value and returns it; raises `StoreTimeout` after timeout_s seconds."""

    def rendezvous(self, prefix: str, rank: int, timeout_s: float, former: tuple[str, int] | None = None) -> Any:
        """A new torch.distributed store for building one communicator, on a connection of its own; all ranks call this.

        `prefix` is the communicator's name, never used twice. The new store waits `timeout_s` at most. The keys of
        `former`, name and this rank of a communicator that all members have left, are removed.
        """

    def break_off(self) -> None:
        """Has the request under way in another thread, and each later one, raise `StoreLost`. Never waits or raises."""

    def local_host(self) -> str:
        """This machine's IP address on the route to the store, at which other clients of the store reach it."""


def write_value(store: ControlStore, key: str, value: object) -> None:
    """Encodes and writes a value; replaces an earlier one."""
    store.put(key, encode(value))


def read_values(store: ControlStore, keys: Sequence[str], kind: type[T]) -> list[T | None]:
    """The values under these keys, decoded as `kind`, in order of the keys; None where there is none."""
    texts = store.get(keys) if keys else []
    return [None if text is None else decode(text, kind) for text in texts]
