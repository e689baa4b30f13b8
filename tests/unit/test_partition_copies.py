"""Copies of partitions: what one rank fetches next and how long it takes, without sockets, on a simulated clock."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.config.schema import OptimizerConfig, RunConfig
from spare_megatron.core.log.actions import StartRepairs
from spare_megatron.core.saves.partition_copies import PartitionCopies
from spare_megatron.formats.frames import Address, ConnectionBroken, NotOffered, WrongStep
from spare_megatron.formats.pieces import Piece, pieces_of
from spare_megatron.mcore.gradients.host_copies import TensorBytes
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import PartitionSetup, Repair, first_ownership
from spare_megatron.state.stacked import partition_copier as repair_module
from spare_megatron.state.stacked.partition_copier import PartitionRepairs
from spare_megatron.state.transfer.piece_server import PieceServer
from spare_megatron.state.transfer.state_transfer import StateSource
from tests.rank_context import rank_context
from tests.unit.silent_server import POINTS, Point, SilentServer

MIB = 1 << 20
LONG_S = 40.0
ME, FIRST, SECOND = Member(GroupId(0)), Member(GroupId(1)), Member(GroupId(2))
NO_HOSTS: tuple[tuple[Member, ...], ...] = ((FIRST, SECOND), (FIRST,), (ME, SECOND))
"""Three partitions, the last of which is mine."""


def repair(number: int, donor: Member = FIRST, receiver: Member = ME) -> Repair:
    return Repair(PartitionId(number), donor, receiver)


# ------------------------------------------------------------------------------------------------------ what comes next


def fetch_all(copying: PartitionCopies) -> Iterator[tuple[int, int]]:
    while (job := copying.next()) is not None:
        copying.install(*job, now_s=8.0)
        yield job[0].partition, job[1]


def test_the_most_urgent_copy_comes_first_piece_by_piece() -> None:
    copying = PartitionCopies(ME, lambda number: int(number) + 2)
    kept = copying.assign([repair(1), repair(0, SECOND), repair(2, FIRST, SECOND)], NO_HOSTS, 5.0)
    assert kept == {2}, "hosted here"
    assert copying.donors == {FIRST, SECOND}
    assert copying.whole() == {0: False, 1: False}
    assert list(fetch_all(copying)) == [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1)]
    assert copying.whole() == {0: True, 1: True}
    assert copying.donors == frozenset()
    assert copying.made(PartitionId(1)) == (repair(1), 3.0)


def test_a_copy_that_is_still_requested_continues_and_one_from_another_donor_starts_over() -> None:
    copying = PartitionCopies(ME, lambda number: 3)
    copying.assign([repair(0), repair(1)], NO_HOSTS, 0.0)
    copying.install(repair(0), 0, 1.0)
    copying.install(repair(1), 0, 1.0)
    kept = copying.assign([repair(1), repair(0, SECOND)], NO_HOSTS, 7.0)
    assert kept == {1, 2}, "what has come of partition 0 is released"
    assert not copying.is_wanted(repair(0)), "a piece of the old donor that comes now"
    assert list(fetch_all(copying)) == [(1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]
    assert [copying.made(PartitionId(number))[1] for number in (0, 1)] == [1.0, 8.0]


def test_a_copy_no_longer_requested_is_released_and_one_that_became_a_host_is_kept() -> None:
    copying = PartitionCopies(ME, lambda number: 1)
    copying.assign([repair(0), repair(1)], NO_HOSTS, 0.0)
    assert list(fetch_all(copying)) == [(0, 0), (1, 0)]
    hosts = ((FIRST, SECOND), (ME, FIRST), (ME, SECOND))
    assert copying.assign([], hosts, 1.0) == {1, 2}
    assert copying.whole() == {}


def test_an_empty_partition_is_complete_at_once() -> None:
    copying = PartitionCopies(ME, lambda number: 0)
    copying.assign([repair(0)], NO_HOSTS, 0.0)
    assert copying.whole() == {0: True}
    assert copying.next() is None
    assert copying.made(PartitionId(0))[1] == 0.0


def test_the_copies_of_all_groups_bring_back_full_redundancy() -> None:
    """Whatever the controller asks for, and only that, makes the partitions whole again."""
    members = [Member(GroupId(group)) for group in range(7)]
    partitioning = PartitionSetup(num_groups=7, redundancy=3)
    ownership = first_ownership(partitioning, members).for_members(members[2:])
    assert ownership.repairs
    made = []
    for member in members[2:]:
        copying = PartitionCopies(member, lambda number: 2)
        copying.assign(ownership.repairs, ownership.hosts, 0.0)
        list(fetch_all(copying))
        made += [(number, member) for number, is_whole in copying.whole().items() if is_whole]
    assert sorted(made) == sorted((item.partition, item.receiver) for item in ownership.repairs)


# ---------------------------------------------------------------------------------------------------------- in time


class Donors:
    """The other groups, and this one's optimizer, on one clock: all make an update every `step_s` seconds."""

    def __init__(self, step_s: float, piece_s: float, num_bytes: int) -> None:
        self.now_s = 100.0
        self.step_s, self.piece_s = step_s, piece_s
        self.num_bytes = num_bytes
        self.installed: dict[int, set[int]] = {}
        self.has_installed = threading.Event()
        self.dropped: list[int] = []
        self.fetched_bytes: dict[Member, int] = {}
        self.lost: set[Member] = set()
        self.late_s = step_s / 10  # by which a donor's update is later than ours

    @property
    def num_updates(self) -> int:
        return int(self.now_s / self.step_s)

    @property
    def hosted(self) -> frozenset[int]:
        return frozenset({2})

    def drop(self, number: PartitionId) -> None:
        self.dropped.append(number)
        self.installed.pop(number, None)


