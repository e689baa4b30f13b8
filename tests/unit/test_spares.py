"""Which groups of a node come back and when, and the processes that wait to take the place of lost ones."""

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from multiprocessing import Pipe, active_children, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from spare_megatron.config.schema import LayoutConfig, RunConfig, SpareConfig
from spare_megatron.core.machines.group_starts import NextStart, RestartBudget
from spare_megatron.faults.points import Fault, FaultPoint
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import FaultRecord
from spare_megatron.machine import timers
from spare_megatron.machine.timers import Timers
from spare_megatron.process import processes
from spare_megatron.process.processes import end_child, rank_context
from spare_megatron.process.specs import NodeSpec, RankSpec
from spare_megatron.stacking.layout import GroupId
from spare_megatron.state.snapshot import snapshot_server
from spare_megatron.state.snapshot.snapshot_server import NodeSnapshotServer
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import restarts
from spare_megatron.supervisor.rank_processes import RankProcesses, Spares
from spare_megatron.supervisor.restarts import GroupRestarts

TIMEOUT_S = 60.0
INTERVAL_S = 1.0
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
ONE = GroupId(1)


# ----------------------------------------------------------------------------------------------------------- who, when


class RestartedNode:
    """A `GroupRestarts` of two groups on a clock of its own, and what it had started."""

    def __init__(self, most_restarts: int, whole: tuple[int, ...] = (0, 1), *, restarts_all: bool = True) -> None:
        self.now_s = 0.0
        self.timers = Timers()
        self.started: list[tuple[int, float, bool]] = []
        self.waiting: list[tuple[int, float]] = []
        self.restarts = GroupRestarts(
            budget=RestartBudget(most_restarts, INTERVAL_S),
            restarts_all=restarts_all,
            whole_groups=frozenset(map(GroupId, whole)),
            timers=self.timers,
            wait_for_parts=lambda group: self.waiting.append((group, self.now_s)),
            start_ranks=lambda group, takes_spares: self.started.append((group, self.now_s, takes_spares)),
        )

    def wait(self) -> None:
        """Until nothing is left to be done."""
        while (pause_s := self.timers.pause_s()) is not None:
            self.now_s += pause_s
            self.timers.run_due()


@pytest.fixture
def make_node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RestartedNode]:
    made: list[RestartedNode] = []

    def make(most_restarts: int, whole: tuple[int, ...] = (0, 1), **settings: bool) -> RestartedNode:
        made.append(RestartedNode(most_restarts, whole, **settings))
        made[0].restarts.on_ready(GroupId(0))
        return made[0]

    for module in (timers, restarts):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made[0].now_s if made else 0.0))
    return make


def test_a_group_that_was_up_for_long_is_started_at_once_and_takes_spares(
    make_node: Callable[..., RestartedNode],
) -> None:
    node = make_node(3)
    for loss_s in (10.0, 20.0, 30.0):
        node.restarts.on_ready(ONE)
        node.now_s = loss_s
        assert node.restarts.on_fenced(ONE)
        node.wait()
    assert node.started == [(1, 10.0, True), (1, 20.0, True), (1, 30.0, True)]


def test_a_flapping_group_waits_longer_and_longer_leaves_spares_to_others_and_is_given_up(
    make_node: Callable[..., RestartedNode],
) -> None:
    node = make_node(4)
    for _ in range(4):
        assert node.restarts.on_fenced(ONE)
        node.wait()
        node.restarts.on_ready(ONE)
    assert node.started == [(1, 0.0, True), (1, 1.0, False), (1, 3.0, False), (1, 7.0, False)]
    assert not node.restarts.on_fenced(ONE)


def test_a_group_that_comes_back_and_stays_may_take_spares_again(make_node: Callable[..., RestartedNode]) -> None:
    node = make_node(9)
    for up_s in (0.0, 0.5, 100.0):
        node.restarts.on_ready(ONE)
        node.now_s += up_s
        node.restarts.on_fenced(ONE)
        node.wait()
    assert [takes_spares for *_, takes_spares in node.started] == [True, False, True]


