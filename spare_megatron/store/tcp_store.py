"""The embedded control store: a torch TCPStore server and its client, neither of which waits for a name server.

torch looks up the host name of every peer, for its log alone, and glibc repeats a lost query after 5 s; so
`without_name_lookups` makes the first lookup fail at once, after which torch 2.13 makes no more.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from spare_megatron.machine.network import address_on_the_way_to
from spare_megatron.store.interface import StoreLost, StoreTimeout
from spare_megatron.store.keys import NUM_READY_REPORTS, RUN_NAME

T = TypeVar("T")

_RES_INIT = 1
"""Flag in `_Resolver.options`: the structure is initialized."""


@contextlib.contextmanager
def without_name_lookups() -> Iterator[None]:
    """Makes this thread's queries to name servers fail at once; /etc/hosts still resolves. torch warns once."""
    libc = ctypes.CDLL(None)
    try:
        resolver = libc.__res_state
    except AttributeError:  # not glibc
        yield
        return
    resolver.restype = ctypes.POINTER(_Resolver)
    state = resolver().contents
    if not state.options & _RES_INIT:
        libc.__res_init()  # else the first lookup would do that, and overwrite `retry`
    before, state.retry = state.retry, 0
    try:
        yield
    finally:
        state.retry = before


class _Resolver(ctypes.Structure):
    """First fields of glibc's `struct __res_state`, of which each thread has one (resolv.h)."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong))


_CONNECT_TIMEOUT_S = 60.0
_DELETED_S = 1.0
"""How long a read waits for a key that has been deleted since it was there."""
_PROBE_S = 0.1
"""A server that can be reached takes a connection within this time."""

_TCP_RTO_MAX_MS = 44
"""Socket option of Linux 6.15 and later (linux/tcp.h): the longest interval between retransmissions."""
_RETRANSMISSION_MS = 1000
_GIVE_UP_MS = 15 * 60 * 1000
"""As by default. That is a number of retransmissions, which would take only 15 s with the shorter interval."""


def _retransmit_often(connection: socket.socket) -> None:
    """Bounds the wait after an outage of the network, which TCP doubles, also of accepted connections; from Linux 6.15
    on.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RETRANSMISSION_MS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_MS)


def _connections_to(port: int) -> Iterator[socket.socket]:
    """This process's connections to a port, each open until the next: torch does not show their descriptors."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a socket, not connected, or closed meanwhile
            connection = socket.socket(fileno=int(descriptor))
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                    yield connection
            finally:
                connection.detach()


def serve(address: str, port: int, parent: Connection) -> None:
    """Serves a store on this address until the other end of `parent` is closed; sends the port first, a free one if it
    is 0.
    """
    store = listen(address, timedelta(seconds=_CONNECT_TIMEOUT_S), port)
    parent.send(store.port)
    with contextlib.suppress(EOFError):
        parent.recv()


def listen(address: str, timeout: timedelta, port: int = 0) -> Any:
    """A TCPStore server and first client on one IP address; torch alone would bind all interfaces."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    _retransmit_often(listener)
    with without_name_lookups():
        return dist.TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def initialize_requests() -> None:
    """Has torch initialize what all stores share, for each kind of request its counter: a process that is forked while
    another thread does so would wait for it forever.
    """
    with contextlib.suppress(RuntimeError, OSError):  # without a loopback interface the risk stays
        store, key = listen("127.0.0.1", timedelta(seconds=1)), RUN_NAME
        store.compare_set(key, "", "value")
        store.set(key, "value")
        store.add(NUM_READY_REPORTS, 1)
        store.check([key])
        store.get(key)
        store.multi_get([key])
        store.wait([key])
        store.delete_key(key)
        store.set_timeout(timedelta(milliseconds=1))
        store.get(key)  # raises


