"""Training samples addressed by (step, shard, index): every group that computes a microbatch reads the same tokens."""

import os
import shutil
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from spare_megatron.config.sample_index import RENEWAL_S, index_folder, num_samples, remove_unused, renew
from spare_megatron.config.schema import RunConfig
from spare_megatron.stacking.layout import ShardId
from spare_megatron.stacking.plans import Microbatch


class _Vocabulary:
    """The tokenizer interface of Megatron's dataset, for a corpus that is already tokens."""

    pad = -1
    eod = -2
    """Neither occurs in a corpus, so no token is masked."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": type(self).__name__, "vocab_size": self.vocab_size}


def prepare_index(config: RunConfig) -> Path:
    """Builds the sample index unless it exists, and returns its folder; removes indices unused for long.

    Call it in one process before the ranks start: they only load the index. Raises ValueError if the corpus is missing
    or too short, or the index cannot be written or is too large.
    """
    folder = index_folder(config)
    if not folder.is_dir():
        _build_index(config, folder)
    renew(folder)
    remove_unused(folder)
    return folder


def _build_index(config: RunConfig, folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _open_dataset(config, aside)
        aside.rename(folder)
    except MemoryError as error:
        raise ValueError(
            f"this machine has too little memory for the sample index of train.steps={config.train.steps}: {error}; "
            f"lower it: where train.max_minutes ends the run, as many steps as it can come to are enough"
        ) from error
    except OSError as error:
        # Another process may have renamed an equal index into place meanwhile.
        if not folder.is_dir():
            raise ValueError(
                f"the sample index of data.corpus={config.data.corpus} cannot be written into {folder.parent}: "
                f"{error}; set data.cache to one that you may write, and that all nodes share"
            ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class Corpus:
    """The training samples of a run, in the order that its seed gives them."""

    def __init__(self, config: RunConfig) -> None:
        """Opens the corpus through the index of `prepare_index`. Raises ValueError if either is missing."""
        folder = index_folder(config)
        if not folder.is_dir():
            raise ValueError(f"the sample index {folder} is missing; call prepare_index once before the ranks start")
        self._folder = folder
        self._renew()
        self._dataset = _open_dataset(config, folder)
        self._num_shards = config.layout.num_groups
        self._microbatches_per_shard = config.spare.microbatches_per_shard
        self._micro_batch_size = config.train.micro_batch_size
        self._num_steps = config.train.steps

    def microbatch(self, step: int, microbatch: Microbatch) -> dict[str, torch.Tensor]:
        """The `tokens`, `labels` and `position_ids` of a microbatch, each [micro_batch_size, seq_length]."""
        if time.monotonic() - self._renewed_at_s > RENEWAL_S:
            self._renew()
        first = self.first_sample(step, microbatch)
        samples = [self._dataset[first + number] for number in range(self._micro_batch_size)]
        return {key: torch.stack([sample[key] for sample in samples]) for key in ("tokens", "labels", "position_ids")}

    def digest(self) -> str:
        """SHA-256 (hex) over every shard's first microbatch of the first step and last microbatch of the last step.

        Raises ValueError if one of them cannot be read.
        """
        digest = sha256()
        for step, index in ((0, 0), (self._num_steps - 1, self._microbatches_per_shard - 1)):
            for shard in range(self._num_shards):
                try:
                    tokens = self.microbatch(step, Microbatch(ShardId(shard), index))["tokens"]
                except (OSError, ValueError) as error:
                    raise ValueError(f"a sample of shard {shard} in step {step} cannot be read: {error}") from error
                digest.update(tokens.numpy().tobytes())
        return digest.hexdigest()

    def _renew(self) -> None:
        renew(self._folder)
        self._renewed_at_s = time.monotonic()

    def first_sample(self, step: int, microbatch: Microbatch) -> int:
        """Number of a microbatch's first sample; the others follow it."""
        shards_before = step * self._num_shards + microbatch.shard
        microbatches_before = shards_before * self._microbatches_per_shard + microbatch.index
        return microbatches_before * self._micro_batch_size


def _open_dataset(config: RunConfig, index_folder: Path) -> GPTDataset:
    """The dataset over the corpus, without BlendedMegatronDatasetBuilder, whose `build` synchronizes the ranks."""
    prefix = Path(config.data.corpus).absolute()
    dataset_config = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=config.model.seq_length,
        blend_per_split=[([str(prefix)], None), None, None],
        path_to_cache=str(index_folder),
        tokenizer=_Vocabulary(config.model.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = GPTDataset.build_low_level_dataset(str(prefix), dataset_config)
    num_tokens = int(indexed.sequence_lengths.sum())
    if num_tokens <= config.model.seq_length:
        raise ValueError(
            f"data.corpus={prefix} has {num_tokens} tokens, a sample needs model.seq_length + 1 = "
            f"{config.model.seq_length + 1}; use a larger corpus or shorter sequences"
        )
    documents = np.arange(GPTDataset.numel_low_level_dataset(indexed), dtype=np.int32)
    return GPTDataset(indexed, str(prefix), documents, num_samples(config), Split.train, dataset_config)