def test_a_wipe_out_starts_groups_that_were_given_up(make_node: Callable[..., RestartedNode]) -> None:
    node = make_node(1)
    node.restarts.on_fenced(ONE)
    node.wait()
    assert not node.restarts.on_fenced(ONE), "once is what it gets"
    node.restarts.on_ended(GroupId(0))
    node.restarts.on_wipe_out()
    node.restarts.on_wipe_out()
    node.wait()
    assert node.started == [(1, 0.0, True), (0, 0.0, True), (1, 1.0, False)]


@pytest.mark.parametrize("restarts_all", [True, False])
def test_a_pause_starts_groups_that_were_given_up_where_a_wipe_out_would(
    make_node: Callable[..., RestartedNode], *, restarts_all: bool
) -> None:
    node = make_node(0, restarts_all=restarts_all)
    node.restarts.on_fenced(ONE)
    node.wait()
    assert node.started == []
    node.restarts.on_pause()
    node.restarts.on_pause()
    node.wait()
    node.restarts.on_fenced(ONE)  # lost again before it is admitted
    node.wait()
    assert [group for group, *_ in node.started] == ([1, 1] if restarts_all else [])
    node.restarts.on_resume()
    node.restarts.on_fenced(ONE)
    node.wait()
    assert len(node.started) == (2 if restarts_all else 0)
    node.restarts.on_pause()
    node.wait()
    node.restarts.on_admitted(ONE)  # of the end of the pause a node without other ranks learns so
    node.restarts.on_fenced(ONE)
    node.wait()
    assert len(node.started) == (3 if restarts_all else 0)


def test_a_group_of_several_nodes_waits_as_long_as_another_and_then_for_its_other_nodes(
    make_node: Callable[..., RestartedNode],
) -> None:
    node = make_node(2, whole=(0,))
    for _ in range(2):
        assert node.restarts.on_fenced(ONE)
        node.wait()
        assert node.restarts.awaits_other_nodes
        assert node.restarts.on_fenced(ONE), "one loss that is reported twice counts once"
        node.restarts.start(ONE)
        assert not node.restarts.awaits_other_nodes
    assert node.waiting == [(1, 0.0), (1, 1.0)]
    assert node.started == [(1, 0.0, True), (1, 1.0, False)]
    assert not node.restarts.on_fenced(ONE), "and is given up after as many restarts"
    node.restarts.on_wipe_out()
    node.wait()
    assert node.waiting[2:] == [(1, 3.0)]


def test_a_group_whose_other_nodes_come_when_the_run_is_over_is_not_started(
    make_node: Callable[..., RestartedNode],
) -> None:
    node = make_node(3, whole=(0,))
    node.restarts.on_fenced(ONE)
    node.wait()
    node.restarts.is_over = True
    node.restarts.start(ONE)
    assert node.started == []
    assert node.restarts.coming_back == set()


def test_no_rank_is_started_once_the_run_is_over(make_node: Callable[..., RestartedNode]) -> None:
    node = make_node(3)
    node.restarts.on_fenced(ONE)
    node.restarts.is_over = True
    node.wait()
    assert node.started == []
    assert node.restarts.not_admitted == {1}
    assert node.restarts.coming_back == set()


# ----------------------------------------------------------------------------------------------------------- processes


def _report_identity(spec: RankSpec, reports: Connection) -> None:
    reports.send((os.getpid(), spec.group, spec.incarnation, spec.rank, spec.page is not None))
    reports.recv()  # until it is killed


def node_of(folder: Path, num_spares: int) -> RankProcesses:
    """Two groups of two ranks."""
    config = RunConfig(layout=LayoutConfig(num_groups=2, pipeline_parallel=2), spare=SpareConfig(spares=num_spares))
    store = TcpStoreSpec(host="127.0.0.1", port=1)
    return RankProcesses(
        NodeSpec(config=config, run_dir=folder, node=0, store=store, faults=(), rank_main=_report_identity)
    )


