"""Writes the journal of a simulated run: the records that a real run of the same history would write."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from spare_megatron.core.log.actions import AttemptEvaluation, AttemptReduce
from spare_megatron.core.log.entries import Entry, Restart, entry_fields
from spare_megatron.journal import records
from spare_megatron.journal.files import FORMAT, Line
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.spans import RecoveryTimes
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.plans import Microbatch, StepPlan
from spare_megatron.tools.simulate.compute_fit import finish_times
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.world import World

LineSink = Callable[[Line], None]
SOURCE = "simulator"


@dataclass(slots=True)
class _Recovery:
    """The recovery in progress, with the same times for all survivors."""

    times: RecoveryTimes
    patches: list[StepPlan] = field(default_factory=list)


class SimulatedJournal:
    """Writes lines at virtual times. Parameters, losses and gradients are not simulated: their fields are constant.
    Contributions and lost groups carry the times at which they happened, so lines are not in time order.
    """

    def __init__(self, scenario: Scenario, world: World, sink: LineSink) -> None:
        self._scenario, self._world, self._sink = scenario, world, sink
        self._plans: list[StepPlan] = []
        self._began_s = 0.0
        self._computed_at_s: dict[GroupId, float] = {}  # for the next attempt
        self._recovery: _Recovery | None = None
        self._num_restarts = 0
        record = RunRecord(
            format=FORMAT,
            name=scenario.name,
            num_groups=scenario.num_groups,
            max_groups=scenario.max_groups if scenario.further_groups else 0,
            ranks_per_group=1 if scenario.slabs is None else scenario.machines_per_group,
            redundancy=scenario.hosts_per_shard,
            microbatches_per_shard=scenario.microbatches_per_shard,
            num_steps=scenario.num_steps,
            placement=scenario.placement,
            granularity=scenario.granularity,
            deal_by_pace=scenario.rounds is not None,
            reduce_mode="simulated",
            faults=[],
            last_resort=scenario.last_resort,
            slice_redundancy=scenario.partition_redundancy,
            num_processors=0 if scenario.costs.full_speed_groups == inf else round(scenario.costs.full_speed_groups),
            pipeline_fill=scenario.costs.pipeline_fill,
            groups_per_domain=scenario.placed_groups_per_domain,
            eval_every_steps=scenario.evaluate_every,
            eval_microbatches_per_shard=scenario.microbatches_per_shard if scenario.evaluate_every else 0,
            least_stages=scenario.least_machines or 0,
            num_layers=0 if scenario.slabs is None else scenario.slabs.num_layers,
        )
        self._write(record)

    def on_step_computed(self, plan: StepPlan, began_s: float) -> None:
        """All groups have computed a step since `began_s`, starting from zero sums."""
        self._plans, self._began_s, self._recovery = [plan], began_s, None
        finished = finish_times(plan.work.loads, self._scenario.microbatches_per_shard, self._scenario.costs)
        scale_s = (self._world.now_s - began_s) / finished.max()
        self._computed_at_s = {GroupId(group): began_s + at * scale_s for group, at in enumerate(finished.tolist())}

    def on_patch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._computed_at_s = dict.fromkeys(self._computed_at_s, self._world.now_s)
        if self._recovery is not None:
            self._recovery.patches.append(plan)
            self._recovery.times.end_stage("patch", self._world.now_s)

    def on_rebuild(self) -> None:
        """The new communicator is built, or no longer needed."""
        if self._recovery is not None:
            self._recovery.times.end_stage("rebuild", self._world.now_s)

    def on_attempt(self, action: AttemptReduce, voters: Sequence[GroupId], *, is_complete: bool) -> None:
        """Writes the contributions of the voters to an attempt, and their votes."""
        incarnations = dict(action.voters)
        for group in voters:
            contribution = records.ContributionRecord(
                group=group,
                step=action.step,
                attempt=action.attempt,
                epoch=action.epoch,
                members=list(action.members),
                microbatches=records.by_shard(self._computed(group)),
                incarnation=incarnations[group],
            )
            self._write(contribution, self._computed_at_s.get(group))
            self._write_vote(action, group, incarnations[group], is_complete=is_complete)
        if is_complete:
            self._recovered(action.step, voters)

    def on_evaluation(self, action: AttemptEvaluation, voters: Sequence[GroupId]) -> None:
        """Writes what the voters found in an evaluation, and their votes; losses are not simulated."""
        incarnations = dict(action.voters)
        for group in voters:
            found = records.EvaluationRecord(
                group=group,
                step=action.step,
                attempt=action.attempt,
                microbatches=records.by_shard(self._computed(group)),
                sums=[],
                incarnation=incarnations[group],
            )
            self._write(found)
            self._write_vote(action, group, incarnations[group], is_complete=True)
        if len(voters) == len(action.voters):
            self._recovered(action.step, voters)

    def _write_vote(
        self, action: AttemptReduce | AttemptEvaluation, group: GroupId, incarnation: int, *, is_complete: bool
    ) -> None:
        vote = records.VoteRecord(
            group=group,
            step=action.step,
            attempt=action.attempt,
            is_complete=is_complete,
            work_digest=records.digest_of_work(self._computed(group)),
            incarnation=incarnation,
        )
        self._write(vote)

    def on_fence(self, member: Member, entry_index: int) -> None:
        """The survivors have agreed that a group is lost."""
        world, (group, incarnation) = self._world, member
        at_s = world.lost_at_s[group]
        cause = world.fleet.cause_of[group]
        record = records.LossRecord(group=group, rank=0, cause=cause, entry_index=entry_index, incarnation=incarnation)
        self._write(record, at_s)
        if self._recovery is None:
            computed_at_s = max(self._computed_at_s.values(), default=at_s)
            times = RecoveryTimes(computed_at_s, world.fenced_at_s, timed_until_s=world.fenced_at_s)
            self._recovery = _Recovery(times)
        elif self._recovery.times.timed_until_s < world.fenced_at_s:
            self._recovery.times.end_stage("reduce", world.fenced_at_s)
        self._recovery.times.end_stage("agree", world.now_s)
        self._recovery.times.lost.append(group)

    def _recovered(self, step: int, survivors: Sequence[GroupId]) -> None:
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return
        recovery.times.end_stage("reduce", self._world.now_s)
        for group in survivors:
            num_patched = sum(len(plan.work.of(group)) for plan in recovery.patches)
            self._write(recovery.times.record(group, step, num_patched))

    def on_entry(self, index: int, entry: Entry) -> None:
        """An entry is folded; recorded by the lowest group that is up."""
        self._num_restarts += isinstance(entry, Restart)
        group = int(self._world.fleet.is_up.argmax())
        self._write(records.EntryRecord(group=group, index=index, entry=entry_fields(entry)))

    def on_update(self, step: int, attempt: int, members: Sequence[GroupId]) -> None:
        """These groups have applied a committed step."""
        for group in members:
            update = records.UpdateRecord(
                group=group,
                step=step,
                attempt=attempt,
                num_microbatches=self._scenario.num_groups * self._scenario.microbatches_per_shard,
                loss=0.0,
                grad_norm=0.0,
                learning_rate=0.0,
                makespan=self._plans[0].work.makespan,
                step_s=self._world.now_s - self._began_s,
            )
            self._write(update)

    def on_finish(self, step: int, members: Sequence[GroupId]) -> None:
        self.on_comparison(step, members)
        self._write(records.EndRecord(outcome="finished", reason="all steps are committed"))

    def on_comparison(self, step: int, members: Sequence[GroupId]) -> None:
        """These groups compare their parameters after `step` steps."""
        digest = hashlib.sha256(f"{self._scenario.name} after {step} steps".encode()).hexdigest()
        for group in members:
            record = records.ParamsRecord(group=group, step=step, digest=digest, num_restarts=self._num_restarts)
            self._write(record)

    def _computed(self, group: GroupId) -> list[Microbatch]:
        return [item for plan in self._plans for item in plan.work.of(group)]

    def _write(self, record: records.Record, at_s: float | None = None) -> None:
        self._sink(Line(source=SOURCE, at_s=self._world.now_s if at_s is None else at_s, record=record))
