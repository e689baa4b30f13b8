"""Weights in Hugging Face's format: safetensors with their index, config.json, and the tokenizer's files."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spare_megatron.config.hf_config import Model, architecture_in, architecture_of, config_json, settings_of
from spare_megatron.config.hf_gpt2 import Gpt2
from spare_megatron.config.model_tensors import ModelTensor
from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.hf_tensors import TensorPair, tensor_pairs
from spare_megatron.state.checkpoint.checkpoint_folder import Checkpoint
from spare_megatron.state.checkpoint.weights_folder import Export, ExportOptions, Reader, made_whole, write_import

try:
    import safetensors
    import safetensors.torch
except ImportError as error:
    raise ValueError("Hugging Face's format needs safetensors: pip install 'spare_megatron[hf]'") from error

_FILE_BYTES = 5 * 10**9
"""Most bytes of tensors in one file of safetensors, unless a single tensor has more."""

_CONSTANTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names that may be stored as well, though they follow from config.json: frequencies, GPT-2's masks."""

_INDEX = "model.safetensors.index.json"


# --------------------------------------------------------------------------------------------------------- export


def export_hf(checkpoint: Checkpoint, config: RunConfig, out: Path, options: ExportOptions) -> None:
    """Writes the weights into the new folder `out`, without the rows that pad the vocabulary.

    Raises ValueError if the model has no equal in Hugging Face's format, or `out` exists.
    """
    model = architecture_of(config)
    export = Export(checkpoint, config, options)
    shards = list(_divided(tensor_pairs(config, model), export.dtype))
    places: dict[str, str] = {}
    with made_whole(out) as folder:
        for number, pairs in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors: dict[str, Tensor] = {}
            for pair in pairs:
                parts = pair.split(export.read(pair.tensor), model)
                # Tensors of a file may not share memory.
                tensors |= {hf_name: part.clone() for hf_name, part in parts.items()}
            safetensors.torch.save_file(tensors, folder / name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, name)
        if len(shards) > 1:
            num_bytes = sum((folder / name).stat().st_size for name in set(places.values()))
            _write_json(folder / _INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": places})
        _write_json(folder / "config.json", config_json(model, str(export.dtype).removeprefix("torch.")))
        export.copy_tokenizer(folder)


def _divided(pairs: Iterable[TensorPair], dtype: torch.dtype) -> Iterator[Sequence[TensorPair]]:
    """The tensors of each file."""
    found: list[TensorPair] = []
    num_bytes = 0
    for pair in pairs:
        size = math.prod(pair.tensor.shape) * dtype.itemsize
        if found and num_bytes + size > _FILE_BYTES:
            yield found
            found, num_bytes = [], 0
        found.append(pair)
        num_bytes += size
    yield found


# --------------------------------------------------------------------------------------------------------- import


def import_hf(folder: Path, out: Path) -> Checkpoint:
    """Writes the model of a folder in Hugging Face's format into the new folder `out`, in its own precision.

    Raises ValueError if the folder is incomplete, or the model has no equal here.
    """
    model = architecture_in(_read_json(folder / "config.json"))
    with _opened(folder) as stored:
        slices = {_usual_name(name, model): values for name, values in stored.items()}
        is_bf16 = {found.get_dtype() for found in slices.values()} == {"BF16"}

        def reader_of(config: RunConfig) -> Reader:
            pairs = {pair.tensor: pair for pair in tensor_pairs(config, model)}
            _require_tensors(
                {name: shape for pair in pairs.values() for name, shape in pair.parts.items()}, slices, folder
            )

            def read(tensor: ModelTensor) -> Tensor:
                return pairs[tensor].join([slices[name][:] for name in pairs[tensor].parts], model)

            return read

        return write_import(folder, out, settings_of(model, "bf16" if is_bf16 else "fp32"), reader_of)


def _usual_name(name: str, model: Model) -> str:
    """GPT-2 is also stored without its output layer, and its names then lack the first part."""
    is_short = isinstance(model, Gpt2) and name.startswith(("h.", "wte.", "wpe.", "ln_f."))
    return f"transformer.{name}" if is_short else name


def _require_tensors(wanted: Mapping[str, tuple[int, ...]], slices: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError unless the tensors of the folder are those of the model."""
    if missing := sorted(wanted.keys() - slices.keys()):
        raise ValueError(f"{folder} has no tensor {missing[0]}, and lacks {len(missing)} in all")
    for name, found in sorted(slices.items()):
        # A tied output layer may be stored, too.
        if name not in wanted and name != "lm_head.weight" and not name.endswith(_CONSTANTS):
            raise ValueError(f"{folder} has a tensor {name}, which has no place in the model of its config.json")
        if name in wanted and tuple(found.get_shape()) != wanted[name]:
            shape = tuple(found.get_shape())
            raise ValueError(f"{folder}: {name} is of {shape}, and {wanted[name]} by config.json")


@contextmanager
def _opened(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The tensors in the files of a folder, by name."""
    index = folder / _INDEX
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder / absent[0]} is missing; only weights in safetensors are read")
    with ExitStack() as stack:
        files = [stack.enter_context(safetensors.safe_open(folder / name, framework="pt")) for name in names]
        yield {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


# ---------------------------------------------------------------------------------------------------------- files


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_bytes()))
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing; name a folder in Hugging Face's format") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
