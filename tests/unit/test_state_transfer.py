"""Whose state a group takes over when it comes back, whom it asks for a snapshot, and what it does with no answer."""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from spare_megatron.config.schema import ReduceConfig, RunConfig
from spare_megatron.core.log.actions import AdmitGroups
from spare_megatron.core.log.events import RestartState
from spare_megatron.core.log.votes import Held
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.frames import Address, NotOffered, TurnedAway
from spare_megatron.formats.pieces import PIECE_BYTES, Piece
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.process.snapshot_wire import Part
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.rank_context import RankProgress
from spare_megatron.state.snapshot import snapshot_loader
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient
from spare_megatron.state.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.state.transfer.piece_client import PieceClient
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.state.transfer.state_transfer import JoinFailed, LengthFirst, StateSource, StateTransfer
from tests.rank_context import rank_context
from tests.unit.silent_server import POINTS, Point, SilentServer

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 40.0
"""For a piece; no test here should wait that long."""
STEP, HEAD = 7, 11
NEWCOMER = Member(GroupId(1), 1)
EARLIER = tuple(Member(GroupId(group)) for group in (0, 2, 3))
ADMISSION = AdmitGroups(step=STEP, members=(NEWCOMER,), donors=EARLIER[1:2], earlier=EARLIER)
"""Group 2 gives; then 3, and then 0."""
NUM_BYTES = 2 * PIECE_BYTES + 17


class Probe(SilentProbe):
    """Keeps the moments between steps."""

    def __init__(self) -> None:
        self.moments: list[FaultPoint] = []

    def between_steps(self, step: int, phase: FaultPoint) -> None:
        assert step == STEP
        self.moments.append(phase)


class Rank:
    """A rank of a group, whose state is so many times the byte `value`, and more by its position if it is that of
    another. `servers`: where others serve theirs; `is_lost` is by the log; `others_have_it`: what the other ranks of
    the group answer, each time.
    """

    def __init__(
        self,
        member: Member,
        value: int = 0,
        *,
        positions: Sequence[int] = (0,),
        servers: Mapping[Member, Address | Sequence[Address]] | None = None,
        is_lost: Callable[[Member], bool] = lambda _: False,
        others_have_it: Sequence[bool] = (True,) * 3,
    ) -> None:
        self.states = [torch.full((NUM_BYTES,), value + position, dtype=torch.uint8) for position in positions]
        self.slabs = [SimpleNamespace(position=position) for position in positions]
        self.num_installed = 0
        self.probe = Probe()
        self.source = StateSource()
        self.server = PieceServer("127.0.0.1", self.source, TIMEOUT_S)
        self.server.start()
        answers = iter(others_have_it)
        agreement = SimpleNamespace(
            member=member,
            is_lost=lambda other, head: head == HEAD and is_lost(other),
            shared=lambda flags: [flag and next(answers) for flag in flags],
        )
        config = RunConfig(reduce=ReduceConfig(timeout_s=TIMEOUT_S))
        self.progress = RankProgress()
        ctx = rank_context(
            member,
            config=config,
            agreement=agreement,
            trainer=self,
            servers=servers,
            head=HEAD,
            probe=self.probe,
            progress=self.progress,
        )
        self.transfer = StateTransfer(ctx, self.source)

    def outgoing_state(self, slab: int) -> Any:
        return SimpleNamespace(description=b"as ever", tensors=TensorBytes([self.states[slab]]))

    def incoming_state(self, description: bytes, slab: int) -> Any:
        assert description == b"as ever"
        return SimpleNamespace(tensors=TensorBytes([self.states[slab]]), install=self._install)

    def _install(self) -> None:
        self.num_installed += 1

    def run(self, *, has_state: bool = True) -> Member | None:
        self.progress.lacks_params = not has_state
        return self.transfer.run(ADMISSION)


@pytest.fixture
def earlier() -> Iterator[Mapping[Member, Rank]]:
    """Those who took part before: the state of each is its group's number."""
    with ExitStack() as stack:
        ranks = {member: Rank(member, member.group) for member in EARLIER}
        for rank in ranks.values():
            stack.callback(rank.server.close)
        yield ranks


def newcomer(earlier: Mapping[Member, Rank], servers: Mapping[Member, Address] | None = None, **settings: Any) -> Rank:
    """That of the group that comes back. Some of the others may be elsewhere."""
    addresses = {member: rank.server.address for member, rank in earlier.items()} | dict(servers or {})
    return Rank(NEWCOMER, 255, servers=addresses, **settings)


def assert_taken(rank: Rank, donor: Member) -> None:
    for slab, state in zip(rank.slabs, rank.states, strict=True):
        assert bool((state == int(donor.group) + slab.position).all())
    assert rank.num_installed == len(rank.slabs)
    assert not [thread for thread in threading.enumerate() if thread.name == "fetch-state"]


