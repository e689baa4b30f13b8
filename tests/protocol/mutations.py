"""Protocols with a planted bug each: what the invariants must find; `mutations_of_*` have those of some subjects."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.controller.restart import Restarts
from spare_megatron.core.log.actions import (
    Action,
    AppendEntry,
    BuildCommunicator,
    FinishRun,
    SaveCheckpoint,
    StartRepairs,
)
from spare_megatron.core.log.bucket_window import BucketWindow
from spare_megatron.core.log.entries import Commit, Entry, Fence
from spare_megatron.core.log.events import Event, VotesRead, WaitingRead
from spare_megatron.core.log.loss_sums import SetSum
from spare_megatron.core.log.relays import BlockVotes, Reliance
from spare_megatron.core.saves.checkpoint_policy import superseded
from spare_megatron.core.saves.checkpoint_validity import CheckpointValidity
from spare_megatron.stacking.layout import Member, PartitionId
from spare_megatron.stacking.plans import StepPlan
from spare_megatron.stacking.state_partitions import Ownership, PartitionCopy, Repair
from spare_megatron.state.checkpoint.verification import refusal_in_log
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.agreement import GroupAgreement
from tests.protocol.audits import AuditDigests
from tests.protocol.buckets import Buckets
from tests.protocol.communicators import Sums
from tests.protocol.evaluations import EvaluationSums
from tests.protocol.lanes import CountsHalfARow, Lanes, PatchesOnOneLane
from tests.protocol.partitions import PartitionStates
from tests.protocol.slabs import (
    AddsTheNormByRank,
    AdmitsAllAsWhole,
    DealsByItsOwnPipeline,
    Gradients,
    KeepsByRank,
    PostsFirstSlabsFirst,
    RemembersTheLost,
    StopsAtUnsoundSums,
)
from tests.protocol.store import UncheckedLog


def given(method: str, **fields: object) -> type[Controller]:
    """A controller whose method gets a first argument with these fields."""

    def changed(self: Controller, first: Any, *others: Any) -> Any:
        return getattr(super(planted, self), method)(replace(first, **fields), *others)

    planted = type(f"ControllerWith{sorted(fields)}", (Controller,), {method: changed})
    return planted


def counting_votes_with(**fields: Any) -> type[Controller]:
    """A controller that decides as if all votes had these fields."""

    class CountsOtherVotes(Controller):
        def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
            votes = {group: replace(vote, **fields) for group, vote in event.votes.items()}
            return super()._decide(replace(event, votes=votes), now_s)

    return CountsOtherVotes


class CommitsWithoutAllVotes(Controller):
    """Decides on the votes that there are."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        present = next(iter(event.votes.values()), None)
        if present is None:
            return ()
        return super()._decide(replace(event, votes={g: event.votes.get(g, present) for g in self.members}), now_s)


class ReusesCommunicatorNames(Controller):
    """Names communicators by the epoch: a retry without a loss uses the name again."""

    def _build_communicator(self) -> BuildCommunicator:
        return replace(super()._build_communicator(), key=self.epoch)


class KeepsTheFirstBatch(Controller):
    """Deals every step as many microbatches as the first one has."""

    def _plan(self, *, after: str = "") -> StepPlan:
        self._dealt = self._ramp.at(self.step)
        return super()._plan(after=after)


class RestartsWithTheLargerBatch(Controller):
    """Deals the steps after a restart as many microbatches as the step had that was under way."""

    def _deal_step(self) -> None:
        earlier = (self._dealt, self._step_dealing) if self.head else None
        super()._deal_step()
        if earlier is not None and earlier[0] > self._dealt:
            self._step_dealing = earlier[1]


class PatchesTwice(Controller):
    """Does not forget what it has patched: a second patch in the step computes it again."""

    def _plan_patch(self) -> StepPlan:
        orphans = list(self._orphans)
        plan = super()._plan_patch()
        self._orphans += orphans
        return plan


