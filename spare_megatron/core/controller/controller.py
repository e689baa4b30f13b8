"""The controller of a run: folds the decision log and answers events with actions.

Pure: time comes from the driver, which executes the actions. The simulator drives the same class as every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spare_megatron.core.audits.audits import AuditPolicy, Dispute
from spare_megatron.core.controller.audit_course import AuditCourse
from spare_megatron.core.controller.decision import decide, decide_undo, departures
from spare_megatron.core.controller.restart import MAX_RESUMES_WITHOUT_COMMIT, RestartLimits, Restarts, decide_pause
from spare_megatron.core.log import actions, entries, events
from spare_megatron.core.log.actions import Action
from spare_megatron.core.log.membership import Change, LogTerms, Membership
from spare_megatron.core.log.votes import Attempted
from spare_megatron.core.saves.checkpoint_policy import LogClock, SavePolicy, Saves
from spare_megatron.core.saves.checkpoint_validity import CheckpointValidity
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy, WholeSnapshot
from spare_megatron.machine.gpus.device_errors import is_ambiguous
from spare_megatron.stacking.batch_ramp import BatchRamp
from spare_megatron.stacking.layout import GroupId, Member, ShardId, Slabs
from spare_megatron.stacking.order import Dealing, Granularity, initial_order
from spare_megatron.stacking.pace_evidence import PaceEvidence, PaceException, exceptions
from spare_megatron.stacking.paces import EVEN, LIKE, Paces, Rounds
from spare_megatron.stacking.placement import WipeOut
from spare_megatron.stacking.plans import Audit, Microbatch, StepPlan, make_plan
from spare_megatron.stacking.state_partitions import Hosts, Ownership, StateWipeOut, first_ownership

MAX_RETRIES_WITHOUT_LOSS = 5
"""Attempts of one step that may fail in a row without a loss; one more halts the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSetup(LogTerms):
    """The settings that decide."""

    microbatches_per_shard: int
    granularity: Granularity = "microbatch"
    saves: SavePolicy | None = None
    fetch: int = 0
    """With `last_resort`, time until a group has data of other shards (`stacking.reorder`); 0 in runs."""
    ends_at_s: float | None = None
    """On the driver's clock: the first commit decided at or after this time is the last. None trains all steps."""
    restarts: RestartLimits | None = None
    """Limits of restarts after a wipe-out; None leaves restarts to the driver."""
    pause_s: float | None = None
    """Longest wait for the return of hosts while a whole copy of the state lives; None if no group comes back."""
    snapshots: SnapshotPolicy | None = None
    audits: AuditPolicy | None = None
    ramp: BatchRamp | None = None
    """Microbatches per shard by step, up to `microbatches_per_shard`; None if constant."""
    rounds: Rounds | None = None
    """What the time of a group's work follows from; None deals the same work to slow groups as to fast ones."""
    slabs: Slabs | None = None
    """What stages are made of, if groups may have fewer than others."""


