"""A directory of etcd, followed in a thread: all its values, and whoever waits for one.

It begins with a read of the directory and is told of every revision after that of the read, so no write is missed.
When its connection breaks it goes on with the next member, at the revision after the last one seen.
"""

import contextlib
import http.client
import socket
import threading
import time

from spare_megatron.store.etcd_gateway import EtcdGateway, Message, StoreFull, decoded, encoded, try_timeout_s
from spare_megatron.store.interface import StoreLost

_PAUSE_S = 0.05


class EtcdWatch:
    """A range of keys that is being followed.

    Args:
        gateway: A connection of its own.
        keys: First key of the range, and the key after it.
        values: What the range held at the revision before the first one to be told of.
        revision: That first revision.
    """

    def __init__(self, gateway: EtcdGateway, keys: tuple[str, str], values: dict[str, str], revision: int) -> None:
        self._keys = keys
        self._gateway = gateway
        self._values = values
        self._next_revision = revision
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._num_failures = 0
        """Streams in a row that told of nothing."""
        threading.Thread(target=self._follow, name="etcd-watch", daemon=True).start()

    def value(self, key: str, timeout_s: float) -> str | None:
        """The key's value, if it has one within this time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def let_go_before(self, key: str) -> None:
        """Forgets the values of keys before this one in the order of their texts: nobody will ask for them."""
        with self._changed:
            for past in [past for past in self._values if past < key]:
                del self._values[past]

    def close(self) -> None:
        """Ends the watch."""
        with self._changed:
            self._is_closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------------------- the thread

    def _follow(self) -> None:
        while not self._is_closed:
            revision = self._next_revision
            # Whoever waits asks with a read of its own every second, and hears there if the store is lost.
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, StoreLost):
                self._follow_one_stream(try_timeout_s(self._num_failures))
            self._num_failures = 0 if self._next_revision > revision else self._num_failures + 1
            if not self._is_closed:
                time.sleep(_PAUSE_S)

    def _follow_one_stream(self, try_s: float) -> None:
        request = {
            "key": encoded(self._keys[0]),
            "range_end": encoded(self._keys[1]),
            "start_revision": str(self._next_revision),
        }
        with self._gateway.stream("/v3/watch", {"create_request": request}, try_s) as (sock, messages):
            with self._changed:
                self._socket = sock
                if self._is_closed:
                    return
            for message in messages:
                if message.get("canceled"):
                    # Compacted away: whoever waits finds out what was missed, and begins anew.
                    self._next_revision = max(self._next_revision, int(message.get("compact_revision", 0)))
                    return
                self._take(message)

    def _take(self, message: Message) -> None:
        with self._changed:
            for event in message.get("events", ()):
                pair = event["kv"]
                self._next_revision = int(pair["mod_revision"]) + 1
                if event.get("type", "PUT") == "PUT":
                    self._values[decoded(pair["key"])] = decoded(pair.get("value", ""))
                else:
                    self._values.pop(decoded(pair["key"]), None)
            self._changed.notify_all()


_RECHECK_S = 1.0
"""A watch that says nothing is checked by a read: a member cut off from the others says nothing, either."""

_RECHECK_READS, _LONGEST_RECHECK_S = 20.0, 5.0
"""Where reads are slow, later, by so many times what the last one took: waiting must not keep a slow cluster busy."""


class EtcdDirectory:
    """A directory that is being followed.

    Args:
        gateway: The connection of whoever asks.
        keys: First key of the directory, and the key after it.
        is_ordered: Its keys are written in the order of their texts. Who has been told the value of one asks for later
            ones, so only from there on are values kept; earlier ones are read when they are asked for.
    """

    def __init__(self, gateway: EtcdGateway, keys: tuple[str, str], *, is_ordered: bool) -> None:
        self._gateway = gateway
        self._keys = keys
        self._is_ordered = is_ordered
        self._first = keys[0]
        """The watch tells of every key from this one on."""
        self._check_at_s = 0.0
        """When a read is to confirm what the watch says."""
        self._watch: EtcdWatch | None = None

    def find(self, key: str, timeout_s: float) -> str | None:
        """The key's value, if the watch has it or is told of it within this time, or before the next check of it."""
        watch = self._watch or self._open(key)
        if key < self._first:
            value = values_of(self._read_one(key)).get(key)
            if value is not None:
                return value
            self._first = key  # not written when the watch began, so neither was any after it
        value = watch.value(key, min(timeout_s, max(0.0, self._check_at_s - time.monotonic())))
        began_s = time.monotonic()
        if value is None and began_s >= self._check_at_s:
            value = self._confirmed(key)
            self._checked(began_s)
            if value is not None:
                self.close()  # it should have said so: its member may be cut off
        elif value is not None and self._is_ordered and key > self._first:
            watch.let_go_before(key)
            self._first = key
        return value

    def _confirmed(self, key: str) -> str | None:
        """The key's value by reads.

        Raises:
            StoreFull: There is none, and none can be written any more.
        """
        value = values_of(self._read_one(key)).get(key)
        if value is None:
            try:
                self._gateway.check_space()
            except StoreFull:
                # It may be the last that was written: all have to see the same end of what they follow.
                value = values_of(self._read_one(key)).get(key)
                if value is None:
                    raise
        return value

    def close(self) -> None:
        """Ends the watch. The next question begins another."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _open(self, key: str) -> EtcdWatch:
        began_s = time.monotonic()
        self._first = key if self._is_ordered else self._keys[0]
        answer = self._read(self._first, self._keys[1])
        self._checked(began_s)
        revision = int(answer["header"]["revision"]) + 1
        self._watch = EtcdWatch(self._gateway.another(), self._keys, values_of(answer), revision)
        return self._watch

    def _read_one(self, key: str) -> Message:
        return self._read(key, key + "\0")

    def _read(self, start: str, end: str) -> Message:
        return self._gateway.call("/v3/kv/range", {"key": encoded(start), "range_end": encoded(end)})

    def _checked(self, began_s: float) -> None:
        """Notes that the watch need not be checked for a while, after a read that began at this time."""
        now_s = time.monotonic()
        self._check_at_s = now_s + min(max(_RECHECK_S, _RECHECK_READS * (now_s - began_s)), _LONGEST_RECHECK_S)


def values_of(answer: Message) -> dict[str, str]:
    """Value by key of a range."""
    return {decoded(pair["key"]): decoded(pair.get("value", "")) for pair in answer.get("kvs", [])}
