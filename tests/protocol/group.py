"""One group as a state machine: the real controller and the real votes, with a simulated model and network.

It does what `rank.train_step` does, in the same order. Every `yield` is a moment at which anything may happen
elsewhere, or the process may die.
"""

import math
from collections import deque
from collections.abc import Sequence
from random import Random

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import (
    Action,
    AdmitGroups,
    AppendEntry,
    ApplySync,
    AttemptEvaluation,
    AttemptFinish,
    AttemptReduce,
    AttemptSync,
    AttemptUndo,
    AwaitHosts,
    BuildCommunicator,
    ChangePaces,
    CheckpointCandidate,
    ComputeAudits,
    ComputePatch,
    ComputeStep,
    DrainGroups,
    FinishRun,
    GatherParams,
    LoadCheckpoint,
    ReadEntry,
    ReadVotes,
    RefuseCheckpoint,
    ReportEvaluation,
    SaveCheckpoint,
    SaveDispute,
    StartRepairs,
    StopHalted,
    StopWipeOut,
    TakeSnapshot,
    UpdateModel,
)
from spare_megatron.core.log.entries import Fence
from spare_megatron.core.log.events import EntryRead, Event, HostsRead, RestartState, RunStarted, WaitingRead
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.layout import Member
from spare_megatron.stacking.plans import StepPlan
from spare_megatron.stacking.state_partitions import Repair
from spare_megatron.voting.fencing import fence
from tests.protocol.buckets import recipients_of
from tests.protocol.communicators import Reduction
from tests.protocol.links import Fenced, Links
from tests.protocol.own_findings import FOUND
from tests.protocol.partitions import NUM_PIECES, WRONG, PartitionStates, marked
from tests.protocol.relaying import Relaying
from tests.protocol.rounds import RoundWork
from tests.protocol.saved import AT_FIRST, Content
from tests.protocol.saving import Saving
from tests.protocol.state_reports import StateReports, majority
from tests.protocol.store import conversation
from tests.protocol.surroundings import Steps, Surroundings, Until, side_by_side
from tests.protocol.violation import Violation


class RaisesForGradients(Exception):
    """The group's own gradients are unsound."""


MOVES_OF_STATE = 6
"""Until its donor has given it, or a piece of it has come: enough for it to change, or to come too late."""


