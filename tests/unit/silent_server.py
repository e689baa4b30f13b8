"""Stands in for the server of a machine that was switched off: connections stand, or not even that, and nothing comes.

No machine here can lose its power, and whatever is killed has its connections closed by the kernel.
"""

import secrets
import select
import socket
import threading
import time
from pathlib import Path
from typing import Literal

from spare_megatron.formats.frames import NONCE_BYTES, Address

Point = Literal["connection", "greeting", "answer"]
POINTS: tuple[Point, ...] = ("connection", "greeting", "answer")

_POLL_S = 0.005
_PATIENT_S = 20.0
_SYN_SENT = "02"


class SilentServer:
    """Silent from some point on: it takes no connection, or does not greet, or greets and does not answer."""

    def __init__(self, point: Point) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.address = Address(host="127.0.0.1", port=self._listener.getsockname()[1], token=secrets.token_hex(32))
        self._point = point
        self._is_reached = threading.Event()
        self._others: list[socket.socket] = []
        self._clients: list[socket.socket] = []
        if point == "connection":
            # The kernel takes as many connections as its backlog allows, never accepted, and drops all others.
            self._others = [self._knock() for _ in range(4)]
            # A busy kernel may see to the first of them later: until then it counts as one that knocks.
            assert select.select([], self._others, [], _PATIENT_S)[1]
        else:
            threading.Thread(target=self._serve, daemon=True).start()
        self._num_knocking = self._count_knocking()

    def await_client(self, timeout_s: float) -> None:
        """Returns when a client waits at the point. TimeoutError: none has come so far in time."""
        end_s = time.monotonic() + timeout_s
        while not (self._is_reached.is_set() or self._count_knocking() > self._num_knocking):
            if time.monotonic() > end_s:
                raise TimeoutError(f"no client waits for the {self._point} of a silent server")
            time.sleep(_POLL_S)

    def close(self) -> None:
        for connection in (self._listener, *self._others, *self._clients):
            connection.close()

    def _knock(self) -> socket.socket:
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex((self.address.host, self.address.port))
        return client

    def _count_knocking(self) -> int:
        """Connections to the server that do not come to stand."""
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return sum(row[2].endswith(f":{self.address.port:04X}") and row[3] == _SYN_SENT for row in rows)

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        self._clients.append(client)
        if self._point == "answer":
            client.sendall(secrets.token_bytes(NONCE_BYTES))
            client.recv(1)
        self._is_reached.set()
