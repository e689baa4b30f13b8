"""What the controller says to a driver where the optimizer state is cut into slices (`stacking.state_partitions`).

GatherParams follows an update, and StartRepairs a loss, a return or a finished copy. A step counts as done only when
all parameters are whole: a group that could not gather them computes nothing and says so in its next vote; after the
Retry all groups gather once more, from the owners that are left, and those groups compute what the others have. After
the last step AttemptFinish is the vote that says so, and the entry Finish its answer. A slice without a host is a
wipe-out at once, for nobody can update it. Copies that have become whole are named in votes; the commit that these
decide makes their members hosts. If that is for a move, the next votes compare all state, and the commit that they
decide has the donors let go. Where hosts differ (`core.comparison`) all groups gather all parameters anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spare_megatron.core.cadence import Cadence
from spare_megatron.core.entries import Entry
from spare_megatron.stacking.layout import GroupId, Member, ShardId, SliceId
from spare_megatron.stacking.plans import StepPlan
from spare_megatron.stacking.state_partitions import Hosts, Ownership, Repair, SliceCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """An action: save the parameters and all state after this many committed steps.

    Attributes:
        step: The committed steps.
        member: Who saves: everything, or all but slices.
        voters: Who takes part then, and may be writing an earlier checkpoint.
        epoch: Number of the set of groups.
        cadence: Why now, where the run decides by what it has measured.
        hosts: For each slice of the optimizer's state, who holds it; none where everybody has all state.
        owners: For each slice, the host that is to write it (`core.partition_saves`).
        is_last: The run has no further steps.
        doubtful: Steps after which something was saved that is not known to be right; this is one of them.
    """

    step: int
    member: Member
    voters: tuple[Member, ...]
    epoch: int
    cadence: Cadence | None = None
    hosts: Hosts = ()
    owners: tuple[Member, ...] = ()
    is_last: bool = False
    doubtful: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseCheckpoint:
    """An action: see to it that nobody begins with this checkpoint, for it holds state that was found to be wrong.

    Attributes:
        step: Committed steps that it holds.
        member: Who has saved it, or is about to.
        epoch: Number of the set of groups then.
        reason: What was wrong.
    """

    step: int
    member: Member
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """An action: the holders copy the state after this many committed steps.

    Attributes:
        step: The steps.
        attempt: Of the last one's commit.
        previous: Of the snapshot before, the only one that is kept; -1 if there is none.
        settled_by: The copy is made before the update that makes so many committed steps.
        holders: For each rank position the groups that keep it.
        slice_holders: For each slice the groups all of whose ranks keep it.
    """

    step: int
    attempt: int
    previous: int
    settled_by: int
    holders: tuple[tuple[GroupId, ...], ...]
    slice_holders: tuple[tuple[GroupId, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherParams:
    """Gather all parameters over the cross-group communicator, unless this group has them.

    Every member takes part, also those that have them. Where it breaks, or the log goes on, the group lacks parameters:
    it skips what needs them, and says so in its next vote. Whoever sees it break says so at once, and all others, who
    would have to do it again in any case, give it up.

    Attributes:
        step: Committed steps that they hold.
        owners: For each slice, who sends it.
        is_anew: Nobody has them: those that were gathered may come from an owner that was put out for wrong ones. The
            next vote compares them again.
    """

    step: int
    owners: tuple[Member, ...]
    is_anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRepairs:
    """Make these copies in the background; they take the place of all that were to be made before.

    Attributes:
        repairs: Those that are missing, the most urgent first.
        hosts: For each slice, who holds the whole state. Whoever is neither a host of a slice nor to copy it lets go of
            what it has of it.
        moves: Copies that take the place of their donors', those included that are made and about to be compared.
        first_step: Committed steps that state must have seen to go into a copy that was not asked for before: gradients
            of the step under way may have been summed without its receiver (`stacking.state_partitions`).
    """

    repairs: tuple[Repair, ...]
    hosts: Hosts
    moves: tuple[Repair, ...] = ()
    first_step: int = 0

    @classmethod
    def of(cls, ownership: Ownership, first_step: int) -> "StartRepairs":
        """All copies that the log asks for."""
        return cls(repairs=ownership.repairs, moves=ownership.moves, hosts=ownership.hosts, first_step=first_step)

    @property
    def copies(self) -> tuple[Repair, ...]:
        """What is still to be copied, the most urgent first."""
        return (*self.repairs, *(move for move in self.moves if not self._is_made(move)))

    @property
    def is_compared(self) -> bool:
        """Whether the next vote compares all state: nobody lets go of a slice for a copy that may differ."""
        return any(map(self._is_made, self.moves))

    def _is_made(self, move: Repair) -> bool:
        return move.receiver in self.hosts[move.slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFinish:
    """Vote on the state after the last step, so that the run can end. Nothing is computed or reduced.

    On whether this group holds all parameters, and what is in the checkpoint that was taken of it.

    Attributes:
        step: Committed steps.
        attempt: The attempt.
        voters: All groups that are left, each with its incarnation.
        plan_digest: Digest of the work of the last step, for the vote.
    """

    step: int
    attempt: int
    voters: tuple[Member, ...]
    plan_digest: str


class CheckpointCandidate(NamedTuple):
    """A checkpoint that lacks nothing at a glance: its manifest is what was written, and all files have their sizes.

    Attributes:
        step: Committed steps that it holds.
        num_files: Of the manifest, which go by their numbers in the order of their names.
        digest: Of the manifest: what others have read counts for the same files alone.
    """

    step: int
    num_files: int = 0
    digest: str = ""


class Reading(NamedTuple):
    """What a group has read of a checkpoint, each file from its first to its last byte.

    Attributes:
        offer: The checkpoint.
        whole: Files that are what was written.
        damaged: Files that are not.
        reason: What is wrong with the first of these.
        num_bytes: Read so far, also of files that are under way.
    """

    offer: CheckpointCandidate
    whole: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    reason: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles:
    """Read these files of a checkpoint against what was written, unless that is done.

    Attributes:
        offer: The checkpoint.
        numbers: The files.
    """

    offer: CheckpointCandidate
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawOffers:
    """Do not offer these checkpoints any more, but earlier ones.

    Attributes:
        reasons: Why not.
    """

    reasons: Mapping[CheckpointCandidate, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpoint:
    """Take over the checkpoint after this many committed steps; 0: the parameters with which the run began.

    Attributes:
        step: The steps.
        rework_steps: Steps that were committed after it and are computed again.
        hosts: For each slice of the optimizer's state, who takes it over; none where everybody takes all state.
        snapshot: Instead of a checkpoint the snapshot of this attempt, from the memory of nodes.
        members: Who takes part from here on, and does the same.
    """

    step: int
    rework_steps: int
    hosts: Hosts = ()
    snapshot: int | None = None
    members: tuple[Member, ...] = ()


# -------------------------------------------------------------------------------- actions: controller to driver


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReduce:
    """Reduce over these groups what is not kept, out of place, and vote on it.

    A group that lacks parameters lets go of the communicator instead, so that no other waits for it, and votes at once.

    Attributes:
        step: The step.
        attempt: The attempt.
        epoch: Number of the set of groups.
        members: The groups, ascending.
        voters: The same, each with its incarnation.
        plan_digest: Digest of all the work that the step consists of, for the vote.
        kept: For each rank of a group, the first buckets whose sums stay as they are.
        ownership: Who holds which slice, where there are any.
    """

    step: int
    attempt: int
    epoch: int
    members: tuple[GroupId, ...]
    voters: tuple[Member, ...]
    plan_digest: str
    kept: tuple[int, ...] = ()
    ownership: Ownership | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeStep:
    """Start a step from zero sums and compute this group's part of the plan, unless that is done.

    A plan comes again, and the patches after it, where some group lacked the parameters to compute it. Their digests
    tell which of them this group has computed. A group that lacks parameters computes none.

    Attributes:
        plan: The plan.
        into: The attempt that the sums go into; parts of them may leave as soon as they are complete. None where a
            patch follows.
    """

    plan: StepPlan
    into: AttemptReduce | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePatch:
    """Add this group's part of the patch to the step's local sums, as far as they are not kept, unless that is done.

    Attributes:
        plan: The patch.
        into: As in `ComputeStep`.
    """

    plan: StepPlan
    into: AttemptReduce | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCommunicator:
    """Let go of the cross-group communicator and begin to build this one; the next attempt uses it.

    Attributes:
        key: Index of the log entry that made the one before useless, so that no name is ever used twice;
            -1 for the first.
        epoch: Number of the set of groups.
        members: The groups it connects, ascending.
    """

    key: int
    epoch: int
    members: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVotes:
    """Leaders that are to read them: report the votes on this attempt, if all who are left may have voted.

    Attributes:
        attempt: The attempt.
        voters: Who began it, also those who were lost since.
        num_left: How many were not.
    """

    attempt: int
    voters: tuple[Member, ...]
    num_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntry:
    """Leaders: write this entry at this index unless another stands there."""

    index: int
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEntry:
    """Wait for the entry at this index and report it."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateModel:
    """The step is committed: apply the sums of this attempt to the parameters.

    With slices, to every copy that this group has, also to what it has of one that is still being made.

    Attributes:
        step: The step.
        attempt: The attempt.
        proven: Copies of slices that have been compared, whose digests count from here on.
    """

    step: int
    attempt: int
    proven: tuple[SliceCopy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitGroups:
    """These take part from this step on: give them the present state.

    Attributes:
        step: The step.
        members: Who takes part now.
        donors: Who gives the state to each of them: groups that took part before, as many different ones as there are.
        earlier: All groups that took part before.
    """

    step: int
    members: tuple[Member, ...]
    donors: tuple[Member, ...]
    earlier: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRun:
    """All steps are committed."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWipeOut:
    """These shards (all where no group is left), or these slices, have no surviving host: only a checkpoint helps."""

    step: int
    shards: tuple[ShardId, ...] = ()
    slices: tuple[SliceId, ...] = ()
    cause: str = ""
    """Why the last hosts were put out, where they are not lost by themselves."""
    reason: str = ""
    """Why training does not start again; empty where that is still to be decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopHalted:
    """The groups cannot agree: stop and say why."""

    step: int
    reason: str


Action = (
    ComputeStep
    | ComputePatch
    | AttemptReduce
    | AttemptFinish
    | BuildCommunicator
    | ReadVotes
    | AppendEntry
    | ReadEntry
    | UpdateModel
    | GatherParams
    | StartRepairs
    | SaveCheckpoint
    | RefuseCheckpoint
    | TakeSnapshot
    | LoadCheckpoint
    | ReadFiles
    | WithdrawOffers
    | AdmitGroups
    | FinishRun
    | StopWipeOut
    | StopHalted
)