def test_the_donor_gives_and_the_others_could(earlier: Mapping[Member, Rank]) -> None:
    """Faults that strike a donor strike the one that the log names."""
    for member, rank in earlier.items():
        assert rank.run() is None
        named = [FaultPoint.JOIN] if member == ADMISSION.donors[0] else []
        assert rank.probe.moments == [*named, FaultPoint.JOIN_CONFIRM]
    new = newcomer(earlier)
    with closing(new.server):
        assert new.run() == EARLIER[1]
    assert_taken(new, EARLIER[1])
    assert new.probe.moments == [FaultPoint.JOIN, FaultPoint.JOIN_CONFIRM]


@pytest.mark.parametrize("of_donors", [[(0,), (1, 2)], [(0, 1), (2,)], [(0, 1, 2)]])
def test_each_slab_comes_from_the_rank_of_the_donor_that_holds_it(of_donors: Sequence[Sequence[int]]) -> None:
    with ExitStack() as stack:
        ranks = [Rank(EARLIER[1], EARLIER[1].group, positions=positions) for positions in of_donors]
        for rank in ranks:
            stack.callback(rank.server.close)
            rank.run()
        addresses = [rank.server.address for rank in ranks for _ in rank.slabs]
        for positions in ((0,), (1, 2)):
            new = Rank(NEWCOMER, 200, positions=positions, servers={EARLIER[1]: addresses})
            stack.callback(new.server.close)
            assert new.run() == EARLIER[1]
            assert_taken(new, EARLIER[1])


@pytest.mark.parametrize("point", POINTS)
def test_a_donor_that_was_switched_off_is_left_when_the_log_says_so_and_another_gives(
    earlier: Mapping[Member, Rank], point: Point
) -> None:
    """It cost the newcomer its incarnation, and the group another rejoin."""
    for rank in earlier.values():
        rank.run()
    began_s, donor = time.monotonic(), ADMISSION.donors[0]
    with closing(SilentServer(point)) as silent:

        def is_lost(other: Member) -> bool:
            if other == donor:
                silent.await_client(TIMEOUT_S)
            return other == donor

        new = newcomer(earlier, {donor: silent.address}, is_lost=is_lost)
        with closing(new.server):
            assert new.run() == EARLIER[2]
    assert_taken(new, EARLIER[2])
    assert time.monotonic() - began_s < TIMEOUT_S / 2


def test_a_donor_whose_connection_breaks_is_left_before_the_log_says_so(earlier: Mapping[Member, Rank]) -> None:
    for rank in earlier.values():
        rank.run()
    earlier[EARLIER[1]].server.close()
    new = newcomer(earlier)
    with closing(new.server):
        assert new.run() == EARLIER[2]
    assert_taken(new, EARLIER[2])


def test_all_ranks_of_a_group_take_the_state_of_one_donor(earlier: Mapping[Member, Rank]) -> None:
    """Votes say whose it is: two equal digests count once if one group has its state from the other."""
    for rank in earlier.values():
        rank.run()
    new = newcomer(earlier, others_have_it=[False, True])
    with closing(new.server):
        assert new.run() == EARLIER[2]
    assert_taken(new, EARLIER[2])


def test_a_group_that_lacks_parameters_is_passed_over(earlier: Mapping[Member, Rank]) -> None:
    for member, rank in earlier.items():
        rank.run(has_state=member == EARLIER[0])
    new = newcomer(earlier)
    with closing(new.server):
        assert new.run() == EARLIER[0]
    assert_taken(new, EARLIER[0])


def test_where_no_group_gives_it_the_group_is_lost_again(earlier: Mapping[Member, Rank]) -> None:
    for rank in earlier.values():
        rank.run(has_state=False)
    new = newcomer(earlier)
    with closing(new.server), pytest.raises(JoinFailed, match="group 0 has not given its state: it lacks parameters"):
        new.run()
    assert not new.num_installed


def test_a_group_that_is_lost_itself_asks_no_other(earlier: Mapping[Member, Rank]) -> None:
    for rank in earlier.values():
        rank.run(has_state=False)
    new = newcomer(earlier, is_lost=lambda other: other == NEWCOMER)
    with closing(new.server), pytest.raises(JoinFailed, match="group 2 has not given"):
        new.run()


SNAPSHOT_TIMEOUT_S = 20.0
ATTEMPT = 7
SNAPSHOT_HEAD = 11
STATE = torch.arange(1000, dtype=torch.float32)
COPY = LengthFirst(b"what it is")._data + STATE.numpy().tobytes()
SHA256 = hashlib.sha256(COPY).hexdigest()
NAME = Part(0).name


