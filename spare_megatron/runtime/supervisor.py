"""Looks after the ranks of one node: starts them, reaps them, watches them, and has the group of a lost one fenced."""

import contextlib
import os
import signal
import sys
import time
from multiprocessing.connection import Connection, Pipe, wait

from spare_megatron.control.open_store import open_store
from spare_megatron.core.liveness import BEATS_PER_INTERVAL, Liveness, first_to_stop
from spare_megatron.core.topology import GroupId, Member
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import LossRecord
from spare_megatron.runtime.agenda import Agenda
from spare_megatron.runtime.causes import LOSSLESS_EXITS, cause_of_end
from spare_megatron.runtime.network import NodeNetwork
from spare_megatron.runtime.processes import log_to_file
from spare_megatron.runtime.rank_processes import RankProcesses
from spare_megatron.runtime.reports import (
    ExitCode,
    FaultStruck,
    FaultWanted,
    GoOn,
    GroupLost,
    GroupRejoined,
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
    StoreGone,
)
from spare_megatron.runtime.restarts import Restarts
from spare_megatron.runtime.spec import NodeSpec
from spare_megatron.runtime.store_link import FenceWanted, FenceWritten, LinkEvent, LinkLost, NodeSilent, StoreLink

_SAVING_S = 60.0
"""How long ranks may take to save their state once the store is gone."""

