"""Carries out the controller's actions on one rank: compute, reduce, vote, follow the log, update."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from spare_megatron.core.actions import (
    AdmitGroups,
    AttemptFinish,
    AttemptReduce,
    ComputePatch,
    ComputeStep,
    GatherParams,
    LoadCheckpoint,
    ReadVotes,
    SaveCheckpoint,
    StartRepairs,
    TakeSnapshot,
)
from spare_megatron.core.entries import Entry, Fence, entry_fields
from spare_megatron.core.events import EntryRead, Event
from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import EntryRecord, Record, RecoveryRecord
from spare_megatron.journal.spans import RecoveryStage
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.process.reports import GroupRejoined, GroupRestarted, StepCommitted
from spare_megatron.rank.gather import ParamsGather
from spare_megatron.rank.recovery_clock import RecoveryClock
from spare_megatron.rank.reduction import Reduction
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.rank.state_keeping import GroupSaves
from spare_megatron.rank.step_progress import StepUnderWay
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import StepPlan
from spare_megatron.stacking.state_partitions import PartitionCopy
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_source import StateSource
from spare_megatron.state.transfer.state_transfer import NO_DIGEST, StateTransfer, confirm
from spare_megatron.voting.agreement import Fenced
from spare_megatron.voting.finish import vote_to_finish
from spare_megatron.voting.voting import Voting


class GroupExecutor:
    """Carries out the controller's actions on one rank. It decides nothing.

    Args:
        gather: Gathers parameters where the optimizer state is partitioned over the groups; else None.
        source: The state that other groups may read from this rank.
        join_timeout_s: Longest time that a rejoining group waits for the others to confirm its state.
        report: Sends a report to the supervisor.
        tells_steps: Whether this rank also reports committed steps.
    """

    def __init__(
        self,
        *,
        trainer: GroupTrainer,
        voting: Voting,
        reduction: Reduction,
        gather: ParamsGather | None,
        journal: JournalWriter,
        source: StateSource,
        transfer: StateTransfer,
        start_over: RestartLoader,
        join_timeout_s: float,
        report: Callable[[StepCommitted | GroupRejoined | GroupRestarted], None],
        tells_steps: bool,
        probe: RankProbe,
        digests: StateDigests,
        saves: GroupSaves,
    ) -> None:
        self._trainer = trainer
        self._agreement, self._voting = voting.agreement, voting
        self._group = voting.agreement.member.group
        self._reduction = reduction
        self._gather = gather
        self._connected: Sequence[GroupId] = ()
        self._journal = journal
        self._source = source
        self._transfer = transfer
        self._start_over = start_over
        self._join_timeout_s = join_timeout_s
        self._report, self._tells_steps = report, tells_steps
        self._probe = probe
        self._digests = digests
        self.saves = saves
        self._clock = RecoveryClock(self._group, self._recovered)
        self._step: StepUnderWay | None = None
        self._head = 0
        self.num_steps = 0  # committed steps in the parameters
        self.num_restarts = 0  # of the run

    # ----------------------------------------------------------------------------------------------------- begin

    def start(self, num_steps: int) -> None:
        """Begins after `num_steps` committed steps. The first vote compares the parameters."""
        self.num_steps = num_steps
        self._digests.check(num_steps, self.num_restarts)

    def restart(self, action: LoadCheckpoint, head: int) -> None:
        """Loads state after a wipe-out; the first vote compares it. `head` counts the log entries folded so far.

        Collective over: all ranks of the group. Raises `JoinFailed` if the state cannot be loaded.
        """
        self._head = head
        self._start_over.load(action, self._agreement.member, head)
        self._step = None
        self.num_steps = action.step
        self._digests.check(action.step, self.num_restarts)
        member = self._agreement.member
        record = self._start_over.record(member, action)
        self._write_if_leader(record)
        rejected = tuple(record.rejected)
        self._report(GroupRestarted(member=member, step=action.step, source=record.loaded_from, rejected=rejected))

    def admit(self, action: AdmitGroups, head: int) -> None:
        """Admits groups, of which this may be one; the next vote compares all. `head` counts log entries folded.

        Collective over: all ranks of the group. Raises `JoinFailed` if this group is admitted and cannot get the state.
        """
        self._head = head
        with self._probe.during(Operation.JOIN):
            donor = self._transfer.run(action, head, has_state=not self.lacks_params)
        if self.lacks_params:
            self._agreement.publish_digest(head - 1, NO_DIGEST)
            return
        self._digests.compute()
        self._digests.hash_rest(copied_from=None if donor is None else donor.group)
        if donor is not None:
            with self._probe.during(Operation.JOIN):
                confirm(self._digests.value.params, action, head, self._agreement, self._join_timeout_s, self._probe)
            self._report(GroupRejoined(member=self._agreement.member, step=action.step))
        else:
            self._agreement.publish_digest(head - 1, self._digests.value.params)
        # Only now: a group whose state was refused does not take part, and its digest must not be journaled.
        self._digests.write(action.step, self.num_restarts)
        self.num_steps = action.step

    # --------------------------------------------------------------------------------------------------- compute

    def compute_step(self, action: ComputeStep, num_alive: int) -> None:
        """Starts the step and computes this group's part of the plan from zero sums.

        Returns at once if the plan is already computed. A group that lacks parameters starts the step and computes
        nothing.
        """
        plan = action.plan
        is_under_way = self._step is not None and self._step.step == plan.step
        if is_under_way and plan.digest in self._now.plans:
            return
        self._probe.begin_step(plan.step)
        is_again = is_under_way and bool(self._now.computed)
        self._step = StepUnderWay(
            step=plan.step,
            started_s=self._now.started_s if is_under_way else time.monotonic(),
            makespan=plan.work.makespan,
            num_alive=num_alive,
            num_recomputed=self._now.num_recomputed + plan.work.num_microbatches if is_under_way else 0,
        )
        if self.lacks_params:
            return
        self._trainer.begin_step(plan.step)
        self._compute(plan, action.into)
        if is_again:
            self._clock.patched(len(self._now.computed))
        else:
            self._clock.computed()

    def compute_patch(self, action: ComputePatch) -> None:
        """Adds this group's part of a patch to the local sums that are not kept, once, if it has all parameters."""
        if self.lacks_params or action.plan.digest in self._now.plans:
            return
        self._now.num_recomputed += action.plan.work.num_microbatches
        self._begin_attempt(action.into)
        self._probe(FaultPoint.PATCH)
        self._compute(action.plan, action.into)
        self._clock.patched(len(action.plan.work.of(self._group)))

    def _compute(self, plan: StepPlan, into: AttemptReduce | None) -> None:
        self._begin_attempt(into)
        work, on_ready = plan.work.of(self._group), None
        if into is not None and work:
            on_ready = self._reduction.leave_early(into, [*self._now.computed, *work])
        self._now.computed.extend(self._trainer.compute(work, on_ready))
        self._now.plans.append(plan.digest)

    def _begin_attempt(self, into: AttemptReduce | None) -> None:
        if into is not None:
            self._reduction.begin(into)

    # ---------------------------------------------------------------------------------------------------- reduce

    def build_communicator(self, key: int, members: Sequence[GroupId]) -> None:
        if key >= 0:
            self._probe(FaultPoint.REBUILD)
        self._reduction.build_communicator(key, members)
        self._connected = members

    def attempt_reduce(self, action: AttemptReduce) -> list[Event]:
        """As `Reduction.attempt`, or `Reduction.abstain` if the group lacks parameters."""
        self._now.epoch = action.epoch
        if self._gather is not None and self._gather.is_lacking:
            return self._reduction.abstain(action, self._gather.evidence)
        events = self._reduction.attempt(action, self._now.computed, digests=self._digests.for_vote, head=self._head)
        self._clock.reduced(self._reduction.ready_at_s)
        return events

    # --------------------------------------------------------------------------------------------------- the log

    def read_votes(self, action: ReadVotes) -> list[Event]:
        """Returns the votes cast so far on a leader that is to read them, else nothing."""
        with self._probe.during(Operation.VOTE):
            if not self._agreement.is_leader:
                return []
            votes = self._voting.read_votes(action.attempt, action.voters, action.num_left)
            return [] if votes is None else [votes]

    def append_entry(self, index: int, entry: Entry) -> None:
        if self._agreement.is_leader:
            with self._probe.during(Operation.VOTE):
                self._agreement.append(index, entry)

    def read_entry(self, index: int) -> list[Event]:
        """Waits for the log entry. Collective over: all ranks of the group. Raises `Fenced` if it fences the group."""
        with self._probe.during(Operation.AWAIT_ENTRY):
            entry = self._voting.read_entry(index)
        self._head = index + 1
        self._write_if_leader(EntryRecord(group=self._group, index=index, entry=entry_fields(entry)))
        if isinstance(entry, Fence):
            if entry.hits(self._agreement.member):
                raise Fenced(f"group {self._group} is fenced by log entry {index}: {entry.reason}")
            self._clock.lost(self.num_steps if self._step is None else self._step.step, entry.group)
            self._digests.is_wanted = True
        else:
            self._clock.decided()
        return [EntryRead(index=index, entry=entry)]

    # ---------------------------------------------------------------------------------------------------- update

    def copies_proven(self, copies: Sequence[PartitionCopy]) -> None:
        """The digests of these copies count in comparisons: a commit has proven them."""
        self._digests.on_proven(copies)

    def update_model(self, step: int, attempt: int) -> None:
        self._clock.committed()
        self._reduction.commit()
        recoveries = self._write_recoveries()
        self._probe(FaultPoint.AFTER_COMMIT)
        self.saves.await_copies(step + 1)
        with self._probe.during(Operation.UPDATE), self._source.changing(step + 1):
            result = self._trainer.update(self._reduction.loss_sum, self._reduction.squares)
        if self._gather is not None:
            self._gather.updated()
            self._digests.forget()
        step_s = self._now.spent_s
        self._write_if_leader(self._now.update_record(self._group, attempt, result, self._reduction.compute_s, step_s))
        self.saves.tell()
        if not self.lacks_params:
            self._hold_params(step + 1)
        split_s = self._probe.take_split()
        if self._tells_steps:
            self._report(
                self._now.report(
                    self._group, result, step_s=step_s, split_s=split_s, head=self._head, recoveries=recoveries
                )
            )

    def save_checkpoint(self, action: SaveCheckpoint) -> None:
        """Starts a checkpoint of the present state if this group has a part in it.

        The state is compared in the next vote and after the next update, so that a wrong checkpoint is found soon.
        """
        has_params = not self.lacks_params
        self._digests.check_saved(action.step, self.num_restarts, has_params=has_params, is_last=action.is_last)
        self.saves.save(action, self._head, has_params=has_params)

    def take_snapshot(self, action: TakeSnapshot) -> None:
        self.saves.take_snapshot(action, has_params=not self.lacks_params)

    # ---------------------------------------------------------------------------------------------------- slices

    @property
    def lacks_params(self) -> bool:
        """Whether some parameters of this group are of an earlier step: the last gather is not complete."""
        return self._gather is not None and self._gather.is_lacking

    def gather_params(self, action: GatherParams) -> None:
        """Gathers all parameters from their owners. After a broken gather the group lacks parameters."""
        assert self._gather is not None, "only slices are gathered"
        if action.is_anew:
            self._gather.updated()
            self._digests.is_wanted = True
            if self._step is not None:
                self._step.plans.clear()  # they were computed with parameters that may be wrong
        lacked = self.lacks_params
        try:
            self._gather.run(action, self._connected, self._head)
        finally:  # even if the store is lost: this may be the last whole copy
            if lacked and not self.lacks_params:
                self._hold_params(action.step)
                self.saves.go_on(action.step)

    def start_repairs(self, action: StartRepairs) -> None:
        self._digests.set_hosted(action)
        self._reduction.start_repairs(action)

    def attempt_finish(self, action: AttemptFinish) -> list[Event]:
        """Votes on whether the run can end. Returns as `Reduction.attempt`."""
        digests, lacks_params = self._digests.for_vote(), self.lacks_params
        return vote_to_finish(action, self._voting, self._journal, self._probe, digests, lacks_params=lacks_params)

    def _hold_params(self, step: int) -> None:
        self.num_steps = step
        self._digests.compare_if_due(step, self.num_restarts)

    def stop(self, step: int) -> None:
        """Journals how the group ends and waits for its saves. Collective over: all ranks of the group."""
        self._clock.stopped()
        self._write_recoveries()
        if not self._digests.value.params and not self.lacks_params:
            self._digests.check(step, self.num_restarts)
        self.saves.finish()
        self.saves.tell()

    # --------------------------------------------------------------------------------------------------- helpers

    @property
    def _now(self) -> StepUnderWay:
        assert self._step is not None, "no step has begun"
        return self._step

    def _write_recoveries(self) -> list[RecoveryRecord]:
        ended = [replace(record, num_restarts=self.num_restarts) for record in self._clock.take_finished()]
        for record in ended:
            self._write_if_leader(record)
        return ended

    def _recovered(self, stage: RecoveryStage, began_s: float, ended_s: float) -> None:
        if self._agreement.is_leader:
            self._probe.recovered(stage, began_s, ended_s)

    def _write_if_leader(self, record: Record) -> None:
        if self._agreement.is_leader:
            self._journal.write(record)
