"""The journal of a simulated run: the records that a real run of the same history writes."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict

from spare_megatron.core.messages import AttemptReduce, Entry
from spare_megatron.core.stepplan import Microbatch, StepPlan
from spare_megatron.core.topology import GroupId
from spare_megatron.journal.records import (
    ContributionRecord,
    EndRecord,
    EntryRecord,
    Line,
    LossRecord,
    ParamsRecord,
    Record,
    RunRecord,
    UpdateRecord,
    VoteRecord,
    digest_of_work,
)
from spare_megatron.simulator.scenario import Scenario
from spare_megatron.simulator.world import World

Sink = Callable[[Line], None]
SOURCE = "simulator"


class Chronicle:
    """Writes lines at virtual times. Parameters, losses and gradients are not simulated: their fields are constant."""

    def __init__(self, scenario: Scenario, world: World, sink: Sink) -> None:
        self._scenario, self._world, self._sink = scenario, world, sink
        self._plans: list[StepPlan] = []
        self._began_s = 0.0
        record = RunRecord(
            name=scenario.name,
            num_groups=scenario.num_groups,
            ranks_per_group=1,
            redundancy=scenario.hosts_per_shard,
            microbatches_per_shard=scenario.microbatches_per_shard,
            num_steps=scenario.num_steps,
            placement=scenario.placement,
            granularity=scenario.granularity,
            reduce_mode="simulated",
            faults=[],
            last_resort=scenario.last_resort,
            groups_per_domain=scenario.placed_groups_per_domain,
        )
        self._write(record)

    def began_step(self, plan: StepPlan) -> None:
        """A step starts from zero sums; called when its compute is done."""
        self._plans = [plan]

    def patched(self, plan: StepPlan) -> None:
        """A patch is added to the sums."""
        self._plans.append(plan)

    def attempted(self, action: AttemptReduce, voters: Sequence[GroupId], *, is_complete: bool) -> None:
        """What the voters brought into an attempt, and their votes."""
        for group in voters:
            work = self._computed(group)
            microbatches: dict[str, list[int]] = defaultdict(list)
            for item in work:
                microbatches[str(item.shard)].append(item.index)
            contribution = ContributionRecord(
                group=group,
                step=action.step,
                attempt=action.attempt,
                epoch=action.epoch,
                members=list(action.members),
                microbatches=dict(microbatches),
            )
            self._write(contribution)
            vote = VoteRecord(
                group=group,
                step=action.step,
                attempt=action.attempt,
                is_complete=is_complete,
                work_digest=digest_of_work(work),
            )
            self._write(vote)

    def lost(self, group: GroupId, entry_index: int) -> None:
        """A group is found lost."""
        self._write(LossRecord(group=group, rank=0, cause=self._world.fleet.cause_of[group], entry_index=entry_index))

    def read(self, index: int, entry: Entry) -> None:
        """An entry is folded; the lowest group that is up tells of it."""
        group = int(self._world.fleet.is_up.argmax())
        self._write(
            EntryRecord(group=group, index=index, entry={"entry": type(entry).__name__.lower(), **asdict(entry)})
        )

    def updated(self, step: int, attempt: int, members: Sequence[GroupId]) -> None:
        """A step is committed and applied by these groups."""
        for group in members:
            update = UpdateRecord(
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
        self._began_s = self._world.now_s

    def finished(self, step: int, members: Sequence[GroupId]) -> None:
        """The run is at its end, with these groups."""
        self.compared(step, members)
        self._write(EndRecord(outcome="finished", reason="all steps are committed"))

    def compared(self, step: int, members: Sequence[GroupId]) -> None:
        """These groups compare their parameters after this many steps."""
        digest = hashlib.sha256(f"{self._scenario.name} after {step} steps".encode()).hexdigest()
        for group in members:
            record = ParamsRecord(group=group, step=step, sha256=digest, num_restarts=self._world.num_restarts)
            self._write(record)

    def _computed(self, group: GroupId) -> list[Microbatch]:
        return [item for plan in self._plans for item in plan.work.of(group)]

    def _write(self, record: Record) -> None:
        self._sink(Line(source=SOURCE, at_s=self._world.now_s, record=record))
