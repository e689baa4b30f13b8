"""The moments of a step that a fault can be aimed at."""

from enum import StrEnum


class Phase(StrEnum):
    """A moment in a step of one rank, in the order they are reached."""

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
    IN_REDUCE = "in_reduce"
    """The cross-group reduction is in flight on this rank."""
    AFTER_REDUCE = "after_reduce"
    """The reduction is complete on this rank, its group has not voted."""
    AFTER_VOTE = "after_vote"
    """The group has voted, the step is not committed as far as this rank knows."""
    AFTER_COMMIT = "after_commit"
    """The step is committed, the optimizer has not run."""
    BEFORE_GATHER = "before_gather"
    """The slices hosted here are updated, the gathering of all parameters has not begun."""
    IN_GATHER = "in_gather"
    """Parameters are being gathered, and this rank has not sent its last ones."""
    JOIN = "join"
    """Before the state is given to or taken by a group that comes back, between two steps."""
    SAVE = "save"
    """Before the state of a checkpoint is copied, between two steps."""
    SAVE_WRITE = "save_write"
    """The first tensors of a checkpoint are written, in a thread beside the training from here on."""
    SAVE_MANIFEST = "save_manifest"
    """All files of a checkpoint are written and verified, its manifest is not; on the group's first rank alone."""
    SAVE_RENAME = "save_rename"
    """A checkpoint is whole and not yet visible; on the group's first rank alone."""
    SAVE_DROP = "save_drop"
    """A checkpoint is visible, those that it supersedes are there still; on the group's first rank alone."""


PHASES_OF_A_SAVE = frozenset({Phase.SAVE, Phase.SAVE_WRITE, Phase.SAVE_MANIFEST, Phase.SAVE_RENAME, Phase.SAVE_DROP})
"""Phases that only the group reaches that saves, at its first save at or after a step."""

PHASES_WITH_SLICES = frozenset({Phase.BEFORE_GATHER, Phase.IN_GATHER})
"""Phases that are reached only where the optimizer state is cut into slices."""
