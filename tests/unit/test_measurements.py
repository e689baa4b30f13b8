"""What a supervisor measures of its ranks, and what the driver makes of it."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.core.slow_machines.culprit import Culprit, MachineSigns, RankTimes
from spare_megatron.journal.files import JournalWriter, read_journal
from spare_megatron.journal.records import CulpritRecord
from spare_megatron.machine.machine_signs import read_machine, starved_s, throttled_s
from spare_megatron.process.heartbeats import HeartbeatPage, HeartbeatWriter, new_page
from spare_megatron.process.reports import NodeMeasured, RankKey
from spare_megatron.process.span_ring import PassTimes
from spare_megatron.slow_machines.slow_machine_drains import Culprits
from spare_megatron.stacking.layout import GroupId, MachineId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.supervisor.measurements import Measurements

KEY = (GroupId(3), 1)


class Clock:
    """The time of passes, which a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class OneRank:
    """A rank that is this process, or another one once it was started again."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pid = os.getpid()
        self.is_there = True
        self.device: int | None = None
        self.stages: dict[GroupId, int | None] = {KEY[0]: None}
        self.start(self.pid)

    def start(self, pid: int) -> None:
        self.pid, self.is_there, self.shown = pid, True, new_page(multiprocessing.get_context("fork"))
        self.writer = HeartbeatWriter(self.shown, PassTimes(self.clock, lambda began_s, ended_s: ended_s - began_s))

    @property
    def pids(self) -> dict[RankKey, int]:
        return {KEY: self.pid} if self.is_there else {}

    def page(self, key: RankKey) -> HeartbeatPage | None:
        return self.shown if key == KEY else None

    def device_index(self, key: RankKey) -> int | None:
        return self.device

    def step(self, number: int) -> None:
        """A step of two microbatches: 2 s forward with 0.5 s of reading besides, and 4 s backward, each."""
        self.writer.begin_step(number)
        for index in range(2):
            microbatch = Microbatch(shard=0, index=index)  # type: ignore[arg-type]
            with self.writer.spans.forward(microbatch):
                self.clock.now_s += 1.0
                with self.writer.during(Operation.STORAGE):
                    self.clock.now_s += 0.5
                self.clock.now_s += 1.0
            self.writer.spans.backward(microbatch)
            self.clock.now_s += 4.0
        with self.writer.during(Operation.REDUCE):
            self.clock.now_s += 100.0
        self.writer.end_step()


def test_a_window_has_the_work_of_its_steps_without_reading_and_waits() -> None:
    rank, answers = OneRank(), [(0, 0.0)]
    measurements = Measurements(rank, MachineId(7), lambda: answers[0], lambda: ())  # type: ignore[arg-type]
    assert measurements.poll(0.0) is None
    for step in range(4):
        rank.step(step)
    assert measurements.poll(1.9) is None, "too short"
    answers[0] = (10, 0.5)
    found = measurements.poll(2.0)
    assert found is not None
    (times,) = found.ranks
    assert (times.machine, times.group, times.rank) == (7, *KEY)
    assert (times.num_steps, times.num_passes, times.pass_s) == (4, 8, 48.0)
    assert 0.0 < times.reduce_s < 1.0, "by the machine's own clock"
    assert 0.0 < times.data_s < 1.0
    assert found.step_s == 0.5
    assert found.signs.answer_s == 0.05
    assert 0.0 <= found.signs.busy <= 1.0
    assert measurements.poll(60.0) is None, "no step since"


@pytest.mark.parametrize("num_before", [0, 100])
def test_a_rank_that_starts_counts_from_its_next_window_on(num_before: int) -> None:
    """Each process counts its steps anew. Some machine has no rank at first; later ones had to do as many again."""
    rank = OneRank()
    rank.is_there = num_before > 0
    for step in range(num_before):
        rank.step(step)
    measurements = Measurements(rank, MachineId(0), lambda: (0, 0.0), lambda: ())  # type: ignore[arg-type]
    measurements.poll(0.0)
    rank.start(os.getppid())
    for step in range(4):
        rank.step(step)
    assert measurements.poll(2.0) is None
    for step in range(4, 8):
        rank.step(step)
    found = measurements.poll(4.0)
    assert found is not None
    assert found.ranks[0].num_steps == 4


def test_ranks_of_a_group_with_fewer_stages_are_not_compared_with_those_of_others() -> None:
    rank = OneRank()
    rank.stages[KEY[0]] = 3
    measurements = Measurements(rank, MachineId(0), lambda: (0, 0.0), lambda: ())  # type: ignore[arg-type]
    measurements.poll(0.0)
    for step in range(4):
        rank.step(step)
    assert measurements.poll(2.0) is None


def test_a_reduced_clock_is_that_of_the_ranks_device() -> None:
    rank = OneRank()
    rank.device = 1
    clocks = ["power brake", "thermal slowdown"]
    measurements = Measurements(rank, MachineId(0), lambda: (0, 0.0), lambda: clocks)  # type: ignore[arg-type]
    measurements.poll(0.0)
    for step in range(4):
        rank.step(step)
    found = measurements.poll(2.0)
    assert found is not None
    assert found.ranks[0].device == "thermal slowdown"


def test_the_kernel_reports_this_machine_and_process() -> None:
    before = read_machine()
    ends_at_s = time.process_time() + 0.05
    while time.process_time() < ends_at_s:
        pass
    after = read_machine()
    assert after.busy_ticks > before.busy_ticks
    assert after.ticks >= after.busy_ticks
    assert after.retransmitted >= before.retransmitted
    assert starved_s(os.getpid()) >= 0.0
    assert throttled_s(os.getpid()) >= 0.0
    assert starved_s(2**22 + 1) == 0.0, "no such process"


def report(machine: int, pass_s: float) -> NodeMeasured:
    times = RankTimes(
        machine=MachineId(machine), group=GroupId(machine), rank=0, num_steps=4, num_passes=4, pass_s=pass_s,
        data_s=0.0, transfer_s=0.0, reduce_s=4.0 - pass_s, wait_s=0.0, starved_s=0.0,
    )  # fmt: skip
    signs = MachineSigns(answer_s=0.001, retransmitted_per_s=0.0, swapped_per_s=0.0, busy=0.5)
    return NodeMeasured(machine=MachineId(machine), step_s=1.0, ranks=(times,), signs=signs)


def test_windows_of_all_machines_are_judged_together_and_changes_journaled(tmp_path: Path) -> None:
    journal, events, named = JournalWriter(tmp_path, "driver"), list[CulpritRecord](), list[Culprit | None]()
    culprits = Culprits(journal, events.append, shares_processors=False, on_named=lambda one, step_s: named.append(one))
    for window in range(12):
        for machine in (0, 1, 2):
            culprits.add(report(machine, 2.0 if machine == 1 and window < 5 else 1.0))
    journal.close()
    found = read_journal(tmp_path).of(CulpritRecord)
    assert events == found
    assert [(one.machine, one.cause, one.of_group, one.rank, one.is_over) for one in found] == [
        (1, "compute", 1, 0, False),
        (1, "compute", 1, 0, True),
    ]
    assert [one is not None for one in named] == 2 * [False] + 6 * [True] + 3 * [False]
    assert found[0].factor == pytest.approx(2.0)
    assert found[0].excess_s == pytest.approx(0.25)
