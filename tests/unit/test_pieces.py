"""Pieces of a state between two ranks: the transport by itself, on the loopback."""

import hashlib
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.formats import frames
from spare_megatron.formats.frames import (
    NONCE_BYTES,
    Address,
    ConnectionBroken,
    NotOffered,
    TurnedAway,
    WrongStep,
    receive,
)
from spare_megatron.formats.pieces import LARGEST_PIECE_BYTES, PIECE_BYTES, Piece, TokenBucket, pieces_of
from spare_megatron.state.transfer import piece_server
from spare_megatron.state.transfer.piece_client import PieceClient
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.state.transfer.state_transfer import StateSource
from tests.unit.silent_server import POINTS, Point, SilentServer

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 20.0
SHORT_S = 0.3
STEP = 7


class Bytes:
    """A state of so many random bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.content = secrets.token_bytes(num_bytes)
        self.num_bytes = num_bytes

    def read(self, piece: Piece) -> bytes:
        return self.content[piece.start : piece.stop]


@pytest.fixture
def source() -> StateSource:
    return StateSource()


@pytest.fixture
def server(source: StateSource) -> Iterator[PieceServer]:
    server = PieceServer("127.0.0.1", source, TIMEOUT_S)
    server.start()
    yield server
    server.close()


# ------------------------------------------------------------------------------------------------------- pure parts


@given(st.integers(0, 5 * PIECE_BYTES))
def test_pieces_are_the_whole_once(num_bytes: int) -> None:
    pieces = list(pieces_of(num_bytes))
    assert sum(piece.size for piece in pieces) == num_bytes
    assert all(0 < piece.size <= PIECE_BYTES for piece in pieces)
    assert [piece.stop for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.0, 3.0)), min_size=1, max_size=50))
def test_a_bucket_never_gives_more_than_its_rate(asked: list[tuple[int, float]]) -> None:
    """Whatever the pauses between pieces, in any window of time."""
    bucket, now_s = TokenBucket(bytes_per_s=100.0, now_s=0.0), 0.0
    moments = [(0.0, 0)]
    for num_bytes, pause_s in asked:
        now_s = bucket.reserve(num_bytes, now_s + pause_s)
        moments.append((now_s, num_bytes))
    for first, (begin_s, _) in enumerate(moments):
        for last in range(first, len(moments)):
            assert sum(size for _, size in moments[first + 1 : last + 1]) <= 100.0 * (moments[last][0] - begin_s) + 1e-6


def test_a_bucket_reaches_its_rate_where_fetching_is_faster() -> None:
    bucket, now_s = TokenBucket(bytes_per_s=1000.0, now_s=5.0), 5.0
    for _ in range(100):
        now_s = bucket.reserve(50, now_s) + 0.04  # that a piece takes to come
    assert now_s == pytest.approx(5.0 + 100 * 0.05 + 0.04)


# -------------------------------------------------------------------------------------------------------- transport


def test_a_state_comes_whole_and_several_clients_are_served_at_once(source: StateSource, server: PieceServer) -> None:
    state = Bytes(3 * PIECE_BYTES + 17)
    source.offer(STEP, {"state": state})
    got: dict[int, bytes] = {}

    def fetch(number: int) -> None:
        with closing(PieceClient(server.address, TIMEOUT_S)) as client:
            got[number] = b"".join(client.fetch("state", STEP, piece) for piece in pieces_of(state.num_bytes))

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert {hashlib.sha256(content).digest() for content in got.values()} == {hashlib.sha256(state.content).digest()}
    assert len(got) == 4


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 17])
def test_pieces_that_are_asked_for_ahead_come_in_order(
    source: StateSource, server: PieceServer, num_bytes: int
) -> None:
    state, found = Bytes(num_bytes), bytearray(num_bytes)
    rooms: list[memoryview] = []

    def room(size: int) -> memoryview:
        rooms.append(memoryview(bytearray(size)))
        return rooms[-1]

    source.offer(STEP, {"state": state})
    with closing(PieceClient(server.address, TIMEOUT_S)) as client:
        for piece in client.fetch_each("state", STEP, pieces_of(num_bytes), room):
            found[piece.start : piece.stop] = rooms.pop()
            assert not rooms, "one at a time"
    assert found == state.content


def test_a_server_prepares_a_piece_while_the_one_before_is_used_and_no_more(
    source: StateSource, server: PieceServer
) -> None:
    class Watched(Bytes):
        def read(self, piece: Piece) -> bytes:
            reads[piece.start].set()
            return super().read(piece)

    pieces = [Piece(start, start + 10) for start in range(0, 40, 10)]
    reads = {piece.start: threading.Event() for piece in pieces}
    source.offer(STEP, {"state": Watched(40)})
    with closing(PieceClient(server.address, TIMEOUT_S)) as client:
        coming = client.fetch_each("state", STEP, pieces, lambda size: memoryview(bytearray(size)))
        assert next(coming) == pieces[0]
        assert reads[10].wait(TIMEOUT_S)
        assert not reads[20].is_set()
        with source.changing(STEP + 1):
            pass
        assert next(coming) == pieces[1], "as of the step before"
        with pytest.raises(WrongStep):
            next(coming)


def test_a_server_that_had_no_descriptors_left_serves_again(
    source: StateSource, server: PieceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Bytes(100)
    source.offer(STEP, {"state": state})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failed = threading.Event()
    monkeypatch.setattr(piece_server, "time", SimpleNamespace(sleep=lambda _: failed.set()))
    with closing(socket.socket()) as client, closing(socket.socket()) as lowest:
        limit = lowest.fileno()
        lowest.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            client.connect((server.address.host, server.address.port))
            assert failed.wait(TIMEOUT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with closing(PieceClient(server.address, TIMEOUT_S)) as other:
        assert other.fetch("state", STEP, Piece(0, 100)) == state.content


def test_a_server_without_room_for_a_thread_turns_its_client_away_at_once_and_serves_the_next(
    source: StateSource, server: PieceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended, so that groups that came back waited for their state until a timeout."""
    state = Bytes(100)
    source.offer(STEP, {"state": state})

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", start)
        with pytest.raises(TurnedAway):
            PieceClient(server.address, TIMEOUT_S)
    with closing(PieceClient(server.address, TIMEOUT_S)) as other:
        assert other.fetch("state", STEP, Piece(0, 100)) == state.content


