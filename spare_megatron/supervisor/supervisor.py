"""Supervises the ranks of one node: starts, watches and reaps them, and fences a group that loses one."""

import contextlib
import time
from multiprocessing.connection import Connection, Pipe, wait

from spare_megatron.core.log.actions import AwaitHosts, StopWipeOut
from spare_megatron.core.machines.failure_detector import BEATS_PER_INTERVAL, STOP_POLL_S
from spare_megatron.core.machines.group_starts import RestartBudget
from spare_megatron.core.machines.reforming import can_reform
from spare_megatron.journal.event_texts import groups_named
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import LOST_A_PEER, ExaminationRecord, LossRecord, RestartRecord
from spare_megatron.machine.gpus import ClockReader, XidWatch
from spare_megatron.machine.network import NodeNetwork
from spare_megatron.machine.timers import Timers
from spare_megatron.process import reports
from spare_megatron.process.heartbeats import CUT_OFF
from spare_megatron.process.processes import close_or_report, report_held, say
from spare_megatron.process.shortages import limits_reached
from spare_megatron.process.specs import NodeSpec
from spare_megatron.slow_machines.examination import ExaminationWanted, Examiner
from spare_megatron.stacking.layout import GroupId, MachineId, Member
from spare_megatron.store.open_store import open_store
from spare_megatron.supervisor import store_watch
from spare_megatron.supervisor.driver_link import DriverLink, Stopped
from spare_megatron.supervisor.measurements import Measurements
from spare_megatron.supervisor.node_faults import NodeFaults
from spare_megatron.supervisor.node_requests import EndRequests, RequestWatch
from spare_megatron.supervisor.places.group_reforming import Assigned, GroupReforming, PlaceTaken
from spare_megatron.supervisor.places.group_rendezvous import PartFenced, PartsReady
from spare_megatron.supervisor.rank_exits import (
    Consequence,
    RaisedExceptions,
    cause_of_end,
    consequence_of,
    with_xid_events,
)
from spare_megatron.supervisor.rank_processes import RankProcesses
from spare_megatron.supervisor.rank_watch import RankWatch
from spare_megatron.supervisor.restarts import GroupRestarts
from spare_megatron.supervisor.run_end import end_without_driver, stopped, write_end
from spare_megatron.supervisor.span_files import Timeline
from spare_megatron.voting.log_follower import controller_setup

_OF_THE_LEADER = (
    reports.StepCommitted | reports.EvaluationDecided | reports.GroupRejoined | RestartRecord | reports.RunPaused
)
"""Reports of which only those of the leader, rank 0, are forwarded."""
_SAVING_S = 60.0
"""Time that ranks have to save their state once the control store is given up."""
_FAREWELL_S = 5.0
"""Longest wait for the control store to accept the node's last heartbeat."""


class _Failed(Exception):
    """The node cannot continue."""


class _Moved(Exception):
    """The machine has another place from now on."""

    def __init__(self, change: store_watch.PlaceChanged) -> None:
        self.change = change


