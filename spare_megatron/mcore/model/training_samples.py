"""Training samples addressed by step and number in the batch: whichever lane computes a microbatch reads its tokens."""

import os
import shutil
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.corpus import HELD_OUT, documents_of, validation_names
from spare_megatron.config.training.read_samples import Cursor, left_over, phases_in, skipped_places
from spare_megatron.config.training.sample_index_folders import (
    RENEWAL_S,
    epoch_folder,
    epoch_seed,
    index_folder,
    num_samples,
    remove_unused,
    renew,
)
from spare_megatron.config.training.terms import global_batch, sequences_before, step_of
from spare_megatron.formats.quantities import format_binary_bytes
from spare_megatron.mcore.model.batches import stacked
from spare_megatron.mcore.model.fill_in_the_middle import FillInTheMiddle


class _Vocabulary:
    """The tokenizer interface of Megatron's dataset, for a corpus that is already tokens."""

    pad = -1
    """Occurs in no corpus."""

    def __init__(self, vocab_size: int, end_of_document: int | None) -> None:
        self.vocab_size = vocab_size
        self.eod = -2 if end_of_document is None else end_of_document

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": type(self).__name__, "vocab_size": self.vocab_size}


def prepare_index(config: RunConfig) -> tuple[Path, ...]:
    """Builds the sample index of each epoch that the run reads, in one process before the ranks start; removes old
    ones. Returns a folder per corpus. Raises ValueError if a corpus is missing or too short, or an index cannot be
    written.
    """
    if not config.data.corpora:
        return ()
    blend = _Blend(config)
    _check_validation(config)
    _check_space(config, blend)
    for samples, epochs in zip(blend.parts, blend.epochs(num_samples(config)), strict=True):
        try:
            for epoch in epochs:
                _build_epoch(samples, epoch)
            if epochs and samples.cursor.read:
                _build_rest(samples, config)
        except MemoryError as error:
            raise ValueError(
                f"this machine has too little memory for the sample index of {samples.prefix}, {samples.per_epoch} "
                f"sequences in an epoch: {error}; build it on a larger one, or cut the corpus in two"
            ) from error
        except OSError as error:
            raise ValueError(
                f"the sample index of {samples.prefix} cannot be written into {samples.folder.parent}: "
                f"{error}; set data.cache to one that you may write, and that all nodes share"
            ) from error
    folders = tuple(samples.folder for samples in blend.parts)
    for folder in folders:
        renew(folder)
        remove_unused(folder)
    return folders


def _check_validation(config: RunConfig) -> None:
    """Raises ValueError for what is wrong with the validation sets."""
    for name, windows in validation_sets(config).items():
        if config.eval.every_steps and len(windows) < config.train.micro_batch_size:
            raise ValueError(
                f"validation set {name} has {len(windows)} sequences of model.seq_length={config.model.seq_length}, "
                f"and an evaluation reads train.micro_batch_size={config.train.micro_batch_size} at a time; hold out "
                f"more, or lower one of them"
            )


def _build_epoch(samples: "_Samples", epoch: int) -> None:
    """Builds the index of one epoch unless it is there."""
    _build(samples, epoch_folder(samples.folder, epoch), lambda aside: samples.open_epoch(epoch, aside))


