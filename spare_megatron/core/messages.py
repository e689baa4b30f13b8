"""What crosses ranks as entries of the decision log, and what a driver and the controller say to each other.

The decision log is the single point of agreement. Entry i is written once, by compare-and-set; membership,
epoch, step and attempt are the fold of the log, done by `core.controller`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from spare_megatron.core.restart_messages import GiveUp, LoadCheckpoint, ReadFiles, WaitingRead, WithdrawOffers
from spare_megatron.core.saves import RefuseCheckpoint, SaveCheckpoint, SaveEnd
from spare_megatron.core.slice_actions import AttemptFinish, GatherParams, StartRepairs
from spare_megatron.core.slices import Ownership, SliceCopy
from spare_megatron.core.snapshots import TakeSnapshot
from spare_megatron.core.stepplan import StepPlan
from spare_megatron.core.topology import GroupId, Member, ShardId, SliceId
from spare_megatron.core.votes import Vote

# ---------------------------------------------------------------------------------- entries of the decision log


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The sums of this attempt are the gradient of this step.

    Attributes:
        step: The step.
        attempt: The attempt.
        save: A checkpoint is taken of the parameters after this step.
        admit: Who takes part from the next step on. They are named here and not in an entry of their own, for
            any entry between two commits makes groups abandon the reduction they are in. Void for those who are
            fenced by then, and where the group takes part already.
        is_last: The run ends with this step, whatever the number of steps it was to have.
        restored: Copies of slices that have become whole: their members are hosts from here on. Void where nothing asks
            for them any more.
        released: Copies of slices that their members let go of: an earlier commit has made others hosts in their place,
            and these have been compared since.
        proven: Copies of slices that the votes have compared for the first time since they were made.
        at_s: Seconds since the run began, as its writer knows: the clock of the log, the same for everybody.
        save_ends: Saves that have ended.
    """

    step: int
    attempt: int
    save: bool = False
    admit: tuple[Member, ...] = ()
    is_last: bool = False
    restored: tuple[SliceCopy, ...] = ()
    released: tuple[SliceCopy, ...] = ()
    proven: tuple[SliceCopy, ...] = ()
    at_s: float = 0.0
    save_ends: tuple[SaveEnd, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The group is lost, in this and every earlier incarnation: it can neither vote nor reduce from here on.

    A later incarnation is not meant, however late the entry is written. One that waits to be admitted can be fenced,
    too: its admission is void from then on.
    """

    group: GroupId
    incarnation: int = 0
    reason: str = ""
    error: str = ""
    """The exception that ended it, if a program's or the data's fault may be behind it: others may meet it too."""
    discard: bool = False
    """What it contributed to the attempt under way is wrong, so that the attempt cannot be committed."""

    def hits(self, member: Member) -> bool:
        """Whether this is the loss of the member.

        >>> Fence(group=GroupId(3), incarnation=1).hits(Member(GroupId(3), 2))
        False
        """
        return self.group == member.group and member.incarnation <= self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The attempt failed on some survivor: compute what is missing and reduce again.

    Attributes:
        step: The step.
        attempt: The attempt.
        kept: For each rank of a group, the first buckets whose sums all survivors hold: they stay as they are, and only
            the others are patched and reduced. None if empty.
        recompute: No sum of this step may stay: everybody computes all of its work again, from zero sums.
        gather: Some survivor lacks parameters: they are gathered once more before anything else. With `recompute` they
            may be wrong everywhere, and all take them.
    """

    step: int
    attempt: int
    kept: tuple[int, ...] = ()
    recompute: bool = False
    gather: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """All steps are committed, and every group holds all parameters. Without slices the last commit says as much."""

    step: int
    """Committed steps."""
    attempt: int
    """The attempt to end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Training starts again from a checkpoint or a snapshot, with these members alone but for those who are fenced."""

    step: int
    """Committed steps that it holds: the next step to train. 0 is the beginning, which needs none."""
    members: tuple[Member, ...]
    snapshot: int | None = None
    """The attempt whose commit the snapshot was taken after; None: it is a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The run cannot go on correctly: every group stops before it changes anything."""

    step: int
    reason: str
    discard: bool = False
    """The state of some group is wrong, and nobody knows of which: a checkpoint of it counts for nothing."""


Entry = Commit | Fence | Retry | Finish | Restart | GiveUp | Halt
_ENTRY_KINDS: dict[str, type[Entry]] = {kind.__name__.lower(): kind for kind in get_args(Entry)}


def entry_fields(entry: Entry) -> dict[str, Any]:
    """The entry as plain values, its kind under `entry`."""
    return {"entry": type(entry).__name__.lower(), **asdict(entry)}


_USUAL = {kind: {field.name: field.default for field in fields(kind)} for kind in _ENTRY_KINDS.values()}


def encode_entry(entry: Entry) -> str:
    """One line of JSON, equal for equal entries. What is as usual is left out: every group reads every entry.

    >>> encode_entry(Commit(step=3, attempt=4))
    '{"attempt": 4, "entry": "commit", "step": 3}'
    """
    usual = _USUAL[type(entry)]
    said = {name: value for name, value in entry_fields(entry).items() if name not in usual or value != usual[name]}
    return json.dumps(said, sort_keys=True)


def decode_entry(text: str) -> Entry:
    """The entry that `encode_entry` wrote.

    Raises:
        ValueError: The text is no entry of a kind that this version knows.
    """
    values = json.loads(text)
    kind = values.pop("entry", None)
    if kind not in _ENTRY_KINDS:
        raise ValueError(f"log entry of unknown kind {kind!r}; known: {', '.join(_ENTRY_KINDS)}")
    for name, of in (("admit", Member), ("members", Member), ("save_ends", SaveEnd)):  # JSON knows no tuples
        if name in values:
            values[name] = tuple(of(*one) for one in values[name])
    if "kept" in values:
        values["kept"] = tuple(values["kept"])
    for name in values.keys() & {"restored", "released", "proven"}:
        values[name] = tuple(SliceCopy(index, Member(*pair)) for index, pair in values[name])
    return _ENTRY_KINDS[kind](**values)


# --------------------------------------------------------------------------------- events: driver to controller


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """Every group is up and holds the same parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRead:
    """The entry at the controller's head has been read."""

    index: int
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class VotesRead:
    """The votes cast so far on an attempt. Only the driver of a group's leader reads them.

    Attributes:
        attempt: The attempt.
        votes: The votes, also of groups that took part in the attempt and were lost since.
        waiting: Who is up, holds a copy of the model, and waits to be taken in.
    """

    attempt: int
    votes: Mapping[GroupId, Vote]
    waiting: tuple[Member, ...] = ()


Event = RunStarted | EntryRead | VotesRead | WaitingRead

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