_FAREWELL_S = 5.0
"""Longest wait for the store to take the node's last word."""


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
        self._control = spec.config.control
        self._interval_s = self._control.heartbeat_interval_s
        self._network = None if spec.hub_pid is None else NodeNetwork(spec.node, spec.hub_pid)
        self._journal = JournalWriter(spec.run_dir, spec.name)
        self._ranks = RankProcesses(spec)
        self._liveness: dict[RankKey, Liveness] = {}
        self._tracebacks: dict[RankKey, str] = {}
        self._lost: set[GroupId] = set()
        self._num_fences_wanted = 0  # and not written yet
        self._restarts = Restarts(spec.config.spare.rejoins, self._interval_s)
        self._has_begun = False
        self._is_over = False
        self._store_failure = ""
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
            self._ranks.start_all()
            self._tell(RanksStarted(node=self._spec.node, pids=self._ranks.pids))
            self._link.start()
            self._watch()
        except _Stopped:
            return "stopped"
        except _Failed as error:
            return str(error)
        return self._store_failure

    def close(self, failure: str) -> None:
        """Leaves no process behind."""
        self._ranks.end()
        if not failure:
            self._link.stop(_FAREWELL_S)
            self._serve_link()
        self._journal.close()
        self._tell(NodeEnded(node=self._spec.node, exits=self._ranks.exits, failure=failure))
        sys.stdout.flush()
        os._exit(0)  # the link's thread may be waiting for a store that does not answer

    # ----------------------------------------------------------------------------------------------------- watch

    def _watch(self) -> None:
        """Serves reports, deaths and silence until no rank is left, or about to come back."""
        self._look()
        ranks = self._ranks
        while ranks.sentinels or self._is_awaiting_more():
            ready = wait([*ranks.pipes, *ranks.sentinels, self._driver, self._inbox], self._agenda.pause_s())
            # Deaths first: a fence is urgent, a report is not.
            for key in [ranks.sentinels.pop(item) for item in ready if item in ranks.sentinels]:
                self._reap(key)
            for pipe in [item for item in ready if item in ranks.pipes]:
                if not self._serve(pipe):
                    del ranks.pipes[pipe]
            if self._driver in ready:
                self._obey()
            self._serve_link()
            self._agenda.run_due()
        for pipe in ranks.pipes:
            while pipe.poll() and self._serve(pipe):
                pass

    def _is_awaiting_more(self) -> bool:
        """Whether a fence is still to be written, or a group to be started again."""
        if self._store_failure:
            return False
        return bool(self._num_fences_wanted or (self._restarts.coming_back and not self._is_over))

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
                self._has_begun = True
                self._restarts.up(group)
                self._watch_beats_of(group)
            case GroupRejoined(member=member):
                self._restarts.not_admitted.discard(member.group)
            case FaultStruck(fault=fault):
                self._ranks.forget_fault(fault)
                return True
            case FaultWanted():
                self._inflict(report)
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
        self._let_go_on(order.wanted)

    def _inflict(self, wanted: FaultWanted) -> None:
        """A fault that strikes a rank from outside, or this supervisor; those of the run are the driver's affair."""
        seconds = wanted.fault.seconds
        match wanted.fault.kind:
            case "stop":
                if self._ranks.is_there((wanted.fault.group, wanted.fault.rank), wanted.pid):
                    os.kill(wanted.pid, signal.SIGSTOP)
                if seconds is not None:
                    self._agenda.after(seconds, lambda: self._let_go_on(wanted))
            case "cut":
                assert self._network is not None, "validation refuses it otherwise"
                self._network.cut()
                if seconds is not None:
                    self._agenda.after(seconds, self._network.mend)
                self._let_go_on(wanted)
            case "kill_supervisor":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                self._tell(wanted)

    def _let_go_on(self, wanted: FaultWanted) -> None:
        key = (wanted.fault.group, wanted.fault.rank)
        if self._ranks.is_there(key, wanted.pid):
            os.kill(wanted.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):  # it has been killed meanwhile
                self._ranks.child(key).reports.send("go on")

    def _watch_beats_of(self, group: GroupId) -> None:
        """From here on: what comes before has the timeout of the start."""
        for key in self._ranks.of(group):
            self._liveness[key] = self._new_liveness()

    def _new_liveness(self) -> Liveness:
        return Liveness(self._interval_s, self._control.group_timeout_s)

    def _reap(self, key: RankKey) -> None:
        group, rank = key
        code = self._ranks.reap(key)
        self._liveness.pop(key, None)
        if code in LOSSLESS_EXITS:
            self._end_with_the_run()
        if code in LOSSLESS_EXITS or group in self._lost or self._store_failure:
            return
        if code == ExitCode.STORE_LOST:
            # Perhaps the store is gone for everybody. The link will know by then.
            member = self._ranks.member(group)
            self._agenda.after(self._interval_s, lambda: self._lose_without_store(member, rank))
            return
        self._hear(group)  # the traceback comes before the end
        self._lose(group, rank, *cause_of_end(code, self._tracebacks.get(key, "")))

    def _lose_without_store(self, member: Member, rank: int) -> None:
        is_present = member == self._ranks.member(member.group) and member.group not in self._lost
        if is_present and not self._store_failure:
            self._lose(member.group, rank, *cause_of_end(ExitCode.STORE_LOST))

    def _hear(self, group: GroupId) -> None:
        """All that the group's ranks have reported so far."""
        for pipe in [pipe for pipe, key in self._ranks.pipes.items() if key[0] == group]:
            while pipe.poll() and self._serve(pipe):
                pass

    def _end_with_the_run(self) -> None:
        """Nobody waits for groups that have yet to be taken in."""
        self._is_over = True
        for group in sorted(self._restarts.not_admitted):
            self._hear(group)
        for group in self._restarts.not_admitted:
            self._lost.add(group)
            self._ranks.kill(group)

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
            self._liveness = {key: self._new_liveness() for key in self._liveness}
            return
        pulses = {key: self._ranks.pulse(key) for key in self._liveness}
        causes = {key: cause for key in pulses if (cause := self._liveness[key].look(pulses[key], now_s))}
        for (group, rank), cause in causes.items():
            if group not in self._lost:
                peers = {key[1]: pulse for key, pulse in pulses.items() if key[0] == group}
                culprit = rank if "heartbeat" in cause else first_to_stop(peers)
                pulse = peers[culprit]
                self._lose(group, culprit, f"{cause} in {pulse.operation} of step {pulse.step}")

    def _look_at_store(self, now_s: float) -> None:
        silent_s, limit_s = self._link.unanswered_s(), self._control.store_timeout_s
        if silent_s > self._interval_s and self._away_since_s is None:
            self._away_since_s = now_s - silent_s
            self._tell(StoreAway(node=self._spec.node, limit_s=limit_s))
        elif silent_s <= self._interval_s and self._away_since_s is not None:
            self._tell(StoreBack(node=self._spec.node, away_s=now_s - self._away_since_s))
            self._away_since_s = None
        if silent_s > limit_s:
            self._give_store_up(
                f"the control store did not answer for control.store_timeout_s={limit_s:g}; see why it does not, "
                "and whether it can be reached from here"
            )

    def _give_store_up(self, reason: str) -> None:
        """Ranks find out for themselves, save their state and end; who has not in time is ended."""
        if self._store_failure:
            return
        self._store_failure, self._is_over = reason, True
        self._tell(StoreGone(node=self._spec.node, reason=reason))
        self._agenda.after(_SAVING_S, self._stop_saving)

    def _stop_saving(self) -> None:
        raise _Failed(f"{self._store_failure}; some ranks had not saved their state {_SAVING_S:g} s later")

    # ------------------------------------------------------------------------------------------------------ loss

    def _lose(self, group: GroupId, rank: int, cause: str, error: str = "") -> None:
        """Fences the group, and ends what is left of it here: it is of no use and must not linger."""
        self._lost.add(group)
        self._want_fence(group, rank, cause, error)
        self._ranks.kill(group)
        for key in self._ranks.of(group):
            self._liveness.pop(key, None)

    def _want_fence(self, group: GroupId, rank: int, cause: str, error: str = "") -> None:
        member = self._ranks.member(group) if group in self._ranks.groups else None
        wanted = FenceWanted(
            group=group, member=member, rank=rank, cause=cause, error=error, from_index=self._head_hint
        )
        self._link.fence(wanted)
        self._num_fences_wanted += 1

    def _serve_link(self) -> None:
        while self._inbox.poll():
            event: LinkEvent = self._inbox.recv()
            match event:
                case FenceWritten(wanted=wanted, member=member, entry_index=index):
                    self._fenced(wanted, member, index)
                case NodeSilent(node=node, cause=cause):
                    for group in self._spec.config.parallel.groups_on(node):
                        self._want_fence(group, -1, f"node {node}: {cause}")
                case LinkLost(reason=reason):
                    self._give_store_up(f"the control store is gone: {reason}")

    def _fenced(self, wanted: FenceWanted, member: Member, index: int) -> None:
        """The loss is in the log: it is told, and the group may come back."""
        self._num_fences_wanted -= 1
        self._head_hint = max(self._head_hint, index)
        group = wanted.group
        is_lost = group in self._ranks.groups and member == self._ranks.member(group) and group in self._lost
        may_restart = is_lost and self._spec.config.spare.rejoins > 0 and not self._is_over
        is_given_up = may_restart and not self._bring_back(member)
        record = LossRecord(
            group=group,
            rank=wanted.rank,
            cause=wanted.cause,
            entry_index=index,
            incarnation=member.incarnation,
            pending=self._ranks.pending(group),
            is_given_up=is_given_up,
        )
        self._journal.write(record)
        self._tell(
            GroupLost(
                group=group,
                rank=wanted.rank,
                cause=wanted.cause,
                traceback=self._tracebacks.pop((group, wanted.rank), ""),
                incarnation=member.incarnation,
                is_given_up=is_given_up,
            )
        )

    def _bring_back(self, lost: Member) -> bool:
        """Starts the group again, at once or later; False if it is to stay away."""
        is_whole = len(self._ranks.of(lost.group)) == self._spec.config.parallel.ranks_per_group
        if self._is_over or not self._has_begun or not is_whole:
            return False
        if lost.group in self._restarts.coming_back:
            return True
        delay_s = self._restarts.delay_s(lost)
        if delay_s is not None:
            self._agenda.after(delay_s, lambda: self._start_again(lost.group))
        return delay_s is not None

    def _start_again(self, group: GroupId) -> None:
        self._restarts.coming_back.discard(group)
        if self._is_over:
            return
        self._hear(group)
        self._ranks.start_again(group)
        for key in self._ranks.of(group):  # what its former life may have reported after it was lost
            self._tracebacks.pop(key, None)
            self._liveness.pop(key, None)
        self._lost.discard(group)
        member = self._ranks.member(group)
        self._link.name_incarnation(member)
        self._tell(RanksStarted(node=self._spec.node, pids=self._ranks.pids))
        self._agenda.after(self._control.startup_timeout_s, lambda: self._give_up_if_not_ready(member))

    def _give_up_if_not_ready(self, member: Member) -> None:
        is_present = member == self._ranks.member(member.group) and member.group not in self._lost
        if is_present and not any(key in self._liveness for key in self._ranks.of(member.group)):
            limit_s = self._control.startup_timeout_s
            self._lose(member.group, 0, f"not up again within control.startup_timeout_s={limit_s:g}")

    def _tell(self, report: NodeReport) -> None:
        try:
            self._driver.send(report)
        except OSError as error:
            raise _Stopped from error