class Kept:
    """The copy of rank 0, as a snapshot server has it."""

    def __init__(self) -> None:
        self.num_reads = 0

    def read(self, name: str, step: int, piece: Piece) -> bytes:
        if (name, step) != (NAME, ATTEMPT):
            raise NotOffered(name)
        self.num_reads += 1
        return COPY[piece.start : piece.stop]


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def server(kept: Kept) -> Iterator[PieceServer]:
    server = PieceServer("127.0.0.1", kept, SNAPSHOT_TIMEOUT_S)
    server.start()
    yield server
    server.close()


@pytest.fixture
def busy_server(kept: Kept) -> Iterator[PieceServer]:
    """It serves one client at a time."""
    server = PieceServer("127.0.0.1", kept, SNAPSHOT_TIMEOUT_S, most_connections=1)
    server.start()
    yield server
    server.close()


def loader(
    servers: dict[Member, Address],
    state: torch.Tensor,
    is_lost: Callable[[Member], bool] = lambda member: False,
    lacking: Collection[Member] = (),
) -> SnapshotLoader:
    """That of rank 0 of group 0, into this tensor, with nothing on its own node; `lacking` have no copy."""
    waiting = [RestartState(member=member, candidates=(), held=(Held(ATTEMPT, 0, SHA256),)) for member in servers]
    values = {
        f"keeper/{member.group}/{member.incarnation}/0": json.dumps(
            [str(address), [] if member in lacking else [[[ATTEMPT, None], SHA256]]]
        )
        for member, address in servers.items()
    }
    incoming = SimpleNamespace(tensors=TensorBytes([state]), install=lambda: None)
    agreement = SimpleNamespace(
        waiting_to_restart=lambda groups: waiting,
        is_lost=lambda member, head: head == SNAPSHOT_HEAD and is_lost(member),
    )
    ctx = rank_context(
        Member(GroupId(0), 1),
        config=RunConfig(reduce=ReduceConfig(timeout_s=SNAPSHOT_TIMEOUT_S)),
        trainer=SimpleNamespace(incoming_state=lambda description: incoming, stacked=None),
        agreement=agreement,
        store=SimpleNamespace(wait=lambda key, timeout_s: values[key]),
        head=SNAPSHOT_HEAD,
    )
    return SnapshotLoader(ctx, cast(SnapshotClient, None))


def member(group: int) -> Member:
    return Member(GroupId(group), 1)


class Clock:
    """The time of a loader, which passes in its pauses alone: two are longer than it waits for anybody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.num_pauses = 0
        self.on_pause = lambda: None
        monkeypatch.setattr(snapshot_loader, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep))

    def _sleep(self, pause_s: float) -> None:
        self.now_s += 0.6 * SNAPSHOT_TIMEOUT_S
        self.num_pauses += 1
        self.on_pause()


def connect_in_time(monkeypatch: pytest.MonkeyPatch, *, but: Address) -> None:
    """Passes the time for a connection at this server only: any other is slow at most because the machine is busy."""

    def connect(
        address: Address, timeout_s: float, *, connect_timeout_s: float, **others: Callable[[], bool]
    ) -> object:
        assert connect_timeout_s == snapshot_loader._CONNECT_TIMEOUT_S < timeout_s
        within_s = 0.05 if address == but else timeout_s
        return PieceClient(address, timeout_s, connect_timeout_s=within_s, **others)

    monkeypatch.setattr(snapshot_loader, "PieceClient", connect)


def test_a_rejected_client_waits_for_as_long_as_others_are_served(
    busy_server: PieceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, other = Clock(monkeypatch), PieceClient(busy_server.address, SNAPSHOT_TIMEOUT_S)

    def let_in() -> None:
        if clock.num_pauses == 3:
            other.close()
            while busy_server._connections:  # its thread is about to see that
                pass

    clock.on_pause = let_in
    state = torch.zeros_like(STATE)
    loader({member(3): busy_server.address}, state).load(ATTEMPT, (), [member(0), member(3)])
    assert torch.equal(state, STATE)
    assert clock.num_pauses == 3


def test_a_server_that_is_too_busy_says_so(busy_server: PieceServer) -> None:
    with (
        closing(PieceClient(busy_server.address, SNAPSHOT_TIMEOUT_S)),
        pytest.raises(TurnedAway, match="has no free connection"),
    ):
        PieceClient(busy_server.address, SNAPSHOT_TIMEOUT_S)


def test_where_no_server_is_left_to_answer_it_fails(server: PieceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    server.close()
    with pytest.raises(JoinFailed, match="no connection"):
        loader({member(3): server.address}, torch.zeros_like(STATE)).load(ATTEMPT, (), [member(3)])
    assert clock.num_pauses == 2


def test_members_are_asked_first(kept: Kept, server: PieceServer) -> None:
    """The node of a group that is late may be gone: no reader waits for its connection while another has the copy."""
    unasked = Kept()
    late = PieceServer("127.0.0.1", unasked, SNAPSHOT_TIMEOUT_S)
    late.start()
    state = torch.zeros_like(STATE)
    with closing(late):
        loader({member(1): late.address, member(5): server.address}, state).load(ATTEMPT, (), [member(0), member(5)])
    assert torch.equal(state, STATE)
    assert kept.num_reads > 0
    assert unasked.num_reads == 0


def test_in_an_undo_others_on_the_node_of_a_lost_holder_are_asked(kept: Kept, server: PieceServer) -> None:
    """They vote with what the node has, so the undo counts on it; who copied it there may be the group at fault."""
    state = torch.zeros_like(STATE)
    servers, holders = {member(3): server.address, member(5): server.address}, [member(3)]
    loading = loader(servers, state, lacking=holders)
    loading.load(ATTEMPT, (), [member(3), member(5)], holders)
    assert torch.equal(state, STATE)
    assert kept.num_reads > 0


def test_a_server_that_does_not_greet_costs_one_short_wait_and_the_next_is_asked(
    kept: Kept, server: PieceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall, or a network card that is half dead: connected by the kernel, or not even that."""
    clock, began_s = Clock(monkeypatch), time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(host="127.0.0.1", port=silent.getsockname()[1], token="00")
        connect_in_time(monkeypatch, but=address)
        present = [member(1), member(5)]
        loading = loader({member(1): address, member(5): server.address}, torch.zeros_like(STATE))
        for _ in range(3):
            loading.load(ATTEMPT, (), present)
        assert time.monotonic() - began_s < SNAPSHOT_TIMEOUT_S
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert kept.num_reads > 0
    assert clock.num_pauses == 0


