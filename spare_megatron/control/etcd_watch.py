"""A watch over some keys of etcd, in a thread: the value of the one key that somebody waits for.

It is opened at the revision after a read that did not find the key, so no write is missed in between. When its
connection breaks it goes on with the next member at the revision after the last one seen.
"""

import contextlib
import http.client
import socket
import threading
import time

from spare_megatron.control.etcd_gateway import EtcdGateway, Message, decoded, encoded
from spare_megatron.control.store import StoreLost

_PAUSE_S = 0.05


class EtcdWatch:
    """A watch.

    Args:
        gateway: A connection of its own.
        keys: First key of the range, and the key after it.
        revision: The first revision to be told of.
        key: The key to remember.
    """

    def __init__(self, gateway: EtcdGateway, keys: tuple[str, str], revision: int, key: str) -> None:
        self.keys = keys
        self._gateway = gateway
        self._next_revision = revision
        self._changed = threading.Condition()
        self._key = key
        self._value: str | None = None
        self._value_revision = 0
        self._socket: socket.socket | None = None
        self._is_closed = False
        threading.Thread(target=self._follow, name="etcd-watch", daemon=True).start()

    def look_for(self, key: str) -> None:
        """From now on remembers what is written to this key."""
        with self._changed:
            if key != self._key:
                self._key, self._value, self._value_revision = key, None, 0

    def value(self, after_revision: int, timeout_s: float) -> str | None:
        """The key's value if it is written after this revision and within this time, else None."""
        with self._changed:
            self._changed.wait_for(lambda: self._value_revision > after_revision, timeout_s)
            return self._value if self._value_revision > after_revision else None

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
            # Whoever waits asks with a read of its own every second, and hears there if the store is lost.
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, StoreLost):
                self._follow_one_stream()
            if not self._is_closed:
                time.sleep(_PAUSE_S)

    def _follow_one_stream(self) -> None:
        request = {
            "key": encoded(self.keys[0]),
            "range_end": encoded(self.keys[1]),
            "start_revision": str(self._next_revision),
        }
        with self._gateway.stream("/v3/watch", {"create_request": request}) as (sock, messages):
            with self._changed:
                self._socket = sock
                if self._is_closed:
                    return
            for message in messages:
                if message.get("canceled"):
                    # Compacted away: the reads of whoever waits make up for what was missed.
                    self._next_revision = max(self._next_revision, int(message.get("compact_revision", 0)))
                    return
                self._take(message)

    def _take(self, message: Message) -> None:
        with self._changed:
            for event in message.get("events", ()):
                pair = event["kv"]
                revision = int(pair["mod_revision"])
                self._next_revision = max(self._next_revision, revision + 1)
                if event.get("type", "PUT") == "PUT" and decoded(pair["key"]) == self._key:
                    self._value, self._value_revision = decoded(pair.get("value", "")), revision
                    self._changed.notify_all()
