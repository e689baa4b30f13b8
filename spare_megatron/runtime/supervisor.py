"""Looks after the ranks of one node: starts them, reaps them, watches them, and has the group of a lost one fenced."""

import contextlib
import os
import signal
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait

from spare_megatron.config.schema import RunConfig
from spare_megatron.control.open_store import open_store
from spare_megatron.core.liveness import BEATS_PER_INTERVAL, Liveness
from spare_megatron.core.topology import GroupId
from spare_megatron.faults.injection import InjectedFault
from spare_megatron.faults.trace import Fault
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import LossRecord
from spare_megatron.runtime.agenda import Agenda
from spare_megatron.runtime.beacon import Page, new_page, read_page
from spare_megatron.runtime.network import NodeNetwork
from spare_megatron.runtime.processes import Child, describe_exit, end_child, log_to_file, start_child
from spare_megatron.runtime.reports import (
    ExitCode,
    FaultWanted,
    GoOn,
    GroupLost,
    NodeEnded,
    NodeReport,
    RankKey,
    RankRaised,
    RankReport,
    RanksReady,
    RanksStarted,
    StepCommitted,
    StoreAway,
    StoreBack,
)
from spare_megatron.runtime.spec import NodeSpec, RankSpec
from spare_megatron.runtime.store_link import FenceWanted, FenceWritten, LinkEvent, LinkLost, NodeSilent, StoreLink

_LOSSLESS_EXITS = (ExitCode.FINISHED, ExitCode.WIPE_OUT, ExitCode.HALTED)
"""Ends that all groups come to by themselves: no reason to fence anybody."""

_CAUSES: dict[int, str] = {
    ExitCode.GROUP_BROKEN: "lost a peer in its group",
    ExitCode.FENCED: "found itself fenced; the log entry says why",
}
"""What the exit codes of lost groups mean, for people."""

_FAREWELL_S = 5.0
"""Longest wait for the store to take the node's last word."""

INJECTED = f"{InjectedFault.__module__}.{InjectedFault.__qualname__}"
"""How the last line of the traceback of an injected fault begins."""


def supervise(spec: NodeSpec, driver: Connection) -> None:
    """The main function of a supervisor's process. It ends with its ranks, or when the driver says so or is gone."""
    log_to_file(spec.run_dir, spec.name)
    supervisor = _Supervisor(spec, driver)
    failure = supervisor.run()
    supervisor.close(failure)


class _Stopped(Exception):
    """The driver wants the node to end, or is gone."""


class _Failed(Exception):
    """The node cannot go on."""


