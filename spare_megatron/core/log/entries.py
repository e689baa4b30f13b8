"""Entries of the decision log, the single point of agreement, and their encoding.

Entry i is written once, by compare-and-set; `core.controller.controller` folds the log. Each entry names the version of
the format, so that no program takes an entry of another version for one of its own.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

from spare_megatron.core.audits.audits import Dispute
from spare_megatron.core.log.loss_sums import SetSum
from spare_megatron.formats.codec import convert, decode, decode_head, encode, set_fields
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.pace_evidence import PaceException
from spare_megatron.stacking.state_partitions import PartitionCopy

VERSION = 8
"""Of the log's entries; rises with every change of their fields or meaning. Entries of version 1 did not name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """After a wipe-out: training does not restart."""

    step: int
    reason: str


class SaveEnd(NamedTuple):
    """Result of a save of these committed steps: whether the checkpoint is visible, and how long training stalled."""

    step: int
    is_saved: bool
    stall_s: float


class OwnFailure(NamedTuple):
    """The group could not take part in the sums of an attempt: it lacks a resource of its own. `cause`: for people."""

    group: GroupId
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The sums of this attempt are the gradient of this step."""

    step: int
    attempt: int
    save: bool = False
    """A checkpoint is taken of the state after this step."""
    admit: tuple[Member, ...] = ()
    """Members that take part from the next step on, unless fenced by then. Part of the commit, because any entry
    between two commits makes groups abandon the reduction they are in."""
    stages: tuple[int, ...] = ()
    """Stages of the members that it admits, in their order; empty if all have the whole pipeline."""
    is_last: bool = False
    """The run ends with this step, whatever its configured number of steps."""
    is_asked: bool = False
    """Because some process of it was asked to end it; else for the time, `train.max_minutes`."""
    restored: tuple[PartitionCopy, ...] = ()
    """Completed copies of state partitions, if still asked for: their members are hosts from here on."""
    released: tuple[PartitionCopy, ...] = ()
    """Copies that their members release; the hosts in their place have been compared since."""
    proven: tuple[PartitionCopy, ...] = ()
    """Copies that the votes have compared for the first time."""
    at_s: float = 0.0
    """Seconds since the run began, on the writer's clock; sets the clock of the log."""
    save_ends: tuple[SaveEnd, ...] = ()
    drain: tuple[Member, ...] = ()
    """Members that have asked to leave: they take no part from the next step on, and nothing of them is missing."""
    leaving: tuple[Member, ...] = ()
    """Members that leave once others host their state partitions; all of them, in every commit until then."""
    paces: tuple[PaceException, ...] = ()
    """Groups that computed this step at another pace than that by which work is dealt to them."""
    sync: bool = False
    """A round with other sites follows, before anything else: `save` is of the state after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The group is lost, in this and every earlier incarnation: it can neither vote nor reduce, nor be admitted."""

    group: GroupId
    incarnation: int = 0
    reason: str = ""
    error: str = ""
    """The exception that ended it, if the program or the data may be at fault and other groups may raise it, too; or
    `votes.WRONG_NUMBERS`."""
    discard: bool = False
    """Its contribution to the attempt under way is wrong, so that the attempt cannot be committed."""
    is_outvoted: bool = False
    """It has computed a microbatch to other values than the groups that agree about it, or than itself before; or its
    own checks have found wrong numbers."""
    wrong_positions: tuple[int, ...] = ()
    """Of an outvoted group the positions at which the values differ first, or that have found them wrong; none if that
    is not known. Its ranks, unless pipelines have several lengths (`Slabs.holder_of`)."""

    def hits(self, member: Member) -> bool:
        """Whether this entry fences the member.

        >>> Fence(group=GroupId(3), incarnation=1).hits(Member(GroupId(3), 2))
        False
        """
        return self.group == member.group and member.incarnation <= self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The attempt failed on some survivor, or lost work of an evaluation: compute what is missing and try again."""

    step: int
    attempt: int
    kept: tuple[int, ...] = ()
    """For each position of a slab, the number of leading buckets that stay because all survivors hold their sums."""
    recompute: bool = False
    """No sum of this step is valid: all groups compute it again from zero sums."""
    gather: bool = False
    """Some survivor lacks parameters, or with `recompute` all may be wrong: all groups gather them first."""
    wrong_sums: tuple[GroupId, ...] = ()
    """Groups to which sums over groups came that contradict their checksums; then nothing stays."""
    disputes: tuple[Dispute, ...] = ()
    """Microbatches that groups have computed to different values, and suspect ones. The groups that these name compute
    them in the next attempt, whose sums are not committed if values differ."""
    failures: tuple[OwnFailure, ...] = ()
    """Groups that are themselves the cause; one that is so in a further attempt of the step is fenced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The evaluation after `step` committed steps: the sums of each validation set over all groups."""

    step: int
    attempt: int
    sums: tuple[SetSum, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """The round with other sites after `step` committed steps is over for this site."""

    step: int
    attempt: int
    round: int = 0
    """The round whose result the site has from here on; 0 if none came about, and nothing changes."""
    sites: tuple[int, ...] = ()
    """The sites whose work the result holds; empty if this site has it from another one and took no part."""
    digest: str = ""
    """Of the result, on all ranks: equal at all sites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """All steps are committed, and every group holds all parameters; only with state partitions or a last save."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Training restarts from a checkpoint or a snapshot with exactly these members, except those that are fenced."""

    step: int
    """Committed steps that it holds; 0 is the beginning, which needs no checkpoint."""
    members: tuple[Member, ...]
    snapshot: int | None = None
    """The attempt whose commit the snapshot was taken after; None restarts from a checkpoint."""
    stages: tuple[int, ...] = ()
    """As in `Commit`, of the members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Ends a pause: with these members every shard has a host again, and the step is computed from zero sums."""

    step: int
    attempt: int
    admit: tuple[Member, ...] = ()
    """Members that take part from here on, unless fenced by then."""
    stages: tuple[int, ...] = ()
    """As in `Commit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """The members go back in place to a snapshot, as later steps hold wrong numbers of a group that is fenced. What was
    committed since is void, and computed again; members and all else stay as they are.
    """

    step: int
    """Committed steps that the snapshot holds."""
    attempt: int
    """Whose votes say that the snapshot is whole."""
    snapshot: int
    """As in `Restart`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The run cannot go on correctly: every group stops before it changes anything."""

    step: int
    reason: str
    discard: bool = False
    """Some group's state is wrong, and it is unknown which: checkpoints that are still to be compared are refused."""


