"""Who counts as lost, also while sums wait, and who does not."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.comm import nccl
from spare_megatron.comm.sum_watch import WaitWatch
from spare_megatron.core.machines.failure_detector import (
    OPERATIONS,
    SHORT_STOP_S,
    STOP_POLL_S,
    Absence,
    FailureDetector,
    Operation,
    ProcessState,
    Pulse,
    StopDetector,
    first_to_stop,
)
from spare_megatron.process.heartbeats import HeartbeatWriter, new_page, read_page
from spare_megatron.process.reports import RankKey
from spare_megatron.process.span_ring import PassTimes
from spare_megatron.stacking.layout import GroupId
from spare_megatron.supervisor.rank_watch import RankWatch
from tests.unit.nccl_stand_in import Backend, new_communicator, post

INTERVAL_S = 1.0
LOOK_S = 0.25
FIRST_LIMIT_S = 60.0
LOAD_LIMIT_S = 600.0


def found_at_s(
    operation: Operation = Operation.COMPUTE,
    *,
    beats: bool,
    progresses: bool,
    slowest_s: float = 0.01,
    starved: float = 0.0,
    peers_starved: float = 0.0,
    until_s: float = 20.0,
) -> tuple[float, str] | None:
    """When a rank is found lost that stands still, in part or in whole, from time 0 on, and why."""
    liveness = FailureDetector(INTERVAL_S, FIRST_LIMIT_S, LOAD_LIMIT_S)
    for number in range(round(until_s / LOOK_S)):
        now_s = number * LOOK_S
        pulse = Pulse(
            beats=number if beats else 7,
            progress=number if progresses else 7,
            operation=operation,
            step=3,
            progress_at_s=0.0,
            slowest_s=slowest_s,
            starved_s=starved * now_s,
        )
        if cause := liveness.poll(pulse, now_s, group_starved_s=(starved + peers_starved) * now_s):
            return now_s, cause
    return None


def test_a_rank_that_works_is_not_lost() -> None:
    assert found_at_s(beats=True, progresses=True) is None


@pytest.mark.parametrize("operation", sorted({*Operation} - {Operation.END, Operation.PROFILE}))
def test_a_stopped_rank_is_found_within_two_intervals(operation: Operation) -> None:
    found = found_at_s(operation, beats=False, progresses=False)
    assert found is not None
    assert found[0] <= 2 * INTERVAL_S - LOOK_S  # it may have stopped right after a look
    assert "no heartbeat" in found[1]


def test_reading_a_checkpoint_may_take_as_long_as_the_setting_says() -> None:
    found = found_at_s(Operation.LOAD, beats=True, progresses=False, until_s=LOAD_LIMIT_S + 1.0)
    assert found is not None
    assert found[0] == LOAD_LIMIT_S


def test_a_hanging_rank_is_found_within_two_intervals_unless_it_waits_for_others() -> None:
    found = found_at_s(beats=True, progresses=False)
    assert found is not None
    assert found[0] <= 2 * INTERVAL_S - LOOK_S
    assert "no progress" in found[1]
    for operation in (Operation.TRANSFER, Operation.SETTLE, Operation.VOTE, Operation.AWAIT_ENTRY):
        assert found_at_s(operation, beats=True, progresses=False) is None


def test_storage_may_pause_for_as_long_as_others_of_a_group_would_wait_however_fast_it_was() -> None:
    found = found_at_s(Operation.STORAGE, beats=True, progresses=False, until_s=FIRST_LIMIT_S + 1.0)
    assert found is not None
    assert found[0] == FIRST_LIMIT_S
    assert "no progress" in found[1]


def test_ten_times_as_slow_as_lately_is_slow_and_not_lost() -> None:
    found = found_at_s(beats=True, progresses=False, slowest_s=1.0)
    assert found is not None
    assert found[0] == 10.0


def test_what_has_never_been_done_may_take_its_time() -> None:
    assert found_at_s(beats=True, progresses=False, slowest_s=0.0, until_s=FIRST_LIMIT_S) is None
    found = found_at_s(beats=True, progresses=False, slowest_s=0.0, until_s=FIRST_LIMIT_S + 1)
    assert found is not None


def test_a_rank_without_a_processor_has_five_times_as_long() -> None:
    assert found_at_s(beats=False, progresses=False, starved=1.0) == (7.5, "no heartbeat for 1.5 s")
    found = found_at_s(beats=False, progresses=False, starved=0.5)
    assert found is not None
    assert found[0] == 3.0


def test_a_rank_that_leaves_has_the_time_of_a_first_operation_to_end() -> None:
    assert found_at_s(Operation.END, beats=False, progresses=False, until_s=FIRST_LIMIT_S) is None
    found = found_at_s(Operation.END, beats=False, progresses=False, until_s=FIRST_LIMIT_S + 1)
    assert found == (FIRST_LIMIT_S, "not ended for 60.0 s")


def test_a_rank_that_writes_a_profile_may_be_silent_for_as_long_as_others_of_its_group_would_wait() -> None:
    """torch keeps the interpreter's lock as long as it converts and writes what it has recorded."""
    assert found_at_s(Operation.PROFILE, beats=False, progresses=False, until_s=FIRST_LIMIT_S) is None
    found = found_at_s(Operation.PROFILE, beats=False, progresses=False, until_s=FIRST_LIMIT_S + 1)
    assert found == (FIRST_LIMIT_S, "no heartbeat for 60.0 s")


