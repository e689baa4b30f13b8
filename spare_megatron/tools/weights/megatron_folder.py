"""Weights in Megatron-LM's format: `iter_*` folders of torch.distributed.checkpoint, named by a file beside them."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spare_megatron.config.foreign_fields import shown
from spare_megatron.config.model.model_tensors import LAYERS, WORDS, ModelTensor, model_tensors, with_local_norms
from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.inert_pickle import named_damage, read_pickled
from spare_megatron.mcore.weights import StoredWeights, WeightsPart, stacked_part, write_weights
from spare_megatron.state.checkpoint.checkpoint_folder import Checkpoint
from spare_megatron.tools.weights import weights_folder
from spare_megatron.tools.weights.megatron_args import args_of, settings_in

_LATEST = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
"""The object in whose place megatron-core 0.16 has `common.pt`; 0.19 writes it."""
_FORMAT = "metadata.json"
_VERSION = 3.0
"""Of the order of rows of queries, keys and values: by query group."""

_STATES = (
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer for which transformer-engine or Megatron's own layers demand an extra state, which is empty."""

_CHUNK = re.compile(r"model\d*$")
"""Keys beside the tensors for parts of the model that Megatron does not store as tensors; usually there are none."""
_MODULES = ("embedding.", "decoder.", "output_layer.", "mtp.")
_OF_OPTIMIZER = re.compile(r"(chained_\d+\.)?(optimizer|param_state)\b")


# --------------------------------------------------------------------------------------------------------- export


def export_megatron(
    checkpoint: Checkpoint, config: RunConfig, out: Path, options: weights_folder.ExportOptions
) -> None:
    """Writes the weights into the new folder `out`, which `pretrain_gpt.py --load` takes.

    Raises ValueError if its arguments cannot describe the model, or `out` exists.
    """
    args = args_of(config)
    export = weights_folder.Export(checkpoint, config, options)
    num_layers, step = config.model.num_layers, checkpoint.manifest.step
    of_training = {
        "bf16": export.dtype is torch.bfloat16,
        "fp16": False,
        "params_dtype": export.dtype,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "data_parallel_random_init": False,
        "consumed_train_samples": checkpoint.manifest.num_samples,
        "ckpt_format": "torch_dist",
        "no_save_optim": True,
        "no_save_rng": True,
    }
    common = {
        "args": argparse.Namespace(**args, **of_training),
        "checkpoint_version": _VERSION,
        "iteration": step,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": options.per_layer},
    }
    part = _part_of_layer if options.per_layer else partial(stacked_part, num_layers=num_layers)
    parts = [part(each, dtype=export.dtype, read=partial(export.read, each)) for each in model_tensors(config)]
    with weights_folder.made_whole(out) as folder:
        name = f"iter_{step:07d}"
        (folder / name).mkdir()
        write_weights(folder / name, parts, dict.fromkeys(_extra_states(config, options)), common)
        export.copy_tokenizer(folder)
        (folder / _LATEST).write_text(str(step))


def _part_of_layer(tensor: ModelTensor, dtype: torch.dtype, read: Callable[[], Tensor]) -> WeightsPart:
    origin = tuple(0 for _ in tensor.shape)
    return WeightsPart(
        key=tensor.key_in_layer, shape=tensor.shape, offsets=origin, sizes=tensor.shape, dtype=dtype, read=read
    )


def _extra_states(config: RunConfig, options: weights_folder.ExportOptions) -> Iterator[str]:
    """Unique keys of sharded objects. A model that lacks some of them does not ask for them."""
    num_layers = config.model.num_layers
    for layer in range(num_layers):
        for module in _STATES:
            if options.per_layer:
                yield f"{LAYERS}{layer}.{module}._extra_state/shard_0_1"
            else:
                yield f"{LAYERS}{module}._extra_state/shard_{layer}_{num_layers}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


# --------------------------------------------------------------------------------------------------------- import


def import_megatron(folder: Path, out: Path) -> Checkpoint:
    """Writes the model of an `iter_*` folder, or of the newest one in the folder, into the new folder `out`.

    Raises ValueError if the folder has another format, or its model is not supported here.
    """
    iteration = _iteration_at(folder)
    stored = StoredWeights(iteration)
    common, where = _read_common(iteration, stored)
    args = common.get("args")
    if not isinstance(args, argparse.Namespace):
        raise ValueError(f"{where} has no args, which describe the model; Megatron-LM's training saves them")
    _require_no_others(common, where, stored, iteration)
    names = {name for name in stored.names() if not _OF_OPTIMIZER.match(name)}
    precision = weights_folder.precision_of({name: stored.dtype(name) for name in names}, iteration)
    try:
        settings = settings_in(vars(args), (stored.shape(WORDS) or (0,))[0], precision)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return weights_folder.write_import(folder, out, settings, lambda config: _reader(stored, names, config, iteration))


def _read_common(folder: Path, stored: StoredWeights) -> tuple[dict[Any, Any], str]:
    """What is saved beside the tensors, and where; Megatron prefers the file, too. Raises ValueError."""
    if (file := folder / _COMMON).exists():
        where = str(file)
        with named_damage(file):
            found = read_pickled(file)
    elif _COMMON_OBJECT in stored.objects():
        where = f"{folder}: {_COMMON_OBJECT}"
        found = stored.read_object(_COMMON_OBJECT)
    else:
        raise ValueError(
            f"{folder} has neither {_COMMON} nor an object {_COMMON_OBJECT} in .metadata; one of them must hold the "
            f"arguments that describe the model"
        )
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds no dictionary")
    return found, where