class FakeContent:
    """One partition."""

    def __init__(self, donors: Donors, number: int) -> None:
        self._donors, self._number = donors, number
        self._pieces = list(pieces_of(donors.num_bytes))
        self.name = f"partition-{number}"
        self.num_pieces = len(self._pieces)

    def piece(self, index: int) -> Piece:
        return self._pieces[index]

    def install(self, index: int, step: int, data: bytes) -> bool:
        assert len(data) == self.piece(index).size
        if step != self._donors.num_updates:
            return False
        self._donors.installed.setdefault(self._number, set()).add(index)
        self._donors.has_installed.set()
        return True


class FakeClient:
    """Takes time for each piece, and refuses what is of another step than the donor's."""

    donors: Donors

    def __init__(self, address: Address, timeout_s: float, *, is_over: Callable[[], bool]) -> None:
        self.donor = Member(GroupId(address.port))
        if self.donor in self.donors.lost:
            raise ConnectionBroken("no server is there")

    def fetch(self, name: str, step: int, piece: Piece) -> memoryview:
        donors = self.donors
        if self.donor in donors.lost:
            raise ConnectionBroken("gone")
        present = int((donors.now_s - donors.late_s) / donors.step_s)
        if present != step:
            raise WrongStep(present)
        donors.now_s += donors.piece_s
        donors.fetched_bytes[self.donor] = donors.fetched_bytes.get(self.donor, 0) + piece.size
        return memoryview(bytearray(piece.size))

    def close(self) -> None:
        pass


def repairs_of(donors: Donors, mib_per_s: float, servers: dict[Member, Address]) -> PartitionRepairs:
    config = RunConfig(optimizer=OptimizerConfig(repair_mib_per_s=mib_per_s))
    contents: Any = [FakeContent(donors, number) for number in range(3)]
    optimizer: Any = donors
    return PartitionRepairs(
        rank_context(ME, config=config, servers=servers), optimizer, contents, awaits_update=True, timeout_s=LONG_S
    )


