"""Drives the real controller in virtual time: executes its actions and returns the resulting events."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log import actions
from spare_megatron.core.log.entries import Entry, Fence, Restart, SaveEnd
from spare_megatron.core.log.events import EntryRead, Event, HostsRead, RunStarted, VotesRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import NO_OWNER, StepPlan, Work
from spare_megatron.stacking.state_partitions import PartitionSetup, Repair
from spare_megatron.tools.simulate.compute_fit import FloatArray, stacks_of
from spare_megatron.tools.simulate.simulated_journal import SimulatedJournal
from spare_megatron.tools.simulate.slow_drains import SlowDrains
from spare_megatron.tools.simulate.world import World


class Copies:
    """Copies of state partitions in progress, one after another per receiver, in `copy_s` each; None: never any."""

    def __init__(self, copy_s: float | None) -> None:
        self._copy_s = inf if copy_s is None else copy_s
        self._whole_at_s: dict[Repair, float] = {}

    def start(self, copies: Sequence[Repair], now_s: float) -> None:
        """Requests exactly these copies. Those in progress go on; after the loss of its donor a copy starts over."""
        under_way = {copy: self._whole_at_s[copy] for copy in copies if copy in self._whole_at_s}
        free_at_s: dict[GroupId, float] = defaultdict(lambda: now_s)
        for copy, at_s in under_way.items():
            free_at_s[copy.receiver.group] = max(free_at_s[copy.receiver.group], at_s)
        for copy in copies:
            if copy not in under_way:
                free_at_s[copy.receiver.group] += self._copy_s
                under_way[copy] = free_at_s[copy.receiver.group]
        self._whole_at_s = under_way

    def whole(self, now_s: float) -> dict[GroupId, list[Repair]]:
        """Receiver -> the requested copies that are complete by now."""
        found: dict[GroupId, list[Repair]] = defaultdict(list)
        for copy, at_s in self._whole_at_s.items():
            if at_s <= now_s:
                found[copy.receiver.group].append(copy)
        return found


Clock = Callable[[], float]
_PACE_NS = 1_000_000
"""Of a group that is not slow; only ratios matter."""


class SpareRun:
    """Executes the controller's actions; holds no policy. `decision_s`: seconds spent in the controller, by `clock`."""

    def __init__(self, world: World, journal: SimulatedJournal | None, clock: Clock | None) -> None:
        scenario = world.scenario
        self._world = world
        self._simulated_journal = journal
        self._clock = clock
        self._placement = make_placement(
            scenario.placement, scenario.num_groups, scenario.hosts_per_shard, scenario.placed_groups_per_domain
        )
        self._all_groups = tuple(GroupId(group) for group in range(scenario.max_groups))
        setup = ControllerSetup(
            placement=self._placement,
            microbatches_per_shard=scenario.microbatches_per_shard,
            num_steps=scenario.num_steps,
            granularity=scenario.granularity,
            saves=self._save_policy(),
            evaluation=scenario.evaluations,
            last_resort=scenario.last_resort,
            fetch=scenario.fetch,
            partitions=self._partition_setup(),
            rounds=scenario.rounds,
            num_stages=scenario.machines_per_group,
            slabs=scenario.slabs,
            pause_s=scenario.costs.restart_s if scenario.policy == "spare" else None,
        )
        self.decision_s = 0.0
        self._controller = Controller(setup)
        self._log: list[Entry] = []
        self._incarnations: Counter[GroupId] = Counter()
        self._votes: dict[GroupId, Vote] = {}
        self._members: tuple[GroupId, ...] = ()  # of the present attempt
        # Of the groups in the present step; None if none is slow or smaller than others.
        self._factors: FloatArray | None = None
        self._save_ends: tuple[SaveEnd, ...] = ()  # not yet in a commit
        self._has_to_rebuild = False
        self._built_at_s = 0.0
        self._fetching: tuple[Work | None, float] = (None, 0.0)
        self._copies = Copies(scenario.partition_copy_s)
        self._drains = SlowDrains(world, self._placement.hosts) if scenario.replace_slow else None

    def _save_policy(self) -> SavePolicy:
        scenario = self._world.scenario
        if scenario.expected_group_life_s is not None:
            return SavePolicy(group_life_s=scenario.expected_group_life_s, group_absence_s=scenario.mean_absence_s())
        cadence_s = scenario.save_cadence_s()
        return SavePolicy(interval_s=None if cadence_s == float("inf") else cadence_s)

    def _partition_setup(self) -> PartitionSetup | None:
        scenario = self._world.scenario
        if not scenario.partition_redundancy:
            return None
        return PartitionSetup(
            num_groups=scenario.num_groups,
            redundancy=scenario.partition_redundancy,
            groups_per_domain=scenario.placed_groups_per_domain,
        )

    def run(self) -> None:
        queue: deque[actions.Action] = deque(self._handle(RunStarted()))
        is_up = self._world.fleet.is_up[: self._placement.num_groups]
        if not is_up.all():
            queue = deque(self._handle(self._start_with(np.flatnonzero(is_up).tolist())))
        while not isinstance(action := queue.popleft(), actions.FinishRun):
            for event in self._execute(action):
                queue.extendleft(reversed(self._handle(event)))
        self._world.ledger.mark_saved()
        if self._simulated_journal:
            self._simulated_journal.on_finish(action.step, self._controller.members)

    def _start_with(self, groups: list[int]) -> EntryRead:
        """The run begins with these groups; the others come later."""
        self._log.append(Restart(step=0, members=self._present(list(map(GroupId, groups)))))
        self._incarnations.update(group for group in self._all_groups if group not in groups)
        return self._read(0)

    def _handle(self, event: Event) -> tuple[actions.Action, ...]:
        if self._clock is None:
            return self._controller.handle(event, now_s=self._world.now_s)
        began_s = self._clock()
        found = self._controller.handle(event, now_s=self._world.now_s)
        self.decision_s += self._clock() - began_s
        return found

    def _execute(self, action: actions.Action) -> tuple[Event, ...]:
        """Executes one action and returns its events; the cases are in the order of a step."""
        match action:
            case actions.ComputeStep(plan=plan):
                self._compute_step(plan)
            case actions.AttemptReduce():
                return self._attempt(action)
            case actions.AttemptEvaluation():
                return self._attempt_evaluation(action)
            case actions.ReadEntry(index=index):
                return (self._read(index),)
            case actions.AppendEntry(index=index, entry=entry):
                if index == len(self._log):
                    self._log.append(entry)
            case actions.UpdateModel(step=step, attempt=attempt):
                self._world.update(len(self._members))
                self._save_ends = ()
                if self._simulated_journal:
                    self._simulated_journal.on_update(step, attempt, self._members)
            case actions.ReadVotes(attempt=attempt):
                return (VotesRead(attempt=attempt, votes=self._votes),) if self._votes else ()
            case actions.BuildCommunicator():
                self._has_to_rebuild = True
                self._built_at_s = self._world.fenced_at_s + self._world.scenario.costs.rebuild_s
            case actions.ComputePatch(plan=plan):
                self._compute_patch(plan)
            case actions.SaveCheckpoint(step=step):
                self._world.save(step)
                self._save_ends = (SaveEnd(step, True, self._world.scenario.costs.save_s),)
                if self._simulated_journal:
                    self._simulated_journal.on_comparison(step, self._members)
            case actions.DrainGroups(members=members):
                self._drain(members)
            case actions.AdmitGroups(members=members):
                self._world.take_in(tuple(member.group for member in members))
            case actions.AttemptFinish(attempt=attempt, plan_digest=plan_digest):
                vote = Vote(is_complete=True, plan_digest=plan_digest)
                return (VotesRead(attempt=attempt, votes=dict.fromkeys(self._controller.members, vote)),)
            case actions.GatherParams() | actions.LoadCheckpoint() | actions.ChangePaces() | actions.ReportEvaluation():
                pass  # the first two are included in the costs of update and restart; the next plan says the paces
            case actions.StartRepairs(copies=copies):
                self._copies.start(copies, self._world.now_s)
            case actions.AwaitHosts():
                return (self._await_hosts(action),)
            case actions.StopWipeOut(partitions=partitions):
                self._world.num_state_wipe_outs += bool(partitions)
                return (self._start_over(),)
            case _:
                raise AssertionError(f"nothing in a simulated run asks for {action}")
        return ()

    def _drain(self, members: Sequence[Member]) -> None:
        self._incarnations.update(member.group for member in members)
        self._world.drain(tuple(member.group for member in members))
        if self._drains:
            self._drains.on_drained(members)

    # ------------------------------------------------------------------------------------------------ one attempt

    def _compute_step(self, plan: StepPlan) -> None:
        began_s = self._world.now_s
        factors = self._world.slow.factors(began_s) * self._world.fleet.paces
        self._factors = factors if (factors != 1.0).any() else None
        if plan.is_evaluation:
            self._world.ledger.spend("evaluate", self._stacks_of(plan.work) * self._world.scenario.costs.evaluate_s)
        else:
            self._world.compute(plan.step, self._stacks_of(plan.work))
        self._world.ledger.spend("fetch", self._fetch_s(plan))
        self._has_to_rebuild = False  # a rebuild at a start, restart or join is part of its cost
        if self._simulated_journal:
            self._simulated_journal.on_step_computed(plan, began_s)

    def _compute_patch(self, plan: StepPlan) -> None:
        costs = self._world.scenario.costs
        cause, whole_s = ("evaluate", costs.evaluate_s) if plan.is_evaluation else ("patch", costs.compute_s)
        self._world.ledger.spend(cause, self._stacks_of(plan.work) * whole_s)
        self._world.ledger.spend("fetch", self._fetch_s(plan))
        if self._simulated_journal:
            self._simulated_journal.on_patch(plan)

    def _attempt(self, action: actions.AttemptReduce) -> tuple[Event, ...]:
        self._members = action.members
        lost: Sequence[GroupId] = self._world.lost_meanwhile() or self._wait_for_sum()
        self._has_to_rebuild = False
        lost = self._world.notice(lost) if lost else ()
        vote = Vote(is_complete=not lost, plan_digest=action.plan_digest, save_ends=self._save_ends)
        self._votes = dict.fromkeys((g for g in action.members if g not in lost) if lost else action.members, vote)
        for group, copies in self._copies.whole(self._world.now_s).items():
            if group in self._votes:
                self._votes[group] = replace(vote, restored=tuple(copy.partition for copy in copies))
        leaving = self._world.fleet.noticed(self._world.now_s)
        if self._drains and (slow := self._drains.leaving(action.step, action.members, self._factors)) is not None:
            leaving.add(slow)
        for group in leaving:
            if group in self._votes:
                self._votes[group] = replace(self._votes[group], leaves=True)
        self._measure_paces()
        if self._simulated_journal:
            self._simulated_journal.on_attempt(action, tuple(self._votes), is_complete=not lost)
        if not lost:
            waiting = self._present(self._world.fleet.ready(self._world.now_s))
            fewer = self._world.fleet.smaller
            return (VotesRead(attempt=action.attempt, votes=self._votes, waiting=waiting, stages=fewer),)
        self._fence(lost)
        return ()

    def _attempt_evaluation(self, action: actions.AttemptEvaluation) -> tuple[Event, ...]:
        lost: Sequence[GroupId] = self._world.lost_meanwhile()
        lost = self._world.notice(lost) if lost else ()
        vote = Vote(is_complete=True, plan_digest=action.plan_digest)
        self._votes = {member.group: vote for member in action.voters if member.group not in lost}
        if self._simulated_journal:
            self._simulated_journal.on_evaluation(action, tuple(self._votes))
        if not lost:
            return (VotesRead(attempt=action.attempt, votes=self._votes),)
        self._fence(lost)
        return ()

    def _measure_paces(self) -> None:
        """Adds the paces to the votes, if they are measured; equal votes stay one object."""
        if self._controller.deals_by_pace:
            usual: dict[Vote, Vote] = {}
            factors = {} if self._factors is None else dict(enumerate(self._factors.tolist()))
            for group, vote in self._votes.items():
                factor = factors.get(group, 1.0)
                if factor == 1.0:
                    self._votes[group] = usual.setdefault(vote, replace(vote, pace_ns=_PACE_NS))
                else:
                    self._votes[group] = replace(vote, pace_ns=round(_PACE_NS * factor))

    def _wait_for_sum(self) -> tuple[GroupId, ...]:
        """Waits for the new communicator, if any, and the reduction; returns the groups whose loss stopped it."""
        world, reduce = self._world, ("reduce", self._world.reduce_s(self._members))
        if not self._has_to_rebuild:
            return world.wait((reduce,))
        lost = world.wait((("rebuild", max(self._built_at_s - world.now_s, 0.0)),))
        if self._simulated_journal:
            self._simulated_journal.on_rebuild()
        return lost or world.wait((("rebuild", world.scenario.costs.retry_s), reduce))

    def _stacks_of(self, work: Work) -> float:
        scenario = self._world.scenario
        fills = self._world.fleet.fills
        return stacks_of(work, scenario.microbatches_per_shard, scenario.costs, self._factors, fills)

    def _fence(self, lost: Sequence[GroupId]) -> None:
        for member in self._present(lost):
            if self._simulated_journal:
                self._simulated_journal.on_fence(member, len(self._log))
            self._log.append(Fence(group=member.group, incarnation=member.incarnation))
            self._incarnations[member.group] += 1

    def _await_hosts(self, action: actions.AwaitHosts) -> Event:
        """Waits until hosts are back, unless they come later than a restart would be over."""
        if action.index < len(self._log):
            return self._read(action.index)
        back_s = self._world.hosts_back_s(self._placement.hosts[shard] for shard in action.shards)
        if back_s is None:
            return self._start_over()
        wait = ("pause", max(back_s - self._world.now_s, 0.0))
        lost: Sequence[GroupId] = self._world.lost_meanwhile() or self._world.wait((wait,))
        if lost:
            self._fence(self._world.notice(lost))
            return self._read(action.index)
        self._world.num_pauses += 1
        waiting = self._present(self._world.fleet.ready(max(back_s, self._world.now_s)))
        return HostsRead(waiting=waiting, stages=self._world.fleet.smaller)

    def _start_over(self) -> EntryRead:
        """Restarts after a wipe-out; fences appended meanwhile are folded, and their actions dropped."""
        self._restart()
        while self._controller.head < len(self._log) - 1:
            self._handle(self._read(self._controller.head))
        return self._read(self._controller.head)

    def _restart(self) -> None:
        self._world.restart()
        self._log.append(Restart(step=self._world.saved_step, members=self._present(self._all_groups)))

    def _present(self, groups: Sequence[GroupId]) -> tuple[Member, ...]:
        return tuple(Member(group, self._incarnations[group]) for group in groups)

    def _read(self, index: int) -> EntryRead:
        entry = self._log[index]
        if self._simulated_journal:
            self._simulated_journal.on_entry(index, entry)
        return EntryRead(index=index, entry=entry)

    def _fetch_s(self, plan: StepPlan) -> float:
        """Seconds by which waiting for data of shards that it does not host delays the last group."""
        scenario, costs = self._world.scenario, self._world.scenario.costs
        if not scenario.last_resort or not costs.fetch_s:
            return 0.0
        if self._fetching[0] is not plan.work:
            self._fetching = (plan.work, self._covered_stacks(plan.work))
        whole_s = costs.evaluate_s if plan.is_evaluation else costs.compute_s
        return max(costs.fetch_s - self._fetching[1] * whole_s, 0.0)

    def _covered_stacks(self, work: Work) -> float:
        """What the last group computes while it waits for data, in whole shards; infinite if none waits."""
        hosts, owners = self._placement.host_array, work.owners
        is_cold = owners != NO_OWNER
        for column in hosts.T:
            is_cold &= owners != column[:, None]
        if not is_cold.any():
            return inf
        cold = Work(np.where(is_cold, owners, NO_OWNER).astype(owners.dtype))
        return self._stacks_of(work) - self._stacks_of(cold)
