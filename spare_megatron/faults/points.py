"""Faults that can be injected: their kinds, and the moments of a step at which they strike."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from spare_megatron.stacking.layout import GroupId


class FaultPoint(StrEnum):
    """A moment in a step of one rank, in the order in which they are reached."""

    FORWARD = "forward"
    """Before the forward pass of a microbatch."""
    SEND = "send"
    """Before a pipeline stage sends an activation or a gradient to its neighbour."""
    RECEIVE = "receive"
    """Before a pipeline stage waits for an activation or a gradient of its neighbour."""
    BACKWARD = "backward"
    """Inside the backward pass of a microbatch, after some parameters of the stage have their gradient."""
    PATCH = "patch"
    """Before the microbatches of a lost group are computed."""
    REBUILD = "rebuild"
    """Before a cross-group communicator is built."""
    BEFORE_REDUCE = "before_reduce"
    """All local work done, the cross-group reduction not begun."""
    STAGED = "staged"
    """A bucket is copied for the sum over groups, which has not begun; once for each bucket of an attempt."""
    IN_REDUCE = "in_reduce"
    """The cross-group reduction is in flight on this rank."""
    SUMMED = "summed"
    """The sum of a bucket over groups is here and has not been checked; once for each bucket of an attempt."""
    AFTER_REDUCE = "after_reduce"
    """The reduction is complete on this rank, its group has not voted."""
    AFTER_VOTE = "after_vote"
    """The group has voted, the step is not committed as far as this rank knows."""
    AFTER_COMMIT = "after_commit"
    """The step is committed, the optimizer has not run."""
    BEFORE_GATHER = "before_gather"
    """The state partitions hosted here are updated, the gathering of all parameters has not begun."""
    IN_GATHER = "in_gather"
    """Parameters are being gathered, and this rank has not sent its last ones."""
    REPAIR = "repair"
    """A piece of a copy of a state partition has come and is not installed, in a background thread."""
    JOIN_WAIT = "join_wait"
    """A returning group is up and has not reported it."""
    JOIN = "join"
    """Before the state is given to or taken by a returning group, between two steps."""
    JOIN_TRANSFER = "join_transfer"
    """The first tensors are given to or taken by a returning group, in a background thread."""
    JOIN_CONFIRM = "join_confirm"
    """The returning group holds the state, which is not confirmed; on the other groups, before they confirm it."""
    JOIN_DONE = "join_done"
    """The state of the returning group is confirmed, its first step has not begun."""
    LOAD_SEARCH = "load_search"
    """After a wipe-out, before a group looks for checkpoints that are whole."""
    LOAD_WAIT = "load_wait"
    """After a wipe-out, a group has reported which checkpoints are whole, and waits."""
    LOAD = "load"
    """Before a checkpoint is loaded, at the start or after a wipe-out."""
    LOAD_READ = "load_read"
    """The tensors of a checkpoint are read, and not all of them are in their places."""
    LOAD_DONE = "load_done"
    """A checkpoint is loaded, and no step has begun."""
    EVALUATION = "evaluation"
    """Before the forward pass of a microbatch of an evaluation; `step` is then the number of committed steps."""
    EVALUATION_PATCH = "evaluation_patch"
    """Before the microbatches of a group that was lost in an evaluation are computed."""
    EVALUATION_COMPUTED = "evaluation_computed"
    """The group's part of an evaluation is computed, and the group has not voted."""
    EVALUATION_VOTED = "evaluation_voted"
    """The group has voted on an evaluation, whose result is not decided as far as this rank knows."""
    ROUND_EXCHANGED = "round_exchanged"
    """The differences of all sites of a round are here, its result is not; only on the group that speaks for its
    site.
    """
    ROUND_VOTED = "round_voted"
    """The group has voted on a round with other sites, whose end is not decided as far as this rank knows."""
    SAVE = "save"
    """Before the state of a checkpoint is copied, between two steps."""
    SAVE_WRITE = "save_write"
    """The first tensors of a checkpoint are written; from here on in a background thread."""
    SAVE_MANIFEST = "save_manifest"
    """All files of a checkpoint are written and verified, its manifest is not; only on the group's first rank."""
    SAVE_RENAME = "save_rename"
    """A checkpoint is whole and not yet visible; only on the group's first rank."""
    SAVE_DROP = "save_drop"
    """A checkpoint is visible, and those that it supersedes still exist; only on the group's first rank."""


