"""A connection to the embedded store over a network that loses all packets for a time, and then carries new ones."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.tcp_store import TcpControlStore, listen

pytestmark = pytest.mark.timeout(60)

WAIT_S = 20.0


class Network:
    """Passes connections on to a server. Those of before an outage carry nothing any more, as if the kernel waited."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._others: dict[socket.socket, socket.socket] = {}
        self._dead: set[socket.socket] = set()
        self.num_lost_bytes = 0
        self.has_lost = threading.Event()
        self._is_over = False
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """What connections carry from now on is lost."""
        self._dead |= set(self._others)

    def redirect(self, port: int) -> None:
        """New connections go to another server."""
        self._port = port

    def close(self) -> None:
        self._is_over = True
        self._thread.join(WAIT_S)
        for one in (self._listener, *self._others):
            one.close()

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(0.02):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._listener:
                    self._accept()
                    continue
                with contextlib.suppress(OSError):
                    data = one.recv(65536)
                    if not data:
                        self._selector.unregister(one)
                    elif one in self._dead:
                        self.num_lost_bytes += len(data)
                        self.has_lost.set()
                    else:
                        self._others[one].sendall(data)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        self._others |= {near: far, far: near}
        for one in (near, far):
            self._selector.register(one, selectors.EVENT_READ)


@pytest.fixture
def server() -> TcpControlStore:
    """A client of the server, past the network."""
    serving = listen("127.0.0.1", timedelta(seconds=WAIT_S))
    client = TcpControlStore("127.0.0.1", serving.port)
    client.serving = serving  # type: ignore[attr-defined]
    return client


@pytest.fixture
def network(server: TcpControlStore) -> Iterator[Network]:
    network = Network(server._address[1])
    yield network
    network.close()


REQUESTS: dict[str, Callable[[TcpControlStore], object]] = {
    "put_if_absent": lambda client: client.put_if_absent("key", "value"),
    "exists": lambda client: client.exists("before"),
    "get": lambda client: client.get(["before", "key"]),
    "put_counted": lambda client: client.put_counted("key", "value", "counter"),
}


@pytest.mark.parametrize("asks", REQUESTS)
def test_a_request_that_an_outage_swallowed_is_answered_on_a_new_connection(
    server: TcpControlStore, network: Network, asks: str
) -> None:
    client = TcpControlStore("127.0.0.1", network.port)
    client.put("before", "the outage")
    answers = {"put_if_absent": "value", "exists": True, "get": ["the outage", None], "put_counted": 1}
    network.cut()
    client.put("unanswered", "pair")  # the server answers none
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(REQUESTS[asks], client)
        assert network.has_lost.wait(WAIT_S)
        assert not asked.done()
        client.renew_if_back()
        assert asked.result(WAIT_S) == answers[asks]
    assert server.exists("key") == asks.startswith("put")
    assert server.get(["unanswered"]) == ["pair"]
    assert client.exists("before")


@pytest.mark.parametrize("asks", [*REQUESTS, "wait"])
def test_a_request_that_an_outage_swallowed_ends_once_the_connection_is_broken_off(network: Network, asks: str) -> None:
    client = TcpControlStore("127.0.0.1", network.port)
    network.cut()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(REQUESTS.get(asks, lambda client: client.wait("key", 3600.0)), client)
        assert network.has_lost.wait(WAIT_S)
        client.break_off()
        with pytest.raises(StoreLost):
            asked.result(WAIT_S)
    with pytest.raises(StoreLost):
        client.exists("key")


def test_a_connection_without_a_request_under_way_is_renewed_by_the_next_one(
    server: TcpControlStore, network: Network
) -> None:
    client = TcpControlStore("127.0.0.1", network.port)
    network.cut()
    client.renew_if_back()
    client.put("key", "value")
    assert client.exists("key")
    assert server.exists("key")


def test_while_the_server_cannot_be_reached_the_request_goes_on_waiting(network: Network) -> None:
    client = TcpControlStore("127.0.0.1", network.port)
    host, port = client._address
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = unused.getsockname()[1]
    client._address = (host, nowhere)
    client.renew_if_back()
    client._address = (host, port)
    client.put("key", "value")
    assert client.exists("key")


def test_a_server_that_was_started_again_empty_is_no_store_of_the_run(network: Network) -> None:
    log = DecisionLog(client := TcpControlStore("127.0.0.1", network.port), check_s=0.0)
    log.append(0, "entry")
    network.cut()
    other = listen("127.0.0.1", timedelta(seconds=WAIT_S))
    network.redirect(other.port)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(log.has, 1)
        assert network.has_lost.wait(WAIT_S)
        client.renew_if_back()
        with pytest.raises(StoreLost, match="has lost log/0000000000, which it had confirmed"):
            asked.result(WAIT_S)
