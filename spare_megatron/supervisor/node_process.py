"""The main functions of a supervisor's process."""

import contextlib
import dataclasses
import gc
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, Queue

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.actions import FinishRun, StopHalted
from spare_megatron.core.machines.failure_detector import BEATS_PER_INTERVAL
from spare_megatron.formats.output import real_paths
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import EndRecord
from spare_megatron.journal.state.summary import UNKNOWN, Summary, conclude
from spare_megatron.machine import end_signal
from spare_megatron.machine.gpus import XidWatch, gpus_of_machine, list_file, read_list, show, visible_gpus, write_list
from spare_megatron.machine.lock import held_path, hold_alone, hold_shared
from spare_megatron.machine.network import NodeNetwork
from spare_megatron.process import processes
from spare_megatron.process.node_connection import connect
from spare_megatron.process.reports import NodeEnded
from spare_megatron.process.requests import asked_to_leave
from spare_megatron.process.specs import NodeSpec
from spare_megatron.slow_machines.examination import Examinations, Examiner
from spare_megatron.stacking.layout import GroupId, MachineId
from spare_megatron.state.checkpoint.checkpoint_folder import folder_of
from spare_megatron.state.checkpoint.emergency_checkpoint import saved_state
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreLost
from spare_megatron.store.open_store import open_store, with_credentials
from spare_megatron.store.tcp_store import initialize_requests
from spare_megatron.supervisor.driver_link import DriverLink, Stopped
from spare_megatron.supervisor.places.group_reforming import AssignmentList, GroupReforming, PlaceTaken
from spare_megatron.supervisor.run_end import end_in_log, wait_for_others, write_end
from spare_megatron.supervisor.supervisor import Supervisor
from spare_megatron.version import code_mismatch
from spare_megatron.voting.log_follower import LogFollower, controller_setup

_LOCK_S = 150.0
"""Longest wait for the lock of a lost driver's machine, which storage on a network frees with its lease, after 90 s."""


def supervise(spec: NodeSpec, driver: Connection) -> None:
    """Main function of a supervisor that the driver starts. Ends with its ranks, the driver, or an order of it."""
    try:
        look_after(spec, driver, Queue())
    except Exception:  # noqa: BLE001  (the driver knows of it)
        processes.say(real_paths(traceback.format_exc()))
        processes.leave(1)
    processes.leave(0)  # the store link's thread may be blocked


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphaned:
    """A node has ended without a driver. `store_failure`: it does not know how, as it has lost the store."""

    place: int
    store_failure: str


def look_after(spec: NodeSpec, driver: Connection, locks: Queue[int]) -> Orphaned | None:
    """Supervises the places that this machine holds one after another. None: the driver, which also gets the text of an
    exception, knows the end. If it is lost, `locks` gets descriptors of `hold_shared`, that of the run first.
    """
    link = DriverLink(driver, is_needed=not spec.is_remote, on_lost=partial(_hold_directories, spec, locks))
    try:
        processes.log_to_file(spec.run_dir, spec.name)
        return _look_after(spec, link)
    except Exception as error:
        failure = f"its supervisor raised {processes.describe_error(error)}"
        with contextlib.suppress(Stopped):
            link.close(NodeEnded(node=spec.node, exits={}, failure=failure))
        raise


def _hold_directories(spec: NodeSpec, locks: Queue[int]) -> None:
    """Keeps other runs out of this one's directories in the place of the lost driver, once that holds them no longer:
    one that is only cut off still does.
    """
    for folder in (spec.run_dir, folder_of(spec.config.checkpoint, spec.run_dir)):
        try:
            locks.put(hold_shared(folder))
        except OSError as error:
            processes.say(real_paths(f"{folder} cannot be locked ({error}): start no run there while this one goes on"))


def _look_after(spec: NodeSpec, link: DriverLink) -> Orphaned | None:
    initialize_requests()  # before ranks are forked beside the thread that connects to the store
    num_places = spec.config.parallel.num_nodes
    machine = MachineId(spec.node + num_places * spec.incarnation)
    network = None if spec.hub_pid is None else NodeNetwork(spec.node, spec.hub_pid)
    minutes = spec.config.train.max_minutes
    spec = dataclasses.replace(
        spec,
        ends_at_s=None if minutes is None else time.monotonic() + 60.0 * minutes,
        gpus=_keep_gpus(spec) if spec.config.cluster.device == "gpu" else (),
    )
    examiner, xids = Examiner(spec, machine), XidWatch(spec.gpus)
    former: Supervisor | None = None
    taken = None
    is_placed = not spec.incarnation
    while True:
        if not is_placed and (taken := _take_place(spec, machine, link, examiner)) is None:
            sys.stdout.flush()
            return None
        if taken is not None:
            spec = dataclasses.replace(spec, node=taken.holding.place, incarnation=taken.holding.incarnation)
            processes.log_to_file(spec.run_dir, spec.name)
        budget = None if former is None else former.budget
        supervisor = Supervisor(spec, link, network, examiner, xids, taken, budget)
        end_signal.listen(supervisor.end_requests.on_signal)
        if former is not None and (asked := former.end_requests.poll()) is not None:  # perhaps while it left its place
            supervisor.end_requests.on_asked(asked)
        end = supervisor.run()
        if isinstance(end, str):
            store_failure = supervisor.close(end)
            sys.stdout.flush()
            return None if store_failure is None else Orphaned(place=spec.node, store_failure=store_failure)
        supervisor.leave()
        former, taken, is_placed = supervisor, end.to, end.to is not None


