"""The messages of a run's processes: from ranks to supervisors, from these to the driver, and on to its observers."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.core.machines.places import QuarantineCause
from spare_megatron.core.slow_machines.culprit import MachineSigns, RankTimes
from spare_megatron.faults.points import Fault
from spare_megatron.formats.store_space import StoreSpace
from spare_megatron.journal import records
from spare_megatron.stacking.layout import GroupId, MachineId, Member, ShardId

RankKey = tuple[GroupId, int]
"""A group, and the index of a rank in it."""


class ExitCode(IntEnum):
    """Exit codes that a rank's process chooses itself."""

    FINISHED = 0
    RAISED = 1
    """An unhandled exception: the rank's group is lost."""
    GROUP_BROKEN = 3
    """Another rank of the same group is gone."""
    FENCED = 4
    """The rank found its own group fenced."""
    WIPE_OUT = 5
    HALTED = 6
    STORE_LOST = 7
    JOIN_FAILED = 8
    """The group, admitted after a loss or restarted after a wipe-out, could not take the state over."""
    RESTART = 9
    """Only a restart from a checkpoint helps: the group is to be started again."""
    LEFT = 10
    """The group has left the run, as it was asked to."""
    STOPPED = 11
    """The run ends before its last step, as it was asked to."""
    ABORT_HUNG = 12
    """An abort of a communicator between groups does not return: the rank's group is lost."""


