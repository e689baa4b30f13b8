"""What watchers of processes make of reports, and of how processes end."""

import os
import signal
import time
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.core.log.entries import Commit, Fence, encode_entry
from spare_megatron.core.machines.places import Holding
from spare_megatron.driver import driver as driver_module
from spare_megatron.driver.driver import Driver, RunFailed
from spare_megatron.driver.preflight import _why_ended
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import LossRecord
from spare_megatron.machine.interrupts import deferred
from spare_megatron.process.reports import ExitCode, GroupLost, NodeEnded, RanksReady, next_report
from spare_megatron.process.specs import NodeSpec, RankSpec
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, Member, PlaceId
from spare_megatron.store.keys import entry as entry_key
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor.rank_processes import RankProcesses
from spare_megatron.supervisor.store_watch import FenceWanted, FenceWritten, HasLeft, NodeSilent, StoreLink
from tests.unit.memory_store import MemoryStore


def quiet_link() -> tuple[StoreLink, Any]:
    """The link of node 0 of 2, never started, and where its events come out."""
    inbox, outbox = Pipe(duplex=False)

    def connect() -> Any:
        raise AssertionError("the store is not asked")

    return StoreLink(
        node=0, layout=Layout(num_groups=2, num_nodes=2), interval_s=1.0, connect=connect, outbox=outbox
    ), inbox


def events_of(inbox: Any) -> list[Any]:
    found = []
    while inbox.poll():
        found.append(inbox.recv())
    return found


def judge(link: StoreLink, beats: str, *times_s: float) -> None:
    """Has the link find node 1 with these beats at each of the times."""
    for now_s in times_s:
        link._judge(MemoryStore({"beat/1": beats}), 1, beats, now_s)


def test_a_silent_node_is_reported_once_even_if_the_store_is_slow_meanwhile() -> None:
    """Each further fence of the same groups would end a reduction of all others."""
    link, inbox = quiet_link()
    judge(link, "7", 0.0, 0.5, 1.0, 1.5)
    assert [type(event) for event in events_of(inbox)] == [NodeSilent]
    link._slow_at_s = 2.0
    judge(link, "7", *(2.0 + step / 4 for step in range(40)))
    assert events_of(inbox) == []


def test_a_node_that_beats_again_may_fall_silent_again() -> None:
    link, inbox = quiet_link()
    judge(link, "7", 0.0, 0.5, 1.0, 1.5)
    judge(link, "8", 2.0, 2.5, 3.0, 3.5)
    assert [event.node for event in events_of(inbox)] == [1, 1]


def test_the_successor_of_a_lost_supervisor_counts_from_its_first_heartbeat() -> None:
    """Each incarnation counted from 1. After few beats of one, the next seemed silent, too, and was fenced."""
    link, inbox = quiet_link()
    store, layout = MemoryStore(), Layout(num_groups=2, num_nodes=2)
    for incarnation, times_s in ((0, (0.0, 0.5, 1.0)), (1, (1.5, 2.0, 2.5))):
        StoreLink(
            node=1, layout=layout, interval_s=1.0, connect=lambda: store, outbox=Pipe()[1], incarnation=incarnation
        )._beat(store)
        judge(link, store.values["beat/1"], *times_s)
    assert events_of(inbox) == []


def test_the_incarnations_lost_with_a_silent_node_are_reported_and_never_those_that_replace_them() -> None:
    """The incarnation was looked up when it was fenced, and might have been the next one by then."""
    link, inbox = quiet_link()
    judge(link, "7", 0.0, 0.5, 1.0)
    store = MemoryStore({"beat/1": "1", "incarnation/1": "3"})  # another one has come since the beat was read
    link._judge(store, 1, "7", 1.5)
    assert events_of(inbox) == []
    store.put("beat/1", "7")
    link._judge(store, 1, "7", 2.0)
    (silent,) = events_of(inbox)
    store.put("incarnation/1", "4")
    assert silent.members == (Member(GroupId(1), 3),)


