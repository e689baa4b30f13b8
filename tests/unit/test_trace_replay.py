"""Which losses of a trace a campaign replays, on which nodes and when; how it suspends processes."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest

from spare_megatron.process.reports import RanksStarted
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.campaign.campaign_figures import FaultCount
from spare_megatron.tools.campaign.trace_replay import NodeAbsence, ReplayedAbsences, TraceReplay, replay_of
from spare_megatron.tools.simulate.failures import Loss
from tests.unit.test_campaign import COMMITTED

DAY_S = 86400.0


def loss(day: float, machine: str | None, days: float | None = 0.5) -> Loss:
    repair_s = None if days is None else days * DAY_S
    return Loss(at_s=day * DAY_S, groups=(), machine=machine, repair_s=repair_s, cause="disk")


LOSSES = [loss(0.5, "x"), loss(1.0, "b"), loss(1.5, "a", 2.0), loss(2.0, "b", 0.25), loss(2.5, "c"), loss(3.0, "b")]


def test_the_machines_with_most_losses_in_the_window_stand_for_nodes() -> None:
    replay = replay_of(LOSSES, 2, (1.0, 3.0), 10.0)
    assert replay.machines == ("b", "a")
    assert replay.left_out == 1
    assert replay.minutes == 2 + 20 / 60
    assert replay.absences == (
        NodeAbsence(node=0, at_s=0.0, seconds=5.0),
        NodeAbsence(node=1, at_s=5.0, seconds=20.0),
        NodeAbsence(node=0, at_s=10.0, seconds=2.5),
    )
    assert replay.text() == (
        "trace: 3 absences of the machines with most of them (by node, 0: b, 1: a), half of them longer than 5 s; "
        "a day takes 10 s; 1 of others are left out"
    )


@pytest.mark.parametrize("unknown", [loss(1.0, None), loss(1.0, "a", None)])
def test_a_trace_has_to_say_who_is_away_and_for_how_long(unknown: Loss) -> None:
    with pytest.raises(ValueError, match="columns machine and repair_s"):
        replay_of([*LOSSES, replace(unknown, groups=(GroupId(0),) if unknown.machine is None else ())], 2, (0, 9), 1.0)


def test_a_window_without_losses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no machine of --trace is lost in --days 7 9"):
        replay_of(LOSSES, 2, (7.0, 9.0), 1.0)


def test_processes_of_a_node_are_suspended_and_go_on() -> None:
    """Two ranks and the supervisor of node 1, but not that of node 11, which is away for no time; and those that are
    suspended at the end.
    """
    context = multiprocessing.get_context("fork")
    names = ("supervisor-1", "supervisor-11", "a", "b", "supervisor-0")
    children = [context.Process(target=time.sleep, args=(60,), name=name) for name in names]
    for child in children:
        child.start()
    pids = {child.name: child.pid for child in children}
    absences = (
        NodeAbsence(node=2, at_s=0.0, seconds=9.0),  # which has no process
        NodeAbsence(node=11, at_s=0.0, seconds=0.0),
        NodeAbsence(node=1, at_s=0.0, seconds=50.0),
        NodeAbsence(node=0, at_s=0.1, seconds=50.0),
    )
    try:
        replay = ReplayedAbsences(absences=absences, machines=("x", "y"), left_out=0, num_days=1.0, day_s=1.0)
        with TraceReplay(replay) as replayed:
            replayed.on_event(RanksStarted(node=1, pids={(0, 0): pids["a"], (0, 1): pids["b"]}))  # type: ignore[dict-item]
            for node in (0, 2, 11):
                replayed.on_event(RanksStarted(node=node, pids={}))
            replayed.on_event(COMMITTED)
            await_stopped(pids, {"supervisor-1", "a", "b", "supervisor-0"})
            until(lambda: replayed.count().fired == 3)
            replayed.on_event(COMMITTED)
            assert replayed.count() == FaultCount(planned=4, due=4, fired=3, masked=3)
        await_stopped(pids, set())
    finally:
        for child in children:
            assert child.pid
            os.kill(child.pid, signal.SIGKILL)
            child.join()


def await_stopped(pids: dict[str, Any], names: set[str]) -> None:
    """Waits until these are suspended, and no other."""
    until(
        lambda: {name for name, pid in pids.items() if psutil.Process(pid).status() == psutil.STATUS_STOPPED} == names
    )


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)