PHASES_OF_A_SAVE = frozenset(
    {FaultPoint.SAVE, FaultPoint.SAVE_WRITE, FaultPoint.SAVE_MANIFEST, FaultPoint.SAVE_RENAME, FaultPoint.SAVE_DROP}
)
"""Reached only by the group that saves."""

PHASES_OF_A_JOIN = frozenset(
    {FaultPoint.JOIN_WAIT, FaultPoint.JOIN, FaultPoint.JOIN_TRANSFER, FaultPoint.JOIN_CONFIRM, FaultPoint.JOIN_DONE}
)
"""Phases of the admission of a returning group."""

PHASES_AFTER_A_WIPE_OUT = frozenset({FaultPoint.LOAD_SEARCH, FaultPoint.LOAD_WAIT})
"""Phases of a load that are absent at the start of a run."""

PHASES_OF_A_LOAD = PHASES_AFTER_A_WIPE_OUT | {FaultPoint.LOAD, FaultPoint.LOAD_READ, FaultPoint.LOAD_DONE}
"""Phases of loading a checkpoint. After a wipe-out they belong to the step that was wiped out."""

PHASES_OF_AN_EVALUATION = frozenset(
    {FaultPoint.EVALUATION, FaultPoint.EVALUATION_PATCH, FaultPoint.EVALUATION_COMPUTED, FaultPoint.EVALUATION_VOTED}
)
"""Reached only with `eval.every_steps`, between two steps or after the last."""

PHASES_OF_A_ROUND = frozenset({FaultPoint.ROUND_EXCHANGED, FaultPoint.ROUND_VOTED})
"""Reached only by a run that is one of several sites."""

PHASES_BETWEEN_STEPS = PHASES_OF_A_SAVE | PHASES_OF_A_JOIN | PHASES_OF_A_LOAD | PHASES_OF_A_ROUND
"""The step at which they are reached is not known beforehand: such a fault strikes at or after its step."""

PHASES_WITH_PARTITIONS = frozenset({FaultPoint.BEFORE_GATHER, FaultPoint.IN_GATHER, FaultPoint.REPAIR})
"""Reached only with partitioned optimizer state."""

PHASES_OF_A_BUCKET = frozenset({FaultPoint.STAGED, FaultPoint.SUMMED})
"""Reached once for each bucket of an attempt; a bit of the bucket can be flipped there."""


FaultKind = NewType("FaultKind", str)
"""A name in `faults.kinds.KINDS`, which has what there is to know of each."""

KILL = FaultKind("kill")


PHASES_OF_A_MICROBATCH = frozenset({FaultPoint.FORWARD, FaultPoint.SEND, FaultPoint.RECEIVE, FaultPoint.BACKWARD})
"""Phases that a rank reaches at least once per microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, fully determined.

    Attributes:
        step: Step at which the rank is hit, from 0; for a repair or a phase between steps, the first one possible.
        rank: Rank inside the group.
        seconds: How long it lasts, or how far the clock jumps; None for good.
        factor: How many times slower it makes what it slows; None for kinds that slow nothing.
        ordinal: Which time in this step the rank reaches the phase, from 1.
        bit: Bit to flip, from 0, the lowest; None for the second highest.
    """

    step: int
    group: GroupId
    rank: int
    phase: FaultPoint
    kind: FaultKind
    ordinal: int = 1
    seconds: float | None = None
    factor: float | None = None
    bit: int | None = None