def test_a_machine_that_is_switched_off_after_its_groups_have_left_is_reported_and_none_of_them_as_lost() -> None:
    """A fence of each, which names no member, cost all others a reduction."""
    link, inbox = quiet_link()
    judge(link, "7", 0.0, 0.5, 1.0)
    store = MemoryStore({"beat/1": "7", "incarnation/1": "3", "left/1/3/1": "yes"})
    link._judge(store, 1, "7", 1.5)
    (silent,) = events_of(inbox)
    assert (silent.members, silent.left) == ((), (Member(GroupId(1), 3),))
    judge(link, "8", 2.0, 2.5, 3.0)
    store = MemoryStore({"beat/1": "8", "incarnation/1": "4", "left/1/3/1": "yes", "left/1/4/0": "yes"})
    link._judge(store, 1, "8", 3.5)
    (silent,) = events_of(inbox)
    assert (silent.members, silent.left) == ((Member(GroupId(1), 4),), ()), "started again since"


def test_a_supervisor_in_the_place_of_one_whose_groups_have_left_fences_none() -> None:
    inbox, outbox = Pipe(duplex=False)
    store = MemoryStore({"incarnation/1": "3", "left/1/3/1": "yes", "all_groups_ready": "yes"})
    link = StoreLink(
        node=1,
        layout=Layout(num_groups=2, num_nodes=2),
        interval_s=1.0,
        connect=lambda: store,  # type: ignore[arg-type, return-value]
        outbox=outbox,
        incarnation=1,
    )
    log = link._begin(store)  # type: ignore[arg-type]
    wanted = FenceWanted(group=GroupId(1), member=None, rank=-1, cause="gone", error="", from_index=0)
    store.put("assignment/0000000000", '{"holdings":[[3,1,1]]}')
    link._holding = Holding(MachineId(3), PlaceId(1), 1)
    for left, expected in (("yes", HasLeft), (None, FenceWritten)):
        if left is None:
            del store.values["left/1/3/1"]
        link.fence(wanted)
        link._beat_at_s = time.monotonic() + 60.0
        link._handle_next(store, log)  # type: ignore[arg-type]
        (event,) = events_of(inbox)
        assert (type(event), event.member) == (expected, Member(GroupId(1), 3))
        assert store.exists("log/0000000000") == (left is None)


class _StoppedStore:
    """Any caller waits forever."""

    def exists(self, key: str) -> bool:
        raise AssertionError(f"asked for {key}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    monkeypatch.setattr(driver_module.processes, "fork_server", lambda: None)
    return Driver(
        config=RunConfig(),
        run_dir=tmp_path,
        faults=(),
        journal=JournalWriter(tmp_path, "driver"),
        on_event=lambda event: None,
        rank_main=lambda spec, reports: None,
    )


def test_a_loss_in_training_does_not_make_the_driver_ask_a_store_that_only_it_can_wake(driver: Driver) -> None:
    driver._store = _StoppedStore()  # type: ignore[assignment]
    driver._handle(RanksReady(group=GroupId(0)), 0)
    driver._handle(GroupLost(record=LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=0)), 0)
    assert driver._absent_groups == {1}


def test_a_loss_before_training_is_judged_even_if_its_report_comes_after_training_has_begun(driver: Driver) -> None:
    """Each supervisor has a pipe to the driver, and what one has seen first may be read last."""
    driver._handle(RanksReady(group=GroupId(0)), 0)
    record = LossRecord(group=1, rank=0, cause="ValueError: other data", entry_index=0)
    with pytest.raises(RunFailed, match="group 1 was lost before training began: rank 0: ValueError: other data"):
        driver._handle(GroupLost(record=record, concerns_all=True, before_training=True), 0)


def test_a_machine_that_has_left_its_place_to_another_does_not_end_the_run_with_the_next_wipe_out(
    driver: Driver,
) -> None:
    driver._config = replace(driver._config, checkpoint=CheckpointConfig(max_restarts=1))
    driver._last_lost = {GroupId(group): 0 for group in range(driver._config.layout.num_groups)}
    assert not driver._is_over([0])
    driver._handle(NodeEnded(node=0, exits={}, failure="stopped"), 0)
    assert not driver._is_over([0])
    driver._handle(NodeEnded(node=0, exits={}, failure=""), 0)
    assert driver._is_over([0])


