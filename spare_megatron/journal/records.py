"""The facts a run writes down.

Times are wall-clock seconds since the epoch (`_at_s`) or durations (`_s`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["finished", "wipe_out", "halted", "failed", "interrupted"]

SaveOutcome = Literal["saved", "failed", "skipped"]
"""A save is skipped while the group is still writing an earlier one."""

StorageOutcome = Literal["held", "written", "lost"]
"""What is held is in memory, and lost unless it is written before the run ends. Only journal files count as lost."""

StateSource = Literal["storage", "memory"]
"""A checkpoint, or the parameters with which the run began; or a snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The terms of the run, written by the driver before any rank starts."""

    format: int = 1
    """Of the journal; the first one does not say so."""
    name: str
    num_groups: int
    ranks_per_group: int
    redundancy: int
    microbatches_per_shard: int
    num_steps: int
    placement: str
    granularity: str
    reduce_mode: str
    faults: list[dict[str, Any]]
    """The faults to be injected: step, group, rank, phase, kind, and which groups that costs for sure."""
    params_check_every_steps: int = 0
    """Steps between comparisons of the parameters of all groups; 0 compares only after recoveries and at the end."""
    last_resort: bool = False
    """Whether a group may compute shards that are not in its stack once their hosts are all lost."""
    slice_redundancy: int = 0
    """Hosts of each slice of the optimizer state; 0 where every group holds all of it."""
    groups_per_domain: int = 1
    """Groups of consecutive ids in a domain, as the placement was told."""
    num_processors: int = 0
    """Processors that all ranks share; 0 where each rank has a device of its own."""
    first_step: int = 0
    """Committed steps of the checkpoint that the run begins with: its first step to train."""
    loaded: str = ""
    """That checkpoint's path."""
    pipeline_fill: float = 0.0
    """Stages before the last over model chunks per stage: the microbatches' time that filling a pipeline can cost."""
    ranks_per_stage: int = 1
    """Consecutive ranks of a group that make a pipeline stage."""
    tokens_per_step: int = 0
    """Tokens of the global batch; 0 where that is unknown, as in a simulated run."""
    flops_per_step: float = 0.0
    """Floating-point operations of the model for the global batch, redundant ones not counted; 0 if unknown."""
    peak_tflops: float | None = None
    """Peak of a rank's device, where `metrics.peak_tflops` says it."""
    max_minutes: float | None = None
    """`train.max_minutes`, after which the run ends with the step under way."""
    version: str = ""
    """Version of the package that started the run; empty in earlier formats, like the two that follow."""
    commit: str = ""
    """Commit of its checkout."""
    host: str = ""
    """Name of the machine of the driver."""
    code: str = ""
    """Digest of its Python files; empty in earlier formats and in a simulated run, where no rank names one."""
    corpus: str = ""
    """Which corpus it reads: digest of both files, tokens, tokenizer where known; empty in earlier versions."""
    loaded_corpus: str = ""
    """That of the checkpoint that it begins with, where that is known to be another one."""
    terms: str = ""
    """`digest_of_terms` of the record, as the driver wrote it; empty in earlier journals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """A rank begins a life of its group; the first record of its file."""

    group: int
    rank: int
    incarnation: int
    code: str
    """Digest of the package's Python files, as this process has imported them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsRecord:
    """The terms that a group runs under in one of its lives, by its own settings; written by its leader first."""

    group: int
    incarnation: int
    sha256: str
    """`digest_of_terms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionRecord:
    """What a group brings into one attempt to reduce a step, written before any of it leaves."""

    group: int
    step: int
    attempt: int
    epoch: int
    members: list[int]
    microbatches: dict[str, list[int]]
    """Shard -> indices of all microbatches of this step that the sums of this group hold, where they are not kept."""
    incarnation: int = 0
    kept: list[int] = field(default_factory=list)
    """For each rank, the first buckets whose sums stay as they are; the attempt reduces the others. None if empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRecord:
    """A group's only vote on an attempt."""

    group: int
    step: int
    attempt: int
    is_complete: bool
    work_digest: str
    """`digest_of_work` of what the group's ranks agree to have computed in the step."""
    evidence: str = ""
    """Why the leader lacks the sum; empty where it has it, or another rank of the group lacks it."""
    incarnation: int = 0
    num_complete: list[int] = field(default_factory=list)
    """For each rank, the buckets whose sums it holds, from the first on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord:
    """An entry of the decision log as a group folded it."""

    group: int
    index: int
    entry: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """A committed step, applied to the group's parameters."""

    group: int
    step: int
    attempt: int
    num_microbatches: int
    """Microbatches in the sum, as counted inside the reduction."""
    loss: float
    grad_norm: float
    learning_rate: float
    makespan: int
    step_s: float
    compute_s: list[float] = field(default_factory=list)
    """Of each rank, seconds of its forward and backward passes for what the group brought in; none if empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsRecord:
    """Digest of all parameters of a group after `step` committed steps; once more if they had to be gathered anew."""

    group: int
    step: int
    sha256: str
    num_restarts: int = 0
    """Restarts before it: the same step done again may end in other bits."""
    slices: dict[str, str] = field(default_factory=dict)
    """Digests of the state of the slices that the group hosts, by their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    """How one surviving group spent the time from a loss to the commit of the step it hit."""

    group: int
    step: int
    lost: list[int]
    computed_at_s: float
    """End of the group's own compute."""
    noticed_at_s: float
    """The first loss of this recovery folded."""
    agree_s: float
    """From noticing to the decision whether the sum is complete, over all losses of the recovery."""
    patch_s: float
    rebuild_s: float
    """Waiting for the new communicator. It is built while the patch is computed."""
    reduce_s: float
    """From the new communicator to the commit."""
    num_patched: int
    """Microbatches of the lost groups that this group computed."""
    num_restarts: int = 0
    """Restarts before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRecord:
    """A group takes part again after a wipe-out."""

    group: int
    incarnation: int
    step: int
    """Committed steps that it has loaded."""
    rework_steps: int
    """Committed steps that are computed again."""
    restart_s: float
    """From when its supervisor knew of the wipe-out to when it had loaded them."""
    rejected: list[str] = field(default_factory=list)
    """The checkpoints and snapshots that it could not use, and why."""
    loaded_from: StateSource = "storage"
    load_s: float = 0.0
    """Of that, loading itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """An injected fault, written by its victim right before it strikes."""

    group: int
    rank: int
    step: int
    phase: str
    kind: str