def _require_no_others(common: Mapping[Any, Any], where: str, stored: StoredWeights, folder: Path) -> None:
    """Raises ValueError for parts of the model that are stored where no tensors are looked for."""
    chunks = {key: part for key, part in common.items() if _CHUNK.match(str(key)) and isinstance(part, dict)}
    pickled = [f"{key}.{name}" for key, part in chunks.items() for name in part]
    objects = [key for key in stored.objects() if key.startswith(_MODULES) and "_extra_state" not in key]
    for place, names in ((where, pickled), (folder / ".metadata", objects)):
        if names:
            raise ValueError(f"{place} has {names[0]} pickled, and only tensors are read")


def _iteration_at(path: Path) -> Path:
    """The folder of the iteration that is to be read. Raises ValueError."""
    folder = path
    if (tracker := path / _LATEST).is_file():
        latest = tracker.read_text(errors="replace").strip()
        is_number = re.fullmatch("[0-9]{1,18}", latest)
        folder = path / (latest if latest == "release" else f"iter_{int(latest):07d}" if is_number else "")
        if not folder.is_dir() or folder == path:
            raise ValueError(f"{tracker} names iteration {shown(latest)}, whose folder is missing")
    if not folder.is_dir():
        raise ValueError(f"{path} is no directory; name Megatron-LM's --save, or an iter_* folder in it")
    if any(folder.glob("mp_rank_*")):
        raise ValueError(
            f"{folder} is in Megatron-LM's format `torch` (mp_rank_*), whose files are those of its layout; convert it "
            f"with pretrain_gpt.py, the arguments of its training and --load {path} --auto-detect-ckpt-format "
            f"--ckpt-convert-format torch_dist --ckpt-convert-save NEW, and import NEW/torch_dist"
        )
    if not (folder / _FORMAT).is_file() or not (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder} has no {_FORMAT} and .metadata, which folders of torch_dist have; name Megatron-LM's --save "
            f"(with {_LATEST}), or an iter_* folder in it"
        )
    return folder


_Source = tuple[tuple[str, ...], int | None]
"""Where the rows of a tensor are: in these keys one after the other, in each at this offset of a stack if set."""


def _reader(stored: StoredWeights, names: Set[str], config: RunConfig, folder: Path) -> weights_folder.Reader:
    """Reads the model of the settings. Raises ValueError for missing, foreign and wrongly shaped tensors."""
    sources: dict[ModelTensor, _Source] = {}
    for tensor in model_tensors(config):
        sources[tensor] = _source(tensor, names, folder)
        _require_shape(stored, tensor, sources[tensor], config.model.num_layers, folder)
    used = {key for keys, _ in sources.values() for key in keys}
    if foreign := sorted(names - used):
        raise ValueError(
            f"{folder} has a tensor {foreign[0]}, which has no place in the model of its arguments, and {len(foreign)} "
            f"such in all"
        )

    def read(tensor: ModelTensor) -> Tensor:
        keys, offset = sources[tensor]
        parts = [_read(stored, key, offset) for key in keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return read


def _source(tensor: ModelTensor, names: Set[str], folder: Path) -> _Source:
    """Raises ValueError if none of the tensor's names is there; the message has the usual one."""
    for offset, prefix in ((tensor.layer, LAYERS), (None, f"{LAYERS}{tensor.layer}.")):
        for keys in _keys_of(tensor):
            found = tuple(key.replace(LAYERS, prefix, 1) for key in keys)
            if names >= set(found):
                return found, offset
    usual = f" nor {tensor.key_in_layer}" if tensor.layer is not None else ""
    raise ValueError(f"{folder} has no tensor {tensor.key}{usual}, which the model of its arguments has")


def _keys_of(tensor: ModelTensor) -> Iterator[Sequence[str]]:
    """The tensor's names, usual ones first; the two inputs of a gated layer may be stored apart."""
    yield (tensor.key,)
    yield (f"{tensor.key}_w", f"{tensor.key}_v")
    if (alone := with_local_norms(tensor.key)) != tensor.key:
        yield (alone,)


def _require_shape(stored: StoredWeights, tensor: ModelTensor, source: _Source, num_layers: int, folder: Path) -> None:
    (num_rows, *others), (keys, offset) = tensor.shape, source
    stack = () if offset is None else (num_layers,)
    wanted = (*stack, num_rows // len(keys), *others)
    for key in keys:
        if stored.shape(key) != wanted:
            raise ValueError(f"{folder}: {key} is of {stored.shape(key)}, and {wanted} by its arguments")


def _read(stored: StoredWeights, key: str, offset: int | None) -> Tensor:
    shape = stored.shape(key)
    values = torch.empty(shape if offset is None else (1, *shape[1:]), dtype=stored.dtype(key))
    stored.read(key, [offset or 0, *(0 for _ in shape[1:])], values)
    return values if offset is None else values[0]
