"""Record types of the journal: the facts that the processes of a run write down.

Fields named `_at_s` are wall-clock seconds since the epoch, fields named `_s` durations in seconds. In records about
state (parameters, checkpoints, snapshots, copies, restarts), `step` counts the committed steps that the state holds.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["finished", "stopped", "wipe_out", "halted", "failed", "interrupted"]

EXIT_CODES: Mapping[Outcome, int] = {
    "finished": 0,
    "stopped": 5,
    "wipe_out": 3,
    "halted": 4,
    "failed": 1,
    "interrupted": 130,
}
"""Of a run that is proven, or where nothing more can be proven."""

MEANINGS: Mapping[int, str] = {
    0: "all steps are committed and the journal is valid, or --resume found a finished training",
    1: "the run failed, its journal does not prove it, or its last checkpoint is missing",
    2: "the configuration cannot run",
    3: "wipe-out",
    4: "halted, because groups disagreed or training diverged",
    5: "stopped with steps left, by SIGTERM or another signal that asks for it",
    130: "interrupted by Ctrl-C or a second SIGTERM, or during the start",
}


def exit_code(outcome: str, verdict: str) -> int:
    """What `spare train` ends with, but for a missing checkpoint; `verdict` is that of `spare check`, if it has run.

    >>> exit_code("finished", "valid"), exit_code("finished", "unknown"), exit_code("stopped", "unknown")
    (0, 1, 5)
    """
    doubts = {"finished": ("invalid", "unknown"), "stopped": ("invalid",)}
    if verdict in doubts.get(outcome, ()):
        return 1
    return next((code for name, code in EXIT_CODES.items() if name == outcome), 1)  # the journal may have no end


SaveOutcome = Literal["saved", "failed", "skipped"]
"""A save is skipped while the group still writes an earlier one."""

StorageOutcome = Literal["held", "written", "lost"]
"""Held bytes are in memory, and lost unless written before the run ends. Only journal files are reported as lost."""

StateOrigin = Literal["storage", "memory"]
"""`storage`: a checkpoint or the initial parameters. `memory`: a snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of the journal. Its kind is the name of the class, in lower case and without `Record`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfGroup(Record):
    """A record about one group."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStep(OfGroup):
    """A record about a group and a step."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAttempt(OfStep):
    """A record about a group and one attempt to reduce a step."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord(OfGroup):
    """A rank starts in an incarnation of its group; first record of its file. `code` is as in `RunRecord`."""

    rank: int
    incarnation: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsRecord(OfGroup):
    """Terms that a group runs under in one incarnation, by its own settings; its leader writes them at the start."""

    incarnation: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionRecord(OfAttempt):
    """A group's contribution to one attempt to reduce a step; written before any of it is sent."""

    epoch: int
    members: list[int]
    microbatches: dict[str, list[int]]
    """Shard -> indices of the microbatches in the group's sums of the buckets that are not kept."""
    incarnation: int = 0
    kept: list[int] = field(default_factory=list)
    """By position, the number of leading buckets that keep their sums and are not reduced; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRecord(OfAttempt):
    """A group's only vote on an attempt."""

    is_complete: bool
    work_digest: str
    """`digest_of_work` of the step's microbatches that the group's ranks agree to have computed."""
    evidence: str = ""
    """What own checks have found, after `votes.WRONG_NUMBERS`; else why the leader lacks the sum; empty if it has it or
    if only another rank of the group lacks it."""
    incarnation: int = 0
    num_complete: list[int] = field(default_factory=list)
    """By position, the number of leading buckets whose sums it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(OfAttempt):
    """What a group votes with in an attempt of a step with audits; written before its vote."""

    digests: list[list[Any]]
    """Shard, index, and digest (16 hex digits) of each audited microbatch that the group has computed, its own and
    those of others."""
    num_added: int
    """Microbatches whose gradients all lanes have added to their sums in this step; none are of other groups."""
    num_planned: int | None = None
    """The first so many digests are of audits that the plan of the step has; None: all are."""
    incarnation: int = 0
    boundaries: list[list[Any]] = field(default_factory=list)
    """Of disputed microbatches, what their digests are made of: shard, index, kind, stage, position, digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisputeRecord(OfAttempt):
    """End of a save of the parameters of a step in which groups differ about a microbatch; by the group that saves."""

    outcome: SaveOutcome
    reason: str = ""
    num_bytes: int = 0
    write_s: float = 0.0
    """Seconds from its start, copying included."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord(OfAttempt):
    """What a group found in an evaluation after `step` committed steps; written before its vote, which carries it."""

    microbatches: dict[str, list[int]]
    """Shard -> indices, counted over all validation sets."""
    sums: list[list[Any]]
    """Name, loss in 2^-32 nats (null if not finite) and tokens of each validation set."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord(OfAttempt):
    """How a round with other sites has ended for this site, after `step` committed steps; by the group that spoke."""

    round: int
    """0: none came about, and `reason` says why."""
    base_round: int = 0
    """That whose result the site had before."""
    sites: list[int] = field(default_factory=list)
    """As in the entry `synced`."""
    weights: dict[str, int] = field(default_factory=dict)
    """Site -> microbatches that it has contributed."""
    num_bytes: int = 0
    """Fetched from other sites, by all ranks."""
    spent_s: float = 0.0
    """Seconds for which training has waited."""
    digest: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord(OfGroup):
    """A decision log entry as a group folded it."""

    index: int
    entry: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacesRecord(OfStep):
    """The paces by which work is dealt from this step on, as a group's fold of the log came to them."""

    permille: dict[str, int]
    """Group -> time per microbatch in thousandths of that of the groups' like, which those not named have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord(OfAttempt):
    """A committed step, applied to the group's parameters."""

    num_microbatches: int
    """Microbatches in the sum, as counted inside the reduction."""
    loss: float
    grad_norm: float
    learning_rate: float
    makespan: int
    step_s: float
    compute_s: list[float] = field(default_factory=list)
    """For each rank, seconds of the forward and backward passes of the group's contribution; empty if unknown."""
    terms: dict[str, float] = field(default_factory=dict)
    """Means of the further terms of a program's loss; on a blend `loss/` and a corpus: the mean over its tokens."""
    bytes_over_groups: int = 0
    """Bytes that the group's first rank gave to sums over groups since the previous commit; 0 if unknown."""
    values: dict[str, float] = field(default_factory=dict)
    """Further metrics of the step by their keys, those of `journal.step_values`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsRecord(OfStep):
    """A group's parameters after `step` committed steps; written again if they are gathered again, and at the end.

    Either digest may be empty: unknown. Earlier versions wrote only `sha256`, in every record.
    """

    digest: str = ""
    """What groups compare."""
    sha256: str = ""
    """SHA-256 of the parameters; only at the end of a run."""
    num_restarts: int = 0
    """Restarts so far: a step that is computed again may end in other bits."""
    slices: dict[str, str] = field(default_factory=dict)
    """Number -> state digest of each state partition that the group hosts."""

    @property
    def compared(self) -> str:
        """The digest that all of a run's records have."""
        return self.digest or self.sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord(OfStep):
    """How one surviving group spent the time from a loss to the commit of the step."""

    lost: list[int]
    computed_at_s: float
    """End of the group's own compute."""
    noticed_at_s: float
    """When the group folded the first fence of this recovery."""
    agree_s: float
    """From noticing a loss to the decision whether the sum is complete, summed over all losses of the recovery."""
    patch_s: float
    rebuild_s: float
    """Waiting for the new communicator, which is built while the patch is computed."""
    reduce_s: float
    """From the new communicator to the commit."""
    num_patched: int
    """Microbatches that the group has computed for it, of patches and of the step begun anew if sums were discarded."""
    num_restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRecord(OfStep):
    """A group takes part again after a wipe-out or, with `is_undo`, has gone back in place."""

    incarnation: int
    rework_steps: int
    restart_s: float
    """From when the supervisor, or the rank itself, learned of the wipe-out to the end of loading."""
    rejected: list[str] = field(default_factory=list)
    """Checkpoints and snapshots that it could not use, each with the reason."""
    loaded_from: StateOrigin = "storage"
    load_s: float = 0.0
    """The part of `restart_s` spent loading."""
    num_restarts: int = 0
    """Restarts and undos so far, this one included; 0 if unknown."""
    stages: int | None = None
    """Of the group's pipeline, if fewer than usual."""
    is_undo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord(OfStep):
    """An injected fault, written by its victim right before the fault strikes."""

    rank: int
    phase: str
    kind: str