class PlansByItsOwnFetchTime(Controller):
    """Plans with a time to get data that each process has measured for itself."""

    num_started = 0

    def __init__(self, setup: ControllerSetup) -> None:
        PlansByItsOwnFetchTime.num_started += 1
        super().__init__(replace(setup, fetch=setup.fetch + 1100 * (self.num_started % 3)))


class IgnoresFences(Controller):
    """Keeps a fenced group as a member."""

    def _on_fence(self, fence: Fence) -> None:
        self.is_discarded |= fence.discard


class AdmitsTheFenced(Controller):
    """Forgets that a waiting group has been fenced."""

    def not_fenced(self, members: Iterable[Member]) -> list[Member]:
        return sorted(members)


class IgnoresDiscards(Controller):
    """Fences a group with wrong parameters and commits the sum that it spoiled."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        self.is_discarded = False
        members = {group: vote for group, vote in event.votes.items() if group in self.members}
        return super()._decide(replace(event, votes=members), now_s)


class RestartsThoseWhoTookPart(Controller):
    """Counts incarnations that reported before an earlier restart that they wait."""

    def handle(self, event: Event, *, now_s: float) -> tuple[Action, ...]:
        if isinstance(event, WaitingRead):
            return self.restarts.decide(event, self._saves.saved, {}, 0.0, self.head)
        return super().handle(event, now_s=now_s)


class RestartsWithoutHosts(Controller):
    """Does not ask whether those who wait host all shards."""

    def __init__(self, setup: ControllerSetup) -> None:
        super().__init__(setup)
        self.restarts = Restarts(setup.restarts, replace(setup, last_resort=True))


class CountsOldVotes(UncheckedLog):
    """Takes a group's vote on an earlier attempt where it has not voted on this one."""

    def votes(self, attempt: int, voters: Sequence[Member], relays: Sequence[Member] = ()) -> dict[int, str]:
        return {**super().votes(attempt - 1, voters, relays), **super().votes(attempt, voters, relays)}


class TakesOldVotes(BlockVotes):
    """A relay that casts whatever its block has sent, as votes on the attempt that it casts its own on."""

    def add_vote(self, attempt: int, voter: Member, vote: str) -> bool:
        return super().add_vote(self.attempt, voter, vote)


class SendsToItsWholeBlock(BlockVotes):
    """A relay that passes entries on to those, too, whose votes it has not cast."""

    entry_receivers = property(lambda votes: votes._block)  # type: ignore[assignment]


class ReadsNothing(Reliance):
    """Leaves the votes to others after a loss, as a relay, too."""

    is_placed = True  # type: ignore[assignment]


class WaitsForVotesOfTheLost(Controller):
    """Reads no votes after a loss before the lost groups have voted, too."""

    def _await_votes(self) -> tuple[Action, ...]:
        read, wait = super()._await_votes()
        return (replace(read, num_left=len(self._attempted_by)), wait)


class ReliesOnTheLost(Reliance):
    """Leaves the votes to its relay, also when that is lost."""

    def fold(self, entry: Entry) -> None:
        pass


class GathersFromTheLost(Controller):
    """Goes on to expect parameters from the owners of the beginning."""

    def _gather_params(self, *, is_anew: bool = False) -> tuple[Action, ...]:
        actions = super()._gather_params(is_anew=is_anew)
        owners = tuple(Member(group) for group in range(self._setup.placement.num_groups))
        return tuple(replace(action, owners=owners) for action in actions)


class CountsUnfinishedCopies(Controller):
    """Takes a group that is to copy a partition for one of its hosts."""

    def _own(self, ownership: Ownership | None, first_step: int = 0) -> tuple[Action, ...]:
        if ownership is not None and ownership.repairs:
            copies = [PartitionCopy(repair.partition, repair.receiver) for repair in ownership.repairs]
            self.ownership = ownership
            return super()._own(ownership.with_copies(copies), first_step)
        return super()._own(ownership, first_step)


class ReleasesTooSoon(Controller):
    """Has the donors of moves release their copies before the receivers have them."""

    def _own(self, ownership: Ownership | None, first_step: int = 0) -> tuple[Action, ...]:
        donors = {PartitionCopy(move.partition, move.donor) for move in ownership.moves} if ownership else set()
        return tuple(
            replace(action, hosts=tuple(_without(donors, number, row) for number, row in enumerate(action.hosts)))
            for action in super()._own(ownership, first_step)
            if isinstance(action, StartRepairs)
        )