def test_where_no_server_listens_the_next_is_asked_at_once(
    server: PieceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, closed = Clock(monkeypatch), PieceServer("127.0.0.1", Kept(), SNAPSHOT_TIMEOUT_S)
    closed.start()
    closed.close()
    state = torch.zeros_like(STATE)
    loader({member(1): closed.address, member(5): server.address}, state).load(ATTEMPT, (), [member(1), member(5)])
    assert torch.equal(state, STATE)
    assert clock.num_pauses == 0


def test_the_only_server_is_asked_again_until_the_timeout_if_it_never_greets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_loader, "_CONNECT_TIMEOUT_S", 0.05)
    clock = Clock(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(host="127.0.0.1", port=silent.getsockname()[1], token="00")
        with pytest.raises(JoinFailed, match=r"32 bytes have not come within 0\.05 s"):
            loader({member(1): address}, torch.zeros_like(STATE)).load(ATTEMPT, (), [member(1)])
    assert clock.num_pauses == 2


def test_a_late_server_is_asked_where_no_other_has_the_copy(kept: Kept, server: PieceServer) -> None:
    state = torch.zeros_like(STATE)
    loader({member(1): server.address}, state).load(ATTEMPT, (), [member(0), member(5)])
    assert torch.equal(state, STATE)


def test_a_holder_that_is_switched_off_in_the_transfer_is_left_when_the_log_says_so(
    kept: Kept, server: PieceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stands, and the time for a piece is that of a slow network."""
    clock, began_s = Clock(monkeypatch), time.monotonic()
    asked: list[Member] = []

    def is_lost(holder: Member) -> bool:
        asked.append(holder)
        return holder == member(1)

    state = torch.zeros_like(STATE)
    with closing(SilentServer("answer")) as silent:
        servers = {member(1): silent.address, member(5): server.address}
        loader(servers, state, is_lost).load(ATTEMPT, (), [member(1), member(5)])
    assert torch.equal(state, STATE)
    assert asked[0] == member(1)
    assert kept.num_reads > 0
    assert clock.num_pauses == 0
    assert time.monotonic() - began_s < SNAPSHOT_TIMEOUT_S / 2


class SlowOnce(Kept):
    """Gives nothing to the first who asks."""

    def __init__(self) -> None:
        super().__init__()
        self._first = threading.Lock()
        self.is_over = threading.Event()

    def read(self, name: str, step: int, piece: Piece) -> bytes:
        if self._first.acquire(blocking=False):
            self.is_over.wait(SNAPSHOT_TIMEOUT_S)
        return super().read(name, step, piece)


def test_the_node_of_a_lost_group_is_waited_for_where_no_other_has_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node survives its ranks, and so does what it keeps."""
    clock, kept = Clock(monkeypatch), SlowOnce()
    clock.on_pause = kept.is_over.set  # it has been left by then, be it for a slow greeting
    server = PieceServer("127.0.0.1", kept, SNAPSHOT_TIMEOUT_S)
    server.start()
    state = torch.zeros_like(STATE)
    with closing(server):
        loader({member(1): server.address}, state, lambda _: True).load(ATTEMPT, (), [member(1)])
    assert torch.equal(state, STATE)
    assert clock.num_pauses == 1
