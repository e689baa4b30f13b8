"""Weights in Hugging Face's format: safetensors with their index, config.json, and the tokenizer's files."""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spare_megatron.config.foreign_fields import require_kinds, shown
from spare_megatron.config.model.model_tensors import ModelTensor
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.codec import json_object
from spare_megatron.state.checkpoint.checkpoint_folder import Checkpoint
from spare_megatron.tools.weights.hf_config import Architecture, architecture_in, architecture_of, config_json
from spare_megatron.tools.weights.hf_fields import token_ids_in
from spare_megatron.tools.weights.hf_tensors import TensorPair, is_constant, table_of, tensor_pairs, tied_names
from spare_megatron.tools.weights.weights_folder import (
    CONFIG_JSON,
    GENERATION_JSON,
    Export,
    ExportOptions,
    Reader,
    made_whole,
    precision_of,
    write_import,
)

try:
    import safetensors
    import safetensors.torch
except ImportError as error:
    raise ValueError("Hugging Face's format needs safetensors: pip install 'spare_megatron[hf]'") from error

_FILE_BYTES = 5 * 10**9
"""Most bytes of tensors in one file of safetensors, unless a single tensor has more."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_MISTRAL = "consolidated"
"""First part of the names of files that hold the same weights under names of Mistral's own."""
_FILE_NAME = re.compile(r"[^/\\]+\.safetensors")
_TYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


# --------------------------------------------------------------------------------------------------------- export


def export_hf(checkpoint: Checkpoint, config: RunConfig, out: Path, options: ExportOptions) -> None:
    """Writes the weights into the new folder `out`, without the rows that pad the vocabulary.

    Raises ValueError if Hugging Face's format does not support the model, or `out` exists.
    """
    model = architecture_of(config)
    export = Export(checkpoint, config, options)
    ids, generation = _token_ids(export, config.data.end_of_document)
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
        described = config_json(model, str(export.dtype).removeprefix("torch."))
        _write_json(folder / CONFIG_JSON, {**described, **ids})
        if generation:
            _write_json(folder / GENERATION_JSON, generation)
        export.copy_tokenizer(folder)


