"""What the processes of a run tell: ranks their supervisor, supervisors the driver, the driver whoever watches."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection

from spare_megatron.config.store_space import StoreSpace
from spare_megatron.core.failure_detector import Operation
from spare_megatron.faults.trace import Fault
from spare_megatron.journal.records import CheckpointRecord, LossRecord, RecoveryRecord, StateSource
from spare_megatron.stacking.layout import GroupId, Member

RankKey = tuple[GroupId, int]
"""A group, and a rank in it."""


class ExitCode(IntEnum):
    """How a rank's process ends by itself."""

    FINISHED = 0
    RAISED = 1
    """An exception that nobody handles: the rank's group is lost."""
    GROUP_BROKEN = 3
    """Another rank of the same group is gone."""
    FENCED = 4
    """The rank found its own group fenced."""
    WIPE_OUT = 5
    HALTED = 6
    STORE_LOST = 7
    JOIN_FAILED = 8
    """The group was admitted after a loss, or started again after a wipe-out, and could not take the state over."""
    RESTART = 9
    """Only a restart from a checkpoint helps: the group is to be started again."""


# ----------------------------------------------------------------------------------------- from ranks, a pipe each


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReady:
    """The group is up and about to train, or waits to be admitted; sent by its first rank on every node."""

    group: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRejoined:
    """A group that was lost takes part again from this step on.

    Sent by each of its ranks, told on by the node of its leader.
    """

    member: Member
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartAwaited:
    """The group waits for training to start again after a wipe-out; sent by its first rank on every node."""

    group: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRestarted:
    """The group takes part again after a wipe-out; sent by each of its ranks, told on by the node of its leader.

    Attributes:
        member: The group in its new life.
        step: Committed steps that it has loaded.
        source: Where from.
        rejected: Checkpoints and snapshots that could not be used, and why.
    """

    member: Member
    step: int
    source: StateSource = "storage"
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """A step is committed and applied.

    Sent by a group's first rank on every node, told on by the node of its leader.
    """

    group: GroupId
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_alive: int
    makespan: int
    step_s: float
    split_s: Mapping[Operation, float]
    """What the rank's main thread spent its time on since it last told."""
    head: int
    """Log entries the group has folded."""
    epoch: int
    """Number of the set of groups that took part."""
    num_recomputed: int
    """Microbatches that were computed anew in it, by all groups."""
    recoveries: tuple[RecoveryRecord, ...]
    """Those of the group that have ended since it last told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception ended the rank.

    Attributes:
        group: The group.
        rank: The rank inside it.
        traceback: Of the exception.
        concerns_all: It was raised for what holds for all groups: a setting, or groups that do not come up.
    """

    group: GroupId
    rank: int
    traceback: str
    concerns_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """The log told the group to stop before the last step: a wipe-out or a halt. Sent by every leader.

    Attributes:
        group: The group.
        step: Committed steps.
        reason: Why.
        is_final: The run ends; otherwise it is to restart.
    """

    group: GroupId
    step: int
    reason: str
    is_final: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultWanted:
    """A fault of the trace that others have to inflict. The rank waits until it is told to go on.

    Attributes:
        fault: The fault.
        pid: The rank's process.
    """

    fault: Fault
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStruck:
    """A fault of the trace is about to strike: the group's next life must not meet it again."""

    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTold:
    """A save has ended; sent by the leader of the group that was to save."""

    record: CheckpointRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsHeld:
    """The storage does not take a file of the run: what is appended to it stays in memory.

    Attributes:
        path: The file.
        reason: The error; empty when the storage has taken everything again.
    """

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsLost:
    """Files of the run were closed before the storage had taken all of them.

    Attributes:
        paths: The files.
        num_bytes: What is missing at their ends.
        reason: The error.
    """

    paths: tuple[str, ...]
    num_bytes: int
    reason: str


RankReport = (
    RanksReady
    | GroupRejoined
    | RestartAwaited
    | GroupRestarted
    | StepCommitted
    | CheckpointTold
    | RankRaised
    | RunStopped
    | FaultStruck
    | FaultWanted
    | RecordsHeld
    | RecordsLost
)

# ----------------------------------------------------------------------------------------------------- from supervisors


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStarted:
    """The ranks of a node are started."""

    node: int
    pids: Mapping[RankKey, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMissing:
    """No supervisor looks after a node before its ranks were ready; told by what stands for it.

    Attributes:
        node: The node.
        cause: Why, and what to look at.
    """

    node: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLost:
    """A group has been found lost and is fenced.

    Attributes:
        group: The group.
        rank: The rank that showed it; -1 if its whole node is lost.
        cause: Why, in a line.
        traceback: Of the exception that ended the rank, where there was one.
        incarnation: Which life of the group it was.
        is_given_up: The group has used up its restarts.
        error: The exception behind it, where other groups may meet the same; else empty.
        concerns_all: It was raised for what holds for all groups.
    """

    group: GroupId
    rank: int
    cause: str
    traceback: str
    incarnation: int = 0
    is_given_up: bool = False
    error: str = ""
    concerns_all: bool = False

    @classmethod
    def of(cls, record: LossRecord, error: str, raised: RankRaised | None) -> "GroupLost":
        """The loss as it is journaled, with what the rank that showed it has told, and what of that may hit others."""
        return cls(
            group=GroupId(record.group),
            rank=record.rank,
            cause=record.cause,
            traceback=raised.traceback if raised else "",
            incarnation=record.incarnation,
            is_given_up=record.is_given_up,
            error=error,
            concerns_all=raised is not None and raised.concerns_all,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAway:
    """The control store does not answer: training pauses until it does, or the limit is reached."""

    node: int
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGone:
    """It is given up: the run ends when the ranks have saved their state."""

    node: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBack:
    """It answers again."""

    node: int
    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded:
    """No rank of the node is left, and its supervisor is about to end.

    Attributes:
        node: The node.
        exits: How each rank ended.
        failure: Why the run cannot go on, where that is so.
    """

    node: int
    exits: Mapping[RankKey, int]
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """To a supervisor from the driver: the fault that this rank wanted has struck."""

    wanted: FaultWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEarly:
    """To a supervisor from the driver: the run is to end with the step under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWordTaken:
    """To a supervisor from what stands for it: the driver has its last word."""


Order = GoOn | EndEarly

NodeReport = RankReport | RanksStarted | NodeMissing | GroupLost | StoreAway | StoreBack | StoreGone | NodeEnded

# ------------------------------------------------------------------------------------------------------ from the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """A stage of the start, for people."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRejected:
    """A checkpoint that the run would have begun with is damaged, and an earlier one takes its place."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLost:
    """Something that takes metrics takes no more, or has not taken all."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeasured:
    """How large etcd is; `shortage` is why it may not do for the steps that are left, and empty if it does."""

    space: StoreSpace
    shortage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAwaited:
    """etcd does not answer before the run has begun, and is waited for when all else is ready.

    Attributes:
        endpoints: Where it should.
        reason: What comes instead of an answer.
        limit_s: How long it is waited for.
    """

    endpoints: tuple[str, ...]
    reason: str
    limit_s: float


RunEvent = NodeReport | Starting | CheckpointRejected | MetricsLost | StoreMeasured | StoreAwaited


def next_report(pipe: Connection) -> NodeReport | None:
    """What a supervisor has sent; None if nothing more will come."""
    try:
        report: NodeReport = pipe.recv()
    except (EOFError, OSError):  # OSError: its writer was killed in the middle of a report
        return None
    return report