def test_requests_for_another_step_or_a_missing_part_are_refused_with_a_reason(
    source: StateSource, server: PieceServer
) -> None:
    state = Bytes(100)
    with closing(PieceClient(server.address, TIMEOUT_S)) as client:
        with pytest.raises(WrongStep) as wrong:
            client.fetch("state", STEP, Piece(0, 100))
        assert wrong.value.present == 0
        source.offer(STEP, {"state": state})
        for step in (STEP - 1, STEP + 1):
            with pytest.raises(WrongStep) as wrong:
                client.fetch("state", step, Piece(0, 100))
            assert wrong.value.present == STEP
        for name, piece in (("other", Piece(0, 100)), ("state", Piece(0, 101))):
            with pytest.raises(NotOffered):
                client.fetch(name, STEP, piece)
        # And the connection is as good as before.
        assert client.fetch("state", STEP, Piece(10, 20)) == state.content[10:20]
        with source.changing(STEP + 1):
            pass
        with pytest.raises(WrongStep):
            client.fetch("state", STEP, Piece(0, 100))
        with pytest.raises(NotOffered):
            client.fetch("state", STEP + 1, Piece(0, 100))


def test_no_reader_reads_while_the_state_changes(source: StateSource, server: PieceServer) -> None:
    source.offer(STEP, {"state": Bytes(100)})
    ended = threading.Event()
    found: list[Exception] = []

    def fetch() -> None:
        with closing(PieceClient(server.address, TIMEOUT_S)) as client:
            try:
                client.fetch("state", STEP, Piece(0, 100))
            except WrongStep as error:
                found.append(error)
        ended.set()

    with source.changing(STEP + 1):
        threading.Thread(target=fetch).start()
        assert not ended.wait(SHORT_S), "served in the middle of a change"
    assert ended.wait(TIMEOUT_S)
    assert [str(error) for error in found] == [f"the state there is that of {STEP + 1} steps"]


