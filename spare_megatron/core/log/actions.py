"""Actions: what the controller asks a driver to do.

With state partitions, GatherParams follows every update, and StartRepairs every loss, return or finished copy. The last
step is followed by AttemptFinish and the entry Finish. In an evaluation AttemptEvaluation takes the place of
AttemptReduce, in a round with other sites AttemptSync. See docs/protocol.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from spare_megatron.core.audits.audits import Dispute
from spare_megatron.core.log.entries import Entry, Synced
from spare_megatron.core.log.loss_sums import SetSum
from spare_megatron.stacking.layout import GroupId, Member, PartitionId, ShardId
from spare_megatron.stacking.plans import Microbatch, StepPlan
from spare_megatron.stacking.state_partitions import Hosts, Ownership, PartitionCopy, Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """An interval between saves, and the figures it follows from."""

    interval_s: float
    save_s: float
    group_interval_s: float
    """Mean seconds until a given group is lost."""
    absence_s: float | None
    """Mean seconds until a lost group takes part again; None if none does."""
    time_to_wipe_out_s: float
    """Mean seconds until a shard or a state partition without a host causes a restart, with the present groups; 0 if a
    shard has none."""
    num_losses: int
    exposure_s: float
    """Seconds that groups have taken part so far, summed over groups."""
    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Save the parameters and all state after this many committed steps."""

    step: int
    member: Member
    """The group that saves everything, or everything but the state partitions."""
    voters: tuple[Member, ...]
    """The groups that take part then and may still be writing an earlier checkpoint."""
    epoch: int
    cadence: Cadence | None = None
    hosts: Hosts = ()
    """For each state partition, its hosts; empty if every group holds all state."""
    owners: tuple[Member, ...] = ()
    """For each state partition, the host that writes it (`core.saves.partition_copies`)."""
    is_last: bool = False
    doubtful: tuple[int, ...] = ()
    """Steps of saved checkpoints, with this one, that are not known to be valid."""
    audited_steps: int | None = None
    """As `AuditedSteps.num_steps`; None without audits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDispute:
    """Groups have computed a microbatch of this step to different values: compare the state that they have computed it
    with in the next vote, and have `member` save the parameters, with which it can be computed again (`spare replay`).
    """

    step: int
    attempt: int
    member: Member
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseCheckpoint:
    """Keep every run from starting from this checkpoint of `member`: its state is or may be wrong."""

    step: int
    member: Member
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """The holders copy the state after this many committed steps, the last by `attempt`, to their nodes' memory."""

    step: int
    attempt: int
    kept: tuple[int, ...]
    """Attempts of the earlier snapshots to keep."""
    settled_by: int
    """The copy is made before the update that makes this many committed steps."""
    holders: tuple[tuple[GroupId, ...], ...]
    """For each rank position, the groups that keep it."""
    partition_holders: tuple[tuple[GroupId, ...], ...] = ()
    """For each state partition, the groups that keep it, on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherParams:
    """Gather all parameters after `step` committed steps from the owners of the state partitions.

    Collective over: all members, including those that have the parameters. If it fails or the log advances, the group
    lacks parameters and reports that in its next vote. A group that sees a failure announces it, and the others abandon
    the gather.
    """

    step: int
    owners: tuple[Member, ...]
    is_anew: bool = False
    """An owner was fenced for wrong parameters, and the next vote compares them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRepairs:
    """Make these copies in the background; replaces all earlier requests."""

    repairs: tuple[Repair, ...]
    """Missing copies, the most urgent first."""
    hosts: Hosts
    """For each state partition, its hosts. A group drops a partition that it neither hosts nor is to copy."""
    moves: tuple[Repair, ...] = ()
    """Copies that replace those of their donors, including complete ones that are about to be compared."""
    first_step: int = 0
    """Committed steps that state must include to enter a newly requested copy (`stacking.state_partitions`)."""
    is_handed_over: bool = False
    """A member that is to leave has been replaced as a host, and leaves once that is compared."""

    @classmethod
    def of(cls, ownership: Ownership, first_step: int) -> "StartRepairs":
        return cls(
            repairs=ownership.repairs,
            moves=ownership.moves,
            hosts=ownership.hosts,
            first_step=first_step,
            is_handed_over=any(map(ownership.has_handed_over, ownership.leaving)),
        )

    @property
    def copies(self) -> tuple[Repair, ...]:
        return (*self.repairs, *(move for move in self.moves if not self._is_made(move)))

    @property
    def is_compared(self) -> bool:
        """Whether the next vote compares all state: no donor releases its copy for one that may differ."""
        return self.is_handed_over or any(map(self._is_made, self.moves))

    def _is_made(self, move: Repair) -> bool:
        return move.receiver in self.hosts[move.partition]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvaluation:
    """Vote with the sums of what this group has computed in the evaluation after `step` committed steps."""

    step: int
    attempt: int
    voters: tuple[Member, ...]
    plan_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEvaluation:
    """The evaluation after `step` committed steps is decided."""

    step: int
    attempt: int
    sums: tuple[SetSum, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSync:
    """Take part in a round with other sites, with the state after `step` committed steps, and vote on the result, which
    is put aside. Collective over: all members.
    """

    step: int
    attempt: int
    voters: tuple[Member, ...]
    """The first one speaks for the site."""
    plan_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplySync:
    """The round is over: apply its result, which the attempt has put aside, if one came about."""

    entry: Synced


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFinish:
    """Vote on the state after the last step: parameters held, and digests of what the last checkpoint contains."""

    step: int
    attempt: int
    voters: tuple[Member, ...]
    plan_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptUndo:
    """Vote with the snapshots that the group's nodes have intact: steps after some of them are to be undone."""

    step: int
    attempt: int
    voters: tuple[Member, ...]
    plan_digest: str


class CheckpointCandidate(NamedTuple):
    """A checkpoint with a valid manifest and files of the right sizes, numbered in the order of their names."""

    step: int
    num_files: int = 0
    digest: str = ""


class Reading(NamedTuple):
    """Files of a checkpoint, by number, that a group has read and found whole or damaged."""

    candidate: CheckpointCandidate
    whole: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    reason: str = ""
    """Of the first damaged one."""
    num_bytes: int = 0
    """Files in progress included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles:
    """Verify these files of a checkpoint, by number, against its manifest, unless that is done."""

    candidate: CheckpointCandidate
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawCandidates:
    """Stop offering these checkpoints, for these reasons, and offer earlier ones."""

    reasons: Mapping[CheckpointCandidate, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpoint:
    """Load the checkpoint after this many committed steps; 0 is the initial parameters of the run."""

    step: int
    rework_steps: int
    hosts: Hosts = ()
    """For each state partition, the members that load it; empty if every group loads all state."""
    snapshot: int | None = None
    """Attempt of the snapshot to load from node memory instead of a checkpoint."""
    members: tuple[Member, ...] = ()
    """The groups that take part from here on; all of them load."""
    holders: tuple[Member, ...] = ()
    """Those that may have copies of the snapshot. Only in an undo, in which groups that have state go back in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReduce:
    """Reduce all sums that are not kept over these groups, out of place, and vote on the result.

    Collective over: `members`. A group that lacks parameters drops the communicator instead and votes at once.
    """

    step: int
    attempt: int
    epoch: int
    members: tuple[GroupId, ...]
    voters: tuple[Member, ...]
    plan_digest: str
    """Of all work of the step."""
    kept: tuple[int, ...] = ()
    """For each position of a slab, the number of leading kept buckets."""
    ownership: Ownership | None = None
    disputed: tuple[Microbatch, ...] = ()
    """The vote shows the boundaries of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeStep:
    """Start a step or an evaluation from zero sums and compute this group's part of the plan, unless that is done.

    Plan and patches are sent again if some group lacked parameters; their digests show what this group has computed. A
    group that lacks parameters computes nothing.
    """

    plan: StepPlan
    into: AttemptReduce | None
    """The attempt that complete buckets may enter during the computation; None if a patch follows, and in an
    evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePatch:
    """Add this group's part of the patch to those local sums that are not kept, unless that is done."""

    plan: StepPlan
    into: AttemptReduce | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeAudits:
    """Compute those microbatches that these disputes ask this group about, once per attempt, and add them to no sum."""

    step: int
    attempt: int
    disputes: tuple[Dispute, ...]

    def asked_of(self, group: GroupId) -> tuple[Microbatch, ...]:
        """What this group is to compute, each once: two disputes may be about one microbatch."""
        return tuple(dict.fromkeys(dispute.microbatch for dispute in self.disputes if group in dispute.asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCommunicator:
    """Replace the cross-group communicator by this one for the next attempt. Collective over: `members`."""

    key: int
    """Index of the log entry that ended the previous one, -1 for the first; makes names unique."""
    epoch: int
    members: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVotes:
    """Leaders: report the votes on this attempt, cast by `voters`, once the `num_left` remaining may have voted."""

    attempt: int
    voters: tuple[Member, ...]
    num_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntry:
    """Leaders: write this entry at this index, unless another one is there."""

    index: int
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEntry:
    """Wait for the entry at this index and report it."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateModel:
    """Apply the sums of this committed attempt to parameters, state partitions and parts of incomplete copies."""

    step: int
    attempt: int
    proven: tuple[PartitionCopy, ...] = ()
    """Copies whose digests count from here on."""
    is_last: bool = False
    """The run ends with this step."""
    sync: bool = False
    """A round with other sites follows, before the state is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitGroups:
    """Admit these members from this step on. Each gets the present state from its donor, one of the earlier members."""

    step: int
    members: tuple[Member, ...]
    donors: tuple[Member, ...]
    earlier: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainGroups:
    """These members have left the run after this many committed steps, as they were asked to: their ranks end."""

    step: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePaces:
    """From this step on work is dealt by these paces, in thousandths of that of the groups' like, which others have."""

    step: int
    permille: Mapping[GroupId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRun:
    """All steps are committed, or all up to the one with which the run was asked to end."""

    step: int
    is_asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitHosts:
    """Keep the committed state, and report the next entry or, on leaders, the groups that wait for admission.

    A report without an entry is answered by the same action. Collective over: all ranks of the group.
    """

    index: int
    """Of the entry to wait for."""
    step: int
    """Committed steps."""
    epoch: int
    voters: tuple[Member, ...]
    shards: tuple[ShardId, ...]
    """Those without a host among the voters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWipeOut:
    """These shards (all if no group is left) or state partitions have no surviving host, and no host is awaited."""

    step: int
    shards: tuple[ShardId, ...] = ()
    partitions: tuple[PartitionId, ...] = ()
    cause: str = ""
    """Why the last hosts were fenced, if for wrong state."""
    reason: str = ""
    """Why training does not restart; empty while that is undecided."""
    is_final: bool = False
    """The run ends; else groups wait for a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopHalted:
    """The run cannot go on correctly: stop and say why."""

    step: int
    reason: str


Action = (
    ComputeStep
    | ComputePatch
    | ComputeAudits
    | AttemptReduce
    | AttemptEvaluation
    | AttemptSync
    | ApplySync
    | AttemptFinish
    | AttemptUndo
    | ReportEvaluation
    | BuildCommunicator
    | ReadVotes
    | AppendEntry
    | ReadEntry
    | UpdateModel
    | GatherParams
    | StartRepairs
    | SaveCheckpoint
    | RefuseCheckpoint
    | SaveDispute
    | TakeSnapshot
    | LoadCheckpoint
    | ReadFiles
    | WithdrawCandidates
    | AdmitGroups
    | DrainGroups
    | ChangePaces
    | FinishRun
    | AwaitHosts
    | StopWipeOut
    | StopHalted
)


WithoutSums = TypeVar("WithoutSums", AttemptEvaluation, AttemptSync, AttemptFinish)


def computations(
    plans: Sequence[StepPlan], patches: Iterable[StepPlan], attempt: AttemptReduce | AttemptEvaluation
) -> list[Action]:
    """The computations of a step, in order; only the last may send sums into the attempt."""
    asked = [patch for patch in patches if patch.work.num_microbatches]
    into = attempt if isinstance(attempt, AttemptReduce) else None
    intos = [None] * (len(plans) + len(asked) - 1) + [into]
    steps = [ComputeStep(plan=plan, into=intos.pop(0)) for plan in plans]
    return [*steps, *(ComputePatch(plan=patch, into=intos.pop(0)) for patch in asked)]