class TcpControlStore:
    """A client of the embedded store; a `ControlStore`. Its requests may be repeated by `renew_if_back`."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._descriptors: set[int] = set()
        """The connection's, and perhaps those that other threads opened at the same time."""
        self._unanswered: list[tuple[str, str]] = []
        """Pairs put since the last answer: the server answers no `set`, but carries requests out in order."""
        self._is_renewing = False
        with _lost_when_unreachable():
            self._client = self._open()

    def _connect(self) -> Any:
        import torch.distributed as dist

        timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        return dist.TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=timeout)

    def _open(self) -> Any:
        port = self._address[1]
        before = {connection.fileno() for connection in _connections_to(port)}
        client = self._connect()
        self._descriptors.clear()
        for connection in _connections_to(port):
            _retransmit_often(connection)
            self._descriptors |= {connection.fileno()} - before
        return client

    def renew_if_back(self) -> None:
        """Repeats the request that another thread waits for on a new connection, if the server takes one now."""
        if self._is_renewing:
            return
        with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=_PROBE_S):
            old = [one.dup() for one in _connections_to(self._address[1]) if one.fileno() in self._descriptors]
            self._is_renewing = True
            for connection in old:  # duplicates: the other thread may open the new one meanwhile, under the same number
                with connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def break_off(self) -> None:
        for connection in _connections_to(self._address[1]):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _request(self, ask: Callable[[Any], T], *, is_answered: bool = True) -> T:
        import torch.distributed as dist

        with _lost_when_unreachable():
            while True:
                try:
                    answer = ask(self._client)
                    if is_answered:
                        self._unanswered.clear()
                    return answer
                except dist.DistNetworkError:
                    if not self._is_renewing:
                        raise
                    self._client = self._open()
                    for key, value in self._unanswered:
                        self._client.set(key, value)
                    self._is_renewing = False

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:  # noqa: ARG002  (loses no keys)
        return self._request(lambda client: bytes(client.compare_set(key, "", value)).decode())

    def put(self, key: str, value: str) -> None:
        self._unanswered.append((key, value))
        self._request(lambda client: client.set(key, value), is_answered=False)

    def beat(self, key: str, value: str, ttl_s: int) -> None:  # noqa: ARG002  (there are no leases)
        self.put(key, value)

    def get(self, keys: Sequence[str]) -> list[str | None]:
        import torch.distributed as dist

        # multi_get blocks on an absent key, and has no value of one that is deleted once it does not.
        if self._request(lambda client: client.check(list(keys))):
            self._client.set_timeout(timedelta(seconds=_DELETED_S))
            with contextlib.suppress(dist.DistStoreError):
                found = self._request(lambda client: client.multi_get(list(keys)))
                return [bytes(value).decode() or None for value in found]
            return self.get(keys)
        if len(keys) == 1:
            return [None]
        middle = len(keys) // 2  # few keys are absent, or there are few keys
        return [*self.get(keys[:middle]), *self.get(keys[middle:])]

    def exists(self, key: str) -> bool:
        return self._request(lambda client: bool(client.check([key])))

    def wait(self, key: str, timeout_s: float) -> str:
        import torch.distributed as dist

        def ask(client: Any) -> str:
            client.set_timeout(timedelta(seconds=timeout_s))  # `get` waits by itself, in fewer messages
            try:
                return bytes(client.get(key)).decode()
            except dist.DistStoreError as error:
                raise StoreTimeout(f"{key} was not written within {timeout_s:g} s") from error

        return self._request(ask)

    def put_counted(self, key: str, value: str, counter: str, weight: int = 1, forget: Sequence[str] = ()) -> int:
        def ask(client: Any) -> int:  # repeated, it counts twice; never too little
            client.set(key, value)
            return int(client.add(counter, weight))

        count = self._request(ask)
        self.delete(forget)
        return count

    def counted(self, counter: str) -> int:
        return self._request(lambda client: int(client.add(counter, 0)))

    def delete(self, keys: Sequence[str]) -> None:
        def ask(client: Any) -> None:
            for key in keys:
                client.delete_key(key)

        if keys:
            self._request(ask)

    def rendezvous(
        self,
        prefix: str,
        rank: int,  # noqa: ARG002  (none is special)
        timeout_s: float,
        former: tuple[str, int] | None = None,
    ) -> Any:
        import torch.distributed as dist

        with _lost_when_unreachable():
            with without_name_lookups():
                client = self._connect()  # a clone would have the timeout of the last request
            if former is not None:
                # Where gloo wrote the rank's addresses, one for each peer.
                client.delete_key(f"{former[0]}/0/{former[1]}")
            store = dist.PrefixStore(prefix, client)
            store.set_timeout(timedelta(seconds=timeout_s))
            return store

    def local_host(self) -> str:
        return address_on_the_way_to(self._address[0])


@contextlib.contextmanager
def _lost_when_unreachable() -> Iterator[None]:
    import torch.distributed as dist

    try:
        yield
    except dist.DistNetworkError as error:
        raise StoreLost(f"the control store does not answer: {error}") from error
