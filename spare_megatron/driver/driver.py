"""Runs one training run: starts its control store and supervisors, handles their reports, determines the outcome."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import step_of
from spare_megatron.core.controller.start import EarlyLoss, Start
from spare_megatron.core.log.actions import FinishRun, StopHalted
from spare_megatron.core.slow_machines.culprit import Culprit
from spare_megatron.driver.storage_watch import DirectoryWatch
from spare_megatron.faults.points import Fault
from spare_megatron.formats.store_space import shortage
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import EndRecord, RestartRecord, UpdateRecord
from spare_megatron.machine import end_signal
from spare_megatron.machine.interrupts import Deferral, deferred
from spare_megatron.machine.network import hosts_of, network_of, refuse_loopback
from spare_megatron.machine.timers import Timers
from spare_megatron.process import processes, reports
from spare_megatron.process.specs import NodeSpec, RankMain
from spare_megatron.slow_machines.slow_machine_drains import Culprits, SlowMachineDrains
from spare_megatron.stacking.layout import GroupId
from spare_megatron.state.checkpoint.emergency_checkpoint import saved_state
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.etcd_gateway import etcd_space
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import ControlStore, StoreLost
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import EtcdStoreSpec, StoreSpec
from spare_megatron.supervisor.node_process import supervise
from spare_megatron.supervisor.places.group_rendezvous import fence_node
from spare_megatron.supervisor.remote_supervisor import Launcher, run_remote_supervisor
from spare_megatron.supervisor.run_end import codes_of, outcome_of, stopped
from spare_megatron.voting.log_follower import LogFollower, controller_setup

STORE_END_TIMEOUT_S = 2.0
"""How long the driver waits for the exit of a control store that no node reaches, before it kills the store."""
_END_POLL_S = 0.5
"""How often the driver looks whether it is asked to end the run."""
_LAST_ANSWER_S = 5.0
"""Longest wait for etcd at the end of a run."""
_STORE_POLL_S, _STORE_ANSWER_S = 600.0, 1.0
"""How often the driver asks etcd for its size, and how long it blocks for an answer."""


class RunFailed(Exception):
    """The run cannot start or go on, for a reason that no redundancy masks."""


class _GraceOver(Exception):
    """The run was asked to end, and has not by now."""


class Driver:
    """One run, driven from this machine. `on_event` is called with every event, in the driver's thread; `launcher`
    starts supervisors on other machines, None if all run on this one. `config` is resolved and has no problems. With
    `takes_requests` SIGTERM and like signals end the run after the step under way, else at once.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run_dir: Path,
        faults: tuple[Fault, ...],
        journal: JournalWriter,
        on_event: Callable[[reports.RunEvent], None],
        rank_main: RankMain,
        launcher: Launcher | None = None,
        takes_requests: bool = False,
    ) -> None:
        self._config = config
        self._takes_requests = takes_requests
        self.directory = DirectoryWatch(run_dir, on_event)
        self._run_dir = run_dir
        self._faults = faults
        self._journal = journal
        self._on_event = on_event
        self._rank_main = rank_main
        self._launcher = launcher
        self._context = processes.fork_server()
        self._nodes: dict[int, processes.Child] = {}
        self._ended: dict[int, reports.NodeEnded] = {}
        self._start: Start | None = None  # set by the first loss before training begins
        self._last_lost: dict[GroupId, int] = {}  # incarnation
        self._last_rejoined: dict[GroupId, int] = {}
        self._stages: dict[GroupId, int | None] = {}  # of groups that have come back, if fewer than usual
        self._pids: dict[int, list[int]] = {}
        self._machines = {node: node for node in range(config.parallel.num_nodes)}  # by the place that they hold
        self._culprits = Culprits(
            journal, on_event, shares_processors=config.cluster.launcher == "local", on_named=self._on_named
        )
        self._drains = SlowMachineDrains(config, run_dir, journal, lambda: self._store)
        self._timers = Timers()
        self._stop_reason = ""
        self._last_cause = ""
        self._has_raised = False
        self._is_halted = False
        self._has_begun = False
        self._asked: reports.EndAsked | None = None
        self._limit_at_s: float | None = None  # at which all processes end
        self._is_cut_off = False
        self._store_failure = ""
        self._without_store: set[int] = set()
        self._num_steps = self._first_step = step_of(Path(config.checkpoint.load)) if config.checkpoint.load else 0
        self._num_restarts = 0

    def run(self, interrupts: Deferral) -> EndRecord:
        """Runs to the end, whatever that is, and leaves no process behind. Returns the record that closes the journal.
        KeyboardInterrupt: after all processes have ended.
        """
        self._interrupts = interrupts
        end = EndRecord(outcome="interrupted", reason="the driver was interrupted")
        hub: processes.Child | None = None
        store: processes.Child | None = None
        outer_store: processes.Child | None = None
        spec: StoreSpec | None = None
        try:
            self._on_event(reports.Message(text="starting: control store"))
            if self._config.cluster.isolate_nodes:
                hub = processes.start_hub(self._context, interrupts.wait)
            store, spec = processes.start_store(
                self._context, self._config.control, self._config.name, hub, interrupts.wait
            )
            self._store_process, self._store_spec, self._hub = store, spec, hub
            if store is None:
                with interrupts.allowed():  # etcd may not answer for a while
                    self._store.put(keys.RUN_NAME, self._config.name)  # shows which run owns the keys
            outer_store = processes.start_outer_store(self._context, self._config.sites, interrupts.wait)
            self._start_nodes(spec, hub)
            if isinstance(spec, EtcdStoreSpec):
                self._measure_store(replace(spec, timeout_s=_STORE_ANSWER_S))
            self._watch(store)
            end = self._end_record()
        except _GraceOver:
            end = self._stopped(self._not_in_time + self._saved_state())
        except (RunFailed, StoreLost, OSError, RuntimeError, ValueError) as error:
            end = EndRecord(outcome="failed", reason=str(error))
        finally:
            # Further signals kill local supervisors only: proxies of remote ones still have to relay the stop.
            here = {node for node in self._nodes if self._main_of(node) is supervise}
            lost = {node for node in here if self._are_lost([node])}
            with deferred(lambda: processes.kill([self._nodes[node] for node in here])):
                processes.end_processes(
                    supervisors=[child for node, child in self._nodes.items() if node not in lost],
                    lost=[self._nodes[node] for node in lost],
                    stores=(store, outer_store),
                    hub=hub,
                )
                end = replace(end, steps_committed=self._num_steps - self._first_step)
                self._journal.write(end)
            if isinstance(spec, EtcdStoreSpec):
                # The ranks of a killed supervisor die with it, but a little later.
                processes.await_exit([pid for node in here for pid in self._pids.get(node, [])])
                _remove_keys(spec)
        return end

    @cached_property
    def _store(self) -> ControlStore:
        """A client, opened when it is first needed: that of the embedded store imports torch, which takes seconds."""
        with contextlib.nullcontext() if self._hub is None else network_of(self._hub.pid):
            return open_store(self._store_spec)

    @cached_property
    def _follower(self) -> LogFollower:
        return LogFollower(DecisionLog(self._store), controller_setup(self._config))

    def _start_nodes(self, store: StoreSpec, hub: processes.Child | None) -> None:
        layout = self._config.parallel
        num_groups = layout.num_home_groups
        text = f"starting: {num_groups * layout.ranks_per_group} ranks in {num_groups} groups"
        self._on_event(reports.Message(text=text))
        if self._launcher is not None and layout.num_nodes > 1:
            refuse_loopback(self._store.local_host(), hosts_of(self._config.control.endpoints))
        for node in range(layout.num_nodes):
            self._interrupts.check()
            spec = NodeSpec(
                config=self._config,
                run_dir=self._run_dir,
                node=node,
                store=store,
                faults=self._faults,
                rank_main=self._rank_main,
                hub_pid=None if hub is None else hub.pid,
            )
            self._nodes[node] = processes.start_child(self._context, spec.name, self._main_of(node), spec)

    def _main_of(self, node: int) -> Callable[[NodeSpec, Connection], None]:
        """Main function of the node's process on this machine: its supervisor, or the proxy of a remote one."""
        if self._launcher is None or (self._config.cluster.launcher == "hand" and node == 0):
            return supervise
        return partial(run_remote_supervisor, self._launcher)

    # ----------------------------------------------------------------------------------------------------- watch

    def _watch(self, store: processes.Child | None) -> None:
        """Handles reports until every supervisor has ended or its node is lost."""
        pipes = {child.reports: node for node, child in self._nodes.items()}
        sentinels = {child.process.sentinel: node for node, child in self._nodes.items()}
        self._poll()
        store_sentinel = [] if store is None else [store.process.sentinel]
        while not self._is_over(sentinels.values()):
            ready = self._interrupts.wait([*pipes, *sentinels, *store_sentinel], self._timers.pause_s())
            self._timers.run_due()
            if self._interrupts.request is not None:
                self._on_end_asked(self._interrupts.request.name, self._config.control.end_grace_s)
            for pipe in [item for item in ready if item in pipes]:
                report = reports.next_report(pipe)
                if report is None:
                    del pipes[pipe]
                else:
                    self._handle(report, pipes[pipe])
            for item in [item for item in ready if item in sentinels]:
                self._node_ended(sentinels.pop(item))
            if store is not None and store.process.sentinel in ready:
                store_sentinel.clear()
                # The supervisors notice by themselves, and end when their ranks have saved their state.
                self._store_died(store)

    def _is_over(self, running: Collection[int]) -> bool:
        """Whether no running node will continue the run. A node that has lost its groups may, until one has ended with
        the run, and not because another machine has its place.
        """
        may_restart = self._config.checkpoint.max_restarts > 0 and all(end.failure for end in self._ended.values())
        return not running or (self._are_lost(running) and not may_restart and not self._have_member(running))

    def _have_member(self, nodes: Iterable[int]) -> bool:
        """Whether one of these nodes has a group that takes part, by the log: its return may be reported after the loss
        of all others, as what they report is read from different pipes.
        """
        going_on = set(nodes).difference(self._ended)
        if not going_on or not self._config.spare.rejoins:
            return False
        try:
            with self._interrupts.allowed():
                stop = self._follower.stop()
        except StoreLost:
            return False
        if isinstance(stop, FinishRun | StopHalted):  # what follows in the log is not read
            return False
        return not self._follower.members.isdisjoint(self._groups_on(going_on))

    def _are_lost(self, nodes: Iterable[int]) -> bool:
        """Whether all groups of these nodes are lost. The nodes may be suspended or cut off from the network."""
        return self._absent_groups.issuperset(self._groups_on(nodes))

    def _groups_on(self, nodes: Iterable[int]) -> set[GroupId]:
        """The groups that have ranks on these nodes; a group with few stages may have none in its last places."""
        layout = self._config.parallel
        places = [place for place, machine in self._machines.items() if machine in set(nodes)]
        pairs = [(group, place) for place in places for group in layout.groups_on(place)]
        return {group for group, place in pairs if place in layout.nodes_of(group, self._stages.get(group))}

    @property
    def _absent_groups(self) -> frozenset[GroupId]:
        """The groups that take no part now. Compares incarnations: a loss may be reported after the group's return."""
        lost = {group for group, last in self._last_lost.items() if last >= self._last_rejoined.get(group, 0)}
        return frozenset(lost | self._config.parallel.further_groups.difference(self._last_rejoined))

    def _node_ended(self, node: int) -> None:
        """Handles the end of a node's process. Unless it has reported its end, its ranks died with it."""
        child = self._nodes[node]
        while child.reports.poll() and (report := reports.next_report(child.reports)) is not None:
            self._handle(report, node)
        child.process.join()
        code = child.process.exitcode or 0
        failure = (
            f"its supervisor died: {processes.describe_exit(code)}{'' if code < 0 else '; spare logs may say why'}"
        )
        if node in self._ended:
            failure = self._ended[node].failure
        if failure and not (self._store_failure or self._is_cut_off):
            if len(self._nodes) == 1 or (node in self._ended and not self._has_begun):
                raise RunFailed(f"node {node}: {failure}")
            self._lose_node(node, f"node {node}: {failure}")

    def _lose_node(self, node: int, cause: str) -> None:
        """Fences the groups of a node without a supervisor, if training has not begun: all others wait for them."""
        if not self._has_begun:
            for record in fence_node(self._store, self._config.parallel, node, cause):
                self._journal.write(record)
                self._handle(reports.GroupLost(record=record), node)

    def _on_named(self, culprit: Culprit | None, step_s: float) -> None:
        if self._config.spare.replace_slow and len(self._nodes) > 1:
            self._drains.consider(culprit, step_s, self._absent_groups, time.monotonic())

    def _handle(self, report: reports.NodeReport, sender: int) -> None:
        """Handles a report of a machine, which reports the place that it holds as its node."""
        match report:
            case reports.FaultWanted():
                HANDLERS[report.fault.kind](self, report, sender)
            case reports.LeftNodeGone(members=members):
                self._last_lost |= dict(members)  # its supervisor is not waited for
            case reports.NodeMeasured():
                self._culprits.add(report)
            case reports.NodeMissing(node=node, cause=cause):
                self._lose_node(node, cause)
            case reports.EndAsked(by=by, limit_s=limit_s):
                self._on_end_asked(by, limit_s)
            case _ if self._note(report, sender):
                self._on_event(report)

    def _note(self, report: reports.NodeReport, sender: int) -> bool:
        """Updates the driver's state from a report that observers get, too; False if it is a repetition."""
        match report:
            case reports.RanksStarted(pids=pids):
                self._pids[sender] = list(pids.values())
                if self._asked is not None:
                    self._order(sender, self._end_early())
            case reports.MachineMoved(node=node):
                self._machines = {place: one for place, one in self._machines.items() if one != sender}
                self._machines[node] = sender
            case (
                reports.GroupRejoined(member=(group, incarnation)) | RestartRecord(group=group, incarnation=incarnation)
            ):
                self._last_rejoined[GroupId(group)], self._stages[GroupId(group)] = incarnation, report.stages
                self._drains.on_admission(report.step)
                self._stop_reason = ""
                if isinstance(report, RestartRecord) and report.num_restarts > self._num_restarts:
                    self._num_restarts, self._num_steps = report.num_restarts, report.step
                    self._drains.on_restart(report.step)
            case reports.StoreGone(reason=reason):
                self._without_store.add(sender)
                if self._are_lost(set(self._nodes) - self._without_store):
                    self._give_store_up(reason)
            case reports.RanksReady(group=group):
                # A group that came back before the others were ready waits for them.
                self._has_begun = self._has_begun or group not in self._absent_groups
                if self._has_begun and self._takes_requests:
                    self._interrupts.take_requests()
            case reports.StepCommitted(update=UpdateRecord(step=step, step_s=step_s)):
                self._num_steps = max(self._num_steps, step + 1)
                self._drains.on_step(step, step_s)
            case reports.RunStopped(reason=reason):
                self._stop_reason = reason
            case reports.RankRaised():
                self._has_raised = True
            case reports.NodeEnded(is_cut_off=is_cut_off):
                self._ended[sender] = report
                self._is_cut_off |= is_cut_off
            case reports.GroupLost():
                return self._note_loss(report)
        return True

    def _note_loss(self, lost: reports.GroupLost) -> bool:
        self._require_start(lost)
        record, group = lost.record, GroupId(lost.record.group)
        if record.incarnation <= self._last_lost.get(group, -1) and not record.is_given_up:
            return False  # several supervisors watch a node
        self._last_lost[group] = record.incarnation
        self._last_cause = record.cause
        return True

    def _require_start(self, lost: reports.GroupLost) -> None:
        """Raises RunFailed if training cannot begin without the groups lost before it. Their loss may be reported here
        after training has begun, as each supervisor has a pipe of its own.
        """
        if self._has_begun and not lost.before_training:
            return
        self._start = self._start or Start(self._config.parallel, controller_setup(self._config))
        group, rank, cause = GroupId(lost.record.group), lost.record.rank, lost.record.cause
        loss = EarlyLoss(group=group, rank=rank, cause=cause, error=lost.error, concerns_all=lost.concerns_all)
        if reason := self._start.lose(loss):
            self._on_event(lost)
            raise RunFailed(reason)

    def _give_store_up(self, reason: str) -> None:
        """Ends a control store that no remaining node reaches, so that ranks waiting for it notice."""
        store = self._store_process
        if store is not None:
            store.process.join(STORE_END_TIMEOUT_S)  # its connections break before its end is seen here
            if store.process.exitcode is not None:
                self._store_died(store)
            store.process.kill()
        self._store_failure = self._store_failure or reason

    def _store_died(self, store: processes.Child) -> None:
        self._store_failure = self._store_failure or f"the control store died: {processes.why_ended(store)}"

    def _measure_store(self, spec: EtcdStoreSpec) -> None:
        """Reports etcd's size, now and periodically: it has to last for the remaining steps."""
        self._timers.after(_STORE_POLL_S, partial(self._measure_store, spec))
        with contextlib.suppress(StoreLost):  # supervisors judge an outage
            space = etcd_space(spec)
            text = shortage(space, self._config.train.steps - self._num_steps)
            self._on_event(reports.StoreMeasured(space=space, shortage=text))

    def stop_node(self, wanted: reports.FaultWanted, node: int) -> None:
        go_on = partial(self._order, node, reports.GoOn(wanted=wanted))
        self._suspend([self._nodes[node].pid, *self._pids[node]], wanted.fault.seconds, go_on)

    def strike_store(self, wanted: reports.FaultWanted, node: int) -> None:
        fault = wanted.fault
        if self._store_process is None:
            raise RunFailed(f"faults.trace wants {fault.kind}, but this run did not start its control store")
        if fault.kind == "kill_store":
            self._store_process.process.kill()
        else:
            self._suspend([self._store_process.pid], fault.seconds, None)
        self._order(node, reports.GoOn(wanted=wanted))

    def _suspend(self, pids: list[int], seconds: float | None, then: Callable[[], None] | None) -> None:
        _signal(pids, signal.SIGSTOP)
        if seconds is not None:
            self._timers.after(seconds, lambda: _signal(pids, signal.SIGCONT))
            if then is not None:
                self._timers.after(seconds, then)

    def _poll(self) -> None:
        """Looks whether the run is asked to end and where its directory is, then reschedules itself."""
        self._timers.after(_END_POLL_S, self._poll)
        if end_signal.is_pending():
            self._on_end_asked(end_signal.WITHOUT_LIMIT.name, None)
        if removed := self.directory.poll():
            self._on_end_asked(f"the removal of its directory {removed}", self._config.control.end_grace_s)

    def _on_end_asked(self, by: str, limit_s: float | None) -> None:
        """Has all supervisors end the run, and limits the time for that once; later requests change nothing."""
        is_limited = limit_s is not None and self._limit_at_s is None
        if self._asked is not None and not is_limited:
            return
        self._asked = reports.EndAsked(by=by, limit_s=limit_s)
        if limit_s is not None:
            self._limit_at_s = time.monotonic() + limit_s
            self._timers.after(limit_s, self._end_at_once)
        for node in self._nodes:
            self._order(node, self._end_early())
        self._on_event(self._asked)

    def _end_early(self) -> reports.EndEarly:
        at_s = self._limit_at_s
        return reports.EndEarly(limit_s=None if at_s is None else max(0.0, at_s - time.monotonic()))

    def _end_at_once(self) -> None:
        raise _GraceOver

    def _order(self, node: int, order: reports.DriverOrder) -> None:
        with contextlib.suppress(OSError):  # the node is lost
            self._nodes[node].reports.send(order)

    # ------------------------------------------------------------------------------------------------------- end

    @property
    def left_s(self) -> float:
        """How much is left of the grace period; infinite if none has begun."""
        return math.inf if self._limit_at_s is None else self._limit_at_s - time.monotonic()

    @property
    def _not_in_time(self) -> str:
        return f"it could not end in order within control.end_grace_s={self._config.control.end_grace_s:g}"

    def _stopped(self, trouble: str = "") -> EndRecord:
        steps = f"{self._num_steps} of {self._config.train.steps} steps"
        return stopped(trouble, by="" if self._asked is None else self._asked.by, steps=steps)

    def _saved_state(self) -> str:
        return saved_state(self._config.checkpoint, self._run_dir, self._num_steps)

    def _end_record(self) -> EndRecord:
        if self._is_cut_off:
            return self._stopped(self._not_in_time + self._saved_state())
        if self._store_failure:
            return EndRecord(outcome="failed", reason=self._store_failure + self._saved_state())
        exits = {key: code for ended in self._ended.values() for key, code in ended.exits.items()}
        codes = codes_of(exits, self._absent_groups)
        outcome = outcome_of(codes)
        if not codes:
            self._read_stop_reason()
            if self._is_halted or not self._has_raised:
                outcome = "halted" if self._is_halted else "wipe_out"
        if outcome == "stopped":
            return self._stopped()
        reason = self._stop_reason or (
            f"no group is left, the last was lost by {self._last_cause}" if not codes else f"exit codes {sorted(codes)}"
        )
        if outcome == "wipe_out" and self._stop_reason:
            reason += self._saved_state()
        return EndRecord(outcome=outcome, reason="" if outcome == "finished" else reason)

    def _read_stop_reason(self) -> None:
        """Looks in the log for a common reason, such as divergence, when no group is left."""
        with self._interrupts.allowed():
            stop = self._follower.stop()
        if isinstance(stop, StopHalted):
            self._is_halted, self._stop_reason = True, stop.reason


def _remove_keys(spec: EtcdStoreSpec) -> None:
    """Removes the run's keys from etcd after the last writer has ended. They stay if etcd does not answer. The journal
    holds all that was in the log, and failed runs would fill etcd one after another.
    """
    store = EtcdControlStore(replace(spec, timeout_s=_LAST_ANSWER_S))
    with contextlib.suppress(StoreLost), contextlib.closing(store):
        store.clear()


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


HANDLERS: dict[str, Callable[[Driver, reports.FaultWanted, int], None]] = {
    "stop_node": Driver.stop_node,
    "stop_store": Driver.strike_store,
    "kill_store": Driver.strike_store,
}
"""Faults that the driver injects into processes of its own machine; it is given the node of the fault."""
