"""The settings of the training text, of evaluation, of checkpoints and of snapshots."""

from dataclasses import dataclass
from itertools import count
from pathlib import PurePath
from typing import Literal

from spare_megatron.config.limits import ChangeableTerm, NonNegativeInt, PositiveFloat, PositiveInt, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendedCorpus:
    """A corpus of a blend."""

    corpus: str
    """Path prefix of the indexed dataset."""
    weight: float = 1.0
    """Sequences taken from it, relative to the other corpora of the blend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationCorpus:
    """A validation set that is a whole corpus."""

    name: str
    """Name of the set."""
    corpus: str
    """Path prefix of the indexed dataset, all of which is in the set."""
    identity: str = ""
    """Required identity of the corpus, as `data.identity`; empty accepts any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training text, and that for validation."""

    corpus: str = ""
    """Path prefix of the indexed dataset that `spare preprocess` wrote (PREFIX.bin and PREFIX.idx)."""
    blend: tuple[BlendedCorpus, ...] = ()
    """Several corpora in place of `data.corpus`, one table each: `corpus`, a path prefix, and `weight`, relative to the
    others'."""
    split: str = ""
    """Shares of each corpus's documents for training, validation and test, in this order, as in 99,1 or 969,30,1; empty
    trains on all."""
    validation: tuple[ValidationCorpus, ...] = ()
    """Corpora for validation, in addition to the part that `data.split` holds out, which is the set `validation`; one
    table each: `name`, and `corpus`, a path prefix."""
    identity: str = ""
    """Required identity of the corpus or blend: digest, tokens, tokenizer, as in a run's `config.toml`; empty accepts
    any."""
    eod_mask_loss: bool = False
    """Leaves the predictions made from end-of-document tokens, which are of the next document, out of the loss."""
    reset_attention_mask: bool = False
    """Restricts attention to tokens of the same document."""
    reset_position_ids: bool = False
    """Counts positions from 0 in each document; for learned positions."""
    fim_rate: Share = 0.0
    """Share of documents that are to be filled in: beginning and end first, the middle last."""
    fim_spm_rate: Share = 0.5
    """Share of these whose end comes before their beginning."""
    fim_tokens: str = ""
    """Ids of the tokens before the beginning, the middle and the end of a document to be filled in, as in
    256,257,258."""
    end_of_document: NonNegativeInt | None = None
    """Token id that ends a document, for the settings above and for exports; the one that `spare preprocess` noted if
    absent."""
    offset: int = 0
    """Sequences by which the place in the data is ahead of the run's batch times its steps, where a checkpoint of other
    batches was loaded; follows from `checkpoint.load`."""
    phases: tuple[str, ...] = ()
    """What runs have read before they changed it, each as SEQ_LENGTH:SEQUENCES with the sequences of all until then,
    and :other if it was of another corpus or seed; follows from `checkpoint.load`."""
    skip: tuple[str, ...] = ()
    """Places in the order of samples that are left out, as 4096, or first and last as 4096-4159; `spare data` prints
    those of a step. From a checkpoint on only places that it has not read may be added, or taken away."""
    cache: str = ""
    """Folder for sample indices; `cache` beside the first corpus if empty."""
    access: Literal["stacked", "shared"] = "stacked"
    """Shards that a group can read: those of its stack, or all (shared), which lets any group compute any shard:
    patches go to all survivors, and no shard is lost with its hosts."""

    @property
    def fim_ids(self) -> tuple[int, ...]:
        """The ids in `fim_tokens`; empty unless it has three different ones."""
        ids = self.fim_tokens.replace(" ", "").split(",")
        are_ids = len(set(ids)) == len(ids) == 3 and all(one.isdecimal() for one in ids)
        return tuple(map(int, ids)) if are_ids else ()

    @property
    def mask_settings(self) -> tuple[str, ...]:
        """The settings that are on and mask something by the ends of documents."""
        names = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids")
        return tuple(name for name in names if getattr(self, name))

    @property
    def document_settings(self) -> tuple[str, ...]:
        """The settings that are on and give the ends of documents a meaning."""
        return (*self.mask_settings, *(("fim_rate",) if self.fim_rate else ()))

    @property
    def corpora(self) -> tuple[BlendedCorpus, ...]:
        """The corpora that a run reads; a single one is a blend of one. Empty if a program provides the data."""
        return self.blend or ((BlendedCorpus(corpus=self.corpus),) if self.corpus else ())

    @property
    def corpus_names(self) -> tuple[str, ...]:
        """What metrics call each of `corpora`: the shortest end of its path that no other has.

        >>> DataConfig(blend=tuple(BlendedCorpus(corpus=path) for path in ("a/text", "b/text", "b/text"))).corpus_names
        ('a/text', 'b/text', 'b/text')
        """
        paths = [PurePath(one.corpus).parts for one in self.corpora]
        size = next(size for size in count(1) if len({path[-size:] for path in paths}) == len(set(paths)))
        return tuple(PurePath(*path[-size:]).as_posix() for path in paths)

    @property
    def named(self) -> str:
        """The corpora as messages name them."""
        if not self.blend:
            return f"data.corpus={self.corpus}"
        return f"data.blend={'+'.join(part.corpus for part in self.blend)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation while training, on the text that `data.split` holds out and on the sets of `data.validation`."""

    every_steps: NonNegativeInt = 0
    """Steps between evaluations; one more follows the last step. 0 disables evaluation."""
    sequences: PositiveInt | None = None
    """Most sequences that an evaluation reads of each validation set; if absent those of a step, after a ramp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are taken, which one the run starts from, and restarts after a wipe-out."""

    cadence: Literal["fixed", "optimal"] = "fixed"
    """When to save: at a fixed interval, or at the optimal one for the measured save, restart and loss times."""
    group_life_s: PositiveFloat = 1e6
    """Mean seconds until a given group is lost, assumed before the first loss; for cadence = optimal."""
    group_absence_s: PositiveFloat | None = None
    """Mean seconds until a lost group is back, assumed before the first return; without it none is expected before. For
    cadence = optimal."""
    interval_steps: PositiveInt | None = None
    """Steps between checkpoints; without this and `interval_s` none is taken until the run is asked to end."""
    interval_s: PositiveFloat | None = None
    """Seconds between checkpoints."""
    asynchronous: bool = True
    """Continues training while a checkpoint is written; otherwise all groups wait until it is on disk."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep, beside the newest audited one and those that later steps have yet to confirm."""
    keep_every_steps: PositiveInt | None = None
    """Keeps one checkpoint per this many steps permanently."""
    folder: str = ""
    """Folder of the checkpoints, on storage that all nodes share; `checkpoints` in the run directory if empty."""
    load: str = ""
    """Checkpoint to start from: a checkpoint, or a folder of checkpoints or a run, of which the newest valid one is
    loaded."""
    load_weights: str = ""
    """Weights to start from with a new optimizer and schedule: an import, or as in `load`, which goes before it."""
    weights_identity: str = ""
    """Required identity of `load_weights`, as in a run's `config.toml`; empty accepts any."""
    allow_changes: tuple[ChangeableTerm, ...] = ()
    """Terms in which a run may differ from the checkpoint that it continues, as corpus, program, model.seq_length or
    model.precision; its record names both values."""
    timeout_s: PositiveFloat = 1800.0
    """Longest time to write a checkpoint, after which it is abandoned and training continues, and to read one."""
    max_restarts: NonNegativeInt = 3
    """Restarts after a wipe-out within an hour of training; the next wipe-out ends the run. 0: the first one does."""
    restart_wait_s: PositiveFloat = 60.0
    """Longest wait for missing groups: in a pause, then the run ends; at a restart also for stalled ones, then the
    others start if they can."""

    @property
    def is_wanted(self) -> bool:
        return self.cadence == "optimal" or self.interval_steps is not None or self.interval_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """Copies of the training state in the nodes' memory, for restarts after a wipe-out."""

    every_steps: int = 0
    """Steps between snapshots of the state in host memory, at least 2; 0 takes none."""
    redundancy: NonNegativeInt = 1
    """Nodes whose loss leaves a snapshot whole; each rank's state is copied to one node more."""
