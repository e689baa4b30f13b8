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
    JOIN = "join"
    """Before the state is given to or taken by a group that comes back, between two steps."""
