"""What the connection to etcd makes of answers, as members of real clusters have given them."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.store import etcd_gateway
from spare_megatron.store.etcd_gateway import ANSWER_S, EtcdGateway, StoreFull, StoreRefused, silence_of
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.spec import EtcdStoreSpec

pytestmark = pytest.mark.timeout(60)

PATIENT_S = 30.0
FINE = (200, {"header": {"revision": "7"}})


class Member(ThreadingHTTPServer):
    """Answers the next request with the next of its answers, and all after the last with that one."""

    daemon_threads = True

    def __init__(self, answers: Sequence[tuple[int, Any]], closes: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.closes = closes
        """So many answers end their connection, and say so."""
        self.num_requests = self.num_connections = 0

    def spec(self, timeout_s: float = PATIENT_S) -> EtcdStoreSpec:
        return EtcdStoreSpec(endpoints=(f"http://127.0.0.1:{self.server_port}",), prefix="/run", timeout_s=timeout_s)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Member

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, answer = self.server.answers[min(self.server.num_requests, len(self.server.answers) - 1)]
        self.server.num_requests += 1
        body = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.server.num_requests <= self.server.closes:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@contextlib.contextmanager
def member(*answers: tuple[int, Any], closes: int = 0) -> Iterator[Member]:
    with Member(answers, closes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _no_try_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member here is slow at most because the machine is busy, and counts what it is asked."""
    monkeypatch.setattr(etcd_gateway, "_FIRST_TRY_S", PATIENT_S)


