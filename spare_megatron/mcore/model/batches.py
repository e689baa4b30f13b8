"""What a batch holds: the keys that samples need, the masks that a forward step has to read, and what a rank gets."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.mcore.model.attention import chunk_offsets, chunks_of, document_mask, document_offsets
from spare_megatron.mcore.model.compatibility import part_of_context_rank
from spare_megatron.mcore.model.model import uses_transformer_engine

_KEY_OF = {"eod_mask_loss": "loss_mask", "reset_attention_mask": "attention_mask", "reset_position_ids": "position_ids"}
"""Settings of `[data]` that act through a tensor of the batch, and its key."""


class BadSample(ValueError):
    """A sample of a program's dataset lacks what the settings or the default forward step need."""


class UnreadMask(ValueError):
    """A role of the program ignores masks that the settings ask for; `masks` maps their keys to the settings."""

    def __init__(self, role: str, verb: str, masks: Mapping[str, str]) -> None:
        self.role = role
        named = " and ".join(f'batch["{key}"] ({setting})' for key, setting in masks.items())
        has = "has" if len(masks) == 1 else "have"
        super().__init__(
            f"{role} does not {verb} {named}, which then {has} no effect; {verb} it as the default forward_step does, "
            f"or remove {' and '.join(masks.values())}"
        )


class RecordedBatch(dict[str, Tensor]):
    """A batch that records which of its tensors are read, also by `dict(batch)`, `**batch` and `items()`. The methods
    of Mapping read through `__getitem__`; without an `__iter__` of its own CPython would copy past it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        tensor = super().__getitem__(key)
        self.read.add(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    get = Mapping.get  # type: ignore[assignment]
    items = Mapping.items  # type: ignore[assignment]
    values = Mapping.values  # type: ignore[assignment]
    pop = MutableMapping.pop  # type: ignore[assignment]
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault  # type: ignore[assignment]

    def copy(self) -> dict[str, Tensor]:
        return dict(self)

    def __or__(self, other: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {**other, **self}


def masks_to_read(data: DataConfig, *, pre_process: bool, post_process: bool) -> dict[str, str]:
    """Keys that the forward step of a chunk has to read, and the setting that asks for each."""
    asks = {"loss_mask": post_process, "position_ids": pre_process, "attention_mask": True}
    return {_KEY_OF[name]: f"data.{name}=true" for name in data.mask_settings if asks[_KEY_OF[name]]}


def keys_needed(config: RunConfig, *, has_own_forward_step: bool) -> dict[str, str]:
    """Keys that every sample of a program's dataset needs, and what needs them."""
    of_default = ["tokens", "labels"]
    if config.model.position_embedding == "learned_absolute":
        of_default.append("position_ids")
    needed = {} if has_own_forward_step else dict.fromkeys(of_default, "the default forward_step")
    for name in config.data.mask_settings:
        # The attention mask is made of the tokens.
        needed["tokens" if name == "reset_attention_mask" else _KEY_OF[name]] = f"data.{name}=true"
    return needed


def stacked(samples: Sequence[Mapping[str, Tensor]], config: RunConfig, needed: Mapping[str, str]) -> dict[str, Tensor]:
    """The batch of some samples. Raises BadSample if one is not a sample, or lacks a key that is `needed`."""
    for sample in samples:
        if not isinstance(sample, Mapping) or not all(isinstance(value, Tensor) for value in sample.values()):
            raise BadSample(f"datasets_provider has a sample {sample!r:.60}; return a mapping from names to tensors")
        shapes = {key: tuple(value.shape) for key, value in sorted(sample.items())}
        first = {key: tuple(value.shape) for key, value in sorted(samples[0].items())}
        if shapes != first:
            raise BadSample(f"samples of datasets_provider differ, as {first} and {shapes}; give them the same tensors")
        for problem in _problems(sample, config, needed):
            raise BadSample(f"{problem} (samples of datasets_provider have {shapes})")
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def on_device(
    batch: dict[str, Tensor], config: RunConfig, device: torch.device, context_parallel: ProcessGroup
) -> dict[str, Tensor]:
    """A microbatch as the model takes it: this rank's part of each sequence, and the `attention_mask` if any."""
    masks = {}
    if config.data.reset_attention_mask:
        batch = dict(batch)
        masks["attention_mask"] = _attention_mask(batch, config, device, context_parallel)
    if device.type != "cpu":
        batch = {key: values.to(device, non_blocking=True) for key, values in batch.items()}
    return {**part_of_context_rank(batch, context_parallel), **masks}


def _attention_mask(
    batch: dict[str, Tensor], config: RunConfig, device: torch.device, context_parallel: ProcessGroup
) -> Tensor:
    """What keeps the documents of a batch apart, in the form that the layers take; takes its `parts` out of it."""
    end = config.data.end_of_document
    assert end is not None, "the driver has found the token that ends a document"
    parts = batch.pop("parts", None) if config.data.phases else None  # else a key of a program's own samples
    tokens, length = batch["tokens"], config.model.seq_length
    chunks = chunks_of(length, context_parallel)
    if uses_transformer_engine(config, device):
        offsets = document_offsets(tokens, end, parts)  # on a GPU it would be waited for
        whole = offsets if len(chunks) == 1 else chunk_offsets(offsets, length, chunks)
        return whole.to(device, non_blocking=True)
    parts = None if parts is None else parts.to(device)
    return document_mask(tokens.to(device), end, parts, chunks)  # large: made where it is needed


def _problems(sample: Mapping[str, Tensor], config: RunConfig, needed: Mapping[str, str]) -> Iterator[str]:
    length, parts = config.model.seq_length, config.layout.context_parallel
    for key, reason in needed.items():
        is_wrong = key in sample and (
            sample[key].shape != (length,) or (key != "loss_mask" and sample[key].is_floating_point())
        )
        if key not in sample or is_wrong:
            kind = "numbers" if key == "loss_mask" else "whole numbers"
            yield f"{reason} needs `{key}` in each sample, {kind} [model.seq_length={length}]; add it" + (
                ", or remove the setting" if reason.startswith("data.") else ""
            )
    if "attention_mask" in sample and config.data.reset_attention_mask:
        yield "data.reset_attention_mask=true makes `attention_mask`, which a sample has already; remove one of them"
    for key, tensor in sample.items() if parts > 1 else ():
        place = 1 if key == "attention_mask" else 0
        if tensor.dim() <= place or tensor.shape[place] != length:
            yield (
                f"layout.context_parallel={parts} divides each tensor of a sample along model.seq_length={length}, its "
                f"dimension {place}, and `{key}` has another shape; change it"
            )