class _Supervisor:
    """One node. All of it happens in the main thread, but for what `StoreLink` does."""

    def __init__(self, spec: NodeSpec, driver: Connection) -> None:
        self._spec = spec
        self._driver = driver
        self._interval_s = spec.config.control.heartbeat_interval_s
        self._network = None if spec.hub_pid is None else NodeNetwork(spec.node, spec.hub_pid)
        # Forked, not from the fork server, so that ranks are this process's children and die with it.
        self._context = get_context("fork")
        self._journal = JournalWriter(spec.run_dir, spec.name)
        self._ranks: dict[RankKey, Child] = {}
        self._pages: dict[RankKey, Page] = {}
        self._liveness: dict[RankKey, Liveness] = {}
        self._exits: dict[RankKey, int] = {}
        self._tracebacks: dict[RankKey, str] = {}
        self._lost: set[GroupId] = set()
        self._head_hint = 0
        self._agenda = Agenda()
        self._looked_at_s = time.monotonic()
        self._away_since_s: float | None = None
        self._inbox, outbox = Pipe(duplex=False)
        self._link = StoreLink(
            node=spec.node,
            num_nodes=spec.config.cluster.num_nodes,
            interval_s=self._interval_s,
            connect=lambda: open_store(spec.store),
            outbox=outbox,
        )

    def run(self) -> str:
        """Looks after the ranks until none is left. Returns why the run cannot go on, where that is so."""
        try:
            for key in self._spec.config.parallel.ranks_on(self._spec.node):
                self._start_rank(key)
            self._tell(RanksStarted(node=self._spec.node, pids={key: c.pid for key, c in self._ranks.items()}))
            self._link.start()
            self._watch()
        except _Stopped:
            return "stopped"
        except _Failed as error:
            return str(error)
        return ""

    def close(self, failure: str) -> None:
        """Leaves no process behind."""
        for child in self._ranks.values():
            end_child(child)
        if not failure:
            self._link.stop(_FAREWELL_S)
            with contextlib.suppress(_Failed):  # the store may have gone before its last word
                self._serve_link()
        self._journal.close()
        self._tell(NodeEnded(node=self._spec.node, exits=self._exits, lost=frozenset(self._lost), failure=failure))
        sys.stdout.flush()
        os._exit(0)  # the link's thread may be waiting for a store that does not answer

    def _start_rank(self, key: RankKey) -> None:
        group, rank = key
        page = self._pages[key] = new_page(self._context)
        spec = RankSpec(
            config=self._spec.config,
            run_dir=self._spec.run_dir,
            group=group,
            rank=rank,
            device=_choose_device(self._spec.config, self._spec.node, key),
            store=self._spec.store,
            faults=tuple(f for f in self._spec.faults if (f.group, f.rank) == key),
            page=page,
            supervisor_pid=os.getpid(),
        )
        self._ranks[key] = start_child(self._context, spec.name, self._spec.rank_main, spec)

    # ----------------------------------------------------------------------------------------------------- watch

    def _watch(self) -> None:
        """Serves reports, deaths and silence until no rank is left."""
        self._look()
        pipes = {child.reports: key for key, child in self._ranks.items()}
        sentinels = {child.process.sentinel: key for key, child in self._ranks.items()}
        while sentinels:
            ready = wait([*pipes, *sentinels, self._driver, self._inbox], self._agenda.pause_s())
            # Deaths first: a fence is urgent, a report is not.
            for key in [sentinels.pop(item) for item in ready if item in sentinels]:
                self._reap(key)
            for pipe in [item for item in ready if item in pipes]:
                if not self._serve(pipe):
                    del pipes[pipe]
            if self._driver in ready:
                self._obey()
            self._serve_link()
            self._agenda.run_due()
        for pipe in pipes:
            while pipe.poll() and self._serve(pipe):
                pass

    def _serve(self, pipe: Connection) -> bool:
        """One report of a rank; False if there will be none any more."""
        try:
            report: RankReport = pipe.recv()
        except (EOFError, OSError):  # OSError: its writer was killed in the middle of a report
            return False
        match report:
            case StepCommitted(head=head):
                self._head_hint = max(self._head_hint, head)
            case RankRaised(group=group, rank=rank, traceback=text):
                self._tracebacks[group, rank] = text
            case RanksReady(group=group):
                self._watch_beats_of(group)
            case FaultWanted(fault=fault):
                self._inflict(fault)
                return True
        self._tell(report)
        return True

    def _obey(self) -> None:
        """What the driver says: go on after a fault, or end."""
        try:
            order = self._driver.recv()
        except (EOFError, OSError) as error:
            raise _Stopped from error
        if not isinstance(order, GoOn):
            raise _Stopped
        self._let_go_on(order.key)

    def _inflict(self, fault: Fault) -> None:
        """A fault that strikes a rank from outside, or this supervisor; those of the run are the driver's affair."""
        key = (fault.group, fault.rank)
        match fault.kind:
            case "stop":
                os.kill(self._ranks[key].pid, signal.SIGSTOP)
                if fault.seconds is not None:
                    self._agenda.after(fault.seconds, lambda: self._let_go_on(key))
            case "cut":
                assert self._network is not None, "validation refuses it otherwise"
                self._network.cut()
                if fault.seconds is not None:
                    self._agenda.after(fault.seconds, self._network.mend)
                self._let_go_on(key)
            case "kill_supervisor":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                self._tell(FaultWanted(fault=fault))

    def _let_go_on(self, key: RankKey) -> None:
        child = self._ranks[key]
        if child.process.is_alive():
            os.kill(child.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):  # it has been killed meanwhile
                child.reports.send("go on")

    def _watch_beats_of(self, group: GroupId) -> None:
        """From here on: what comes before has the timeout of the start."""
        for key in self._ranks:
            if key[0] == group:
                self._liveness[key] = Liveness(self._interval_s, self._spec.config.control.group_timeout_s)

    def _reap(self, key: RankKey) -> None:
        group, rank = key
        child = self._ranks[key]
        child.process.join()
        code = child.process.exitcode
        assert code is not None, "a process whose sentinel is ready has ended"
        self._exits[key] = code
        self._liveness.pop(key, None)
        if code in _LOSSLESS_EXITS or group in self._lost:
            return
        while child.reports.poll() and self._serve(child.reports):
            pass  # the traceback comes before the end
        error = _last_line(self._tracebacks.get(key, ""))
        cause = error or _CAUSES.get(code) or describe_exit(code)
        self._lose(group, rank, cause, "" if error.startswith(INJECTED) else error)

    def _look(self) -> None:
        """At all beacons, and at whether the store answers; from now on ever again."""
        self._agenda.after(self._interval_s / BEATS_PER_INTERVAL, self._look)
        now_s = time.monotonic()
        if now_s - self._looked_at_s > self._interval_s:
            self._link.forgive()  # this process was stopped, and the link's thread with it
        self._looked_at_s = now_s
        self._look_at_store(now_s)
        if self._away_since_s is not None:
            # Ranks wait for the store wherever they ask it. That is nobody's fault.
            for group in {key[0] for key in self._liveness}:
                self._watch_beats_of(group)
            return
        pulses = {key: read_page(self._pages[key]) for key in self._liveness}
        causes = {key: cause for key in pulses if (cause := self._liveness[key].look(pulses[key], now_s))}
        # Where several stand still, the others wait for the one that stood still first.
        for key in sorted(causes, key=lambda key: pulses[key].progress_at_s):
            if key[0] not in self._lost:
                self._lose(*key, f"{causes[key]} in {pulses[key].operation} of step {pulses[key].step}")

    def _look_at_store(self, now_s: float) -> None:
        silent_s, limit_s = self._link.unanswered_s(), self._spec.config.control.store_timeout_s
        if silent_s > self._interval_s and self._away_since_s is None:
            self._away_since_s = now_s - silent_s
            self._tell(StoreAway(node=self._spec.node, limit_s=limit_s))
        elif silent_s <= self._interval_s and self._away_since_s is not None:
            self._tell(StoreBack(node=self._spec.node, away_s=now_s - self._away_since_s))
            self._away_since_s = None
        if silent_s > limit_s:
            raise _Failed(
                f"the control store did not answer for control.store_timeout_s={limit_s:g}; see why it does not, "
                "and whether it can be reached from here"
            )

    # ------------------------------------------------------------------------------------------------------ loss

    def _lose(self, group: GroupId, rank: int, cause: str, error: str = "") -> None:
        """Fences the group, and ends what is left of it here: it is of no use and must not linger."""
        self._lost.add(group)
        self._want_fence(group, rank, cause, error)
        for key, child in self._ranks.items():
            if key[0] == group and child.process.is_alive():
                child.process.kill()

    def _want_fence(self, group: GroupId, rank: int, cause: str, error: str = "") -> None:
        self._link.fence(FenceWanted(group=group, rank=rank, cause=cause, error=error, from_index=self._head_hint))

    def _serve_link(self) -> None:
        while self._inbox.poll():
            event: LinkEvent = self._inbox.recv()
            match event:
                case FenceWritten(wanted=wanted, entry_index=index):
                    self._fenced(wanted, index)
                case NodeSilent(node=node, cause=cause):
                    for group in self._spec.config.parallel.groups_on(node):
                        self._want_fence(group, -1, f"node {node}: {cause}")
                case LinkLost(reason=reason):
                    raise _Failed(f"the control store is gone: {reason}")

    def _fenced(self, wanted: FenceWanted, index: int) -> None:
        pending = [
            {"rank": key[1], "operation": str(pulse.operation), "step": pulse.step}
            for key, page in self._pages.items()
            if key[0] == wanted.group
            for pulse in [read_page(page)]
        ]
        self._journal.write(
            LossRecord(group=wanted.group, rank=wanted.rank, cause=wanted.cause, entry_index=index, pending=pending)
        )
        text = self._tracebacks.get((wanted.group, wanted.rank), "")
        self._tell(GroupLost(group=wanted.group, rank=wanted.rank, cause=wanted.cause, traceback=text))

    def _tell(self, report: NodeReport) -> None:
        try:
            self._driver.send(report)
        except OSError as error:
            raise _Stopped from error


def _choose_device(config: RunConfig, node: int, key: RankKey) -> str:
    """The rank's device on its node."""
    local_rank = config.parallel.ranks_on(node).index(key)
    return f"cuda:{local_rank}" if config.cluster.device == "gpu" else "cpu"


def _last_line(traceback: str) -> str:
    lines = traceback.strip().splitlines()
    return lines[-1] if lines else ""