Decision = Commit | Retry | Evaluated | Synced | Finish | Resume
"""Of one attempt."""
Entry = Commit | Fence | Retry | Evaluated | Synced | Finish | Resume | Restart | Undo | GiveUp | Halt

_ENTRY_KINDS: dict[str, type[Entry]] = {kind.__name__.lower(): kind for kind in get_args(Entry)}


def entry_fields(entry: Entry) -> dict[str, Any]:
    return {"entry": type(entry).__name__.lower(), **asdict(entry)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What the text of an entry names beside its fields."""

    entry: str = ""
    version: int = 1


def encode_entry(entry: Entry) -> str:
    """One line of JSON, equal for equal entries. Defaults are left out, because every group reads every entry.

    >>> encode_entry(Commit(step=3, attempt=4))
    '{"entry":"commit","version":8,"step":3,"attempt":4}'
    """
    return encode({"entry": type(entry).__name__.lower(), "version": VERSION} | set_fields(entry))


def decode_entry(text: str) -> Entry:
    """The inverse of `encode_entry`. Raises ValueError for an entry of another version, and for an unknown kind."""
    head = decode_head(text, _Head)
    if head.version != VERSION:
        raise ValueError(
            f"log entry of version {head.version!r}; this program reads version {VERSION}: every process of a run must "
            f"be of the version of spare_megatron that began it"
        )
    if head.entry not in _ENTRY_KINDS:
        raise ValueError(f"log entry of unknown kind {head.entry!r}; known: {', '.join(_ENTRY_KINDS)}")
    return decode(text, _ENTRY_KINDS[head.entry], beside=("entry", "version"))


def entry_of(found: Mapping[str, Any]) -> Entry:
    """The entry of fields as `entry_fields` names them, some perhaps of earlier versions. ValueError: it is none."""
    kind = _ENTRY_KINDS.get(found.get("entry", ""))
    if kind is None:
        raise ValueError(f"unknown kind of entry {found.get('entry')!r}; known: {', '.join(_ENTRY_KINDS)}")
    try:
        return convert(found, kind)
    except ValueError as error:
        raise ValueError(f"damaged entry: {error}: {str(found)[:80]}") from error
