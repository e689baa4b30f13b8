"""The first record of a run: its terms, and digests of them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from spare_megatron.journal.records import Record
from spare_megatron.stacking.batch_ramp import BatchRamp


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTerms(Record):
    """Terms of the first format, which settings determine. Never reorder: the digest of the terms follows this
    order.
    """

    name: str
    num_groups: int
    """Groups that the run begins with, and shards of a batch."""
    ranks_per_group: int
    ranks_per_stage: int = 1
    """Consecutive ranks of a group that form a pipeline stage, those of all lanes."""
    pipeline_fill: float = 0.0
    """Time to fill the pipeline, in microbatches: (pipeline stages - 1) / model chunks per stage x those that the lanes
    of a group compute at a time."""
    redundancy: int
    microbatches_per_shard: int
    placement: str
    groups_per_domain: int = 1
    """Groups of consecutive ids in a failure domain, as passed to the placement."""
    granularity: str
    last_resort: bool = False
    """Whether a group may compute shards outside its stack once all their hosts are lost."""
    slice_redundancy: int = 0
    """Hosts of each state partition; 0 if not partitioned."""
    reduce_mode: str
    num_steps: int
    params_check_every_steps: int = 0
    """Steps between comparisons of all groups' parameters; 0 compares only after recoveries and at the end."""
    loaded: str = ""
    """Path of the checkpoint that the run starts from."""
    tokens_per_step: int = 0
    """Tokens of the global batch; 0 if unknown, as in a simulated run."""
    flops_per_step: float = 0.0
    """Model FLOPs of the global batch, redundant computation excluded; 0 if unknown."""
    peak_tflops: float | None = None
    max_minutes: float | None = None
    """`train.max_minutes`: the run then ends with the step under way."""
    corpus: str = ""
    """Corpus identity: digest of both files, tokens, tokenizer if known; empty in earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms(FirstTerms):
    """All terms. Add new ones at the end; the default is what versions without the term did, and is left out of the
    digest.
    """

    order: int = 1
    """Version of the order of samples; 1 in earlier versions, where it depended on the number of steps."""
    weights: str = ""
    """Identity of the weights alone that the training began with; empty if there were none."""
    validation: str = ""
    """Name and corpus of each validation set of its own; empty in earlier versions."""
    masks: str = ""
    """Settings that give the ends of documents a meaning; empty if they have none, as in earlier versions."""
    program: str = ""
    """SHA-256 of the file of the user's program; empty without one."""
    offset: int = 0
    """Sequences that earlier runs have read beyond what steps of this run's batches would have."""
    audit_every_steps: int = 0
    """Steps between audits; 0 if there are none, as in earlier versions."""
    eval_every_steps: int = 0
    """Steps between evaluations; 0 if there are none, as in earlier versions."""
    eval_microbatches_per_shard: int = 0
    """Microbatches of a shard in an evaluation, over all validation sets."""
    ramp: list[int] = field(default_factory=list)
    """Microbatches per shard at the first step, those that each increase adds, and the step from which there are
    `microbatches_per_shard`; empty if there are as many in every step."""
    max_groups: int = 0
    """Most groups that may take part; 0 if those are all."""
    lanes: int = 1
    """Replicas of the model in a group, which share its microbatches."""
    row_size: int = 1
    """Microbatches in a row. Above 1, with experts, the microbatches of all records are rows, which a group's lanes
    compute together."""
    deal_by_pace: bool = False
    """Whether slow groups get less work; False in earlier versions."""
    skip: str = ""
    """Places in the order of samples that are left out; empty if none, as in earlier versions."""
    phases: str = ""
    """Sequence lengths of earlier runs, as in `data.phases`; empty if none differs, as in earlier versions."""
    least_stages: int = 0
    """Fewest pipeline stages of a group that lacks machines; 0 if all groups have as many, as in earlier versions."""
    num_layers: int = 0
    """Of the model, if groups may have fewer stages; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(RunTerms):
    """Terms and origin of the run; the driver writes them before any rank starts."""

    format: int = 1
    """Journal format; format 1 does not write this field."""
    faults: list[dict[str, Any]]
    """Planned faults: step, group, rank, phase, kind, and in `costs` the groups that each certainly costs."""
    num_processors: int = 0
    """Processors that all ranks share; 0 if each rank has its own device."""
    first_step: int = 0
    """Committed steps of the checkpoint `loaded`; equals the first step to train."""
    version: str = ""
    """Package version that started the run; empty in earlier formats, as are `commit` and `host`."""
    commit: str = ""
    host: str = ""
    """The driver's machine."""
    code: str = ""
    """Digest of the package's Python files; empty in earlier formats and in simulated runs."""
    loaded_corpus: str = ""
    """Written by earlier versions, for `changes` of the corpus alone."""
    changes: dict[str, list[str | int | float | bool | None]] = field(default_factory=dict)
    """Terms that differ from those of the loaded checkpoint, as `checkpoint.allow_changes` names them: its value, and
    the run's."""
    terms: str = ""
    """`digest_of_terms` of this record as the driver wrote it; empty in earlier journals."""

    @property
    def most_groups(self) -> int:
        """Groups that may take part; ids are below it."""
        return max(self.num_groups, self.max_groups)

    def num_ranks(self, num_groups: int, num_missing_stages: int = 0) -> int:
        """Ranks of so many groups, which together lack so many stages."""
        return num_groups * self.ranks_per_group - num_missing_stages * self.ranks_per_stage

    @property
    def turns(self) -> list[int]:
        """For each rank of a group, the turn of its lane: lanes of the same turn compute the same microbatches."""
        places = (rank % self.ranks_per_stage for rank in range(self.ranks_per_group))
        return [place * self.lanes // self.ranks_per_stage // self.row_size for place in places]

    def microbatches_of_a_shard(self, step: int) -> int:
        return self._ramp.at(step)

    def size_of_step(self, step: int) -> float:
        """The global batch of a step in those of `tokens_per_step` and `flops_per_step`."""
        return self._ramp.at(step) / self.microbatches_per_shard

    @property
    def _ramp(self) -> BatchRamp:
        if not self.ramp:
            return BatchRamp.constant(self.microbatches_per_shard)
        start, increment, steps = self.ramp
        return BatchRamp(largest=self.microbatches_per_shard, start=start, increment=increment, steps=steps)


def digest_of_terms(terms: Mapping[str, Any]) -> str:
    """SHA-256 in hex of the values of all terms, of those that came later only where they differ from their defaults.

    The json module writes them: the codec writes large numbers otherwise, and digests of earlier versions must match.
    """
    first = fields(FirstTerms)
    values = [terms[one.name] for one in first]
    for one in fields(RunTerms)[len(first) :]:
        default = [] if one.default is MISSING else one.default
        values += [] if terms[one.name] == default else [{one.name: terms[one.name]}]
    text = json.dumps(values, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
