"""What crosses ranks as entries of the decision log, and what a driver and the controller say to each other.

The decision log is the single point of agreement. Entry i is written once, by compare-and-set; membership,
epoch, step and attempt are the fold of the log, done by `core.controller`.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, get_args

from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.state_partitions import SliceCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """After a wipe-out: training does not start again."""

    step: int
    reason: str


class SaveEnd(NamedTuple):
    """How a save has ended.

    Attributes:
        step: Committed steps that it was to hold.
        is_saved: It is visible.
        stall_s: How long it kept training waiting.
    """

    step: int
    is_saved: bool
    stall_s: float


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