def _keep_gpus(spec: NodeSpec) -> tuple[str, ...]:
    """Has this process see the machine's GPUs in the order of its list, which its first supervisor writes: if one falls
    off the bus, all others stay those of the ranks that had them.
    """
    file = list_file(spec.run_dir, spec.node)
    kept, here = read_list(file), [gpu.uuid for gpu in visible_gpus()]
    found = gpus_of_machine(kept, here)
    for number, uuid in enumerate(found):
        if uuid not in here:
            processes.say(f"GPU {number} of this machine is lost: the driver does not list {uuid}, and {file} does")
    if found != kept:
        try:
            write_list(file, found)
        except OSError as error:  # a disk that is full
            processes.say(f"{file} cannot be written: {error}; if a GPU is lost, later ranks may get those of others")
    show(found)
    return found


def _take_place(spec: NodeSpec, machine: MachineId, link: DriverLink, examiner: Examiner) -> PlaceTaken | None:
    """A place for a machine that replaces another or has lost its own; None if the run has ended before."""
    store = open_store(spec.store)
    assignments = AssignmentList(store, spec.config.parallel)
    if assignments.read().quarantine_of(machine) is not None and not _passes(spec, machine, link, examiner, store):
        return None
    reforming = GroupReforming(spec.config, machine, lambda: _left_out(spec))
    return reforming.take_place(store, assignments)


def _passes(spec: NodeSpec, machine: MachineId, link: DriverLink, examiner: Examiner, store: ControlStore) -> bool:
    """Has a machine without a place examined until it passes; False if the run has ended before."""
    assignments = AssignmentList(store, spec.config.parallel)
    interval_s = spec.config.control.heartbeat_interval_s
    follower = LogFollower(DecisionLog(store), controller_setup(spec.config))
    examinations = Examinations(machine, interval_s, examiner.start)
    journal = JournalWriter(spec.run_dir, f"machine-{machine}", on_held=processes.report_held(link.report))
    try:
        while not isinstance(follower.stop(), FinishRun | StopHalted):
            if (examined := examinations.poll(store, assignments.read())) is not None:
                journal.write(examined)
                link.report(examined)
                if not examined.reason:
                    return True
            if wait(link.pipes, interval_s / BEATS_PER_INTERVAL):
                link.next_order()
        link.close(NodeEnded(node=spec.node, exits={}))
    except Stopped:
        link.close(NodeEnded(node=spec.node, exits={}, failure="stopped"))
    finally:
        examiner.end_all()
        processes.close_or_report(journal, link.report)
    return False


def _left_out(spec: NodeSpec) -> frozenset[GroupId]:
    """The groups that are asked to leave, and further ones that are not asked for: all, if the storage fails."""
    further = spec.config.parallel.further_groups
    with contextlib.suppress(OSError):
        return asked_to_leave(spec.run_dir, further)
    return further


@contextlib.contextmanager
def children_killed_on_error() -> Iterator[None]:
    """Python waits for children when a process ends: after an error these would train on without a supervisor."""
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise


def look_after_node(run_dir: Path, node: int, wait_s: float) -> tuple[Summary | None, RunConfig] | None:
    """Supervises a node for a driver on another machine. Returns how the run has ended, and its configuration, if the
    driver is lost. ValueError: the node is not awaited, its code is another one, or it cannot use the control store.
    """
    processes.set_environment_of_ranks()
    driver = connect(run_dir, node, wait_s)
    importlib.import_module("spare_megatron.rank.rank")  # so that forked ranks have it
    gc.freeze()  # a collection in a rank would copy all of that
    spec: NodeSpec = driver.recv()
    if mismatch := code_mismatch(spec.code):
        raise ValueError(f"{mismatch}: install the same on all nodes")
    with held_path(run_dir) as held:
        store = with_credentials(spec.store, spec.config.control, os.environ)
        spec = dataclasses.replace(spec, store=store, run_dir=held)
        locks: Queue[int] = Queue()
        with children_killed_on_error():
            orphaned = look_after(spec, driver, locks)
        if orphaned is None:
            return None
        spec = dataclasses.replace(spec, node=orphaned.place)
        if failure := orphaned.store_failure:
            return _end_without_store(spec, failure, locks), spec.config
        return _end_with_others(spec), spec.config


def _end_with_others(spec: NodeSpec) -> Summary:
    """Sums up a run without driver when all nodes have ended."""
    config, end = spec.config, None
    with contextlib.suppress(StoreLost):
        store = open_store(spec.store)
        wait_for_others(store, spec.node, config.parallel.num_nodes, config.control.heartbeat_interval_s)
        end = end_in_log(store, config)
    summary = conclude(spec.run_dir)
    if summary.outcome == UNKNOWN and end is not None:  # no group was left that knew it
        write_end(spec, end)
        summary = conclude(spec.run_dir)
    return summary


def _end_without_store(spec: NodeSpec, failure: str, locks: Queue[int]) -> Summary | None:
    """Sums up a run that has lost its driver and its store. None: other nodes, or a driver that this one cannot reach,
    have not ended; without locks of files that is not known.
    """
    try:
        is_alone = hold_alone(locks.get(timeout=_LOCK_S))
    except Empty:
        is_alone = False
    if not is_alone:
        processes.say(f"{failure}; the driver is lost, too, and other nodes may go on")
        return None
    summary = conclude(spec.run_dir)
    if summary.outcome == UNKNOWN:  # else a driver that only this node had lost
        state = saved_state(spec.config.checkpoint, spec.run_dir, num_committed=0)
        write_end(spec, EndRecord(outcome="failed", reason=f"{failure}, and the driver is lost{state}"))
        summary = conclude(spec.run_dir)
    return summary