LOST_A_PEER = "lost a peer in its group"
"""Cause of a loss that shows on one rank while another rank of the group is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecord(OfGroup):
    """Loss of a group, found by its node's supervisor or by the watchers of that node; rank -1 stands for the node."""

    rank: int
    cause: str
    entry_index: int
    """Of the log entry that fences the group."""
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Rank, operation and step of each of the group's ranks on the node when the loss was found."""
    incarnation: int = 0
    is_given_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord(OfGroup):
    """A supervisor has started the ranks of a lost group on its node again."""

    incarnation: int
    num_ranks: int
    num_spares: int
    stages: int | None = None
    """Of the group's pipeline, if fewer than usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesRecord(Record):
    """Machines take places, or their quarantine begins or ends; written by the process that wrote the entry of the
    list, and by each supervisor whose machine takes a place or is put into quarantine.
    """

    index: int
    """Of the assignment in their list in the control store."""
    num_places: int
    """Places of the run: equal blocks of consecutive ranks. Machine i + k x num_places replaces machine i."""
    holdings: list[list[int]]
    """Machine, place, and incarnation of the place's supervisor."""
    places: list[list[int | None]] = field(default_factory=list)
    """What the choice was made from: places of broken groups, each with its machine, null if it had none."""
    idle: list[int] = field(default_factory=list)
    """Likewise, machines without a place."""
    shards: list[int] = field(default_factory=list)
    """Likewise, shards without a host."""
    quarantined: list[list[int | str]] = field(default_factory=list)
    """Machine, cause (`outvoted` or `slow`) and reason of the quarantines that begin."""
    released: list[int] = field(default_factory=list)
    """Machines whose quarantine ends."""
    stages: list[list[int]] = field(default_factory=list)
    """Groups that are made or grow, where their pipeline stages change, each with its number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationRecord(Record):
    """A machine in quarantine was examined, by its supervisor; figures as in `core.slow_machines.examination_rules`."""

    machine: int
    number: int
    reason: str
    """Why it has not passed; empty if it has."""
    wait_s: float
    """Until it is examined again; 0 if it has passed."""
    own: dict[str, Any] | None
    likes: dict[str, dict[str, Any]]
    """By machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritRecord(Record):
    """What holds the run back, as the driver finds; written when that changes."""

    machine: int
    cause: str
    """`compute`, `data`, `link` or `host`."""
    of_group: int | None = None
    """None if the machine is meant as a whole."""
    rank: int | None = None
    """None if ranks of the group on this machine look alike."""
    excess_s: float = 0.0
    """Seconds by which it makes each step longer."""
    factor: float = 0.0
    """Its time over that of its like; 0 if unknown."""
    detail: str = ""
    is_over: bool = False
    """Whether it does so no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRecord(Record):
    """Whether a machine that holds the run back is replaced, as the driver decides; written when the rule changes by
    which it is or is not. For the fields after `cost_s`, what it was decided from, see
    `core.slow_machines.slow_machine_policy.Situation`.
    """

    machine: int
    rule: str
    """`drain`, or why not."""
    gain_s: float
    """Seconds that each step gains by it."""
    cost_s: float
    cause: str
    excess_s: float
    mended_ratio: float
    step_s: float
    lost_steps: int
    steps_left: int
    num_members: int
    num_leaving: int
    least_hosts: int | None
    replacement: str
    admission_s: float
    since_drain_s: float | None
    under_way: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceRecord(OfStep):
    """Why a checkpoint is taken now, by its group's leader; for fields after `step` see `core.log.actions.Cadence`."""

    interval_s: float
    save_s: float
    group_interval_s: float
    absence_s: float | None
    time_to_wipe_out_s: float
    num_losses: int
    exposure_s: float
    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord(OfStep):
    """How a group's save ended; written by its leader. A group that is lost during the save writes no record."""

    outcome: SaveOutcome
    reason: str
    """Why the outcome is not `saved`, or what else went wrong."""
    num_bytes: int
    stall_s: float
    """How long the save kept the leader from training."""
    write_s: float
    """From the start of the save until it is visible or has failed."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord(OfStep):
    """How the copy of a rank's state to its node's memory ended. A rank lost before that writes no record."""

    rank: int
    attempt: int
    """Attempt that committed the last of these steps."""
    is_kept: bool
    reason: str
    num_bytes: int
    stall_s: float
    copy_s: float
    """From the start of the copy until it is whole or has failed."""
    registered_bytes: int = 0
    """Of the server's memory that the rank keeps registered with CUDA."""
    register_s: float = 0.0
    """What registering took after this copy."""
    not_registered: str = ""
    """Why CUDA has refused; copies go through buffers then."""
    slices: list[int] = field(default_factory=list)
    """State partitions in the snapshot, if the optimizer state is partitioned."""
    has_params: bool = True
    """Whether the snapshot holds everything that is not in a state partition."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyRecord(OfStep):
    """Missing copies of state partitions, and partitions that the group hosts; written whenever hosts change."""

    num_missing: int
    num_hosted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRecord(OfStep):
    """A group's copy of a state partition is whole on all of its ranks; written before its vote reports it."""

    slice: int
    donor: int
    is_move: bool = False
    """Whether the donor releases its own copy afterwards; otherwise the copy replaces a missing one."""
    num_bytes: int
    """Size on the group's leader."""
    repair_s: float
    """On the group's leader, since the copy was requested. A rank makes its copies one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionRecord(OfAttempt):
    """A microbatch whose loss is far from the losses before; written by a rank of the last stage before the vote."""

    rank: int
    shard: int
    index: int
    number: int
    """Of the microbatch in the batch."""
    loss: float | None
    """Mean over its tokens; None if it is not finite."""
    median: float
    """Of the losses that the rank has computed before."""
    samples: list[str]
    """Where each of its sequences lies: corpus, epoch and place in the order of the epoch."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord(Record):
    """End of the run; written by the driver when no rank is left, or by every supervisor if the driver is lost."""

    outcome: Outcome
    reason: str
    steps_committed: int | None = None
    """By the leaders' reports to the driver; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRecord(Record):
    """Storage refuses the run's files, accepts them again, or lacks their ends; written by the driver."""

    outcome: StorageOutcome
    path: str
    """First of these files, relative to the run directory."""
    reason: str = ""
    num_files: int = 1
    num_bytes: int = 0
    """Bytes lost."""


def by_shard(work: Iterable[tuple[int, int]]) -> dict[str, list[int]]:
    """Microbatches as records have them: the indices of each shard."""
    found: dict[str, list[int]] = {}
    for shard, index in work:
        found.setdefault(str(shard), []).append(index)
    return found


def digest_of_work(work: Iterable[tuple[int, int]]) -> str:
    """SHA-256 in hex of a set of microbatches, given as (shard, index) pairs in any order."""
    return hashlib.sha256(repr(sorted((int(shard), int(index)) for shard, index in work)).encode()).hexdigest()