def _without(copies: set[PartitionCopy], number: int, row: tuple[Member, ...]) -> tuple[Member, ...]:
    return tuple(host for host in row if PartitionCopy(PartitionId(number), host) not in copies)


class ReleasesWithTheCopy(Controller):
    """Has the donors release with the commit that has the copies, which no group has compared."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        return tuple(map(self._with_all_released, super()._decide(event, now_s)))

    def _with_all_released(self, action: Action) -> Action:
        if not (isinstance(action, AppendEntry) and isinstance(action.entry, Commit) and self.ownership):
            return action
        restored = set(action.entry.restored)
        made = [move for move in self.ownership.moves if PartitionCopy(move.partition, move.receiver) in restored]
        released = tuple(PartitionCopy(move.partition, move.donor) for move in made)
        return replace(action, entry=replace(action.entry, released=released))


class EndsWithTheLastCommit(Controller):
    """Does not wait until all parameters are whole."""

    def _end(self) -> tuple[Action, ...]:
        return (FinishRun(step=self.step),)


class EndsWithTheLastSave(Controller):
    """Compares what it has saved with no other state after the last step."""

    def _end(self) -> tuple[Action, ...]:
        return super()._end() if self.ownership else (FinishRun(step=self.step),)


class TrustsAnyReport(Controller):
    """Takes a copy for compared that one vote reports, whichever other votes report the partition."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        reported = tuple(
            PartitionCopy(digest.partition, voter)
            for voter in self.voters
            for digest in (event.votes[voter.group].partition_digests if voter.group in event.votes else ())
            if not digest.is_proven
        )
        return tuple(
            replace(action, entry=replace(action.entry, proven=reported))
            if isinstance(action, AppendEntry) and isinstance(action.entry, Commit)
            else action
            for action in super()._decide(event, now_s)
        )


class _ValidityOfOneStep(CheckpointValidity):
    def _committed(self) -> None:
        super()._committed()
        super()._committed()


class ChecksOnce(Controller):
    """Takes what one commit has compared for right."""

    def __init__(self, setup: ControllerSetup) -> None:
        super().__init__(setup)
        self._validity = _ValidityOfOneStep()