@pytest.mark.parametrize(
    "trouble",
    [
        # A leader that ends on SIGTERM.
        (408, {"error": "grpc: the client connection is closing", "code": 1}),
        (500, {"error": "raft proposal dropped", "code": 2}),
        (400, {"error": "etcdserver: leader changed", "message": "etcdserver: leader changed", "code": 14}),
        # What a stream is answered with without a quorum.
        (503, {"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}}),
        (200, {"error": {"grpc_code": 2, "http_code": 500, "message": "lease: not a primary lessor"}}),
        (200, {"error": {"code": 14, "message": "etcdserver: no leader", "details": []}}),
        # A proxy before a member that is gone.
        (502, "Bad Gateway"),
        (503, {}),
    ],
)
def test_an_answer_that_says_nothing_about_the_request_is_worth_another_try(trouble: tuple[int, Any]) -> None:
    with member(trouble, trouble, FINE) as server, contextlib.closing(EtcdGateway(server.spec())) as gateway:
        assert gateway.call("/v3/kv/put", {}) == FINE[1]
        assert server.num_requests == 3


@pytest.mark.parametrize("answer", [FINE, (403, {"error": "permission denied", "code": 7})])
def test_who_answers_is_not_silent_whatever_it_answers(answer: tuple[int, Any]) -> None:
    with member(answer) as server:
        assert silence_of(server.spec()) == ""
        refused = silence_of(server.spec(), refusal_counts=True)
    assert bool(refused) is (answer is not FINE)


def test_a_member_without_a_leader_is_silent_and_asked_for_a_short_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in the pauses between tries alone."""
    pauses_s: list[float] = []
    monkeypatch.setattr(etcd_gateway, "time", SimpleNamespace(monotonic=lambda: sum(pauses_s), sleep=pauses_s.append))
    with member((503, {"error": {"grpc_code": 14, "message": "etcdserver: no leader"}})) as server:
        assert silence_of(server.spec(timeout_s=3600.0)) == "etcdserver: no leader"
    assert sum(pauses_s) < ANSWER_S + 1.0


def test_a_beat_goes_on_after_a_time_without_a_leader() -> None:
    no_leader = (503, {"error": {"grpc_code": 14, "http_code": 503, "message": "etcdserver: no leader"}})
    renewed = (200, {"result": {"ID": "5", "TTL": "60"}})
    with member((200, {"ID": "5", "TTL": "60"}), FINE, no_leader, no_leader, renewed, FINE) as server:
        with contextlib.closing(EtcdControlStore(server.spec())) as store:
            store.beat("beat/0", "1", 60)
            store.beat("beat/0", "2", 60)
        assert server.num_requests == 6


def test_the_store_is_lost_when_no_answer_has_been_a_good_one_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in the pauses between tries alone."""
    pauses_s: list[float] = []
    monkeypatch.setattr(etcd_gateway, "time", SimpleNamespace(monotonic=lambda: sum(pauses_s), sleep=pauses_s.append))
    closing = (408, {"error": "grpc: the client connection is closing", "code": 1})
    with member(closing) as server, contextlib.closing(EtcdGateway(server.spec(timeout_s=0.2))) as gateway:
        with pytest.raises(StoreLost, match=r"control\.store_timeout_s=0\.2: grpc: the client connection is closing"):
            gateway.call("/v3/kv/put", {})
        assert server.num_requests == len(pauses_s) + 1 > 1
    assert sum(pauses_s) >= 0.2


@pytest.mark.parametrize("code", [3, 7, 9])
@pytest.mark.parametrize("shape", ["unary", "stream"])
def test_a_request_that_etcd_does_not_take_is_not_sent_again(code: int, shape: str) -> None:
    text = "etcdserver: permission denied"
    answer = {"error": text, "code": code} if shape == "unary" else {"error": {"grpc_code": code, "message": text}}
    with member((400, answer), FINE) as server, contextlib.closing(EtcdGateway(server.spec())) as gateway:
        with pytest.raises(StoreRefused, match=f"etcd refuses: {text}"):
            gateway.call("/v3/kv/put", {})
        assert server.num_requests == 1


@pytest.mark.parametrize(
    ("code", "text"), [(3, "etcdserver: revision of auth store is old"), (2, "auth: revision in header is old")]
)
def test_a_token_from_before_a_change_of_users_is_replaced(code: int, text: str) -> None:
    """Any change of users or roles, such as a new user, makes earlier tokens useless, and was the end of a run."""
    with member((400, {"error": text, "code": code}), FINE) as server:
        with contextlib.closing(EtcdGateway(server.spec())) as gateway:
            gateway._session.token = "of before"
            assert gateway.call("/v3/kv/put", {}) == FINE[1]
            assert (server.num_requests, gateway._session.token) == (2, "")


def test_a_full_etcd_is_not_asked_again_and_the_error_has_its_size_and_the_remedy() -> None:
    full = (429, {"error": "etcdserver: mvcc: database space exceeded", "code": 8})
    status = (200, {"dbSize": str(3 << 20), "errors": ["memberID:1 alarm:NOSPACE "]})
    with member(full, status, FINE) as server, contextlib.closing(EtcdGateway(server.spec())) as gateway:
        with pytest.raises(StoreFull, match=r"its database has 3 MiB, its quota; remove .* `etcdctl alarm disarm`"):
            gateway.call("/v3/kv/put", {})
        assert server.num_requests == 2


def test_an_etcd_with_too_much_to_do_is_asked_again() -> None:
    """By the same code as one that is full."""
    busy = (429, {"error": "etcdserver: too many requests", "code": 8})
    with member(busy, FINE) as server, contextlib.closing(EtcdGateway(server.spec())) as gateway:
        assert gateway.call("/v3/kv/put", {}) == FINE[1]
        assert server.num_requests == 2


def test_a_stream_that_ends_with_an_error_breaks_like_its_connection() -> None:
    """Whatever else it raised ended the thread that follows a directory, and with it the watch."""
    error = (200, {"error": {"grpc_code": 14, "message": "etcdserver: no leader"}})
    with member(error) as server, contextlib.closing(EtcdGateway(server.spec())) as gateway:
        with gateway.stream("/v3/watch", {}, PATIENT_S) as (_, messages):
            with pytest.raises(http.client.HTTPException, match="no leader"):
                next(messages)


def test_a_connection_that_an_answer_ends_is_opened_again() -> None:
    with member(FINE, closes=2) as server, contextlib.closing(EtcdGateway(server.spec())) as gateway:
        for _ in range(4):
            assert gateway.call("/v3/kv/put", {}) == FINE[1]
        assert (server.num_requests, server.num_connections) == (4, 3)


def test_the_address_of_this_machine_is_known_though_the_answer_ends_the_connection() -> None:
    with member(FINE, closes=1) as server, contextlib.closing(EtcdGateway(server.spec())) as gateway:
        assert gateway.local_host() == "127.0.0.1"


def test_a_stream_is_read_to_its_end_though_its_answer_ends_the_connection() -> None:
    message = (200, {"result": {"events": []}})
    with member(message, FINE, closes=1) as server, contextlib.closing(EtcdGateway(server.spec())) as gateway:
        with gateway.stream("/v3/watch", {}, PATIENT_S) as (_, messages):
            assert list(messages) == [{"events": []}]
        assert gateway.call("/v3/kv/put", {}) == FINE[1]


def test_a_request_that_no_member_answers_ends_once_it_is_broken_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        gateway = EtcdGateway(EtcdStoreSpec(endpoints=(endpoint,), prefix="/run", timeout_s=PATIENT_S))
        asked = pool.submit(gateway.call, "/v3/kv/range", {})
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)
            gateway.break_off()
            with pytest.raises(StoreLost, match="broken off"):
                asked.result(PATIENT_S / 2)


# ------------------------------------------------------------------------------------------------ a lost history


def answer_of(revision: int, cluster: str = "1") -> tuple[int, Any]:
    return 200, {"header": {"cluster_id": cluster, "revision": str(revision)}}


@pytest.mark.parametrize(
    ("later", "named"),
    [(answer_of(6), "has gone back in time \\(revision 6, before 7\\)"), (answer_of(900, "2"), "is another cluster")],
)
def test_an_etcd_that_has_lost_what_it_confirmed_is_a_lost_store(later: tuple[int, Any], named: str) -> None:
    with member(answer_of(5), answer_of(7), answer_of(7), later) as server:
        gateway = EtcdGateway(server.spec())
        other = gateway.another()  # of the same process: what one has seen the other knows
        for one in (gateway, other, gateway):
            one.call("/v3/kv/range", {})
        with pytest.raises(StoreLost, match=named):
            other.call("/v3/kv/txn", {})
        assert server.num_requests == 4, "asking again would not help"


def test_the_status_of_a_member_that_lags_behind_is_no_lost_history() -> None:
    with member(answer_of(7), answer_of(3), answer_of(8)) as server:
        gateway = EtcdGateway(server.spec())
        gateway.call("/v3/kv/range", {})
        gateway.call("/v3/maintenance/status", {})
        assert gateway.call("/v3/kv/range", {}) == answer_of(8)[1]
