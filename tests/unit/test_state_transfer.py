"""Whose state a group that comes back takes over, and what it does about those who do not give theirs."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.config.schema import ReduceConfig, RunConfig
from spare_megatron.core.log.actions import AdmitGroups
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.frames import Address
from spare_megatron.formats.pieces import PIECE_BYTES
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.rank_context import RankProgress
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.state.transfer.state_transfer import JoinFailed, StateSource, StateTransfer
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