class Group:
    """One process of one group."""

    def __init__(
        self,
        member: Member,
        controller: Controller,
        world: Surroundings,
        held: PartitionStates | None,
        *,
        is_replacing: bool,
    ) -> None:
        self.held = held
        self.member = member
        self.group = member.group
        self.name = f"{member.group}.{member.incarnation}"
        self._controller = controller
        self._world = world
        self._gradients = world.gradients_of(member, self.name)
        self._evaluation = world.evaluation_type()
        self.audits = world.audits_type(self.name, world.suspect_every)
        self._rounds = RoundWork(member, world)
        self._computed: list[str] = []  # digests of this step's plans
        self._has_work = False  # in this step
        self._params = AT_FIRST
        self._spoiled = ""  # by what: it belongs to the parameters, and shows in them one update later
        self._digested: Content | None = None  # the state that a save has had digested in this step
        self._lacks_params = False
        self._state_reports = StateReports()
        self._saving = Saving(member, world)
        self._links = Links(member, self.name, controller, world)
        self._relaying = Relaying(member, self._links, world)
        self._is_replacing = is_replacing
        self.leaves = False
        self._seen: tuple[tuple[Member, ...], bool] = (
            (),
            False,
        )  # as `_await_hosts` reported

    def run(self) -> Steps:
        """From the start to the end, whatever that is."""
        actions = self._handle(RunStarted())
        try:
            if self.member.incarnation:
                actions = yield from self._come_back()
            pending = deque(actions)
            while pending:
                action = pending.popleft()
                if isinstance(action, FinishRun | StopWipeOut | StopHalted):
                    yield from self._saving.finish()
                    self._world.invariants.stopped(self.name, action)
                    if isinstance(action, FinishRun):
                        self._has_params(action.step)
                        self._world.invariants.saves.finished(self._content)
                    if isinstance(action, StopWipeOut):
                        self._world.wiped_out(self.member)
                    return
                if isinstance(action, DrainGroups) and self.member in action.members:
                    yield from self._saving.finish()
                    return
                for event in (yield from self._execute(action)) or ():
                    pending.extendleft(reversed(self._handle(event)))
        except Fenced:
            self._world.invariants.counts["fenced while alive"] += 1
            yield from self._saving.go_on_for_a_while()
        except RaisesForGradients:
            self._world.invariants.counts["raises for its gradients"] += 1
            self._world.observe(self.member)

    def spoil(self, random: Random) -> bool:
        """A local gradient sum becomes unsound. False if none is to be summed any more."""
        return self._gradients.spoil(random)

    def lack(self, num_failures: int) -> None:
        """As `Links.lack`."""
        self._links.lack(num_failures)

    def flip(self, what: str) -> None:
        """As `Buckets.flip`."""
        self._gradients.flip(what)

    def corrupt(self, random: Random) -> None:
        """Its parameters, or one of its state partitions, change unnoticed, to values that no group has."""
        if self.held is not None and self.held.corrupt(random, len(self._world.groups), self.name):
            return
        if self.held is None and random.random() < 0.5:
            self._spoiled = f"{WRONG} in {self.name}"
        else:
            self._params = f"{WRONG} in {self.name}"

    @property
    def _content(self) -> Content:
        return Content(self._params, self._spoiled)

    def _handle(self, event: Event) -> tuple[Action, ...]:
        self._state_reports.is_wanted |= isinstance(event, EntryRead) and isinstance(event.entry, Fence)
        try:
            return self._controller.handle(event, now_s=self._world.now_s(self.name))
        except ValueError as error:
            raise Violation(f"{self.name} cannot go on: {error}") from error

    def _execute(self, action: Action) -> Steps:
        match action:
            case ComputeStep(plan=plan):
                yield from self._compute(plan, is_patch=False)
            case ComputePatch(plan=plan, into=into):
                if into is not None:
                    self._gradients.begin(into.attempt, into.kept, recipients_of(into))
                yield from self._compute(plan, is_patch=True)
            case ComputeAudits():
                yield None
                self._compute_audits(action)
            case BuildCommunicator(key=key, members=members):
                communicator = self._world.communicators.named(key, members)
                self._links.begin(communicator)
            case AttemptReduce() | AttemptEvaluation() | AttemptSync() | AttemptFinish() | AttemptUndo():
                return (yield from self._attempt(action))
            case ReportEvaluation(step=step, sums=sums):
                self._world.invariants.evaluated(self.name, self._generation, step, sums)
            case ReadVotes():
                votes = yield from self._relaying.read_votes(action)
                return [(yield from self._links.with_waiting(votes))] if votes else []
            case AppendEntry(index=index, entry=entry):
                self._world.invariants.counts["decisions"] += 1
                yield from self._links.speak(lambda voice: voice.append(index, entry))
            case ReadEntry(index=index):
                return (yield from self._relaying.read_entry(index))
            case AwaitHosts():
                return (yield from self._await_hosts(action))
            case UpdateModel():
                yield None
                self._update(action)
            case GatherParams():
                yield None
                yield from self._gather(action)
            case StartRepairs():
                assert self.held is not None, "only state partitions are repaired"
                self._state_reports.is_wanted |= action.is_compared
                for repair in self.held.assign(action):
                    self._world.start_in_background(f"{self.name} copies {repair}", self._copy(repair))
            case DrainGroups() | ChangePaces():
                self._world.invariants.counts[type(action).__name__] += 1
            case AdmitGroups():
                yield from self._give_state()
            case SaveCheckpoint():
                yield None
                yield from self._save(action)
            case SaveDispute(step=step):
                self._save_dispute(step)
            case RefuseCheckpoint(step=step, member=member):
                self._world.invariants.refused(self.name, step, member)
            case _:
                yield None
                self._take_or_load(action)
        return ()

    def _take_or_load(self, action: Action) -> None:
        match action:
            case ApplySync(entry=entry):
                self._params = self._rounds.apply(action)
                self._has_params(entry.step)
                self._state_reports.hold(entry.step)
            case TakeSnapshot():
                self._world.memory.take(self.group, action, self._content)
            case LoadCheckpoint(holders=(_, *_)):
                self._go_back(action)
            case LoadCheckpoint(step=step, hosts=hosts):
                self._load(step, [index for index, row in enumerate(hosts) if self.member in row])
            case _:
                raise AssertionError(f"nothing asks for {action}")

    def _compute_audits(self, action: ComputeAudits) -> None:
        asked = () if self._lacks_params else action.asked_of(self.group)
        if len(set(asked)) < len(asked):
            raise Violation(f"{self.name} is to compute {asked}, one of them twice")
        self._world.computes(self.group, asked)
        suspects = {dispute.microbatch for dispute in action.disputes if dispute.is_suspicion}
        for microbatch in asked:
            self.audits.compute_again(self._params, action.step, microbatch, is_suspect=microbatch in suspects)

    def _await_hosts(self, action: AwaitHosts) -> Steps:
        """Reads who waits, once that changes or patience is over, until an entry is written."""
        self._world.paused()
        is_over = self._world.is_patience_over
        if not self._world.is_written(action.index):
            waiting, stages = yield from self._links.waiting(action.voters)
            event = HostsRead(waiting=waiting, waited_s=math.inf if is_over else 0.0, stages=stages)
            if (waiting, is_over) != self._seen:
                self._seen = (waiting, is_over)
                return [event]
            seen = self._world.num_announced
            yield Until(
                lambda: (
                    self._world.is_written(action.index)
                    or seen != self._world.num_announced
                    or is_over != self._world.is_patience_over
                )
            )
            return [HostsRead()]
        self._seen = ((), False)
        self._computed = []
        return (yield from self._relaying.read_entry(action.index))

    def _save(self, action: SaveCheckpoint) -> Steps:
        self._state_reports.save(action.step, lacks_params=self._lacks_params)
        if not self._lacks_params:
            self._has_params(action.step)
            self._digested = self._content
            if action.member == self.member:
                yield None  # what is copied may change after it was digested
                self._saving.begin(action, self._links.head, self._content)

    def _save_dispute(self, step: int) -> None:
        self._world.invariants.counts["saved dispute"] += 1
        if self._lacks_params:
            self._state_reports.is_wanted = True
        else:
            self._has_params(step)
            self._state_reports.is_due = True

    def _give_state(self) -> Steps:
        for _ in range(MOVES_OF_STATE):
            yield None
        given = Content("", "") if self._lacks_params else self._content
        self._state_reports.is_due |= not self._lacks_params
        self._world.states.setdefault(self._links.head, {})[self.member] = given

    def _load(self, step: int, hosted: Sequence[int]) -> None:
        self._digested, self._rounds.synced_step = None, -1
        self._params, self._spoiled = self._world.invariants.saves.params[step], ""
        self._state_reports.is_due = True
        if self.held is not None:
            self.held.load(step, self._world.invariants.partitions.saved(self._generation, step, hosted))
        self._lacks_params = False
        self._has_params(step)

    def _go_back(self, action: LoadCheckpoint) -> None:
        """Takes its state from the memory of its node, else of another one that has it."""
        copies = [self._world.memory.of[group] for group in (self.group, *(holder.group for holder in action.holders))]
        self._params, self._spoiled = next(held[action.snapshot] for held in copies if action.snapshot in held)
        self._digested, self._computed = None, []
        self._state_reports.is_due = True
        self._has_params(action.step)

    def _compute(self, plan: StepPlan, *, is_patch: bool) -> Steps:
        yield None
        if self._lacks_params or plan.digest in self._computed:
            return
        self._has_params(plan.step)
        work = plan.work.of(self.group)
        self._world.computes(self.group, work)
        if not is_patch:
            self._computed, self._has_work = [], False
        self._has_work |= bool(work)
        if plan.is_evaluation:
            if not is_patch:
                self._evaluation.begin()
            self._evaluation.add(self._params, work)
        elif is_patch:
            self.audits.count(self._params, plan.step, work)
            self._gradients.patch(self._world.lanes.compute(plan, work, is_patch=True))
        else:
            self.audits.begin()
            audits = plan.audited_by(self.group)
            self._world.computes(self.group, audits)
            for microbatch in sorted({*audits, *plan.audited_of(self.group)}):
                self.audits.compute(self._params, plan.step, microbatch)
            self.audits.count(self._params, plan.step, work)
            counted = self.audits.counted(work, plan, self.group)
            self._gradients.compute(self._world.lanes.compute(plan, counted, is_patch=False))
        self._computed.append(plan.digest)

    def _update(self, action: UpdateModel) -> None:
        step, attempt = action.step, action.attempt
        change = self._world.invariants.updated(self.name, step, attempt, self._gradients.sums())
        change += f", norm {self._gradients.norm()!r}" if len(self._gradients.slabs) > 1 else ""
        self._state_reports.changed()
        self._digested = None
        if self.held is None:
            self._params = marked([self._params, self._spoiled], f"{self._params}|{change}{self._spoiled}")
            self._has_params(step + 1)
            if not action.sync:
                self._state_reports.hold(step + 1)
        else:
            for index in self.held.held:
                if self._gradients.lacks(self.group, index):
                    raise Violation(f"{self.name} updates partition {index}, whose sums have not come to it")
            self.held.update(change)
            self.held.proven(action.proven)
            self._world.invariants.partitions.updated(
                self.name, self.member, self._generation, attempt, self.held, change
            )
            self._lacks_params = True

    def _has_params(self, step: int) -> None:
        if self._lacks_params:
            raise Violation(f"{self.name} goes on without all parameters of step {step}")
        is_synced = self._rounds.synced_step == step
        self._world.invariants.params.has(self.name, self._generation, step, self._params, is_synced=is_synced)

    # ------------------------------------------------------------------------------------------------- state partitions

    def _gather(self, action: GatherParams) -> Steps:
        assert self.held is not None, "only state partitions are gathered"
        if action.is_anew:
            self._lacks_params, self._computed = True, []
            self._state_reports.is_wanted = True
            self._world.invariants.counts["gather anew"] += 1
        sent = {index: self.held.whole(index) for index, owner in enumerate(action.owners) if owner == self.member}
        posted = yield from self._links.gather(f"gather {action.step}", sent)
        if posted is None:
            # What comes next on this communicator is something else for those who got everything.
            self._links.release()
            self._world.invariants.counts["broken gather"] += 1
        elif self._lacks_params:
            gathered = self._world.invariants.partitions.gathered
            params = gathered(self.name, self._generation, action.owners, posted, self.held)
            self._params = params if action.step or params.startswith(WRONG) else AT_FIRST
            self._lacks_params = False
            self._has_params(action.step)
            self._state_reports.hold(action.step)

    def _copy(self, repair: Repair) -> Steps:
        """Piece by piece, each while donor and receiver are at the same step."""
        held, world = self.held, self._world
        assert held is not None, "only state partitions are copied"

        def is_void() -> bool:
            return repair not in held.repairs or None in (
                world.partitions_of(self.member),
                world.partitions_of(repair.donor),
            )

        def may_copy() -> bool:
            is_late_enough = held.num_updates >= held.first_steps[repair.partition]
            return is_late_enough and world.partitions_of(repair.donor).num_updates == held.num_updates

        for piece in range(NUM_PIECES):
            is_installed = False
            while not is_installed:
                yield Until(lambda: is_void() or may_copy())
                if is_void():
                    return
                donor = world.partitions_of(repair.donor)
                step, state = donor.num_updates, donor.whole(repair.partition)
                if state is None:
                    raise Violation(f"{repair.donor} is to give partition {repair.partition}, and has it not")
                for _ in range(MOVES_OF_STATE):
                    yield None
                if repair not in held.repairs:
                    return
                is_installed = held.install(repair.partition, piece, step, state[piece])
                world.invariants.counts["piece in time" if is_installed else "piece too late"] += 1

    # ------------------------------------------------------------------------------------------------- coming back

    def _come_back(self) -> Steps:
        """Waits to be admitted. Returns the actions of the step that it is admitted to, none if the run ends before."""
        log_type, before = self._world.log_type, Member(self.group, self.member.incarnation - 1)
        # Two incarnations of a group would wait for each other: only this fence makes room for the admission.
        if self._is_replacing:
            yield from conversation(lambda store: fence(log_type(store), before, "replaced", 0))
        while True:
            if self._controller.restarts.wipe_out is not None:
                if not self._world.is_written(self._links.head):  # else it is long over
                    yield from self._await_restart()
            else:
                # Again after every entry: an earlier incarnation may have written the key since.
                yield from self._links.announce()
            [event] = yield from self._links.read_entry(self._links.head)
            actions = self._handle(event)
            for index, action in enumerate(actions):
                if isinstance(action, FinishRun | StopHalted) or self._is_given_up(action):
                    return ()
                if isinstance(action, RefuseCheckpoint):
                    yield from self._execute(action)
                if isinstance(action, LoadCheckpoint) and self.member in self._controller.voters:
                    return actions[index:]
                if isinstance(action, AdmitGroups) and self.member in action.members:
                    return actions[index + 1 :] if (yield from self._take_state(action)) else ()

    def _is_given_up(self, action: Action) -> bool:
        return isinstance(action, StopWipeOut) and action.is_final

    def _await_restart(self) -> Steps:
        """Says that it waits, and decides on every change of who does; ends when an entry is written."""
        own = RestartState(
            member=self.member, candidates=tuple(map(CheckpointCandidate, sorted(self._world.invariants.saves.params)))
        )
        yield from self._links.speak(lambda voice: voice.announce_restart(own))
        self._world.wiped_out(self.member)
        while not self._world.is_written(self._links.head):
            waiting = yield from self._links.speak(lambda voice: voice.waiting_to_restart(self._world.groups))
            waited_s = math.inf if self._world.is_patience_over else 0.0
            for action in self._handle(WaitingRead(group=self.group, waiting=waiting, waited_s=waited_s)):
                yield from self._execute(action)
            seen = (self._world.num_waiting, self._world.is_patience_over)
            yield Until(
                lambda seen=seen: (
                    self._world.is_written(self._links.head)
                    or seen != (self._world.num_waiting, self._world.is_patience_over)
                )
            )

    @property
    def _generation(self) -> int:
        """Restarts of the run, as far as it has read."""
        return self._controller.num_restarts

    def _take_state(self, admission: AdmitGroups) -> Steps:
        """Whether there is a state to go on with: one that more than half of the members of before agree on.

        One donor is not enough: its parameters may be wrong, and the next comparison would count them twice.
        """
        donors = [voter for voter in self._controller.voters if voter not in admission.members]
        given = self._world.states.setdefault(self._links.head, {})
        yield Until(lambda: majority(given, len(donors)) is not None or not self._world.has_more(donors, given))
        donor = majority(given, len(donors))
        if donor is None:
            self._world.invariants.counts["admission without a state"] += 1
            self._world.observe(self.member)
            return False
        self._params, self._spoiled = given[donor]
        self._state_reports.is_due = True
        self._state_reports.copied_from = donor.group
        if self.held is not None:
            self.held.num_updates = admission.step
        self._world.invariants.took_state(self.name, donor)
        return True

    # --------------------------------------------------------------------------------------------------- an attempt

    def _attempt(self, action: AttemptReduce | AttemptEvaluation | AttemptSync | AttemptFinish | AttemptUndo) -> Steps:
        self._world.invariants.attempted(self.name, action, self._controller.epoch, self._controller.stages)
        yield None
        num_complete: tuple[int, ...] = ()
        if self._lacks_params:
            self._links.release()  # an admission may have brought a new one, on which the others wait for this group
        elif isinstance(action, AttemptReduce):
            yield from self._reduce(action)
            if self._gradients.has_posted_unsound:
                raise RaisesForGradients
            num_complete = self._gradients.num_complete
        elif isinstance(action, AttemptSync):
            yield from self._rounds.take_part(action, self._links.head, self._params)
        has_wrong_sum = not self._lacks_params and isinstance(action, AttemptReduce) and self._gradients.has_wrong_sum
        self._world.invariants.counts["wrong sum"] += has_wrong_sum
        is_reduced = not isinstance(action, AttemptReduce) or (self._gradients.sums() is not None and not has_wrong_sum)
        is_undoing = isinstance(action, AttemptUndo)
        is_complete = not self._lacks_params and is_reduced and not is_undoing
        is_compared = not self._lacks_params and self._state_reports.is_due and not is_undoing
        params, spoiled = self._content if self._digested is None or self.held is not None else self._digested
        is_audited = isinstance(action, AttemptReduce) and not self._lacks_params
        vote = Vote(
            is_complete=is_complete,
            plan_digest=action.plan_digest,
            params_digest=params if is_compared else "",
            num_complete=num_complete,
            lacks_params=self._lacks_params,
            restored=() if self.held is None else self.held.restored(),
            partition_digests=() if self.held is None else self.held.digests(is_compared=is_compared),
            state_digest=(spoiled or "right") if is_compared and self.held is None else "",
            copied_from=self._state_reports.copied_from,
            sums=self._evaluation.sums() if isinstance(action, AttemptEvaluation) and is_complete else (),
            pace_ns=self._world.pace_ns(self.member, action.step) if self._has_work else 0,
            leaves=self.leaves and isinstance(action, AttemptReduce),
            failure="" if is_complete else self._links.failure,
            has_wrong_sum=has_wrong_sum,
            audits=self.audits.digests() if is_audited else (),
            losses=self.audits.losses.digests() if is_audited else (),
            wrong_numbers=FOUND if is_audited and self._world.checks_itself and self.audits.finds_itself_wrong else "",
            held=self._world.memory.held(self.group) if is_undoing else (),
            sync=is_audited and bool(self._world.sync_every) and not (action.step + 1) % self._world.sync_every,
        )
        vote = self._rounds.vote(action, vote) if isinstance(action, AttemptSync) else vote
        if self.held is not None:
            self._world.invariants.partitions.voted(self.name, self._generation, vote.restored, self.held)
        yield None
        self._world.invariants.voted(self.name, action.attempt, vote, self.audits)
        last_votes = yield from self._relaying.vote(action, vote)
        return [] if last_votes is None else [(yield from self._links.with_waiting(last_votes))]

    def _reduce(self, action: AttemptReduce) -> Steps:
        """All buckets that are not kept, or as many as can be had before they are no longer needed."""
        self._gradients.begin(action.attempt, action.kept, recipients_of(action))
        if not (yield from self._links.connect()):
            yield from self._links.report()
            return
        ranks = [self._reduce_of_rank(action.attempt, positions) for positions in self._gradients.ranks]
        yield from side_by_side(ranks, self._world.random)

    def _reduce_of_rank(self, attempt: int, positions: Sequence[int]) -> Steps:
        """Position by position: the sums of one hold up what the rank posts after them. An unsound sum ends one."""
        for position in positions:
            if not (yield from self._reduce_slab(attempt, position)):
                return

    def _reduce_slab(self, attempt: int, position: int) -> Steps:
        """Whether the rank goes on with another one."""
        buckets = self._gradients.slabs[position]
        in_flight: deque[Reduction] = deque()
        while not buckets.window.is_complete:
            while buckets.window.may_post(buckets.num_buckets):
                bucket, local = buckets.post()
                posted = self._links.post(f"attempt {attempt}, bucket {bucket}", local, position)
                if posted is None:
                    yield from self._links.report()
                    return False
                in_flight.append(posted)
                yield None
            sums = yield from self._links.await_sums(in_flight.popleft())
            if sums is None:
                yield from self._links.report()
                return False
            if not buckets.receive(sums):
                self._world.invariants.counts["sum with an unsound part"] += 1
                # Connected until the log moves on: others may still receive it, or wait for another slab.
                return not self._gradients.stops_at_unsound_sums
        return True