def test_a_stranger_is_refused_and_gets_nothing(source: StateSource, server: PieceServer) -> None:
    source.offer(STEP, {"state": Bytes(100)})
    stranger = replace(server.address, token=secrets.token_hex(32))
    with closing(PieceClient(stranger, TIMEOUT_S)) as client, pytest.raises(ConnectionBroken, match=r"closed|nothing"):
        client.fetch("state", STEP, Piece(0, 100))
    with socket.create_connection((server.address.host, server.address.port), TIMEOUT_S) as connection:
        receive(connection, memoryview(bytearray(NONCE_BYTES)), TIMEOUT_S)
        connection.sendall(secrets.token_bytes(200))
        with pytest.raises(ConnectionBroken):
            receive(connection, memoryview(bytearray(1)), TIMEOUT_S)
    with closing(PieceClient(server.address, TIMEOUT_S)) as client:
        assert len(client.fetch("state", STEP, Piece(0, 100))) == 100, "others are served as before"


def test_more_than_a_piece_is_not_served(source: StateSource, server: PieceServer) -> None:
    source.offer(STEP, {"state": Bytes(LARGEST_PIECE_BYTES + 1)})
    with closing(PieceClient(server.address, TIMEOUT_S)) as client:
        assert len(client.fetch("state", STEP, Piece(1, LARGEST_PIECE_BYTES + 1))) == LARGEST_PIECE_BYTES
        with pytest.raises(ConnectionBroken):
            client.fetch("state", STEP, Piece(0, LARGEST_PIECE_BYTES + 1))


class Relay:
    """Passes what a server sends to one client through `change`, with its position in the stream; None: hangs up."""

    def __init__(self, server: Address, change: object) -> None:
        self._server = server
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = replace(server, port=self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection((self._server.host, self._server.port), TIMEOUT_S) as server:
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            position = 0
            while data := server.recv(PIECE_BYTES):
                passed = self._change(position, data)  # type: ignore[operator]
                if passed is None:
                    client.shutdown(socket.SHUT_RDWR)  # closing alone would wait for the other thread
                    return
                client.sendall(passed)
                position += len(data)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(PIECE_BYTES):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other thread was faster

    def close(self) -> None:
        self._thread.join(TIMEOUT_S)
        self._listener.close()


def _flipped(position: int, data: bytes) -> bytes:
    """One bit of the 500th byte after the greeting."""
    index = NONCE_BYTES + 500 - position
    if not 0 <= index < len(data):
        return data
    return data[:index] + bytes([data[index] ^ 4]) + data[index + 1 :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_flipped, "damaged"), (lambda position, data: data if not position else None, "closed|nothing comes")],
    ids=["damaged", "hung_up"],
)
def test_what_comes_damaged_or_not_at_all_is_not_taken(
    source: StateSource, server: PieceServer, change: object, reason: str
) -> None:
    source.offer(STEP, {"state": Bytes(PIECE_BYTES)})
    with closing(Relay(server.address, change)) as relay, closing(PieceClient(relay.address, TIMEOUT_S)) as client:
        with pytest.raises(ConnectionBroken, match=reason):
            client.fetch("state", STEP, Piece(0, PIECE_BYTES))


def test_the_answer_to_one_connection_is_worth_nothing_in_another(source: StateSource, server: PieceServer) -> None:
    """The greeting differs, and goes into every signature: what was recorded cannot be played back."""
    source.offer(STEP, {"state": Bytes(100)})
    recorded: list[bytes] = []

    def record(position: int, data: bytes) -> bytes:
        recorded.append(data)
        return data

    with closing(Relay(server.address, record)) as relay, closing(PieceClient(relay.address, TIMEOUT_S)) as client:
        client.fetch("state", STEP, Piece(0, 100))
    old = b"".join(recorded)[NONCE_BYTES:]

    def play_back(position: int, data: bytes) -> bytes:
        return data if position < NONCE_BYTES else old[position - NONCE_BYTES :][: len(data)]

    with closing(Relay(server.address, play_back)) as relay, closing(PieceClient(relay.address, TIMEOUT_S)) as client:
        with pytest.raises(ConnectionBroken, match="damaged"):
            client.fetch("state", STEP, Piece(0, 100))