def test_threads_that_wake_up_to_find_nothing_to_do_hide_no_rank_that_hangs() -> None:
    """Those of gloo do so every few milliseconds: on a busy machine ten of them lacked 7 s of processor each second,
    and a rank that hung in the gathering of parameters was never found.
    """
    found = found_at_s(Operation.REDUCE, beats=True, progresses=False, starved=3.5, peers_starved=3.5)
    assert found == (7.5, "no progress for 1.5 s")
    assert found_at_s(Operation.REDUCE, beats=False, progresses=False, starved=3.5) == (7.5, "no heartbeat for 1.5 s")


def test_a_wait_that_shows_when_it_is_over_counts_from_its_beginning() -> None:
    liveness = FailureDetector(INTERVAL_S, FIRST_LIMIT_S, LOAD_LIMIT_S)
    pulse = Pulse(beats=1, progress=1, operation=Operation.COMPUTE, step=0, progress_at_s=0.0, slowest_s=0.01)
    for number in range(6):
        assert liveness.poll(pulse, number * LOOK_S, group_starved_s=0.0) == ""
    late = replace(pulse, starved_s=1.0)
    assert [liveness.poll(late, now_s, group_starved_s=1.0) for now_s in (1.5, 1.75, 2.0, 2.25)] == [""] * 4
    assert liveness.poll(late, 2.5, group_starved_s=1.0) == "no heartbeat for 1.5 s"


def test_a_rank_that_waits_for_one_without_a_processor_has_as_long_while_it_beats() -> None:
    """As in an all-reduce of its group, which may stand in the middle of an update."""
    found = found_at_s(Operation.UPDATE, beats=True, progresses=False, peers_starved=1.0)
    assert found == (7.5, "no progress for 1.5 s")
    found = found_at_s(Operation.UPDATE, beats=True, progresses=False, peers_starved=0.5)
    assert found == (3.0, "no progress for 1.5 s")
    found = found_at_s(Operation.UPDATE, beats=False, progresses=False, peers_starved=1.0)
    assert found == (1.5, "no heartbeat for 1.5 s")


def test_a_polling_rank_is_suspected_sooner_than_one_that_runs_something_for_the_first_time() -> None:
    found = found_at_s(Operation.JOIN, beats=True, progresses=False, slowest_s=0.0, until_s=FIRST_LIMIT_S)
    assert found == (10.0, "no progress for 10.0 s")


def test_a_watcher_that_was_away_begins_anew() -> None:
    liveness, absence = FailureDetector(INTERVAL_S, FIRST_LIMIT_S, LOAD_LIMIT_S), Absence(INTERVAL_S)
    pulse = Pulse(beats=1, progress=1, operation=Operation.COMPUTE, step=0, progress_at_s=0.0, slowest_s=0.01)
    for now_s in (0.0, 0.25, 30.0, 30.25, 31.25):
        assert liveness.poll(pulse, now_s, group_starved_s=0.0) == ""
        assert absence.poll(1, now_s) == ""
    assert liveness.poll(replace(pulse, progress=2), 31.5, group_starved_s=0.0) == "no heartbeat for 1.5 s"
    assert absence.poll(1, 31.5) == "no heartbeat for 1.5 s"
    assert absence.poll(2, 31.75) == ""


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    pulse = Pulse(beats=1, progress=1, operation=Operation.UPDATE, step=0, progress_at_s=5.0, slowest_s=0.01)
    waiting = replace(pulse, operation=Operation.TRANSFER, progress_at_s=1.0)
    culprit = replace(pulse, operation=Operation.COMPUTE, progress_at_s=6.0)
    assert first_to_stop({0: pulse, 1: waiting, 2: culprit}) == 2
    assert first_to_stop({0: waiting, 1: replace(waiting, progress_at_s=2.0)}) == 0


RUNNING, STOPPED = (ProcessState(is_stopped=is_stopped, num_switches=70) for is_stopped in (False, True))


def stopped_at_s(states: Sequence[tuple[float, ProcessState]]) -> tuple[float, str] | None:
    """When a process is found stopped that was in these states when it was polled, and why."""
    detector = StopDetector()
    found = ((at_s, cause) for at_s, state in states if (cause := detector.poll(state, at_s)))
    return next(found, None)


def test_a_process_is_lost_once_it_has_been_seen_stopped_for_half_a_second() -> None:
    polls_s = [number * STOP_POLL_S for number in range(20)]
    assert stopped_at_s([(at_s, RUNNING) for at_s in polls_s]) is None
    found = stopped_at_s([(at_s, STOPPED if at_s > 0.75 else RUNNING) for at_s in polls_s])
    assert found == (pytest.approx(1.3), "stopped for 0.5 s")


@pytest.mark.parametrize("first_poll_s", [0.0, 0.001, 0.05, 0.099])
def test_a_short_stop_survives_whenever_it_begins_and_even_if_it_ends_a_little_late(first_poll_s: float) -> None:
    polls_s = [first_poll_s + number * STOP_POLL_S for number in range(20)]
    stop = range(round(1000 * (SHORT_STOP_S + 0.09)))
    states = [(at_s, STOPPED if round(1000 * at_s) in stop else RUNNING) for at_s in polls_s]
    assert stopped_at_s(states) is None


def test_stops_with_a_moment_between_them_that_no_poll_saw_are_not_one() -> None:
    states = [(number * STOP_POLL_S, replace(STOPPED, num_switches=70 + number // 5)) for number in range(40)]
    assert stopped_at_s(states) is None


def test_a_watcher_that_was_suspended_with_the_process_counts_only_what_it_has_seen() -> None:
    assert stopped_at_s([(0.0, STOPPED), (0.1, STOPPED), (30.0, STOPPED), (30.1, RUNNING)]) is None
    found = stopped_at_s([(0.0, STOPPED), (0.1, STOPPED), (30.0, STOPPED), (30.1, STOPPED), (30.25, STOPPED)])
    assert found is not None
    assert found[0] == 30.25


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