def identities(ranks: RankProcesses, group: int) -> list[tuple[int, int, int, int, bool]]:
    """What the present processes of a group say of themselves, by rank."""
    pipes = {key: pipe for pipe, key in ranks.pipes.items()}
    found = []
    for key in ranks.of(GroupId(group)):
        assert pipes[key].poll(TIMEOUT_S)
        found.append(pipes[key].recv())
    return found


def test_a_fault_strikes_once_whichever_machine_has_the_place(tmp_path: Path) -> None:
    """A group that was re-formed in a pause met the fault of its step again, on its new machine."""
    faults = tuple(
        Fault(step=step, group=GroupId(0), rank=1, phase=FaultPoint.FORWARD, kind="kill_supervisor") for step in (2, 7)
    )
    with closing(JournalWriter(tmp_path, "group-0000-rank-1")) as journal:
        journal.write(FaultRecord(group=0, rank=1, step=2, phase="forward", kind="kill_supervisor"))
    (tmp_path / "journal" / "group-0000-rank-1-life-1.jsonl").write_text('{"record":"fault","gro')
    config = RunConfig(layout=LayoutConfig(num_groups=2, pipeline_parallel=2))
    store = TcpStoreSpec(host="127.0.0.1", port=1)
    for incarnation, left in ((0, {2, 7}), (1, {7})):
        spec = NodeSpec(
            config=config, run_dir=tmp_path, node=0, store=store, faults=faults, rank_main=_report_identity,
            incarnation=incarnation,
        )  # fmt: skip
        assert {fault.step for fault in RankProcesses(spec)._faults} == left


def lose(ranks: RankProcesses, group: int, *, takes_spares: bool = True) -> int:
    ranks.kill(GroupId(group))
    started, failure = ranks.start_again(GroupId(group), None, takes_spares=takes_spares)
    assert not failure
    return started.num_spares


def waiting(ranks: RankProcesses) -> list[int]:
    return [process.child.pid for process in ranks._spares._waiting[None]]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RankProcesses]:
    ranks = node_of(tmp_path, 1)
    ranks.start_all()
    yield ranks
    ranks.end_all()
    assert active_children() == []


def test_spares_become_the_ranks_of_a_lost_group_in_its_next_incarnation(node: RankProcesses) -> None:
    assert [who[1:] for group in (0, 1) for who in identities(node, group)] == [
        (group, 0, rank, True) for group in (0, 1) for rank in (0, 1)
    ]
    node.warm_spares()
    spares = waiting(node)
    assert len(spares) == 2, "as many as a group has ranks"
    assert lose(node, 1) == 2
    assert identities(node, 1) == [(spares[rank], 1, 1, rank, True) for rank in (0, 1)]
    assert [node.pids[GroupId(1), rank] for rank in (0, 1)] == spares
    assert waiting(node) == []
    assert lose(node, 0) == 0, "none are left"
    assert [who[1:] for who in identities(node, 0)] == [(0, 1, rank, True) for rank in (0, 1)]


def test_missing_spares_are_made_up_for(node: RankProcesses) -> None:
    node.warm_spares()
    first = waiting(node)
    node.warm_spares()
    assert waiting(node) == first
    lose(node, 0)
    node.warm_spares()
    assert len(waiting(node)) == 2
    assert not set(first) & set(waiting(node))


def test_a_group_that_must_not_take_spares_leaves_them(node: RankProcesses) -> None:
    node.warm_spares()
    spares = waiting(node)
    assert lose(node, 1, takes_spares=False) == 0
    assert waiting(node) == spares
    assert not set(spares) & {who[0] for who in identities(node, 1)}