@pytest.fixture
def make_repairs(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(donors: Donors, mib_per_s: float) -> PartitionRepairs:
        monkeypatch.setattr(repair_module, "PieceClient", type("Client", (FakeClient,), {"donors": donors}))
        monkeypatch.setattr(repair_module, "time", SimpleNamespace(monotonic=lambda: donors.now_s))
        servers = {member: Address(host="here", port=member.group, token="") for member in (FIRST, SECOND)}
        return repairs_of(donors, mib_per_s, servers)

    return make


def run_until_idle(repairs: PartitionRepairs, donors: Donors, until_s: float = 1e9) -> None:
    while donors.now_s < until_s and (pause_s := repairs.work(donors.now_s)) is not None:
        donors.now_s += pause_s


def assign(repairs: PartitionRepairs, *wanted: Repair) -> None:
    repairs.assign(StartRepairs(repairs=wanted, hosts=NO_HOSTS))


@pytest.mark.parametrize(("mib_per_s", "step_s"), [(1.0, 10.0), (100.0, 0.2), (100.0, 0.05), (20.0, 1.0)])
def test_copies_take_their_bytes_over_the_bandwidth(make_repairs: Any, mib_per_s: float, step_s: float) -> None:
    """Though a tenth of the time the donor is at another step, and some pieces come too late to be installed."""
    donors = Donors(step_s, piece_s=0.4 / mib_per_s, num_bytes=40 * MIB + 5)
    repairs = make_repairs(donors, mib_per_s)
    assert repairs.work(donors.now_s) is None
    assign(repairs, repair(0), repair(1, SECOND))
    run_until_idle(repairs, donors)
    assert repairs.whole() == {0: True, 1: True}
    assert {number: len(pieces) for number, pieces in donors.installed.items()} == {0: 41, 1: 41}
    expected_s = 2 * donors.num_bytes / (mib_per_s * MIB)
    assert expected_s <= donors.now_s - 100.0 <= 1.2 * expected_s


def test_a_donor_lost_in_the_middle_makes_the_copy_start_over_with_another(make_repairs: Any) -> None:
    donors = Donors(1000.0, piece_s=0.0, num_bytes=10 * MIB)
    repairs = make_repairs(donors, 1.0)
    assign(repairs, repair(0))
    run_until_idle(repairs, donors, until_s=105.5)
    assert donors.fetched_bytes == {FIRST: 5 * MIB}
    donors.lost.add(FIRST)
    run_until_idle(repairs, donors, until_s=108.0)
    assert repairs.whole() == {0: False}
    assign(repairs, repair(0, SECOND))
    assert donors.dropped[-2:] == [0, 1]
    run_until_idle(repairs, donors)
    assert donors.fetched_bytes == {FIRST: 5 * MIB, SECOND: 10 * MIB}
    assert repairs.whole() == {0: True}
    assert donors.now_s == pytest.approx(117.5, abs=2.0)


@pytest.mark.parametrize("point", POINTS)
def test_a_donor_that_was_switched_off_is_left_as_soon_as_the_log_names_another(point: Point) -> None:
    """Only a fetch under way could be ended: a connection to a machine without power took its whole timeout."""
    donors, source = Donors(1000.0, piece_s=0.0, num_bytes=MIB), StateSource()
    source.offer(donors.num_updates, {"partition-0": TensorBytes([torch.zeros(MIB, dtype=torch.uint8)])})
    other = PieceServer("127.0.0.1", source, LONG_S)
    other.start()
    with closing(SilentServer(point)) as silent, closing(other):
        repairs = repairs_of(donors, 1000.0, {FIRST: silent.address, SECOND: other.address})
        repairs.run_in_background()
        assign(repairs, repair(0))
        silent.await_client(LONG_S)
        assign(repairs, repair(0, SECOND))
        assert donors.has_installed.wait(LONG_S / 2)
        assert donors.installed == {0: {0}}


def test_a_piece_that_is_no_longer_requested_is_not_installed(make_repairs: Any) -> None:
    """The log names another donor while the old one's piece is on its way."""
    donors = Donors(1000.0, piece_s=0.0, num_bytes=MIB)
    repairs = make_repairs(donors, 1.0)
    assign(repairs, repair(0))
    client = repair_module.PieceClient
    fetch = client.fetch

    def reassign_meanwhile(self: Any, name: str, step: int, piece: Piece) -> memoryview:
        data = fetch(self, name, step, piece)
        if self.donor == FIRST:
            assign(repairs, repair(0, SECOND))
        return data

    client.fetch = reassign_meanwhile
    run_until_idle(repairs, donors)
    assert donors.fetched_bytes == {FIRST: MIB, SECOND: MIB}
    assert repairs.whole() == {0: True}
    assert donors.installed == {0: {0}}


def test_a_donor_that_has_nothing_yet_is_asked_again(make_repairs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    donors = Donors(1000.0, piece_s=0.0, num_bytes=MIB)
    repairs = make_repairs(donors, 1.0)
    assign(repairs, repair(0))
    client = repair_module.PieceClient
    fetch, refusals = client.fetch, [NotOffered("not yet"), NotOffered("not yet")]

    def refuse_at_first(self: Any, name: str, step: int, piece: Piece) -> memoryview:
        if refusals:
            raise refusals.pop()
        return fetch(self, name, step, piece)

    client.fetch = refuse_at_first
    run_until_idle(repairs, donors)
    assert repairs.whole() == {0: True}
    assert capsys.readouterr().out.count("state partition 0, from group 1: not yet") == 2


def test_what_ends_the_thread_that_copies_ends_the_rank(make_repairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    donors = Donors(1000.0, piece_s=0.0, num_bytes=MIB)
    repairs = make_repairs(donors, 1e6)
    monkeypatch.setattr(repair_module, "time", SimpleNamespace(monotonic=count(100.0).__next__))
    assign(repairs, repair(0))

    def fail(self: Any, name: str, step: int, piece: Piece) -> memoryview:
        raise ValueError("unexpected")

    repair_module.PieceClient.fetch = fail  # type: ignore[method-assign]
    repairs._run()
    with pytest.raises(ValueError, match="unexpected"):
        repairs.whole()


def test_a_copy_that_a_fence_asks_for_begins_when_the_step_under_way_is_applied(make_repairs: Any) -> None:
    """Sums of that step may go to those alone who were to get them before."""
    donors = Donors(step_s=10.0, piece_s=0.1, num_bytes=3 * MIB)
    repairs = make_repairs(donors, 100.0)
    step = donors.num_updates
    repairs.assign(StartRepairs(repairs=(repair(0),), hosts=NO_HOSTS, first_step=step + 1))
    run_until_idle(repairs, donors, until_s=donors.step_s * (step + 1) - 0.1)
    assert donors.num_updates == step
    assert donors.fetched_bytes == {}
    run_until_idle(repairs, donors)
    assert repairs.whole() == {0: True}
    assert donors.num_updates == step + 1