class Supervisor:
    """One node's event loop in the main thread: turns reports, exits, timers and store events into fences and restarts.
    Call `run`, then `leave` if the machine is to take another place, else `close`. `taken`: how it took this place, if
    it did not begin with it. `budget`: the machine's, from its former place.
    """

    def __init__(
        self,
        spec: NodeSpec,
        driver: DriverLink,
        network: NodeNetwork | None,
        examiner: Examiner,
        xids: XidWatch,
        taken: PlaceTaken | None = None,
        budget: RestartBudget | None = None,
    ) -> None:
        self._spec = spec
        self._examiner = examiner
        self._driver = driver
        self._taken = taken
        self._control = spec.config.control
        self._interval_s = self._control.heartbeat_interval_s
        self._journal = JournalWriter(spec.run_dir, spec.name, on_held=report_held(driver.report))
        self._ranks = RankProcesses(spec)
        self._timeline = Timeline(spec, self._ranks)
        driver.listener = self._timeline.on_event
        limits_s = self._control.group_timeout_s, spec.config.checkpoint.timeout_s
        self._rank_watch = RankWatch(self._ranks, self._interval_s, *limits_s)
        self._raised = RaisedExceptions()
        self._lost: set[GroupId] = set()
        self._num_fences_wanted = 0  # not written yet
        self._num_without_store = 0  # groups whose ranks have lost it, before the link has
        self._is_following = False  # whether the link follows the log, as no rank here does
        self._timers = Timers()
        self.end_requests = self._make_end_requests()
        self.budget = budget or RestartBudget(spec.config.spare.rejoins, self._interval_s)
        self.budget.hold(self._ranks.groups)
        self._restarts = self._make_restarts()
        layout = spec.config.parallel
        self._asked = layout.further_groups  # to leave, by requests
        self._restarts.on_asked(self._asked)
        self._has_given_up = False  # its place
        self._is_last_committed = False
        self._is_cut_off = False
        self._store_failure = ""
        self._head_hint = 0
        self._faults = NodeFaults(spec, self._ranks, self._timers, network, self._driver.report)
        examiner.limit, examiner.page = self._faults.limit, self._ranks.first_page
        self._leaving: frozenset[GroupId] = frozenset()  # groups that are to leave for what their machines are
        self._polled_at_s = time.monotonic()
        self._inbox, outbox = Pipe(duplex=False)
        machine = MachineId(spec.node) if taken is None else taken.holding.machine
        self._machine, self._xids = machine, xids
        self._started_again_at_s: dict[GroupId, float] = {}
        self._link = self._make_link(machine, outbox)
        notice = spec.config.cluster.notice_file.replace("{node}", str(machine % layout.num_nodes))
        self._measurements = Measurements(self._ranks, machine, lambda: self._link.answers, ClockReader())
        self._requests = RequestWatch(spec.run_dir, sorted(self._ranks.groups), notice, layout.further_groups)
        self._store_watch = store_watch.StoreWatch(self._link, self._interval_s, self._control.store_timeout_s)

    def _make_end_requests(self) -> EndRequests:
        return EndRequests(
            self._timers,
            self._control.end_grace_s,
            ask_ranks=self._ranks.ask_to_end,
            cut_off=self._cut_off,
            end_at_once=self._end_at_once,
            report=self._driver.report,
        )

    def _make_restarts(self) -> GroupRestarts:
        return GroupRestarts(
            budget=self.budget,
            restarts_all=self._spec.config.checkpoint.max_restarts > 0,
            whole_groups=self._ranks.whole_groups,
            # Of a node that is taken over the last lives are not known yet: the fence of each decides.
            further_groups=frozenset() if self._spec.incarnation else self._ranks.further_groups,
            timers=self._timers,
            wait_for_parts=lambda group: self._link.wait_for_parts(self._ranks.next_member(group)),
            start_ranks=self._start_again,
        )

    def _make_link(self, machine: MachineId, outbox: Connection) -> store_watch.StoreLink:
        spec, layout = self._spec, self._spec.config.parallel
        reforms = spec.config.spare.rejoins and can_reform(layout)
        return store_watch.StoreLink(
            node=spec.node,
            layout=layout,
            interval_s=self._interval_s,
            connect=lambda: open_store(spec.store),
            outbox=outbox,
            incarnation=spec.incarnation,
            machine=machine,
            reforming=GroupReforming(spec.config, machine, lambda: self._restarts.left_out) if reforms else None,
            slabs=spec.config.slabs,
        )

    def run(self) -> str | store_watch.PlaceChanged:
        """Supervises until no rank is left. Returns why the run cannot go on, if so, or the machine's other place."""
        try:
            if self._taken is not None:
                with contextlib.suppress(OSError):
                    self._requests.poll()  # groups that have left stay away
                self._handle_requests()
                self._take_over(self._taken)
            else:
                self._ranks.start_all()
                self._driver.report(reports.RanksStarted(node=self._spec.node, pids=self._ranks.pids))
            self._link.start()
            self._requests.start()
            self._watch()
        except Stopped:
            return "stopped"
        except _Moved as moved:
            return moved.change
        except _Failed as error:
            return str(error)
        return self._store_failure

    def _cut_off(self) -> None:
        """Has the ranks save their state alone, unless the last step is committed and the store there to save it."""
        if self._is_last_committed and not self._store_watch.is_away:
            self._timers.after(self._interval_s, self._cut_off)  # it may go away
        elif not self._store_failure:
            self._is_cut_off, self._restarts.is_over = True, True
            self._store_failure = CUT_OFF
            self._ranks.ask_to_end(at_once=True)

    def _end_at_once(self) -> None:
        self._is_cut_off = True
        raise _Failed(f"it did not end within control.end_grace_s={self._control.end_grace_s:g}")

    def leave(self) -> None:
        """Ends all processes, for a supervisor of another place in this process."""
        self._requests.stop()
        self._examiner.end_all()
        self._ranks.end_all()
        self._close_files()

    def _close_files(self) -> None:
        self._faults.close()
        self._timeline.close()
        close_or_report(self._journal, self._driver.report)

    def close(self, failure: str) -> str | None:
        """Ends all processes and connections. None: the driver knows how the run has ended. Without one it is written
        here, unless the node does not know it as it has lost the store, too: returns that failure, else nothing.
        """
        self._examiner.end_all()
        self._ranks.end_all()
        if not failure:
            self._link.stop(_FAREWELL_S)
            with contextlib.suppress(_Moved):
                self._handle_link_events()
        self._close_files()
        ended = reports.NodeEnded(
            node=self._spec.node, exits=self._ranks.exits, failure=failure, is_cut_off=self._is_cut_off
        )
        self._driver.close(ended)
        if self._driver.is_there:
            return None
        if failure and not self._is_cut_off:
            return failure if self._store_failure else None
        write_end(self._spec, stopped(failure) if failure else end_without_driver(self._ranks.exits, self._lost))
        return ""

    # ----------------------------------------------------------------------------------------------------- watch

    def _watch(self) -> None:
        """Handles events until no rank is left and no fence or restart is pending."""
        self._poll()
        self._poll_stops()
        ranks = self._ranks
        while ranks.sentinels or self._is_awaiting_more():
            inboxes = [*self._driver.pipes, self._inbox, self._requests.inbox]
            ready = wait([*ranks.pipes, *ranks.sentinels, *inboxes], self._timers.pause_s())
            # Deaths first: a fence is urgent, a report is not.
            for key in ranks.reap([item for item in ready if item in ranks.sentinels]):
                self._on_rank_exit(key)
            for pipe in [item for item in ready if item in ranks.pipes]:
                if not self._receive_report(pipe):
                    del ranks.pipes[pipe]
            for _ in set(self._driver.pipes).intersection(ready):
                self._handle_order()
            self._handle_requests()
            self._handle_link_events()
            self._timers.run_due()
        for group in ranks.groups:
            self._receive_all_reports(group)

    def _is_awaiting_more(self) -> bool:
        """Whether a fence is pending, or a group may be started again, possibly after a later wipe-out."""
        restarts = self._restarts
        if self._store_failure:
            return False
        if restarts.is_over:
            return self._num_fences_wanted > 0
        may_be_wiped_out = restarts.has_begun and self._spec.config.checkpoint.max_restarts > 0
        # Both may last to the end of the run, which a node without ranks learns only from the log.
        may_last = restarts.awaits_other_nodes if restarts.coming_back else may_be_wiped_out or restarts.drained
        if may_last and not self._is_following:
            self._is_following = True
            self._link.follow(controller_setup(self._spec.config))
        is_expecting = self._num_fences_wanted or self._num_without_store
        return bool(is_expecting or restarts.coming_back or may_be_wiped_out or restarts.drained)

    def _receive_report(self, pipe: Connection) -> bool:
        """Handles one report of a rank. Returns False when its pipe has ended."""
        try:
            report: reports.RankReport = pipe.recv()
        except (EOFError, OSError):  # OSError: the rank was killed in the middle of a report
            return False
        match report:
            case reports.StepCommitted(head=head, is_last=is_last):
                self._head_hint = self._link.head = max(self._head_hint, head)
                self._is_last_committed |= is_last
            case reports.RankRaised(group=group, rank=rank):
                self._raised.note(report)
                if not (group in self._lost or self._restarts.is_over or self._store_failure):
                    self._lose(group, rank, *self._raised.cause_of_end((group, rank), report.code))
            case reports.RanksReady(group=group, is_wiped_out=is_wiped_out):
                self._restarts.on_ready(group)
                self._timers.after(self._interval_s, self._warm_spares)  # leaves the processors to the group first
                self._rank_watch.start_watching(group)
                if is_wiped_out:
                    self._restarts.on_wipe_out()
            case reports.GroupRejoined(member=(group, _)) | RestartRecord(group=group):
                self._restarts.on_admitted(GroupId(group))
            case reports.RunPaused(shards=shards):
                (self._restarts.on_pause if shards else self._restarts.on_resume)()
            case reports.FaultStruck(fault=fault):
                self._ranks.forget_fault(fault)
                self._examiner.note_fault(fault)
                return True
            case reports.FaultWanted():
                self._faults.inflict(report)
                return True
        if isinstance(report, _OF_THE_LEADER) and self._ranks.pipes[pipe][1] > 0:
            self._timeline.on_event(report)
            return True
        self._driver.report(report)
        return True

    def _handle_requests(self) -> None:
        while self._requests.inbox.poll():
            self._asked = self._requests.receive()
            if len(self._asked) == self._spec.config.parallel.num_groups:  # all machines are about to go
                self.end_requests.request("requests to all groups to leave")
            self._ranks.ask_to_leave(self._asked | self._leaving)
            self._restarts.on_asked(self._asked)

    def _handle_order(self) -> None:
        match self._driver.next_order():
            case reports.GoOn(wanted=wanted):
                self._faults.let_go_on(wanted)
            case reports.EndEarly(limit_s=limit_s):
                self.end_requests.on_asked(reports.EndAsked(by="the driver", limit_s=limit_s))

    def _on_rank_exit(self, key: reports.RankKey) -> None:
        group, rank = key
        code = self._ranks.exits[key]
        self._rank_watch.stop_watching(key)
        is_lost = group in self._lost
        match consequence_of(code, is_group_lost=is_lost, is_store_given_up=bool(self._store_failure)):
            case Consequence.RUN_ENDS:
                self._end_with_the_run()
            case Consequence.GROUP_LEFT:
                if self._ranks.have_ended(group):
                    self._receive_all_reports(group)
                    self._link.publish_left(self._ranks.member(group))
                    self._restarts.on_left(group)
            case Consequence.RUN_RESTARTS:
                if self._ranks.have_ended(group):
                    self._restarts.on_ended(group)
                self._restarts.on_wipe_out()
            case Consequence.GROUP_LOST_LATER:
                member = self._ranks.member(group)
                self._num_without_store += 1
                self._timers.after(self._interval_s, lambda: self._lose_without_store(member, rank))
            case Consequence.GROUP_LOST:
                self._receive_all_reports(group)  # a rank sends its traceback before it ends; its peers end after it
                first = self._raised.first_rank(group, rank)
                self._lose(group, first, *self._raised.cause_of_end((group, first), code))

    def _lose_without_store(self, member: Member, rank: int) -> None:
        self._num_without_store -= 1
        is_present = member == self._ranks.member(member.group) and member.group not in self._lost
        if is_present and not self._store_failure:
            self._lose(member.group, rank, *cause_of_end(reports.ExitCode.STORE_LOST))

    def _receive_all_reports(self, group: GroupId) -> None:
        for pipe in [pipe for pipe, key in self._ranks.pipes.items() if key[0] == group]:
            while pipe.poll() and self._receive_report(pipe):
                pass

    def _end_with_the_run(self) -> None:
        """Gives up the groups that have yet to be admitted again, because the run has ended."""
        self._restarts.is_over = True
        for group in sorted(self._restarts.not_admitted):
            self._receive_all_reports(group)
        for group in self._restarts.not_admitted:
            self._lost.add(group)
            self._ranks.kill(group)

    def _poll(self) -> None:
        """Polls heartbeats, the snapshot server and the store, then reschedules itself."""
        self._timers.after(self._interval_s / BEATS_PER_INTERVAL, self._poll)
        self._ranks.ensure_snapshot_server()
        now_s = time.monotonic()
        if now_s - self._polled_at_s > self._interval_s:
            self._link.forgive()  # this process was suspended, and the link's thread with it
        self._polled_at_s = now_s
        change = self._store_watch.poll(now_s)
        if change is not None:
            self._driver.report(change)
        if self._store_watch.failure:
            self._give_store_up(self._store_watch.failure)
        if self._store_watch.is_away:
            # Ranks block wherever they use the store, so a lack of progress proves nothing.
            self._rank_watch.forgive()
            return
        if (measured := self._measurements.poll(now_s)) is not None:
            self._driver.report(measured)
        for group, rank, cause in self._rank_watch.find_lost(now_s, self._lost):
            self._lose(group, rank, "; ".join([cause, *limits_reached(self._ranks.pids[group, rank])]))

    def _poll_stops(self) -> None:
        """Reads which ranks are stopped or being killed, and handles signals, then reschedules itself."""
        self._timers.after(STOP_POLL_S, self._poll_stops)
        self.end_requests.poll()
        if self._store_watch.is_away:
            return
        for group, rank, cause in self._rank_watch.find_stopped(time.monotonic(), self._lost):
            self._receive_all_reports(group)
            if group not in self._lost:
                self._lose(group, rank, cause)

    def _give_store_up(self, reason: str) -> None:
        """Gives the store up. Ranks notice by themselves, save their state and end; `_SAVING_S` limits that."""
        if self._store_failure:
            return
        self._store_failure, self._restarts.is_over = reason, True
        self._driver.report(reports.StoreGone(node=self._spec.node, reason=reason))
        self._timers.after(_SAVING_S, self._stop_saving)

    def _stop_saving(self) -> None:
        raise _Failed(f"{self._store_failure}; some ranks had not saved their state {_SAVING_S:g} s later")

    # ------------------------------------------------------------------------------------------------------ loss

    def _take_over(self, taken: PlaceTaken) -> None:
        """Fences the groups of the place's former supervisor, so that they start again under this one."""
        self._journal.write(taken.by.record(self._spec.config.parallel))
        self._driver.report(reports.MachineMoved(machine=taken.holding.machine, node=self._spec.node))
        self._restarts.has_begun = True
        for group in sorted(self._ranks.foreign):
            self._want_fence(group, -1, f"node {self._spec.node}: its supervisor is lost")

    def _lose(self, group: GroupId, rank: int, cause: str, error: str = "") -> None:
        """Fences the group and kills its ranks on this node, which must not linger."""
        self._lost.add(group)
        events = self._xids.recent(self._ranks.gpus_of(group), self._started_again_at_s.get(group, 0.0))
        self._want_fence(group, rank, *with_xid_events(cause, error, self._machine, events))
        self._ranks.kill(group)
        self._rank_watch.stop_watching(*self._ranks.of(group))

    def _want_fence(self, group: GroupId, rank: int, cause: str, error: str = "", member: Member | None = None) -> None:
        member = self._ranks.member(group) if group in self._ranks.groups - self._ranks.foreign else member
        wanted = store_watch.FenceWanted(
            group=group,
            member=member,
            rank=rank,
            cause=cause,
            error=error,
            from_index=self._head_hint,
            concerns_all=self._raised.concerns_all(group, rank),
        )
        self._link.fence(wanted)
        self._num_fences_wanted += 1

    def _handle_link_events(self) -> None:
        while self._inbox.poll():
            event: store_watch.LinkEvent = self._inbox.recv()
            match event:
                case store_watch.FenceWritten():
                    self._on_fence_written(event)
                case store_watch.NodeSilent(node=node, cause=cause, members=members, left=left):
                    self._lose_members(members, f"node {node}: {cause}")
                    if left:
                        groups = groups_named([member.group for member in left])
                        say(f"node {node}: {cause}; {groups} had left the run, which loses nothing")
                        self._driver.report(reports.LeftNodeGone(node=node, members=left))
                case store_watch.HasLeft(member=member):
                    self._num_fences_wanted -= 1
                    self._ranks.adopt(member)
                    self._lost.add(member.group)
                    self._restarts.on_left(member.group)
                case PartFenced(member=member, rank=rank, cause=cause):
                    if member == self._ranks.member(member.group):
                        self._lose_part(member.group, rank, cause)
                    elif member == self._ranks.next_member(member.group):
                        self._ranks.adopt(member)
                        self._restarts.on_missed(member.group)
                case store_watch.RunsWithout(member=member):
                    self._wait_out(member)
                case PartsReady(member=member, stages=stages):
                    self._ranks.stages[member.group] = stages
                    self._restarts.start(member.group)
                case store_watch.LogStopped(stop=stop):
                    if isinstance(stop, AwaitHosts):
                        self._restarts.on_pause()
                    elif isinstance(stop, StopWipeOut) and not stop.is_final:
                        self._restarts.on_wipe_out()
                    else:
                        self._end_with_the_run()
                case Assigned():
                    self._journal.write(event.record(self._spec.config.parallel))
                case store_watch.QuarantineChanged():
                    self._on_quarantine(event)
                case ExaminationWanted():
                    self._examiner.start(event)
                case ExaminationRecord():
                    self._journal.write(event)
                    self._driver.report(event)
                case store_watch.PlaceChanged() if not self._has_given_up:
                    raise _Moved(event)
                case store_watch.NodeReplaced() | store_watch.PlaceChanged():
                    raise Stopped
                case store_watch.LinkLost(reason=reason):
                    self._give_store_up(f"the control store is gone: {reason}")

    def _wait_out(self, member: Member) -> None:
        """The group's present incarnation does without this machine, which takes part in a later one."""
        self._num_fences_wanted -= 1
        self._ranks.adopt(Member(member.group, member.incarnation - 1))
        self._lost.add(member.group)
        self._restarts.on_missed(member.group)

    def _on_quarantine(self, change: store_watch.QuarantineChanged) -> None:
        """Starts no group while this machine is in quarantine, and asks groups to leave whose machines change."""
        self._leaving = change.leaving
        self._ranks.ask_to_leave(self._asked | self._leaving)
        if change.own is None:
            self._restarts.release()
            return
        self._restarts.hold()
        if change.by is not None:
            self._journal.write(change.by.record(self._spec.config.parallel))
        self._driver.report(
            reports.MachineQuarantined(machine=change.own.machine, cause=change.own.cause, reason=change.own.reason)
        )

    def _lose_members(self, members: tuple[Member, ...], cause: str) -> None:
        for member in members:
            if member.group in self._ranks.groups:
                self._lose_part(member.group, -1, cause)
            else:
                self._want_fence(member.group, -1, cause, member=member)

    def _lose_part(self, group: GroupId, rank: int, cause: str) -> None:
        """Loses a group that is lost on another node, if ranks of it still run here."""
        if group not in self._lost | self._ranks.foreign and not self._ranks.have_ended(group):
            self._lose(group, rank, cause)

    def _on_fence_written(self, fence: store_watch.FenceWritten) -> None:
        """Journals and reports a loss that is now in the log, and schedules the group's restart."""
        wanted, member, index = fence.wanted, fence.member, fence.entry_index
        self._num_fences_wanted -= 1
        self._head_hint = max(self._head_hint, index)
        group = wanted.group
        if group in self._ranks.foreign:
            self._ranks.adopt(member)
            self._lost.add(group)
        is_lost = group in self._ranks.groups and member == self._ranks.member(group) and group in self._lost
        is_given_up = is_lost and not self._restarts.on_fenced(group, is_own=self._has_ended(wanted))
        if is_given_up and group not in self._ranks.whole_groups:
            self._link.give_place_up()
            self._has_given_up = True
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
        raised = self._raised.pop(group, wanted.rank)
        self._driver.report(
            reports.GroupLost(
                record=record,
                traceback="" if raised is None else raised.traceback,
                error=wanted.error,
                concerns_all=wanted.concerns_all,
                before_training=fence.before_training,
            )
        )

    def _has_ended(self, wanted: store_watch.FenceWanted) -> bool:
        """Whether the loss began on this machine, as far as it knows."""
        is_here = (wanted.group, wanted.rank) in self._ranks.of(wanted.group) and wanted.cause != LOST_A_PEER
        return is_here or wanted.group in self._ranks.whole_groups

    def _start_again(self, group: GroupId, takes_spares: bool) -> None:
        self._receive_all_reports(group)
        started, failure = self._ranks.start_again(group, self._restarts.wiped_out_at_s, takes_spares=takes_spares)
        self._started_again_at_s[group] = time.monotonic()
        self._raised.forget(group)  # reports of the lost incarnation
        self._rank_watch.stop_watching(*self._ranks.of(group))
        self._lost.discard(group)
        member = self._ranks.member(group)
        self._journal.write(started)
        self._link.publish_incarnation(member, started.stages)
        self._is_following = False
        self._driver.report(reports.RanksStarted(node=self._spec.node, pids=self._ranks.pids))
        self._timers.after(self._control.startup_timeout_s, lambda: self._give_up_if_not_ready(member))
        if failure:
            self._lose(group, self._ranks.of(group)[0][1], failure)

    def _give_up_if_not_ready(self, member: Member) -> None:
        is_present = member == self._ranks.member(member.group) and member.group not in self._lost
        if is_present and self._rank_watch.is_getting_on(member.group, time.monotonic()):  # may read a long log
            self._timers.after(self._interval_s, lambda: self._give_up_if_not_ready(member))
        elif is_present and not self._rank_watch.is_watched(member.group):
            limit_s = self._control.startup_timeout_s
            rank = 0 if member.group in self._ranks.whole_groups else -1  # on whichever node it was
            self._lose(member.group, rank, f"did not start again within control.startup_timeout_s={limit_s:g}")

    def _warm_spares(self) -> None:
        if not self._restarts.is_over:
            self._ranks.warm_spares()