class KeepsWhatSomeHold(Controller):
    """Keeps the buckets that any survivor holds."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        counts = [vote.num_complete for vote in event.votes.values()]
        if () in counts or not counts:
            return super()._decide(event, now_s)
        votes = {group: replace(vote, num_complete=max(counts)) for group, vote in event.votes.items()}
        return super()._decide(replace(event, votes=votes), now_s)


class WritesSumsAtOnce(BucketWindow):
    """Takes what is complete here for what every group holds."""

    @property
    def num_everywhere(self) -> int:
        return self.num_complete


class AppliesUnsoundSums(Buckets):
    """Takes every sum for sound."""

    def receive(self, sums: Sums) -> bool:
        self.complete(sums)
        return True


class CountsUnsoundSums(Buckets):
    """Ends the attempt with an unsound sum, and says that it holds it."""

    def receive(self, sums: Sums) -> bool:
        is_sound = super().receive(sums)
        if not is_sound:
            self.complete(sums)
        return is_sound


class ChecksNoSums(Buckets):
    """Takes every sum that comes for the sum of what was staged."""

    def is_wrong(self, sums: Sums) -> bool:
        return False


class KeepsWhatWasGathered(Controller):
    """Has only those gather who lack parameters, also after an owner was wrong."""

    def _gather_params(self, *, is_anew: bool = False) -> tuple[Action, ...]:
        return super()._gather_params()


class InstallsOldPieces(PartitionStates):
    """Takes any piece for one of the present step."""

    def install(self, index: int, piece: int, step: int, content: str) -> bool:
        return super().install(index, piece, self.num_updates, content)


class CopiesAtOnce(PartitionStates):
    """Begins a copy in the step whose sums were to go to others."""

    def assign(self, action: StartRepairs) -> list[Repair]:
        return super().assign(replace(action, first_step=0))


class ReportsNoBreak(GroupAgreement):
    """Lets the others wait for what never comes."""

    def report_broken(self, index: int, cause: str) -> str:
        return cause


class PatchesEvaluations(Controller):
    """Takes the work of an evaluation for a part of the next step: after a loss it is computed for a gradient."""

    def _plan(self, *, after: str = "") -> StepPlan:
        before = [plan for plan in self._plans if plan.is_evaluation]
        plan = super()._plan(after=after)
        self._plans = [*before, plan]
        return plan


class KeepsFirstSums(EvaluationSums):
    """Votes again with the value of an attempt that was retried."""

    def begin(self) -> None:
        super().begin()
        self._first: tuple[SetSum, ...] = ()

    def sums(self) -> tuple[SetSum, ...]:
        self._first = self._first or super().sums()
        return self._first


class EvaluatesWithoutTheLost(Controller):
    """Decides an evaluation with the sums of those who are left."""

    def _decide(self, event: VotesRead, now_s: float) -> tuple[Action, ...]:
        attempted_by = self._attempted_by
        if self.is_evaluating:
            self._attempted_by = self.voters
        actions = super()._decide(event, now_s)
        self._attempted_by = attempted_by
        return actions


@dataclass(frozen=True, slots=True)
class Protocol:
    """The parts under test."""

    controller_type: type[Controller] = Controller
    log_type: type[DecisionLog] = UncheckedLog
    partitions_type: type[PartitionStates] = PartitionStates
    window_type: type[BucketWindow] = BucketWindow
    buckets_type: type[Buckets] = Buckets
    gradients_type: type[Gradients] = Gradients
    evaluation_type: type[EvaluationSums] = EvaluationSums
    votes_type: type[BlockVotes] = BlockVotes
    reliance_type: type[Reliance] = Reliance
    voice_type: type[GroupAgreement] = GroupAgreement
    lanes_type: type[Lanes] = Lanes
    audits_type: type[AuditDigests] = AuditDigests
    refusal_in_log: Callable[[DecisionLog, int, SaveCheckpoint], str] = refusal_in_log
    superseded: Callable[..., frozenset[int]] = superseded


CORRECT = Protocol()
MUTATIONS = {
    "commits without all votes": Protocol(controller_type=CommitsWithoutAllVotes),
    "reuses the names of communicators": Protocol(controller_type=ReusesCommunicatorNames),
    "keeps the batch of the first step": Protocol(controller_type=KeepsTheFirstBatch),
    "counts a patch twice": Protocol(controller_type=PatchesTwice),
    "ignores fences": Protocol(controller_type=IgnoresFences),
    "commits what was discarded": Protocol(controller_type=IgnoresDiscards),
    "goes on with different parameters": Protocol(controller_type=counting_votes_with(params_digest="")),
    "goes on with copies that differ": Protocol(controller_type=counting_votes_with(state_digest="")),
    "counts a copy and its donor as two": Protocol(controller_type=counting_votes_with(copied_from=None)),
    "lets a fence hit a later incarnation": Protocol(controller_type=given("_on_fence", incarnation=10**6)),
    "admits a group that was fenced while it waited": Protocol(controller_type=AdmitsTheFenced),
    "counts votes on an earlier attempt": Protocol(log_type=CountsOldVotes),
    "gathers parameters from lost owners": Protocol(controller_type=GathersFromTheLost),
    "counts copies that are not finished": Protocol(controller_type=CountsUnfinishedCopies),
    "releases state partitions before they are copied": Protocol(controller_type=ReleasesTooSoon),
    "releases state partitions before copies are compared": Protocol(controller_type=ReleasesWithTheCopy),
    "ends before all parameters are whole": Protocol(controller_type=EndsWithTheLastCommit),
    "compares nothing of its last checkpoint": Protocol(controller_type=EndsWithTheLastSave),
    "trusts any report of a copy": Protocol(controller_type=TrustsAnyReport),
    "goes on without gathering parameters": Protocol(controller_type=given("_retry", gather=False)),
    "keeps buckets that only some hold": Protocol(controller_type=KeepsWhatSomeHold),
    "patches a step that was discarded": Protocol(controller_type=given("_retry", recompute=False)),
    "writes sums over local sums at once": Protocol(window_type=WritesSumsAtOnce),
    "casts votes on an earlier attempt for a block": Protocol(votes_type=TakesOldVotes),
    "passes entries to groups whose votes it has not cast": Protocol(votes_type=SendsToItsWholeBlock),
    "waits for votes of the lost": Protocol(controller_type=WaitsForVotesOfTheLost),
    "reads no votes after a loss": Protocol(reliance_type=ReadsNothing),
    "leaves votes to lost relays": Protocol(reliance_type=ReliesOnTheLost),
    "does not report what has failed": Protocol(voice_type=ReportsNoBreak),
    "installs pieces of an earlier step": Protocol(partitions_type=InstallsOldPieces),
    "copies state partitions in the step of the loss": Protocol(partitions_type=CopiesAtOnce),
    "publishes checkpoints without reading the log": Protocol(refusal_in_log=lambda log, head, action: ""),
    "compares what it has saved in one step alone": Protocol(controller_type=ChecksOnce),
    "removes what is right for what may be wrong": Protocol(superseded=lambda of, _, *kept: superseded(of, (), *kept)),
}
MUTATIONS_OF_COMPARISONS = {
    "compares parameters alone": Protocol(controller_type=counting_votes_with(partition_digests=())),
    "keeps what was gathered from a wrong owner": Protocol(controller_type=KeepsWhatWasGathered),
}
MUTATIONS_OF_GRADIENTS = {
    "applies sums with unsound parts": Protocol(buckets_type=AppliesUnsoundSums),
    "keeps sums with unsound parts": Protocol(buckets_type=CountsUnsoundSums),
}
MUTATIONS_OF_SUMS = {
    "commits a wrong sum": Protocol(buckets_type=ChecksNoSums),
    "keeps buckets of a wrong sum": Protocol(controller_type=counting_votes_with(has_wrong_sum=False)),
}
MUTATIONS_OF_EVALUATIONS = {
    "counts an evaluation into a gradient": Protocol(controller_type=PatchesEvaluations),
    "keeps the value of a retried evaluation": Protocol(evaluation_type=KeepsFirstSums),
    "evaluates without what the lost have computed": Protocol(controller_type=EvaluatesWithoutTheLost),
}
MUTATIONS_OF_LANES = {
    "counts half a row": Protocol(lanes_type=CountsHalfARow),
    "votes without the patch of a lane": Protocol(lanes_type=PatchesOnOneLane),
}
MUTATIONS_OF_UNSOUND_SHAPES = {
    "sums no slab after an unsound sum": Protocol(gradients_type=StopsAtUnsoundSums),
}
MUTATIONS_OF_SHAPES = {
    "keeps buckets by rank": Protocol(gradients_type=KeepsByRank),
    "adds the norm by rank": Protocol(gradients_type=AddsTheNormByRank),
    "posts slabs in another order in smaller groups": Protocol(gradients_type=PostsFirstSlabsFirst),
    "remembers the stages of the lost": Protocol(controller_type=RemembersTheLost),
    "admits all groups as whole": Protocol(controller_type=AdmitsAllAsWhole),
    "deals by the pipeline of its own group": Protocol(controller_type=DealsByItsOwnPipeline),
}
MUTATIONS_OF_SHARED_DATA = {
    "plans by a fetch time of its own": Protocol(controller_type=PlansByItsOwnFetchTime),
    "loses shards that others can read": Protocol(controller_type=given("__init__", last_resort=False)),
}
MUTATIONS_OF_RESTARTS = {
    "restarts with incarnations that took part": Protocol(controller_type=RestartsThoseWhoTookPart),
    "restarts without hosts": Protocol(controller_type=RestartsWithoutHosts),
    "restarts with the larger batch": Protocol(controller_type=RestartsWithTheLargerBatch),
}
