"""A supervisor's connection to the driver: its messages, and when the other side counts as gone."""

import contextlib
import multiprocessing
import threading
import unittest.mock
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import Queue

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.machine.lock import LOCK, is_held
from spare_megatron.process import processes
from spare_megatron.process.reports import (
    EndEarly,
    LastReportAcknowledged,
    NodeEnded,
    RankRaised,
    StopProcess,
    StoreAway,
)
from spare_megatron.process.specs import NodeSpec
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import node_process
from spare_megatron.supervisor.driver_link import DriverLink, Stopped

REPORT = StoreAway(limit_s=2.0)
WAIT_S = 30.0


def test_a_node_goes_on_without_a_driver_where_that_is_elsewhere() -> None:
    ours, theirs = Pipe()
    link = DriverLink(ours, is_needed=False)
    theirs.close()
    link.report(REPORT)
    assert link.next_order() is None
    link.report(REPORT)
    assert (link.is_there, link.pipes) == (False, [])


def no_main(spec: object, pipe: object) -> None:
    raise AssertionError("no rank is started")


def go_on_alone(spec: NodeSpec, driver: Connection, pipe: Connection) -> None:
    """A supervisor that does nothing but lose its driver. Sends what it prints then."""
    messages: list[str] = []

    def look_after(_: NodeSpec, link: DriverLink) -> None:
        assert link.next_order() is None
        for thread in threading.enumerate():
            if thread.name == "driver-lost":
                thread.join()
        pipe.send(messages)
        pipe.recv()

    with (
        unittest.mock.patch.object(node_process, "_look_after", look_after),
        unittest.mock.patch.object(processes, "say", messages.append),
    ):
        node_process.look_after(spec, driver, Queue())


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_node_that_goes_on_without_a_driver_keeps_other_runs_out(tmp_path: Path, *, has_folder: bool) -> None:
    """The next run saved into the same folder, and removed what this one was saving."""
    folders = [tmp_path, tmp_path / "checkpoints"]
    for folder in folders[: 1 + has_folder]:
        folder.mkdir(exist_ok=True)
        (folder / LOCK).touch()
    store = TcpStoreSpec(host="127.0.0.1", port=1)
    spec = NodeSpec(
        config=RunConfig(), run_dir=tmp_path, node=1, store=store, faults=(), rank_main=no_main, is_remote=True
    )
    context = multiprocessing.get_context("fork")
    (driver, theirs), (ours, pipe) = context.Pipe(), context.Pipe()
    driver.close()
    assert not is_held(tmp_path)
    node = context.Process(target=go_on_alone, args=(spec, theirs, pipe))
    node.start()
    try:
        assert ours.poll(60.0)
        messages = ours.recv()
        assert ["checkpoints cannot be locked" in text for text in messages] == ([] if has_folder else [True])
        assert [is_held(folder) for folder in folders] == [True, True if has_folder else None]
    finally:
        node.kill()
        node.join()
    assert not is_held(tmp_path)


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_node_ends_when_the_driver_says_so(is_needed: bool) -> None:
    ours, theirs = Pipe()
    theirs.send(StopProcess())
    with pytest.raises(Stopped):
        DriverLink(ours, is_needed=is_needed).next_order()


def test_a_node_ends_with_the_driver_where_both_are_here() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(Stopped):
        DriverLink(ours, is_needed=True).next_order()


@pytest.mark.timeout(60)
def test_a_driver_that_does_not_read_blocks_no_supervisor() -> None:
    """One that is stopped once kept a supervisor from fencing any group. Its messages are there when it goes on."""
    ours, theirs = Pipe()
    link = DriverLink(ours, is_needed=True)
    reports = [RankRaised(group=GroupId(0), rank=rank, traceback="x" * 2**20) for rank in range(4)]
    for report in reports:  # each is more than the pipe holds
        link.report(report)
    exits = {(GroupId(0), 0): 1}
    link.report(NodeEnded(node=0, exits=exits))
    exits.clear()
    assert [theirs.recv() for _ in reports] == reports
    assert theirs.recv() == NodeEnded(node=0, exits={(GroupId(0), 0): 1})
    link.close(REPORT)
    assert theirs.recv() == REPORT


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_needed", [True, False])
def test_a_driver_that_leaves_too_much_unread_counts_as_gone(is_needed: bool) -> None:
    ours, _theirs = Pipe()
    link = DriverLink(ours, is_needed=is_needed, most_unread=3)
    report = RankRaised(group=GroupId(0), rank=0, traceback="x" * 2**20)
    with pytest.raises(Stopped) if is_needed else contextlib.nullcontext():
        for _ in range(5):
            link.report(report)
    assert link.is_there == is_needed


@pytest.mark.timeout(60)
def test_a_driver_elsewhere_is_not_waited_for_without_end() -> None:
    ours, _theirs = Pipe()
    link = DriverLink(ours, is_needed=False, last_report_s=0.01)
    link.report(RankRaised(group=GroupId(0), rank=0, traceback="x" * 2**20))
    link.close(REPORT)
    assert not link.is_there


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("reports", "is_there"),
    [((EndEarly(), LastReportAcknowledged()), True), ((StopProcess(),), True), ((EndEarly(),), False)],
)
def test_a_driver_elsewhere_has_the_last_report_when_it_acknowledges_it(
    reports: Sequence[object], is_there: bool
) -> None:
    """A report counted as delivered as soon as it was sent, perhaps to what was about to die with the driver."""
    ours, theirs = Pipe()
    link = DriverLink(ours, is_needed=False)
    for order in reports:
        theirs.send(order)

    def read() -> None:
        with theirs:
            theirs.recv()

    thread = threading.Thread(target=read)
    thread.start()
    link.close(REPORT)
    thread.join(WAIT_S)
    assert link.is_there == is_there


@pytest.mark.timeout(60)
def test_a_driver_that_asked_to_stop_and_left_is_not_taken_for_lost() -> None:
    """The node went on without it, for it had something to report before it listened."""
    ours, theirs = Pipe()
    link = DriverLink(ours, is_needed=False)
    theirs.send(StopProcess())
    theirs.close()
    link.report(REPORT)
    assert link._sender is not None
    link._sender.join(WAIT_S)
    link.report(REPORT)
    with pytest.raises(Stopped):
        link.next_order()


def test_a_node_receives_an_early_end() -> None:
    ours, theirs = Pipe()
    theirs.send(EndEarly())
    assert DriverLink(ours, is_needed=True).next_order() == EndEarly()