def test_a_frame_that_is_repeated_in_its_connection_is_not_taken() -> None:
    token, room = secrets.token_hex(32), memoryview(bytearray(9))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.Channel(ours, token, b"nonce").send(
            frames.Frame(frames.FrameKind.PIECE, STEP, (3, 7), b"some"), TIMEOUT_S
        )
        ours.sendall(theirs.recv(PIECE_BYTES) * 2)
        channel = frames.Channel(theirs, token, b"nonce")
        assert channel.receive(room, TIMEOUT_S) == frames.Frame(frames.FrameKind.PIECE, STEP, (3, 7), b"some")
        with pytest.raises(ConnectionBroken, match="damaged"):
            channel.receive(room, TIMEOUT_S)


def test_a_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = Address(host="127.0.0.1", port=mute.getsockname()[1], token=secrets.token_hex(32))
        with pytest.raises(ConnectionBroken, match=r"within 0\.3 s"):
            PieceClient(address, SHORT_S)
    with pytest.raises(ConnectionBroken, match="no connection"):
        PieceClient(address, TIMEOUT_S)


def ask(address: Address, timeout_s: float, is_over: Callable[[], bool]) -> None:
    with closing(PieceClient(address, timeout_s, is_over=is_over)) as client:
        client.fetch("state", STEP, Piece(0, 100))


@pytest.mark.parametrize("point", POINTS)
def test_a_silent_server_is_left_as_soon_as_it_is_of_no_use(point: Point) -> None:
    """Wherever that is. A machine without power closes no connection, and its time is that of a slow one."""
    looks, began_s = chain([False, False], repeat(True)), time.monotonic()
    with closing(SilentServer(point)) as silent, pytest.raises(ConnectionBroken, match="not waited for any longer"):
        ask(silent.address, TIMEOUT_S, lambda: next(looks))
    assert time.monotonic() - began_s < TIMEOUT_S / 2


@pytest.mark.parametrize("point", POINTS)
def test_a_silent_server_is_waited_for_while_it_may_be_of_use(point: Point) -> None:
    looks: list[float] = []

    def look() -> bool:
        looks.append(time.monotonic())
        return False

    with closing(SilentServer(point)) as silent, pytest.raises(ConnectionBroken, match=r"within 0\.3 s"):
        ask(silent.address, SHORT_S, look)
    assert looks


def test_a_server_that_is_closed_leaves_no_thread_and_ends_its_clients(source: StateSource) -> None:
    server = PieceServer("127.0.0.1", source, TIMEOUT_S)
    server.start()
    source.offer(STEP, {"state": Bytes(100)})
    clients = [PieceClient(server.address, TIMEOUT_S) for _ in range(3)]
    for client in clients:
        client.fetch("state", STEP, Piece(0, 100))
    server.close()
    assert [thread for thread in threading.enumerate() if thread.name == "pieces"] == []
    for client in clients:
        with pytest.raises(ConnectionBroken):
            client.fetch("state", STEP, Piece(0, 100))
        client.close()


class Lingering(threading.Thread):
    """Has released its connection long before it ends: when another thread waits for that."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._is_awaited = threading.Event()

    def run(self) -> None:
        super().run()
        self._is_awaited.wait(TIMEOUT_S)

    def join(self, timeout: float | None = None) -> None:
        self._is_awaited.set()
        super().join(timeout)


def test_the_thread_of_a_client_that_has_just_left_is_waited_for_too(
    source: StateSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it was found when there was to be none."""
    monkeypatch.setattr(piece_server, "threading", SimpleNamespace(Lock=threading.Lock, Thread=Lingering))
    server = PieceServer("127.0.0.1", source, TIMEOUT_S)
    server.start()
    PieceClient(server.address, TIMEOUT_S).close()
    while server._connections:
        pass
    server.close()
    assert [thread for thread in threading.enumerate() if isinstance(thread, Lingering)] == []


def test_an_address_is_read_as_it_was_written() -> None:
    address = Address(host="fe80::1", port=65535, token=secrets.token_hex(32))
    assert Address.parse(str(address)) == address
