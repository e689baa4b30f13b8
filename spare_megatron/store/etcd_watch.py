"""A thread that follows one directory of etcd: it caches all values and wakes those that wait for one.

After a read it receives every later revision; on a broken connection it resumes at the next member.
"""

import contextlib
import http.client
import socket
import threading
import time

from spare_megatron.store.etcd_gateway import EtcdGateway, EtcdMessage, StoreFull, decoded, key_range, try_timeout_s
from spare_megatron.store.interface import StoreLost

_PAUSE_S = 0.05


class EtcdWatch:
    """A range of keys (the first one, and the one after the last) that is followed on a connection of its own.

    `values` are the contents of the range at the revision before `revision`, the first one to receive.
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
        """Consecutive streams that delivered nothing."""
        threading.Thread(target=self._follow, name="etcd-watch", daemon=True).start()

    def value(self, key: str, timeout_s: float) -> str | None:
        """The key's value if it has one within this time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def forget_before(self, key: str) -> None:
        """Drops the values of keys lexicographically before this one: they will not be asked for."""
        with self._changed:
            for past in [past for past in self._values if past < key]:
                del self._values[past]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------------------- the thread

    def _follow(self) -> None:
        while not self._is_closed:
            revision = self._next_revision
            # A waiting reader confirms with a read of its own every few seconds, and that raises if the store is lost.
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, StoreLost):
                self._follow_one_stream(try_timeout_s(self._num_failures))
            self._num_failures = 0 if self._next_revision > revision else self._num_failures + 1
            if not self._is_closed:
                time.sleep(_PAUSE_S)

    def _follow_one_stream(self, try_s: float) -> None:
        request = {**key_range(*self._keys), "start_revision": str(self._next_revision)}
        with self._gateway.stream("/v3/watch", {"create_request": request}, try_s) as (sock, messages):
            with self._changed:
                self._socket = sock
                if self._is_closed:
                    return
            for message in messages:
                if message.get("canceled"):
                    # Compacted: a waiting reader's next check finds what was missed and opens a new watch.
                    self._next_revision = max(self._next_revision, int(message.get("compact_revision", 0)))
                    return
                self._apply(message)

    def _apply(self, message: EtcdMessage) -> None:
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
"""A silent watch is checked by a read after this time: a member cut off from the others is silent, too."""

_RECHECK_READS, _LONGEST_RECHECK_S = 20.0, 5.0
"""After slow reads the check comes later, by this multiple of the last read's duration, up to _LONGEST_RECHECK_S."""


class EtcdDirectory:
    """A followed directory (its first key, and the one after the last) whose watch is checked by reads. `is_ordered`:
    keys are written and asked for in order; earlier values are dropped, and read on demand.
    """

    def __init__(self, gateway: EtcdGateway, keys: tuple[str, str], *, is_ordered: bool) -> None:
        self._gateway = gateway
        self._keys = keys
        self._is_ordered = is_ordered
        self._first = keys[0]
        """The watch knows every key from this one on."""
        self._check_at_s = 0.0
        """Monotonic time at which a read is to confirm what the watch says."""
        self._watch: EtcdWatch | None = None

    def find(self, key: str, timeout_s: float) -> str | None:
        """The key's value if the watch has or receives it within this time, or before the watch's next check."""
        watch = self._watch or self._open(key)
        if key < self._first:
            value = values_of(self._gateway.read(key)).get(key)
            if value is not None:
                return value
            self._first = key  # not written yet, so neither is any later key
        value = watch.value(key, min(timeout_s, max(0.0, self._check_at_s - time.monotonic())))
        began_s = time.monotonic()
        if value is None and began_s >= self._check_at_s:
            value = self._confirmed(key)
            self._checked(began_s)
            if value is not None:
                self.close()  # the watch has missed it: its member may be cut off
        elif value is not None and self._is_ordered and key > self._first:
            watch.forget_before(key)
            self._first = key
        return value

    def _confirmed(self, key: str) -> str | None:
        """The key's value by direct reads. Raises StoreFull if it has none and etcd takes no writes any more."""
        value = values_of(self._gateway.read(key)).get(key)
        if value is None:
            try:
                self._gateway.check_space()
            except StoreFull:
                # It may be the last key that was written: all followers have to see the same end of the directory.
                value = values_of(self._gateway.read(key)).get(key)
                if value is None:
                    raise
        return value

    def close(self) -> None:
        """Ends the watch; the next `find` opens another."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _open(self, key: str) -> EtcdWatch:
        began_s = time.monotonic()
        self._first = key if self._is_ordered else self._keys[0]
        answer = self._gateway.read(self._first, self._keys[1])
        self._checked(began_s)
        revision = int(answer["header"]["revision"]) + 1
        self._watch = EtcdWatch(self._gateway.another(), self._keys, values_of(answer), revision)
        return self._watch

    def _checked(self, began_s: float) -> None:
        """Schedules the next check of the watch, after a read that began at this time."""
        now_s = time.monotonic()
        self._check_at_s = now_s + min(max(_RECHECK_S, _RECHECK_READS * (now_s - began_s)), _LONGEST_RECHECK_S)


def values_of(answer: EtcdMessage) -> dict[str, str]:
    return {decoded(pair["key"]): decoded(pair.get("value", "")) for pair in answer.get("kvs", [])}