class Controller(Membership):
    """Folds the log of one run, and decides. Controllers of all ranks are equal after the same entries."""

    def __init__(self, setup: ControllerSetup) -> None:
        super().__init__(setup)
        self._setup = setup
        self._attempted_by = self.voters  # voters of this attempt, including those lost since it began
        self._all_groups = self.members
        self._paces = PaceEvidence()
        self._ramp = setup.ramp or BatchRamp.constant(setup.microbatches_per_shard)
        self._deal_step()
        self._evaluation_dealing = self._deal(setup.evaluation.microbatches_per_shard) if setup.evaluation else None
        self._plans: list[StepPlan] = []  # of this step or evaluation: the plan, then its patches
        self._orphans: list[Microbatch] = []
        self.ownership = None if setup.partitions is None else first_ownership(setup.partitions, self.voters)
        self._is_asked = False  # whether the last commit was the last because the run was asked to end
        self._is_end_requested = False
        self._retries_without_loss = 0
        self._last_error, self._last_error_in = "", 0  # of a group lost in this step; the first attempt that had it
        self._wrong_sums: tuple[GroupId, ...] = ()  # that found some in the attempt before this one
        self._failed: frozenset[GroupId] = frozenset()  # by themselves, in this step
        self._hosts = None if setup.last_resort else setup.placement.hosts
        self._audits = AuditCourse(setup.audits, self._hosts, setup.first_step)
        self._is_communicator_unused = False
        self._saves = Saves(setup.saves, setup, setup.pause_s)
        self._validity = CheckpointValidity()
        self._num_admitted = 0
        self._clock = LogClock()
        self.restarts = Restarts(setup.restarts, setup, setup.snapshots)
        self.pause: actions.AwaitHosts | None = None  # while shards have no host and groups wait for one
        self._num_resumes = 0  # of this step or evaluation
        self._committed, self._saves_after_round = 0, False  # the last attempt that was, and whether it asks for both
        self._is_undo_due = False  # a group was found wrong since the last commit
        self._is_undoing = False  # the attempt is about an undo

    def handle(self, event: events.Event, *, now_s: float) -> tuple[Action, ...]:
        """The actions that follow from an event; raises ValueError if the log is damaged."""
        match event:
            case events.RunStarted():
                self._clock.start(now_s)
                return (self._build_communicator(), *self._begin())
            case events.EntryRead(index=index, entry=entry):
                if index != self.head:
                    raise ValueError(f"log entry {index} read, but the next one to fold is {self.head}")
                return self._fold(entry, now_s)
            case events.VotesRead(attempt=attempt):
                return self._decide(event, now_s) if attempt == self.attempt else ()
            case events.WaitingRead():
                over = {**self.last_fenced, **dict(self.voters)}  # only later incarnations wait
                return self.restarts.decide(event, self._saves.saved, over, self._clock.at_s, self.head)
            case events.HostsRead():
                return self._await_hosts(event, now_s)
            case events.EndRequested():
                self._is_end_requested = True
                return ()

    @property
    def audited_steps(self) -> int | None:
        return self._audits.audited_steps

    @property
    def saved(self) -> frozenset[int]:
        return self._saves.saved

    @property
    def state_hosts(self) -> Hosts:
        """Hosts of each state partition; empty if every group holds all state."""
        return () if self.ownership is None else self.ownership.hosts

    @property
    def deals_by_pace(self) -> bool:
        return self._setup.rounds is not None

    def _deal(self, num_microbatches: int) -> Dealing:
        setup = self._setup
        fetch = setup.fetch if setup.last_resort else None
        order = initial_order(setup.placement, num_microbatches, setup.granularity, fetch=fetch)
        return Dealing(order, self._all_groups)

    # ------------------------------------------------------------------------------------------- folding the log

    def _fold(self, entry: entries.Entry, now_s: float) -> tuple[Action, ...]:
        change = self.apply(entry)
        if change.contradictions:
            raise ValueError(f"log entry {entry}: {change.contradictions[0]}")
        if isinstance(entry, entries.Decision) and isinstance(entry, entries.Resume) != (self.pause is not None):
            raise ValueError(f"log entry {entry} while training {'pauses' if self.pause else 'does not pause'}")
        refused = self._validity.fold(entry)
        self._saves.on_refusal(refused)
        return (*refused, *self._follow(entry, change, now_s))

    def _follow(self, entry: entries.Entry, change: Change, now_s: float) -> tuple[Action, ...]:
        match entry:
            case entries.Fence():
                return self._lose(entry, change)
            case entries.Commit():
                return self._commit(entry, change, now_s)
            case entries.Retry():
                return self._retry(entry)
            case entries.Evaluated():
                return self._evaluated(entry)
            case entries.Synced():
                return self._synced(entry)
            case entries.Finish(step=step):
                return (actions.FinishRun(step=step, is_asked=self._is_asked),)
            case entries.Resume():
                return self._resume(change)
            case entries.Restart():
                return self._restart(entry, change, now_s)
            case entries.Undo():
                return self._undo(entry, change)
            case entries.GiveUp(step=step, reason=reason):
                shards = self.pause.shards if self.pause else ()
                stop = self.restarts.wipe_out or actions.StopWipeOut(step=step, shards=shards)
                return self._stop_wiped_out(replace(stop, reason=reason))
            case entries.Halt(step=step, reason=reason):
                return (actions.StopHalted(step=step, reason=reason),)

    def _lose(self, fence: entries.Fence, change: Change) -> tuple[Action, ...]:
        group = fence.group
        self._saves.on_loss(change.lost)
        self.restarts.snapshots.on_loss(group, self.step if fence.discard else None)
        if fence.discard:
            self._audits.on_wrong(group)
            self._is_undo_due = True
        if not change.lost:
            # A second fence of one loss, or of a group that took no part. It may occupy the index of a decision.
            return self._await_decision()
        # Two devices may fail at once, of one rack; a bug comes again when a survivor computes the microbatch.
        is_bug = not is_ambiguous(fence.error) or self.attempt > self._last_error_in
        if fence.error and fence.error == self._last_error and is_bug:
            # Every further group that computes that microbatch would fail, too, until none is left.
            reason = f"two groups raised the same in one step, which no redundancy masks: {fence.error}"
            return (actions.StopHalted(step=self.step, reason=reason),)
        if fence.error and fence.error != self._last_error:
            self._last_error, self._last_error_in = fence.error, self.attempt
        self._failed -= {group}
        self._paces.keep(self.members)
        self._retries_without_loss = 0
        self._orphans += [item for plan in self._plans for item in plan.work.of(group)]
        if not self.voters:
            shards = tuple(ShardId(int(group)) for group in self._all_groups)
            return self._stop_wiped_out(actions.StopWipeOut(step=self.step, shards=shards))
        try:
            own = self._own(self.ownership and self.ownership.for_members(self.voters), self.step + 1)
        except StateWipeOut as lost:
            wrong = fence.reason if fence.discard else ""
            return self._stop_wiped_out(actions.StopWipeOut(step=self.step, partitions=lost.partitions, cause=wrong))
        saved = self._save_dispute() if fence.is_outvoted and not fence.error else ()  # no microbatch to compute again
        return (self._build_communicator(), *own, *saved, *self._await_decision())

    def _commit(self, commit: entries.Commit, change: Change, now_s: float) -> tuple[Action, ...]:
        step, members = commit.step, tuple(voter.group for voter in change.voters)
        update = actions.UpdateModel(step=step, attempt=commit.attempt, proven=commit.proven, is_last=self.is_trained)
        found: list[Action] = [replace(update, sync=commit.sync)]
        self._committed, self._saves_after_round = commit.attempt, commit.save and commit.sync
        self._clock.set_by(commit.at_s, now_s)
        self._audits.on_commit(step, self._plans, members)
        dealt = dict(self._paces.dealt)
        has_changed = self._paces.fold(commit.paces, members, self._idle(members))
        self._audits.on_paces(dealt, self._paces.dealt, members)
        self._begin_anew()
        owned = self.ownership and self.ownership.with_copies(commit.restored, commit.released, commit.leaving)
        found += self._own(owned)
        lacks_copies = bool(owned and owned.repairs)
        self._saves.on_commit(commit.at_s, len(members), commit.save_ends, lacks_copies=lacks_copies)
        found += self._gather_params()
        if commit.is_last:
            self._is_asked = commit.is_asked
        if commit.save and not commit.sync:
            found.append(self._save(commit.at_s, change.voters, change.epoch))
        if self.is_trained:
            return (*found, *self._begin())
        groups = members
        if change.left:
            staying = tuple(voter for voter in change.voters if voter not in change.left)
            groups, owned = tuple(voter.group for voter in staying), owned and owned.for_members(staying)
        whole = [group for group in groups if group not in self.stages and not commit.sync]
        found += self.restarts.snapshots.after(self.step, commit.attempt, whole, owned, self.audited_steps)
        if has_changed:
            found.append(actions.ChangePaces(step=self.step, permille=dict(self._paces.dealt)))
        return (*found, *self._admit(change), *self._begin())

    def _admit(self, change: Change) -> tuple[Action, ...]:
        """Follows a change of the members: drained ones have left, and those that asked for it have come in."""
        if not change.admitted and not change.left:
            return ()
        self._paces.keep(self.members)
        found: list[Action] = []
        if change.left:
            found.append(actions.DrainGroups(step=self.step, members=change.left))
        if admitted := change.admitted:
            earlier = tuple(voter for voter in change.voters if voter not in change.left)
            # Donors take turns, which spreads the cost.
            donors = tuple(earlier[(self._num_admitted + number) % len(earlier)] for number in range(len(admitted)))
            self._num_admitted += len(admitted)
            self._saves.on_admission(admitted)
            self._audits.on_admitted(admitted)
            found.append(actions.AdmitGroups(step=self.step, members=admitted, donors=donors, earlier=earlier))
        found.append(self._build_communicator())
        return (*found, *self._own(self.ownership and self.ownership.for_members(self.voters)))

    def _evaluated(self, entry: entries.Evaluated) -> tuple[Action, ...]:
        self._retries_without_loss = self._num_resumes = 0
        self._last_error = ""
        report = actions.ReportEvaluation(step=entry.step, attempt=entry.attempt, sums=entry.sums)
        return (report, *self._begin())

    def _synced(self, entry: entries.Synced) -> tuple[Action, ...]:
        self._begin_anew()
        found: list[Action] = [actions.ApplySync(entry=entry)]
        if self._saves_after_round:
            found.append(self._save(self._clock.at_s, self.voters, self.epoch))
        whole = [group for group in self.members if group not in self.stages and not self.is_trained]
        found += self.restarts.snapshots.after(self.step, self._committed, whole, None, self.audited_steps)
        return (*found, *self._begin())

    def _restart(self, restart: entries.Restart, change: Change, now_s: float) -> tuple[Action, ...]:
        step = restart.step
        self._paces.start_over()  # other machines may have taken the places
        self.restarts.on_restart(step, self._clock.at_s)
        self.pause = None
        partitions = self._setup.partitions
        ownership = first_ownership(partitions, self.voters) if partitions and self.voters else None
        hosts = ownership.hosts if ownership else ()
        load = actions.LoadCheckpoint(
            step=step, rework_steps=len(change.undone), hosts=hosts, snapshot=restart.snapshot, members=self.voters
        )
        self._begin_anew()
        self._audits.on_restart(step, self.members)
        self._saves.on_restart(step, self._clock.read_s(now_s))
        self._step_dealing.start_over()
        if self._evaluation_dealing is not None:
            self._evaluation_dealing.start_over()
        return (load, self._build_communicator(), *self._own(ownership), *self._begin())

    def _undo(self, undo: entries.Undo, change: Change) -> tuple[Action, ...]:
        """All members go back in place; they have voted, so that no newcomer is copying state any more."""
        step, members, snapshots = undo.step, self.voters, self.restarts.snapshots
        # If none of those that copied it is left, it is on their nodes, as others there have voted.
        rework, holders = len(change.undone), snapshots.holders(undo.snapshot, members) or members
        load = actions.LoadCheckpoint(
            step=step, rework_steps=rework, snapshot=undo.snapshot, members=members, holders=holders
        )
        self._begin_anew()
        snapshots.on_restart(step)
        self._audits.on_restart(step, self.members)
        self._saves.on_undo(step)
        build = () if self._is_communicator_unused else (self._build_communicator(),)
        return (load, *build, *self._begin())

    def _begin_anew(self) -> None:
        """What has gone wrong in the step is over: it is committed, or training goes back."""
        self._wrong_sums, self._failed, self._last_error = (), frozenset(), ""
        self._retries_without_loss = self._num_resumes = 0
        self._is_undo_due = self._is_undoing = False

    def _resume(self, change: Change) -> tuple[Action, ...]:
        self.pause = None
        self._wrong_sums = ()
        self._audits.on_resume()
        self._num_resumes += 1
        # Some group may lack parameters: no vote has shown it since the last gather.
        return (*self._gather_params(), *self._admit(change), *self._begin())

    def _retry(self, retry: entries.Retry) -> tuple[Action, ...]:
        self._wrong_sums = retry.wrong_sums
        self._failed |= {failure.group for failure in retry.failures}
        self._audits.on_retry(retry)
        # A loss during the attempt has requested a new communicator. Without a loss, the attempt's own is broken.
        build = () if self._is_communicator_unused else (self._build_communicator(),)
        self._retries_without_loss += len(build) and not retry.disputes
        if self._retries_without_loss > MAX_RETRIES_WITHOUT_LOSS:
            reason = f"{MAX_RETRIES_WITHOUT_LOSS} reductions in a row failed though no group was lost"
            if retry.wrong_sums:
                groups = ", ".join(map(str, retry.wrong_sums))
                reason += f"; in the last one sums contradicted their checksums on groups {groups}"
            reason += "".join(f"; group {group}: {cause}" for group, cause in retry.failures[:1])
            return (actions.StopHalted(step=self.step, reason=reason),)
        self._is_undoing = retry.recompute and self._is_undo_due and bool(self._undoable)
        self._is_undo_due &= not retry.recompute
        if self._is_undoing:
            self._attempted_by, digest = self.voters, self._plans[-1].digest
            asked = actions.AttemptUndo(step=self.step, attempt=self.attempt, voters=self.voters, plan_digest=digest)
            return (*build, asked, actions.ReadEntry(index=self.head))
        state = self._gather_params(is_anew=retry.recompute) if retry.gather else ()
        state = (*state, *(self._save_dispute(retry.disputes) if self.is_discarded else ()))
        if self.is_trained and not self.is_syncing and self._saves.lacks_last(self.step):
            # The checkpoint of the last step has been refused; one that awaits a round is not yet asked for.
            state = (*state, self._save(self._clock.at_s, self.voters, self.epoch))
            self.votes_on_end = True
        if retry.recompute or self.is_syncing or (self.is_trained and not self.is_evaluating):
            return (*build, *state, *self._begin(is_anew=retry.recompute))
        try:
            patch = self._plan_patch()
        except WipeOut as wipe_out:
            return self._wiped_out(wipe_out, (*build, *state))
        attempt = self._attempt(retry.kept)
        # A group that lacked parameters has all of the step's work still to do.
        plans, patches = (self._plans[:1], self._plans[1:]) if retry.gather else ([], [patch])
        compute = actions.computations(plans, patches, attempt)
        if retry.disputes:
            compute.append(actions.ComputeAudits(step=self.step, attempt=self.attempt, disputes=retry.disputes))
        return (*build, *state, *compute, attempt, actions.ReadEntry(index=self.head))

    # ------------------------------------------------------------------------------------------------- deciding

    def _decide(self, event: events.VotesRead, now_s: float) -> tuple[Action, ...]:
        attempted = Attempted(
            step=self.step,
            attempt=self.attempt,
            members=self.members,
            voters=self._attempted_by,
            is_discarded=self.is_discarded,
            is_over=self.is_trained,
            is_evaluation=self.is_evaluating and not self.is_syncing,
            is_sync=self.is_syncing,
            ownership=self.ownership,
            wrong_sums=self._wrong_sums,
            failed=self._failed,
            disputes=self._audits.disputes,
            questioned=self._audits.questioned,
            may_question=self._audits.may_question,
            hosts=self._hosts,
        )
        is_again = self.step + 1 == self.num_steps < self._setup.num_steps  # an early end, after a restart
        saves = any(vote.ends for vote in event.votes.values()) or (is_again and self._is_asked)
        is_asked = saves and self.step + 1 < self._setup.num_steps  # else the run is finished all the same
        is_last = is_asked or is_again or self._is_time_over(now_s)
        at_s = self._clock.read_s(now_s)
        hosts = self.state_hosts
        is_due = self._saves.is_due(self.step + 1, at_s, self.members, hosts, is_last=is_last, is_asked=saves)
        entry = decide(attempted, event, save=is_due, at_s=at_s, is_last=is_last, is_asked=is_asked)
        if self._is_undoing and isinstance(entry, entries.Retry):
            held = (one for group in self.members for one in event.votes[group].held)
            entry = decide_undo(entry, self.restarts.snapshots.newest_whole(held, among=self._undoable))
        if isinstance(entry, entries.Commit):
            entry = self._let_leave(entry) if entry.drain else entry
            paces = self._exceptions(event) if self.deals_by_pace else ()
            if paces or event.stages:
                entry = replace(entry, paces=paces, stages=self.terms.stages_of(entry.admit, event.stages))
        return () if entry is None else (actions.AppendEntry(index=self.head, entry=entry),)

    @property
    def _undoable(self) -> tuple[WholeSnapshot, ...]:
        """Those to which spoiled steps can be undone. Shorter groups can load none; no group has partitioned state."""
        can_load = self._audits.is_spoiled and self.ownership is None and not self.stages
        return self.restarts.snapshots.clean(self.audited_steps) if can_load else ()

    def _exceptions(self, event: events.VotesRead) -> tuple[PaceException, ...]:
        """By the paces in the votes, each over the one that the group's stages explain."""
        by_stages = self._paces_by_stages
        measured = {group: event.votes[group].pace_ns for group in self.members if event.votes[group].pace_ns > 0}
        like = {group: pace_ns * LIKE // by_stages.get(group, LIKE) for group, pace_ns in measured.items()}
        return exceptions(like, self._paces.dealt)

    def _let_leave(self, commit: entries.Commit) -> entries.Commit:
        """The commit that drains those members, of the ones that ask, that may leave now."""
        if commit.is_last or self.step + 1 == self.num_steps:
            return replace(commit, drain=())
        found = departures(
            commit.drain,
            self.voters,
            self._setup.placement,
            self.ownership,
            writers=self._validity.writers | self._saves.writers,
            last_resort=self._setup.last_resort,
        )
        # A save would keep its writers here until it is compared: it waits for those that are about to leave.
        save = commit.save and not found.ready
        return replace(commit, drain=found.drain, leaving=found.leaving, save=save)

    def _await_hosts(self, event: events.HostsRead, now_s: float) -> tuple[Action, ...]:
        if self.pause is None or self._setup.pause_s is None:
            return ()
        entry = decide_pause(
            self.pause,
            self._setup.placement,
            self.attempt,
            [member for member in self.not_fenced(event.waiting) if member.group not in self.members],
            event.waited_s,
            self._setup.pause_s,
            is_end_due=self._is_end_requested or self._is_time_over(now_s),
        )
        if isinstance(entry, entries.Resume):
            entry = replace(entry, stages=self.terms.stages_of(entry.admit, event.stages))
        return (self.pause,) if entry is None else (actions.AppendEntry(index=self.head, entry=entry), self.pause)

    def _is_time_over(self, now_s: float) -> bool:
        return self._setup.ends_at_s is not None and now_s >= self._setup.ends_at_s

    # ------------------------------------------------------------------------------------------------- planning

    def _begin(self, *, is_anew: bool = False) -> tuple[Action, ...]:
        """Begins the round with other sites or evaluation that is due, else the next step; `is_anew`: once more."""
        if self.is_syncing and self.voters:
            return (self._without_sums(actions.AttemptSync), actions.ReadEntry(index=self.head))
        if self.is_trained and not self.is_evaluating and self.voters:
            return self._end()
        try:
            plan = self._plan(after=f"attempt {self.attempt}" if is_anew else "")
        except WipeOut as wipe_out:
            return self._wiped_out(wipe_out)
        attempt = self._attempt()
        return (*actions.computations([plan], [], attempt), attempt, actions.ReadEntry(index=self.head))

    def _deal_step(self) -> None:
        """Starts to deal as many microbatches as this step has."""
        self._dealt = self._ramp.at(self.step)
        self._step_dealing = self._deal(self._dealt)

    def _wiped_out(self, wipe_out: WipeOut, prepare: tuple[Action, ...] = ()) -> tuple[Action, ...]:
        if self._setup.pause_s is None or not self.voters:
            return self._stop_wiped_out(actions.StopWipeOut(step=self.step, shards=wipe_out.shards))
        if self._num_resumes == MAX_RESUMES_WITHOUT_COMMIT:
            reason = f"training has resumed {MAX_RESUMES_WITHOUT_COMMIT} times in this step, which no commit followed"
            return self._stop_wiped_out(actions.StopWipeOut(step=self.step, shards=wipe_out.shards, reason=reason))
        return (*prepare, self._pause())

    def _stop_wiped_out(self, stop: actions.StopWipeOut) -> tuple[Action, ...]:
        self.pause = None
        return self.restarts.on_wipe_out(stop)

    def _pause(self) -> actions.AwaitHosts:
        """Begins the pause, or goes on with it after an entry."""
        self.pause = actions.AwaitHosts(
            index=self.head, step=self.step, epoch=self.epoch, voters=self.voters, shards=self.uncovered
        )
        return self.pause

    def _end(self) -> tuple[Action, ...]:
        if not self.votes_on_end:
            return (actions.FinishRun(step=self.step, is_asked=self._is_asked),)
        return (self._without_sums(actions.AttemptFinish), actions.ReadEntry(index=self.head))

    @property
    def _dealing(self) -> Dealing:
        return self._evaluation_dealing if self.is_evaluating and self._evaluation_dealing else self._step_dealing

    def _plan(self, *, after: str = "") -> StepPlan:
        if not self.is_evaluating and self._dealt != self._ramp.at(self.step):
            self._deal_step()
        probe = None if self.is_evaluating else self._paces.probe
        work = self._dealing.work(self.members, self._dealt_paces, probe)
        self._orphans = []
        audits: tuple[Audit, ...] = ()
        if not self.is_evaluating:
            is_last = self.step + 1 == self.num_steps
            audits = self._audits.draw(self.step, work, self.members, self._all_paces, is_last=is_last)
        plan = make_plan(self.step, self.epoch, work, after=after, is_evaluation=self.is_evaluating, audits=audits)
        self._plans = [plan]
        return plan

    def _plan_patch(self) -> StepPlan:
        patch, after = self._dealing.patch(self.members, self._orphans, self._dealt_paces), self._plans[-1].digest
        self._orphans = []
        self._plans.append(make_plan(self.step, self.epoch, patch, after=after, is_evaluation=self.is_evaluating))
        return self._plans[-1]

    @property
    def _dealt_paces(self) -> Paces:
        """Those by which work is dealt; they change between two steps alone."""
        rounds, paces = self._setup.rounds, self._all_paces
        return replace(paces, rounds=rounds) if rounds and paces.permille else EVEN

    @property
    def _all_paces(self) -> Paces:
        """What is known of the paces of all groups."""
        dealt, by_stages = self._paces.dealt, self._paces_by_stages
        permille = {
            group: dealt.get(group, LIKE) * by_stages.get(group, LIKE) // LIKE for group in {**dealt, **by_stages}
        }
        fill = self._setup.rounds.fill if self._setup.rounds else self.terms.num_stages
        lacking = {group: min(self.terms.num_stages - number, fill) for group, number in self.stages.items()}
        return Paces(permille=permille, lacking=lacking)

    @property
    def _paces_by_stages(self) -> dict[GroupId, int]:
        """Of groups with fewer stages, as fast as their like: measured paces are over these."""
        slabs = self._setup.slabs
        return {} if slabs is None else {group: slabs.pace(number) for group, number in self.stages.items()}

    def _idle(self, members: Iterable[GroupId]) -> list[GroupId]:
        """Of the members of this step those that are known to be slow and have computed nothing."""
        slow = self._all_paces.permille
        return [group for group in members if group in slow and not any(plan.work.of(group) for plan in self._plans)]

    # --------------------------------------------------------------------------------------------------- actions

    def _save(self, at_s: float, voters: tuple[Member, ...], epoch: int) -> actions.SaveCheckpoint:
        action = self._saves.start_save(self.step, at_s, voters, epoch, self.state_hosts, is_last=self.is_trained)
        self._validity.on_save(action)
        doubtful = tuple(sorted(self._saves.void | self._validity.unsettled))
        owners = self.ownership.owners if self.ownership else ()
        return replace(action, owners=owners, doubtful=doubtful, audited_steps=self.audited_steps)

    def _save_dispute(self, disputes: Iterable[Dispute] = ()) -> tuple[actions.SaveDispute, ...]:
        member = self._audits.saver(self.voters, disputes)
        if member is None:
            return ()
        return (actions.SaveDispute(step=self.step, attempt=self.attempt, member=member, epoch=self.epoch),)

    def _own(self, ownership: Ownership | None, first_step: int = 0) -> tuple[Action, ...]:
        """Sets the ownership; asks for its copies if it has changed."""
        earlier, self.ownership = self.ownership, ownership
        return () if ownership is None or ownership == earlier else (actions.StartRepairs.of(ownership, first_step),)

    def _gather_params(self, *, is_anew: bool = False) -> tuple[Action, ...]:
        if self.ownership is None:
            return ()
        return (actions.GatherParams(step=self.step, owners=self.ownership.owners, is_anew=is_anew),)

    def _build_communicator(self) -> actions.BuildCommunicator:
        self._is_communicator_unused = True
        return actions.BuildCommunicator(key=self.head - 1, epoch=self.epoch, members=self.members)

    def _attempt(self, kept: tuple[int, ...] = ()) -> actions.AttemptReduce | actions.AttemptEvaluation:
        if self.is_evaluating:
            return self._without_sums(actions.AttemptEvaluation)
        self._is_communicator_unused, self._attempted_by = False, self.voters
        return actions.AttemptReduce(
            step=self.step,
            attempt=self.attempt,
            epoch=self.epoch,
            members=self.members,
            voters=self.voters,
            plan_digest=self._plans[-1].digest,
            kept=kept,
            ownership=self.ownership,
            disputed=tuple(dispute.microbatch for dispute in self._audits.disputes),
        )

    def _await_decision(self) -> tuple[Action, ...]:
        return self._await_votes() if self.pause is None else (self._pause(),)

    def _await_votes(self) -> tuple[Action, ...]:
        read = actions.ReadVotes(attempt=self.attempt, voters=self._attempted_by, num_left=len(self.voters))
        return (read, actions.ReadEntry(index=self.head))

    def _without_sums(self, kind: type[actions.WithoutSums]) -> actions.WithoutSums:
        self._is_communicator_unused, self._attempted_by = False, self.voters
        return kind(step=self.step, attempt=self.attempt, voters=self.voters, plan_digest=self._plans[-1].digest)