def test_a_spare_that_has_died_is_passed_over(node: RankProcesses) -> None:
    node.warm_spares()
    dead, left = waiting(node)
    os.kill(dead, signal.SIGKILL)
    node._spares._waiting[None][0].child.process.join(TIMEOUT_S)
    assert lose(node, 1) == 1
    who = identities(node, 1)
    assert who[0][0] == left
    assert [rank for *_, rank, _ in who] == [0, 1]


def test_a_spare_that_dies_during_its_assignment_shows_by_its_end(node: RankProcesses) -> None:
    """Between the look at whether it is alive and the order to it."""
    node.warm_spares()
    process = node._spares._waiting[None].popleft()
    process.child.process.kill()
    process.child.process.join(TIMEOUT_S)
    end_child(node.child((ONE, 0)))
    node._start((ONE, 0), process)
    assert node.reap([process.child.process.sentinel]) == [(ONE, 0)]
    assert node.exits[ONE, 0] == -signal.SIGKILL


def test_ranks_stand_still_before_the_first_of_them_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was ended last had its group fenced, and the journal recorded a loss that was none."""
    ranks = node_of(tmp_path, 0)
    ranks.start_all()
    processes = [psutil.Process(pid) for pid in ranks.pids.values()]
    kill = BaseProcess.kill

    def kill_stopped(process: BaseProcess) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while any(one.is_running() and one.status() not in STOPPED for one in processes):
            assert time.monotonic() < end_s
        kill(process)

    monkeypatch.setattr(BaseProcess, "kill", kill_stopped)
    ranks.end_all()
    assert not any(process.is_running() for process in processes)


def test_the_end_of_a_node_leaves_no_spare(tmp_path: Path) -> None:
    ranks = node_of(tmp_path, 2)
    ranks.start_all()
    ranks.warm_spares()
    processes = [psutil.Process(pid) for pid in [*waiting(ranks), *ranks.pids.values()]]
    assert len(processes) == 8
    ranks.end_all()
    assert not any(process.is_running() for process in processes)


def _show_a_beat(spec: RankSpec, reports: Connection) -> None:
    assert spec.page is not None
    spec.page.beats = 7
    reports.send("done")
    reports.recv()  # until it is killed


def test_on_gpus_ranks_are_no_forks_and_share_their_page_all_the_same(tmp_path: Path) -> None:
    spares = Spares(rank_context("gpu", get_context("fork")), _show_a_beat, {"GPU-a": 1})
    spares.warm()
    process = spares.pop("GPU-a")
    assert process is not None
    try:
        process.become(
            RankSpec(
                config=RunConfig(),
                run_dir=tmp_path,
                group=ONE,
                incarnation=0,
                rank=0,
                store=TcpStoreSpec(host="127.0.0.1", port=1),
                faults=(),
            )
        )
        assert process.child.reports.poll(TIMEOUT_S)
        process.child.reports.recv()
        assert process.page.beats == 7
        assert "--multiprocessing-fork" in psutil.Process(process.child.pid).cmdline()
    finally:
        end_child(process.child)


def test_a_group_whose_processes_cannot_be_started_leaves_none_behind_and_starts_later(
    monkeypatch: pytest.MonkeyPatch, node: RankProcesses
) -> None:
    """At a limit on processes the restart of one group ended its node."""
    start_child, calls = processes.start_child, iter([None, BlockingIOError(errno.EAGAIN, "no process")] * 2)

    def start_or_refuse(*words: Any) -> Any:
        if error := next(calls, None):
            raise error
        return start_child(*words)

    def of_group() -> set[int]:
        return {pid for (group, _), pid in node.pids.items() if group == 0}

    others = {child.pid for child in active_children()} - of_group()
    monkeypatch.setattr(processes, "start_child", start_or_refuse)
    for incarnation in (1, 2):
        node.kill(GroupId(0))
        _, failure = node.start_again(GroupId(0), None, takes_spares=True)
        assert failure == "its processes cannot be started: [Errno 11] no process"
        assert node.member(GroupId(0)).incarnation == incarnation
        assert {child.pid for child in active_children()} == others
    assert lose(node, 0) == 0
    assert {child.pid for child in active_children()} == others | of_group()


def test_where_no_process_can_be_started_there_are_no_spares_and_no_snapshots_for_now(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """At a limit on processes a node did without nothing that it can do without: it ended, with all its ranks."""

    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    spares = Spares(get_context("fork"), _report_identity, {None: 2})
    server = NodeSnapshotServer(SimpleNamespace(node=0, run_dir=tmp_path), get_context("fork"))  # type: ignore[arg-type]
    monkeypatch.setattr(processes, "start_child", refuse)
    monkeypatch.setattr(snapshot_server, "start_child", refuse)
    spares.warm()
    for _ in range(3):
        server.ensure_running()
    assert spares.pop() is None
    output = capfd.readouterr()
    assert (output.out + output.err).count("started: [Errno 11] Resource temporarily unavailable") == 2
    monkeypatch.undo()
    spares.warm()
    first = spares.pop()
    assert first is not None
    end_child(first.child)
    spares.end_all()


def _keep_spares(pids: Connection) -> None:
    spares = Spares(get_context("fork"), _report_identity, {None: 3})
    spares.warm()
    pids.send([process.child.pid for process in (spares.pop(), spares.pop(), spares.pop()) if process])
    signal.pause()


def test_spares_do_not_outlive_a_supervisor_that_is_killed() -> None:
    ours, theirs = Pipe()
    supervisor = get_context("fork").Process(target=partial(_keep_spares, theirs))
    supervisor.start()
    assert ours.poll(TIMEOUT_S)
    spares = [psutil.Process(pid) for pid in ours.recv()]
    supervisor.kill()
    supervisor.join(TIMEOUT_S)
    _, alive = psutil.wait_procs(spares, timeout=TIMEOUT_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_group_that_is_lost_soon_waits_longer_and_a_restart_of_the_whole_run_counts_against_none() -> None:
    budget = RestartBudget(most_restarts=2, interval_s=1.0)
    assert budget.spend(ONE, 0.0, is_free=False) == NextStart(0.0, takes_spares=True)
    for delay_s in (1.0, 2.0, 4.0):
        assert budget.spend(ONE, 3.9, is_free=True) == NextStart(delay_s, takes_spares=False)
    assert budget.spend(GroupId(0), 3.9, is_free=False) == NextStart(0.0, takes_spares=True), "that is another's"
    assert budget.spend(ONE, 4.0, is_free=False) == NextStart(0.0, takes_spares=True), "it was up for long"
    assert budget.spend(ONE, 100.0, is_free=False) is None
    assert budget.spend(ONE, 100.0, is_free=True) is not None


def test_losses_of_a_large_run_leave_each_machine_its_restarts() -> None:
    """2,300 short lives over 600 groups of 128 machines, each ended by one of them; by group most would be given up."""
    generator, size = np.random.default_rng(0), 128
    budgets = [[RestartBudget(most_restarts=3, interval_s=1.0) for _ in range(size)] for _ in range(600)]
    losses = Counter[int]()
    for group in generator.integers(600, size=2300).tolist():
        losses[group] += 1
        own = int(generator.integers(size))
        for machine, budget in enumerate(budgets[group]):
            assert budget.spend(GroupId(group), 100.0, is_free=False, is_own=machine == own) is not None
    assert max(losses.values()) > 10
    alone = RestartBudget(most_restarts=3, interval_s=1.0)
    spent = [alone.spend(ONE, 100.0, is_free=False, is_own=is_own) for is_own in (True, False, True, True, True)]
    assert [start is None for start in spent] == [False, False, False, False, True]


def test_restarts_are_counted_anew_after_a_long_life() -> None:
    """A run of weeks loses each group several times; only one that is lost again and again is given up."""
    budget = RestartBudget(most_restarts=1, interval_s=1.0)
    assert all(budget.spend(ONE, 512.0, is_free=False) is not None for _ in range(4))
    assert budget.spend(ONE, 511.0, is_free=False) is None
