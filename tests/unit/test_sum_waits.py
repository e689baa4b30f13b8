"""Which ranks count as lost while sums wait: the one that hangs, and not those that it keeps waiting on their devices.

Every main thread stands still: that of the culprit in its program, the others in CUDA, behind a sum that never ends.
"""

import threading
from collections.abc import Sequence
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.comm import nccl
from spare_megatron.comm.sum_watch import WaitWatch
from spare_megatron.core.machines.failure_detector import OPERATIONS, Operation, Pulse
from spare_megatron.process.heartbeats import HeartbeatWriter, new_page, read_page
from spare_megatron.process.reports import RankKey
from spare_megatron.process.span_ring import PassTimes
from spare_megatron.stacking.layout import GroupId
from spare_megatron.supervisor.rank_watch import RankWatch
from tests.unit.nccl_stand_in import Backend, new_communicator, post

INTERVAL_S = 1.0
LOOK_S = 0.25
TIMEOUT_S = 20.0
COMPUTE = OPERATIONS.index(Operation.COMPUTE)


class Rank:
    """A rank with a GPU that posts two sums, its page and its watch. Then its main thread stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page = new_page(get_context("spawn"))
        self.page.operation, self.page.slowest_s[COMPUTE] = COMPUTE, 0.01
        self.writer = HeartbeatWriter(self.page, PassTimes(lambda: 0.0, lambda _began, _ended: 0.0))
        self.communicator = new_communicator(monkeypatch)
        self.backend = post(self.communicator, 0)
        self.watch = WaitWatch(self.communicator, self.writer.wait_for_groups, pause_s=LOOK_S, timeout_s=TIMEOUT_S)

    def complete(self, num_sums: int) -> None:
        for work in self.backend.works[:num_sums]:
            work.has_come = True


class Ranks:
    """Ranks under watch, on a clock of their own."""

    def __init__(self, ranks: dict[RankKey, Rank]) -> None:
        self._ranks = ranks
        self._watch = RankWatch(self, INTERVAL_S, 60.0, 600.0)  # type: ignore[arg-type]
        for group in {group for group, _ in ranks}:
            self._watch.start_watching(group)
        self._number = 0

    def of(self, group: GroupId) -> Sequence[RankKey]:
        return [key for key in self._ranks if key[0] == group]

    def pulse(self, key: RankKey) -> Pulse:
        return read_page(self._ranks[key].page, 0.0)

    def lost(self, until_s: float) -> dict[GroupId, float]:
        """Lost groups, and when they were found."""
        found: dict[GroupId, float] = {}
        while (now_s := self._number * LOOK_S) < until_s:
            for rank in self._ranks.values():
                rank.page.beats += 1
                rank.watch.poll(now_s)
            for group, _, cause in self._watch.find_lost(now_s, found):
                assert "no progress" in cause
                found[group] = now_s
            self._number += 1
        return found


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(nccl, "connect", lambda *_arguments, **_options: Backend())
    return monkeypatch


def ranks_of(monkeypatch: pytest.MonkeyPatch, num_groups: int, num_ranks: int = 1) -> dict[RankKey, Rank]:
    return {(GroupId(group), rank): Rank(monkeypatch) for group in range(num_groups) for rank in range(num_ranks)}


def test_of_three_groups_that_stand_still_the_one_whose_sums_complete_is_lost(stand_in: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(stand_in, 3)
    for (group, _), rank in ranks.items():
        rank.complete(2 if group == 2 else 1)
    watched = Ranks(ranks)
    found = watched.lost(until_s=TIMEOUT_S - 1.0)
    assert found.keys() == {2}
    assert found[GroupId(2)] <= 2 * INTERVAL_S


def test_peers_of_a_rank_that_waits_for_other_groups_are_not_lost(stand_in: pytest.MonkeyPatch) -> None:
    """As with tensor parallelism: the sums of the second ranks complete, and they wait for the first ones."""
    ranks = ranks_of(stand_in, 3, num_ranks=2)
    for (group, rank), of_rank in ranks.items():
        of_rank.complete(2 if group == 2 or rank == 1 else 1)
    assert Ranks(ranks).lost(until_s=TIMEOUT_S - 1.0).keys() == {2}


def test_a_device_that_hangs_before_its_sum_does_not_count_as_waiting(stand_in: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(stand_in, 2)
    for rank in ranks.values():
        rank.complete(1)
    hanging = ranks[GroupId(1), 0]
    looks, poll = threading.Event(), hanging.watch.poll

    def synchronize() -> None:
        looks.set()
        threading.Event().wait()

    hanging.communicator.first_waiting().preceding = SimpleNamespace(synchronize=synchronize)  # type: ignore[union-attr]
    threading.Thread(target=poll, args=(0.0,), daemon=True).start()
    assert looks.wait(30.0)
    stand_in.setattr(hanging.watch, "poll", lambda _now_s: None)
    assert Ranks(ranks).lost(until_s=TIMEOUT_S - 1.0).keys() == {1}


def test_a_sum_that_waits_too_long_is_ended_with_the_reason(stand_in: pytest.MonkeyPatch) -> None:
    rank = Rank(stand_in)
    rank.complete(1)
    for number in range(round(TIMEOUT_S / LOOK_S) + 1):
        rank.watch.poll(number * LOOK_S)
    assert rank.backend.is_aborted.wait(30.0)
    num_waits = rank.page.waits
    assert rank.communicator.poll() == 0
    assert rank.communicator.evidence == "connection: aborted: no end within reduce.timeout_s=20"
    rank.watch.poll(TIMEOUT_S + 1.0)
    assert rank.page.waits == num_waits


def test_a_wait_for_other_groups_is_not_the_time_that_an_operation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("spare_megatron.process.heartbeats.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    page = new_page(get_context("spawn"))
    marks: PassTimes[Any] = PassTimes(lambda: 0.0, lambda _began, _ended: 0.0)
    writer = HeartbeatWriter(page, marks)
    writer.begin_step(0)
    writer.begin_step(1)
    with writer.during(Operation.COMPUTE):
        now_s[0] += 0.1
        writer.progress()
        now_s[0] += 9.0
        writer.wait_for_groups()
        writer.progress()
        now_s[0] += 0.01
    assert page.slowest_s[COMPUTE] == pytest.approx(0.1, rel=0.05)