# ----------------------------------------------------------------------------------------- from ranks, a pipe each
# Each rank sends a records.RestartRecord as it sends GroupRejoined. A CheckpointRecord comes from the leader alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReady:
    """The group is ready to train, waits for admission, or (`is_wiped_out`) waits for its restart. Sent by its first
    rank on every node.
    """

    group: GroupId
    is_wiped_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRejoined:
    """A lost group takes part again from this step on; sent by each rank, forwarded by the node of its leader."""

    member: Member
    step: int
    stages: int | None = None
    """Of its pipeline, if fewer than usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaused:
    """Training pauses after `step` committed steps until these shards have a host; without shards it goes on.

    Sent by a group's first rank on every node, also of a group that waits for admission; forwarded by its leader's
    node.
    """

    group: GroupId
    step: int
    shards: tuple[ShardId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """A step is committed and applied; sent by a group's first rank on every node, forwarded by its leader's node."""

    update: records.UpdateRecord
    num_alive: int
    split_s: Mapping[Operation, float]
    """Seconds of the rank's main thread by operation, since its last report."""
    head: int
    """Log entries the group has folded."""
    epoch: int
    """Number of the set of groups that took part."""
    num_recomputed: int
    """Microbatches that all groups have computed again for losses in the step: `num_patched` of its recovery."""
    recoveries: tuple[records.RecoveryRecord, ...]
    """Recoveries of the group that ended since its last report."""
    is_last: bool = False
    """The run ends with this step."""
    num_missing_stages: int = 0
    """Those that the groups together lack."""

    @property
    def step(self) -> int:
        return self.update.step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDecided:
    """An evaluation after `step` committed steps is decided; sent and forwarded as StepCommitted is."""

    group: GroupId
    step: int
    attempt: int
    loss: float
    """Over all validation sets; NaN if not finite."""
    losses: Mapping[str, float]
    """Of each."""
    spent_s: float
    """Since the update before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception ended the rank, with this exit code; `concerns_all` if its cause holds for all groups: a setting, or
    missing groups. `device_code`: of an error of CUDA, where torch gives it.
    """

    group: GroupId
    rank: int
    traceback: str
    concerns_all: bool = False
    device_code: int | None = None
    code: ExitCode = ExitCode.RAISED


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """The log ends training after `step` committed steps, for good (`is_final`) or to restart; sent by every leader."""

    group: GroupId
    step: int
    reason: str
    is_final: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultWanted:
    """A fault of the trace that other processes must inflict on the rank, which waits until they have."""

    fault: Fault
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStruck:
    """A fault of the trace is about to strike: the group's next incarnation must not meet it again."""

    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsHeld:
    """Storage does not take a file of the run; what is appended stays in memory. An empty `reason` ends that."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsLost:
    """Files of the run were closed before storage had taken all of them; `num_bytes` are missing at their ends."""

    paths: tuple[str, ...]
    num_bytes: int
    reason: str


RankReport = (
    RanksReady
    | GroupRejoined
    | RunPaused
    | records.RestartRecord
    | StepCommitted
    | EvaluationDecided
    | records.CheckpointRecord
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
    node: int
    pids: Mapping[RankKey, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMoved:
    """The sender's supervisor holds this place from now on: its reports name it as their node."""

    machine: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineQuarantined:
    """The machine is in quarantine: it gets no place, and starts no group, before an examination of it passes."""

    machine: MachineId
    cause: QuarantineCause
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftNodeGone:
    """A node is silent that has no rank but of members that have left the run before, so that nothing is lost."""

    node: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasured:
    """What the ranks of a machine did in some steps, of `step_s` each, and what the machine showed meanwhile."""

    machine: MachineId
    step_s: float
    ranks: tuple[RankTimes, ...]
    signs: MachineSigns


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMissing:
    """A node's supervisor did not come, or was lost before its ranks were ready; sent by its remote supervisor."""

    node: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLost:
    """A group has been found lost and is fenced.

    `error`: the exception behind it if other groups may meet the same, else empty. `before_training`: it was fenced
    before all groups were ready or lost. The rest is of `RankRaised`.
    """

    record: records.LossRecord
    traceback: str = ""
    error: str = ""
    concerns_all: bool = False
    before_training: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked:
    """The run is asked to end after the step under way; all of its processes end after `limit_s`, if that is set.

    Attributes:
        by: What asks for it, such as the name of a signal.
    """

    by: str
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAway:
    """The control store does not answer: training pauses until it does, for `limit_s` at most."""

    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGone:
    """The control store is given up: the run ends when the ranks have saved their state."""

    node: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBack:
    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded:
    """No rank of the node is left and its supervisor is about to end; `failure` says why if the run cannot go on.
    `is_cut_off`: because it was asked to end, and could not within the grace period.
    """

    node: int
    exits: Mapping[RankKey, int]
    failure: str = ""
    is_cut_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """From the driver to a supervisor, and from this to the rank: the fault that the rank wanted has struck."""

    wanted: FaultWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEarly:
    """From the driver to a supervisor: the run is to end with the current step, within `limit_s` if that is set."""

    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProcess:
    """From a process to its child, as from the driver to a supervisor: end now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRaised:
    """From a process that is not a rank, to its parent: this exception ends it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReportAcknowledged:
    """From a remote supervisor to the supervisor it stands for: the driver has its last message."""


DriverOrder = GoOn | EndEarly | StopProcess

NodeReport = (
    RankReport
    | RanksStarted
    | MachineMoved
    | MachineQuarantined
    | records.ExaminationRecord
    | NodeMeasured
    | LeftNodeGone
    | NodeMissing
    | GroupLost
    | EndAsked
    | StoreAway
    | StoreBack
    | StoreGone
    | NodeEnded
)

# ------------------------------------------------------------------------------------------------------ from the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Text for people; no process acts on it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectoryOpened:
    """The run has its directory; `path` leads to it from this machine, wherever it is moved."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectoryMoved:
    """The run's directory has been moved while the run goes on, which writes all further files there."""

    path: Path
    former: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeasured:
    """The size of etcd; `shortage` says why it may not suffice for the remaining steps, and is empty if it does."""

    space: StoreSpace
    shortage: str


RunEvent = NodeReport | Message | RunDirectoryOpened | RunDirectoryMoved | records.CulpritRecord | StoreMeasured


def next_report(pipe: Connection) -> NodeReport | None:
    """The next message of a supervisor; None if none will come."""
    try:
        report: NodeReport = pipe.recv()
    except (EOFError, OSError):  # OSError: its writer was killed in the middle of a report
        return None
    return report
