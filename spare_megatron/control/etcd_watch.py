"""A directory of etcd, followed in a thread: all its values, and whoever waits for one.

It begins with a read of the directory and is told of every revision after that of the read, so no write is missed.
When its connection breaks it goes on with the next member, at the revision after the last one seen.
"""

import contextlib
import http.client
import socket
import threading
import time

from spare_megatron.control.etcd_gateway import EtcdGateway, Message, decoded, encoded, try_timeout_s
from spare_megatron.control.store import StoreLost

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