LOST_A_PEER = "lost a peer in its group"
"""Cause of a loss that shows on one rank where another one of its group is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecord:
    """A group found lost, by the supervisor of its node or by those that watch that node; rank -1 is the node."""

    group: int
    rank: int
    cause: str
    entry_index: int
    """Index of the log entry that fences the group."""
    pending: list[dict[str, Any]] = field(default_factory=list)
    """What each of its ranks was about when it was found lost: rank, operation, step."""
    incarnation: int = 0
    is_given_up: bool = False
    """The group has used up its restarts and stays away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """The ranks of a lost group on a node have been started again, by its supervisor."""

    group: int
    incarnation: int
    """The life that begins."""
    num_ranks: int
    num_spares: int
    """Of these ranks, those whose processes had waited for a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceRecord:
    """Why a checkpoint is taken now; written by the leader of the group that takes it. Times are those of the log."""

    group: int
    step: int
    interval_s: float
    """From one save to the next, as decided."""
    save_s: float
    """How long a save has kept training waiting."""
    group_interval_s: float
    """Mean time until a given group is lost, by the losses so far and the prior."""
    absence_s: float | None
    """Mean time until a lost group takes part again; none if none does."""
    time_to_wipe_out_s: float
    """Mean time until some shard has no host, with the groups that are there."""
    num_losses: int
    exposure_s: float
    """Time that groups have taken part, over all of them."""
    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """How a group's save ended; written by its leader. A group that is lost while it saves leaves none."""

    group: int
    step: int
    """Committed steps that the checkpoint holds."""
    outcome: SaveOutcome
    reason: str
    """Why it is not `saved`, or what else went wrong."""
    num_bytes: int
    stall_s: float
    """How long it kept the leader from training."""
    write_s: float
    """From its beginning to its being visible, or to its failure."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """How a rank's copy of its state to its node's memory ended. A rank that is lost before leaves none."""

    group: int
    rank: int
    step: int
    """Committed steps that it holds."""
    attempt: int
    """Of the last one's commit."""
    is_kept: bool
    reason: str
    """Why it is not."""
    num_bytes: int
    stall_s: float
    """How long it kept the rank from training."""
    copy_s: float
    """From its beginning to its being whole, or to its failure."""
    slices: list[int] = field(default_factory=list)
    """Of the optimizer's state, where it is cut into any."""
    has_params: bool = True
    """Whether it has all but slices."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyRecord:
    """How many copies of slices are missing, and how many slices the group holds, whenever hosts have changed."""

    group: int
    step: int
    """Committed steps."""
    num_missing: int
    num_hosted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairRecord:
    """A group has made a copy of a slice, whole on all of its ranks, and is about to say so in its vote."""

    group: int
    step: int
    """Committed steps that the copy holds."""
    slice: int
    donor: int
    is_move: bool = False
    """Whether the donor lets go of its own copy afterwards; else one is missing."""
    num_bytes: int
    """Of the group's leader."""
    repair_s: float
    """Of the group's leader, since the copy was asked for. A rank makes one copy after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """The end of the run, written by the driver when no rank is left."""

    outcome: Outcome
    reason: str
    steps_committed: int | None = None
    """As the leaders reported to the driver; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRecord:
    """The storage stops taking files of the run, takes them again, or has not taken their ends; by the driver."""

    outcome: StorageOutcome
    path: str
    """Of the first of these files, in the run's directory."""
    reason: str = ""
    """The error; empty where it takes them again."""
    num_files: int = 1
    num_bytes: int = 0
    """That are lost."""


Record = (
    RunRecord
    | RankRecord
    | ContributionRecord
    | VoteRecord
    | EntryRecord
    | UpdateRecord
    | ParamsRecord
    | RecoveryRecord
    | RestartRecord
    | FaultRecord
    | LossRecord
    | StartRecord
    | CadenceRecord
    | CheckpointRecord
    | SnapshotRecord
    | RedundancyRecord
    | RepairRecord
    | EndRecord
    | StorageRecord
    | TermsRecord
)


def digest_of_work(work: Iterable[tuple[int, int]]) -> str:
    """SHA-256 in hex of a set of microbatches, given as pairs of shard and index in any order."""
    return hashlib.sha256(repr(sorted((int(shard), int(index)) for shard, index in work)).encode()).hexdigest()


TERMS = (
    "name",
    "num_groups",
    "ranks_per_group",
    "ranks_per_stage",
    "pipeline_fill",
    "redundancy",
    "microbatches_per_shard",
    "placement",
    "groups_per_domain",
    "granularity",
    "last_resort",
    "slice_redundancy",
    "reduce_mode",
    "num_steps",
    "params_check_every_steps",
    "loaded",
    "tokens_per_step",
    "flops_per_step",
    "peak_tflops",
    "max_minutes",
    "corpus",
)
"""Fields of the run record that its settings fix: every group knows them by itself."""


def digest_of_terms(terms: Mapping[str, Any]) -> str:
    """SHA-256 in hex of the values that `TERMS` names."""
    text = json.dumps([terms[name] for name in TERMS], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