@pytest.mark.parametrize("admitted", [(Member(GroupId(1), 1),), ()])
def test_the_loss_of_all_other_groups_does_not_end_a_run_with_one_that_is_back_and_not_reported_yet(
    driver: Driver, admitted: tuple[Member, ...]
) -> None:
    """Its supervisor reads of its return from another pipe than of their losses; the run ended as wiped out."""
    config = replace(driver._config, layout=LayoutConfig(num_groups=2), checkpoint=CheckpointConfig(max_restarts=0))
    driver._config = replace(config, spare=replace(config.spare, redundancy=2, rejoins=1))
    fences = (Fence(group=GroupId(group), incarnation=0, reason="SIGKILL") for group in (1, 0))
    first, second = map(encode_entry, fences)
    commit = encode_entry(Commit(step=0, attempt=0, admit=admitted))
    driver._store = MemoryStore(dict(zip(map(entry_key, range(3)), (first, commit, second), strict=True)))  # type: ignore[assignment]
    for index, group in ((0, 1), (2, 0)):
        driver._handle(RanksReady(group=GroupId(group)), 0)
        driver._handle(GroupLost(record=LossRecord(group=group, rank=0, cause="SIGKILL", entry_index=index)), 0)
    with deferred() as driver._interrupts:
        assert driver._is_over([0]) == (not admitted)


def test_stopping_a_node_passes_over_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    hit: list[int] = []

    def kill(pid: int, number: int) -> None:
        if pid == 2:
            raise ProcessLookupError
        assert number == signal.SIGSTOP
        hit.append(pid)

    monkeypatch.setattr(os, "kill", kill)
    driver._suspend([1, 2, 3], None, None)
    assert hit == [1, 3]


def test_what_goes_wrong_with_a_report_is_not_taken_for_the_end_of_its_pipe() -> None:
    """An error of the disk, say, made the driver deaf to a node, whose supervisor then waited for good."""
    ours, theirs = Pipe()
    theirs.send(RanksReady(group=GroupId(0)))
    assert next_report(ours) == RanksReady(group=GroupId(0))
    theirs.close()
    assert next_report(ours) is None


def _end_on_command(spec: RankSpec, reports: Any) -> None:
    os._exit(ExitCode.GROUP_BROKEN if spec.rank == 0 else 9)


def test_a_rank_that_lost_a_peer_is_reported_lost_after_the_peer(tmp_path: Path) -> None:
    """Rank 0 is the first in every list."""
    config = RunConfig(layout=LayoutConfig(num_groups=1, pipeline_parallel=2))
    store = TcpStoreSpec(host="127.0.0.1", port=1)
    ranks = RankProcesses(
        NodeSpec(
            config=config, run_dir=tmp_path, node=0, store=store, faults=(), rank_main=_end_on_command, hub_pid=None
        )
    )
    ranks.start_all()
    sentinels = list(ranks.sentinels)
    for sentinel in sentinels:
        assert wait([sentinel], 60.0)
    assert ranks.reap(sentinels) == [(0, 1), (0, 0)]
    assert ranks.exits == {(0, 0): ExitCode.GROUP_BROKEN, (0, 1): 9}
    assert not ranks.sentinels
    ranks.end_all()


@pytest.mark.parametrize(
    ("code", "is_for_memory", "names_main_guard"),
    [(-signal.SIGKILL, True, False), (1, False, False), (96, False, True)],
)
def test_memory_is_blamed_only_for_a_process_that_was_killed(
    code: int, is_for_memory: bool, names_main_guard: bool
) -> None:
    """A script that starts a run whenever it is imported ended the first process with 1, and read of memory."""
    text = _why_ended(RunConfig(), code)
    assert ("memory" in text, "if __name__ ==" in text) == (is_for_memory, names_main_guard)