def _token_ids(export: Export, end_of_document: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of config.json and generation_config.json for special tokens, so that a generator stops: those of an
    import, and the id that ends the documents of the corpus if the import lacks it.
    """

    def ending(found: Mapping[str, Any]) -> dict[str, Any]:
        eos = found.get("eos_token_id")
        is_known = end_of_document in (None, *(eos if isinstance(eos, list) else [eos]))
        return dict(found) if is_known else {**found, "eos_token_id": end_of_document}

    ids = ending(token_ids_in(export.described(CONFIG_JSON), CONFIG_JSON))
    generation = export.described(GENERATION_JSON)
    token_ids_in(generation, GENERATION_JSON)
    known = {name: value for name, value in ids.items() if value is not None}
    return ids, ending(generation) if generation else known


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

    Every tensor of the folder is a parameter of that model, or equals what it computes with. Raises ValueError if that
    is not so, or the model is not supported here.
    """
    try:
        content = json_object(folder / CONFIG_JSON)
    except FileNotFoundError as error:
        raise ValueError(f"{folder / CONFIG_JSON} is missing; name a folder in Hugging Face's format") from error
    model = architecture_in(content)
    token_ids_in(content, CONFIG_JSON)
    if (generation := folder / GENERATION_JSON).is_file():
        token_ids_in(json_object(generation), GENERATION_JSON)
    with _opened(folder) as stored:
        tensors = dict(_beside_constants(stored, model, folder))
        precision = precision_of({name: tensor.dtype for name, tensor in tensors.items()}, folder)
        output, embedding = tied_names(model)
        if model.is_tied and {output, embedding} <= tensors.keys():
            # transformers does not tie either where a checkpoint has an output layer of its own.
            one, other = tensors[output], tensors[embedding]
            is_tied = one.shape == other.shape and torch.equal(one.read().float(), other.read().float())
            model = replace(model, model={**model.model, "tie_embeddings": is_tied})
            if is_tied:
                del tensors[output]
        model = _without_what_is_not_stored(model, tensors)
        for name in list(tensors):
            table = tensors.get(table_of(name, model) or "")
            if table is not None and torch.equal(tensors[name].read(), table.read()):
                del tensors[name]  # one that differs has no place in the model

        def reader_of(config: RunConfig) -> Reader:
            pairs = dict(_pairs_in(tensors, config, model, folder))
            return lambda tensor: pairs[tensor].join([tensors[name].read() for name in pairs[tensor].parts], model)

        _require_enough(tensors, model, folder)
        return write_import(folder, out, model.settings(precision), reader_of)


def _without_what_is_not_stored(model: Architecture, names: Collection[str]) -> Architecture:
    """Without multi-token prediction if a folder has none of its tensors, as `transformers` writes none."""
    if f"model.layers.{model.num_layers}.eh_proj.weight" in names:
        return model
    return replace(model, megatron={key: one for key, one in model.megatron.items() if key != "mtp_num_layers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in a file; `dtype` is safetensors' name of a type that no weights have here."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    read: Callable[[], Tensor]


def _beside_constants(
    stored: Mapping[str, _Stored], model: Architecture, folder: Path
) -> Iterator[tuple[str, _Stored]]:
    """All tensors but those that the model computes with anyway, by their usual names."""
    names: dict[str, str] = {}
    for name, tensor in stored.items():
        # GPT-2 is also stored without its output layer, and its names then lack the first part.
        is_short = model.family == "gpt2" and name.startswith(("h.", "wte.", "wpe.", "ln_f."))
        usual = f"transformer.{name}" if is_short else name
        if names.setdefault(usual, name) != name:
            raise ValueError(f"{folder} has two tensors for one parameter, {names[usual]} and {name}; remove one")
        if not is_constant(usual, tensor.read, model):
            yield usual, tensor


def _require_enough(names: Collection[str], model: Architecture, folder: Path) -> None:
    """Raises ValueError for a config.json with so many layers or experts that listing their tensors would take long."""
    further = model.megatron.get("mtp_num_layers", 0)
    experts = 0 if model.family == "gpt_oss" else model.model.get("num_experts", 0)  # its experts share tensors
    for what, number in (("layers", model.num_layers + further), ("experts", experts)):
        if number > len(names):
            raise ValueError(f"{folder}: {CONFIG_JSON} has {shown(number)} {what}, and there are {len(names)} tensors")


def _pairs_in(
    tensors: Mapping[str, _Stored], config: RunConfig, model: Architecture, folder: Path
) -> Iterator[tuple[ModelTensor, TensorPair]]:
    """The model's tensors. Raises ValueError unless the folder has exactly these, in their shapes."""
    foreign = dict(tensors)
    for pair in tensor_pairs(config, model):
        for name, shape in pair.parts.items():
            if name not in tensors:
                raise ValueError(f"{folder} has no tensor {name}, which the model of its {CONFIG_JSON} has")
            if (found := foreign.pop(name).shape) != shape:
                raise ValueError(f"{folder}: {name} is of {found}, and {shape} by its {CONFIG_JSON}")
        yield pair.tensor, pair
    if foreign:
        raise ValueError(
            f"{folder} has a tensor {min(foreign)}, which has no place in the model of its {CONFIG_JSON}, nor equals "
            f"what that computes with; there are {len(foreign)} such in all"
        )


# ---------------------------------------------------------------------------------------------------------- files


@contextmanager
def _opened(folder: Path) -> Iterator[Mapping[str, _Stored]]:
    """The tensors in the files of a folder, by name. Raises ValueError unless an index that is there describes them."""
    index = folder / _INDEX
    places = _places_in(index) if os.path.lexists(index) else None
    names = [_SINGLE] if places is None else sorted(set(places.values()))
    if absent := [name for name in names if not (folder / name).is_file()]:
        why = f"and there is no {_INDEX}; only weights in safetensors are read"
        by_index = f"which {index} names; copy it, or remove the index if it is of other weights"
        raise ValueError(f"{folder / absent[0]} is missing, {why if places is None else by_index}")
    for file in sorted(folder.glob("*.safetensors")):
        if file.name not in names and not file.name.startswith(_OF_MISTRAL):
            what = f"{folder / _SINGLE} has the model" if places is None else f"{index} does not name it"
            raise ValueError(f"{file} would be passed over, as {what}; move away what is not of the model")
    with ExitStack() as stack:
        files = {name: stack.enter_context(_open(folder / name)) for name in names}
        stored = [(tensor, name) for name in names for tensor in files[name].keys()]  # noqa: SIM118
        for tensor, name in sorted(set() if places is None else places.items() ^ stored):
            has, says = ("has", "does not name") if (tensor, name) in stored else ("lacks", "names")
            raise ValueError(f"{folder / name} {has} a tensor {tensor}, which {index} {says} there; write them anew")
        yield {tensor: _stored_in(files[name], tensor) for tensor, name in stored}


def _stored_in(file: Any, name: str) -> _Stored:
    found = file.get_slice(name)
    dtype = found.get_dtype()
    return _Stored(shape=tuple(found.get_shape()), dtype=_TYPES.get(dtype, dtype), read=partial(file.get_tensor, name))


def _open(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _places_in(index: Path) -> Mapping[str, str]:
    """The file of each tensor. Raises ValueError if it is not an index, or names files outside its folder."""
    content = {"weight_map": None, **json_object(index)}
    require_kinds({"weight_map": dict[str, str]}, content, f"{index}: ")
    places: dict[str, str] = content["weight_map"]
    for name in sorted(set(places.values())):
        if not _FILE_NAME.fullmatch(name) or not name.isprintable():
            raise ValueError(f"{index}: weight_map names {shown(name)}, which is not the name of a file in its folder")
        if not _is_inside(index.with_name(name), index.parent):
            raise ValueError(f"{index}: weight_map names {name}, a link that leads out of its folder; copy the file")
    return places


def _is_inside(file: Path, folder: Path) -> bool:
    """Whether a file lies in the folder, or, if that is a snapshot of Hugging Face's cache, where the cache has it."""
    kept = folder.absolute().parents[1] / "blobs" if folder.absolute().parent.name == "snapshots" else folder
    return any(Path(os.path.realpath(file)).is_relative_to(os.path.realpath(place)) for place in (folder, kept))


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