def _build_rest(samples: "_Samples", config: RunConfig) -> None:
    """Builds the index of what earlier phases have left of an epoch, unless it is there."""

    def build(aside: Path) -> None:
        cursor, seed = samples.cursor, samples.seed_of(samples.cursor.epoch)
        (first_length, _), *_ = cursor.read
        first = _Samples(replace(config, model=replace(config.model, seq_length=first_length)), samples.place)
        _build_epoch(first, cursor.epoch)
        order = first.open_epoch(cursor.epoch, epoch_folder(first.folder, cursor.epoch)).shuffle_index
        runs = np.array([[0, samples.num_tokens - 1]])
        lengths = [*(length for length, _ in cursor.read[1:]), samples.seq_length]
        for (length, number), next_length in zip(cursor.read, lengths, strict=True):
            runs = left_over(runs, length, order[:number])
            order = np.random.RandomState(seed).permutation(int(runs[:, 1].sum()) // next_length)
        aside.mkdir()
        np.save(aside / "texts.npy", runs[:, 0])
        np.save(aside / "begins.npy", np.concatenate(([0], np.cumsum(runs[:, 1]))))
        np.save(aside / "order.npy", order)

    _build(samples, samples.rest_folder, build)


def _build(samples: "_Samples", built: Path, build: Callable[[Path], object]) -> None:
    """Builds a folder of an index aside, unless it is there, so that no other process ever finds a part of it."""
    if built.is_dir():
        return
    aside = samples.folder.with_name(f".{samples.folder.name}.{built.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        build(aside)
        built.parent.mkdir(parents=True, exist_ok=True)
        aside.rename(built)
    except OSError:
        if not built.is_dir():  # else another process has renamed an equal index into place meanwhile
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_space(config: RunConfig, blend: "_Blend") -> None:
    """Raises ValueError if the storage has no room for the missing epochs, before it is filled."""
    place = next(path for path in blend.parts[0].folder.parents if path.is_dir())
    epochs = [len(some) for some in blend.epochs(num_samples(config))]
    needed, free = 0, shutil.disk_usage(place).free
    for samples, num_epochs in zip(blend.parts, epochs, strict=True):
        num_built = len(list(samples.folder.glob("epoch-*")))
        needed += max(0, num_epochs - num_built) * samples.epoch_bytes
    if needed > free:
        raise ValueError(
            f"train.steps={config.train.steps} of {global_batch(config)} sequences each need "
            f"{format_binary_bytes(needed)} more for the sample indices of {sum(epochs)} epochs of "
            f"{config.data.named}, and {place} has {format_binary_bytes(free)} free; lower train.steps: with "
            f"train.max_minutes, only as many as the run can reach are needed; or set data.cache"
        )


class Dataset(Protocol):
    """Training samples without end: the tensors of a sample, by name, are a function of its number alone."""

    def __getitem__(self, number: int) -> Mapping[str, torch.Tensor]:
        """The sample after `number` sequences have been consumed."""


class _Blend:
    """Maps the sequences consumed to the samples of several corpora, in the proportions of their weights.

    Megatron's greedy choice for the first `_CHOICES` samples repeats, so that its index has the same size for every
    run. A single corpus is a blend of one.
    """

    def __init__(self, config: RunConfig) -> None:
        """Opens the corpora. Raises ValueError if one is missing or too short."""
        self.parts = tuple(_Samples(config, place) for place in range(len(config.data.corpora)))
        weights = np.array([part.weight for part in config.data.corpora])
        self._num_choices = _CHOICES if len(weights) > 1 else 1
        self._chosen, self._earlier = np.zeros(self._num_choices, np.int16), np.zeros(self._num_choices, np.int64)
        helpers.build_blending_indices(
            self._chosen, self._earlier, weights / weights.sum(), len(weights), self._num_choices, False
        )
        self._counts = np.bincount(self._chosen, minlength=len(weights))
        self.first = 0
        """The place at which the present phase begins."""
        self._ended: list[tuple[int, int, int]] = []  # first place, place after the last, and length of what was read
        ended = phases_in(config.data.phases)
        num_of_other = max((number for number, phase in enumerate(ended, 1) if phase.is_of_other), default=0)
        for index, phase in enumerate(ended):
            end = skipped_places(config.data.skip).place(phase.sequences - 1) + 1
            if index >= num_of_other:
                for part, number in zip(self.parts, self._read(end), strict=True):
                    part.cursor = part.cursor.after(phase.seq_length, number)
                self._ended.append((self.first, end, phase.seq_length))
            self.first = end

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """The sample after `number` sequences have been consumed."""
        part, place = self._place(number)
        return self.parts[part][place]

    def address(self, number: int) -> str:
        """Where the sample after `number` sequences lies, for people."""
        part, place = self._place(number)
        epoch, index = (one := self.parts[part]).cursor.place(one.seq_length, place)
        return f"{one.prefix}, epoch {epoch}, sequence {index}{' of the rest' * one.is_of_rest(epoch)}"

    def documents(self, number: int) -> list[int]:
        """The documents of its corpus that a sample has text of, in its order."""
        part, place = self._place(number)
        return self.parts[part].documents(place)

    def _place(self, number: int) -> tuple[int, int]:
        """The part that a sample is from, and how many of it the present phase reads before."""
        round_, choice = divmod(number - self.first, self._num_choices)
        chosen = int(self._chosen[choice])
        return chosen, round_ * int(self._counts[chosen]) + int(self._earlier[choice])

    def epochs(self, end: int) -> list[range]:
        """Epochs of each corpus that the present phase touches up to a place."""
        return [
            range(part.cursor.epoch, part.cursor.place(part.seq_length, number - 1)[0] + 1 if number else 0)
            for number, part in zip(self._read(end), self.parts, strict=True)
        ]

    def tokens(self, first: int, end: int) -> np.ndarray:
        """Tokens of each corpus at the places from `first` to before `end`, in all phases that have read of it."""
        found = np.zeros(len(self.parts), np.int64)
        for begin, stop, seq_length in (*self._ended, (self.first, end, self.parts[0].seq_length)):
            before, until = (max(0, min(place, stop) - begin) for place in (first, end))
            found += seq_length * np.subtract(self._of_parts(until), self._of_parts(before))
        return found

    def _read(self, end: int) -> list[int]:
        """Samples of each corpus from the begin of the present phase up to a place."""
        return self._of_parts(end - self.first)

    def _of_parts(self, number: int) -> list[int]:
        """How many of the first `number` samples of a phase are from each corpus."""
        rounds, rest = divmod(number, self._num_choices)
        more = (int(np.searchsorted(places, rest)) for places in self._places_of_parts)
        return [rounds * int(count) + further for count, further in zip(self._counts, more, strict=True)]

    @cached_property
    def _places_of_parts(self) -> list[np.ndarray]:
        return [np.flatnonzero(self._chosen == part).astype(np.int32) for part in range(len(self.parts))]


_CHOICES = 2**20


class _Samples:
    """The samples of one corpus without end: each once per epoch, in Megatron's order for the seed of the epoch."""

    def __init__(self, config: RunConfig, place: int) -> None:
        """Opens the corpus at a place in the blend. Raises ValueError if it is missing or too short."""
        self.folder = index_folder(config, place)
        self.place = place
        self.prefix = str(Path(config.data.corpora[place].corpus).absolute())
        self.seq_length = config.model.seq_length
        self.config = _dataset_config(config, self.prefix)
        self.seed_of = partial(epoch_seed, config.train.seed, place)
        self._indexed = GPTDataset.build_low_level_dataset(self.prefix, self.config)
        documents = documents_of(config.data.split, 0, GPTDataset.numel_low_level_dataset(self._indexed))
        self._documents = np.arange(documents.start, documents.stop, dtype=np.int32)
        self.num_tokens = _num_tokens(self.config, config.data.split, self._indexed, documents)
        self.per_epoch = (self.num_tokens - 1) // self.seq_length
        self.cursor = Cursor(num_tokens=self.num_tokens)
        """Where the corpus stands at the begin of the present phase."""
        self._open: dict[int, GPTDataset] = {}
        self._rest: _Rest | None = None

    @property
    def epoch_bytes(self) -> int:
        """Size of an epoch's index: place of each document, first document and offset of each sample, its place."""
        return 4 * len(self._documents) + 12 * self.per_epoch + 4 * _BLOCK_BYTES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """The sample that the present phase reads after `number` others of the corpus."""
        epoch, index = self.cursor.place(self.seq_length, number)
        return self._of_epoch(epoch)[index]

    def is_of_rest(self, epoch: int) -> bool:
        """Whether earlier phases have read a part of an epoch."""
        return epoch == self.cursor.epoch and bool(self.cursor.read)

    def _of_epoch(self, epoch: int) -> "GPTDataset | _Rest":
        if epoch not in self._open:
            folder = epoch_folder(self.folder, epoch)
            if not folder.is_dir():
                raise ValueError(
                    f"the sample index {folder} is missing; call prepare_index once before the ranks start"
                )
            while len(self._open) >= _MOST_OPEN:
                del self._open[min(self._open)]
            self._open[epoch] = self.open_epoch(epoch, folder)
        if not self.is_of_rest(epoch):
            return self._open[epoch]
        if self._rest is None:
            self._rest = _Rest(self._open[epoch], self.rest_folder)
        return self._rest

    @property
    def rest_folder(self) -> Path:
        """The index of what earlier phases have left of the first epoch."""
        read = "-".join(f"{number}x{length}" for length, number in self.cursor.read)
        return self.folder / f"after-{read}-of-{epoch_folder(self.folder, self.cursor.epoch).name}"

    def documents(self, number: int) -> list[int]:
        """Documents of the sample at a place, by Megatron's index."""
        epoch, index = self.cursor.place(self.seq_length, number)
        dataset = self._of_epoch(epoch)
        if isinstance(dataset, _Rest):
            return dataset.documents(index)
        sample = int(dataset.shuffle_index[index])
        (first, _), (last, _) = dataset.sample_index[sample], dataset.sample_index[sample + 1]
        return [int(document) for document in dataset.document_index[first : last + 1]]

    def open_epoch(self, epoch: int, folder: Path) -> GPTDataset:
        """The dataset of one epoch, whose index Megatron builds in the folder unless it is there."""
        config = replace(self.config, random_seed=self.seed_of(epoch), path_to_cache=str(folder))
        return GPTDataset(self._indexed, self.prefix, self._documents, None, Split.train, config)


class _Rest:
    """The samples of what earlier phases have left of an epoch. A sample may have several parts, which lie apart in the
    text; its labels are what follows each of them there.
    """

    def __init__(self, dataset: GPTDataset, folder: Path) -> None:
        """`dataset`: the epoch. Raises ValueError if the index is missing."""
        if not folder.is_dir():
            raise ValueError(f"the sample index {folder} is missing; call prepare_index once before the ranks start")
        self._dataset = dataset
        names = ("texts.npy", "begins.npy", "order.npy")
        self._texts, self._begins, self._order = (np.load(folder / name, mmap_mode="r") for name in names)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        texts = [np.concatenate([text for _, text in self._read(*part)]) for part in self._parts(index)]
        return _sample([torch.from_numpy(text.astype(np.int64)) for text in texts], self._dataset.config)

    def documents(self, index: int) -> list[int]:
        return [document for part in self._parts(index) for document, _ in self._read(*part)]

    def _parts(self, index: int) -> Iterator[tuple[int, int]]:
        """First token in the epoch's text, and number of tokens, of the parts of a sample."""
        length = self._dataset.config.sequence_length
        first = int(self._order[index]) * length
        end, run = first + length, int(np.searchsorted(self._begins, first, "right")) - 1
        while first < end:
            stop = min(end, int(self._begins[run + 1]))
            yield int(self._texts[run]) + first - int(self._begins[run]), stop - first
            first, run = stop, run + 1

    def _read(self, first: int, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """The tokens of a part and the one that follows them, document by document."""
        indexed, number = self._dataset.dataset, number + 1
        sample, ahead = divmod(first, self._dataset.config.sequence_length)
        place, offset = (int(value) for value in self._dataset.sample_index[sample])
        offset += ahead
        while number:
            document = int(self._dataset.document_index[place])
            length = int(indexed.sequence_lengths[document])
            if offset < length:
                text = indexed.get(document, offset=offset, length=min(number, length - offset))
                yield document, text
                number -= len(text)
            place, offset = place + 1, max(0, offset - length)


def _sample(texts: Sequence[torch.Tensor], config: GPTDatasetConfig) -> dict[str, torch.Tensor]:
    """The sample of one or several texts, each with the token that follows it, as Megatron's dataset makes it of one;
    `parts` numbers them.
    """
    made: dict[str, list[torch.Tensor]] = {"tokens": [], "labels": [], "loss_mask": [], "position_ids": [], "parts": []}
    for number, text in enumerate(texts):
        tokens = text[:-1].contiguous()
        _, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
            tokens,
            config.tokenizer.eod,
            config.reset_position_ids,
            config.reset_attention_mask,
            config.eod_mask_loss,
            config.create_attention_mask,
        )
        values = (tokens, text[1:], loss_mask, position_ids, torch.full_like(tokens, number))
        for row, value in zip(made.values(), values, strict=True):
            row.append(value)
    sample = {key: torch.cat(row) for key, row in made.items()}
    if not config.reset_position_ids:
        sample["position_ids"] = torch.arange(len(sample["tokens"]))
    return sample


_MOST_OPEN = 2
"""A step may read from two epochs."""

_BLOCK_BYTES = 4096
"""What a file takes of the storage at least; an epoch has four."""


def _num_tokens(config: GPTDatasetConfig, split: str, indexed: IndexedDataset, documents: range) -> int:
    """Tokens in the documents. Raises ValueError if they have no sample, which one more token follows."""
    num_tokens = int(indexed.sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    needed = config.sequence_length + 1
    if num_tokens < needed:
        prefix = indexed.path_prefix
        part = f"documents {documents.start} to {documents.stop} of data.split={split} in {prefix}" if split else prefix
        raise ValueError(
            f"{part} has {num_tokens} tokens, a sample needs model.seq_length + 1 = {needed}; use a larger corpus or "
            f"shorter sequences, or split it otherwise"
        )
    return num_tokens


def validation_sets(config: RunConfig) -> Mapping[str, "ValidationWindows"]:
    """The validation sets of a run by name. Raises ValueError as `ValidationWindows`."""
    return {name: ValidationWindows(config, name) for name in validation_names(config.data)}


class ValidationWindows:
    """A validation set, in the order of its text, in windows of `model.seq_length` that do not overlap."""

    def __init__(self, config: RunConfig, name: str = HELD_OUT) -> None:
        """Opens the corpora of the set. Raises ValueError if one is missing or has no window, or the set is none."""
        data, self._length = config.data, config.model.seq_length
        if name not in validation_names(data):
            raise ValueError(
                f"data.split={data.split or None} holds nothing out; set it as in 99,1"
                if name == HELD_OUT
                else f"data.validation has no set named {name}"
            )
        own = [(one.corpus, "", 0) for one in data.validation if one.name == name]
        self._keys = _keys(config)
        self._parts: list[tuple[IndexedDataset, int]] = []
        self._begins = [0]
        for corpus, split, share in own or [(part.corpus, data.split, 1) for part in data.corpora]:
            prefix = str(Path(corpus).absolute())
            self._config = _dataset_config(config, prefix)
            indexed = GPTDataset.build_low_level_dataset(prefix, self._config)
            documents = documents_of(split, share, GPTDataset.numel_low_level_dataset(indexed))
            num_tokens = _num_tokens(self._config, split, indexed, documents)
            self._begins.append(self._begins[-1] + (num_tokens - 1) // self._length)
            self._parts.append((indexed, int(indexed.index.sequence_pointers[documents.start])))

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, number: int) -> torch.Tensor:
        """The tokens of a window and the one that follows them, [seq_length + 1]."""
        place = bisect_right(self._begins, number) - 1
        indexed, begin_bytes = self._parts[place]
        dtype = np.dtype(indexed.index.dtype)
        offset = begin_bytes + (number - self._begins[place]) * self._length * dtype.itemsize
        # Documents lie one after another in the file, as `spare train` checks.
        return torch.from_numpy(indexed.bin_reader.read(dtype, self._length + 1, offset).astype(np.int64))

    def sample(self, number: int) -> dict[str, torch.Tensor]:
        """What `Corpus.microbatch` has of a sequence, of a window: each [seq_length]."""
        sample = _sample([self[number]], self._config)
        return {key: sample[key] for key in self._keys}


def _keys(config: RunConfig) -> tuple[str, ...]:
    """What a sample has; a mask of the loss, and the numbers of its parts, only where there is something to mask."""
    masks = {"loss_mask": config.data.eod_mask_loss, "parts": config.data.reset_attention_mask and config.data.phases}
    return ("tokens", "labels", "position_ids", *(key for key, is_needed in masks.items() if is_needed))


def _dataset_config(config: RunConfig, prefix: str) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=0,
        sequence_length=config.model.seq_length,
        blend_per_split=[([prefix], None), None, None],
        tokenizer=_Vocabulary(config.model.vocab_size, config.data.end_of_document),
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=False,  # `on_device` makes the mask
        eod_mask_loss=config.data.eod_mask_loss,
        create_attention_mask=False,
    )


def corpus_dataset(config: RunConfig) -> "IndexedCorpora":
    """The corpus or blend of the settings; the default datasets provider. Raises ValueError if it is missing."""
    return IndexedCorpora(config)


class IndexedCorpora(_Blend):
    """The corpora of a run, read through the index of `prepare_index`, whose lease they renew."""

    def __init__(self, config: RunConfig) -> None:
        """Raises ValueError if a corpus or its index is missing."""
        super().__init__(config)
        self._keys = _keys(config)
        self._filling = FillInTheMiddle(config.data, config.train.seed) if config.data.fim_rate else None
        self._corpora: list[torch.Tensor] = []
        if len(names := list(dict.fromkeys(config.data.corpus_names))) > 1:
            shape = (config.model.seq_length,)
            self._corpora = [torch.full(shape, names.index(one), dtype=torch.int16) for one in config.data.corpus_names]
        self._renew()
        self[self.first]

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """`tokens`, `labels`, `position_ids`, with `data.eod_mask_loss` 0/1 `loss_mask` and, of a blend, `corpus` (the
        place of its name among the different ones) of a sample: each [seq_length].
        """
        if time.monotonic() - self._renewed_at_s > RENEWAL_S:
            self._renew()
        part, place = self._place(number)
        sample: Mapping[str, torch.Tensor] = self.parts[part][place]
        if self._filling is not None:
            sample = self._filling.of_sample(sample, number, partial(_sample, config=self.parts[part].config))
        found = {key: sample[key] if key in sample else torch.zeros_like(sample["tokens"]) for key in self._keys}
        return {**found, "corpus": self._corpora[part]} if self._corpora else found

    def _renew(self) -> None:
        for part in self.parts:
            renew(part.folder)
        self._renewed_at_s = time.monotonic()


class Corpus:
    """The training samples of a run, addressed by the sequences consumed before them."""

    def __init__(
        self, config: RunConfig, dataset: Dataset | None = None, needed: Mapping[str, str] | None = None
    ) -> None:
        """Reads `dataset`, by default the settings' corpora; samples have the keys `needed`. ValueError as
        `corpus_dataset`.
        """
        self._samples = dataset or corpus_dataset(config)
        self._config, self._needed = config, needed or {}
        self._num_shards = config.layout.num_groups
        self._ramp = config.spare.ramp
        self._micro_batch_size = config.train.micro_batch_size
        self._sequences_before = partial(sequences_before, config)
        self._read_of_order = config.sites.read_of_order
        self._first_step = step_of(Path(config.checkpoint.load)) if config.checkpoint.load else 0
        self._num_steps = config.train.steps
        self._skipped = skipped_places(config.data.skip)

    def microbatch(self, step: int, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a step's microbatch of this number, each [micro_batch_size, ...]. Raises BadSample as
        `stacked` does.
        """
        return stacked([self._samples[place] for place in self.places(step, number)], self._config, self._needed)

    def digest(self) -> str:
        """SHA-256 (hex) of every shard's first microbatch of the first step and last one of the last. ValueError:
        unreadable.
        """
        digest = sha256()
        first, last = self._first_step, self._num_steps - 1
        for step, index in ((first, 0), (last, self._ramp.at(last) - 1)):
            for shard in range(self._num_shards):
                try:
                    batch = self.microbatch(step, shard * self._ramp.at(step) + index)
                except (OSError, ValueError) as error:
                    raise ValueError(f"a sample of shard {shard} in step {step} cannot be read: {error}") from error
                for _, values in sorted(batch.items()):
                    digest.update(values.numpy().tobytes())
        return digest.hexdigest()

    def addresses(self, step: int, number: int) -> list[str]:
        """Where the sequences of a microbatch lie; of a program's own dataset, which are read before them."""
        if isinstance(self._samples, _Blend):
            return [self._samples.address(place) for place in self.places(step, number)]
        return [f"sequence {place}" for place in self.places(step, number)]

    def consumed(self, num_steps: int) -> dict[str, float]:
        """Epochs and tokens of each corpus that so many steps of all sites have read, by the keys of metrics: none of a
        program's own dataset, and sums for a corpus that a blend has twice.
        """
        if not isinstance(blend := self._samples, _Blend):
            return {}
        number = self._read_of_order(self._sequences_before(num_steps))
        ranges = [(0, self._skipped.place(number - 1)), *self._skipped.before(number)]
        read, *skipped = (blend.tokens(first, last + 1) for first, last in ranges)
        found: dict[str, float] = defaultdict(float)
        for name, part, count in zip(self._config.data.corpus_names, blend.parts, read - sum(skipped), strict=True):
            found[f"data/epochs/{name}"] += int(count) / (part.per_epoch * part.seq_length)
            found[f"data/tokens/{name}"] += int(count)
        return found

    def places(self, step: int, number: int) -> list[int]:
        """Where the sequences of a microbatch stand in the order of samples, some of which `data.skip` leaves out."""
        first = self.first_sample(step, number)
        ends = (self._read_of_order(first + more + 1) for more in range(self._micro_batch_size))
        return [self._skipped.place(end - 1) for end in ends]

    def first_sample(self, step: int, number: int) -> int:
        """Sequences consumed before the first sample of a microbatch; its others follow."""
        return self._sequences_before(step) + number * self._micro_batch_size
