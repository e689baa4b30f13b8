"""Weights in Hugging Face's format: safetensors with their index, config.json, and the tokenizer's files.

Both directions hold a file of safetensors, or a few tensors, in memory, and make the folder visible by one rename. An
import looks like the directory of a run: `config.toml`, and a checkpoint of step 0 that has weights alone.
"""

import json
import math
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from torch import Tensor

from spare_megatron import __version__
from spare_megatron.config.hf_config import Architecture, architecture_in, architecture_of, config_json, settings_of
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.terms import weights_differences, weights_terms_of
from spare_megatron.mcore.hf_tensors import TensorPair, tensor_pairs
from spare_megatron.mcore.weights import StoredWeights, WeightsPart, write_weights
from spare_megatron.state.checkpoint.checkpoint_folder import (
    FOLDER,
    WEIGHTS_ALONE,
    Checkpoint,
    Manifest,
    StoredFile,
    publish,
)

try:
    import safetensors
    import safetensors.torch
except ImportError as error:
    raise ValueError("Hugging Face's format needs safetensors: pip install 'spare_megatron[hf]'") from error

Dtype = Literal["fp32", "bf16"]

_DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

_FILE_BYTES = 5 * 10**9
"""Most bytes of tensors in one file of safetensors, unless a single tensor has more."""

_INDEX = "model.safetensors.index.json"

_TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files in an import."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


# --------------------------------------------------------------------------------------------------------- export


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """`dtype` is that of the parameters if None; `tokenizer` a folder with its files, a file, or that of an import."""

    dtype: Dtype | None = None
    tokenizer: Path | None = None


def export_hf(checkpoint: Checkpoint, config: RunConfig, out: Path, options: ExportOptions) -> None:
    """Writes the weights into the new folder `out`, without the rows that pad the vocabulary.

    Raises ValueError if the model has no equal in Hugging Face's format, or `out` exists.
    """
    model = architecture_of(config)
    _require_same_model(checkpoint, config)
    dtype = _DTYPES[options.dtype or config.model.precision]
    imported = checkpoint.path.absolute().parents[1] / _TOKENIZER
    tokenizer = options.tokenizer or (imported if imported.is_dir() else None)
    files = [] if tokenizer is None else _tokenizer_files(tokenizer)
    stored = StoredWeights(checkpoint.path)
    shards = list(_divided(model, dtype))
    places: dict[str, str] = {}
    with _made_whole(out) as folder:
        for number, pairs in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors: dict[str, Tensor] = {}
            for pair in pairs:
                parts = pair.split(_read(stored, pair, dtype), model)
                # Tensors of a file may not share memory.
                tensors |= {hf_name: part.clone() for hf_name, part in parts.items()}
            safetensors.torch.save_file(tensors, folder / name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, name)
        if len(shards) > 1:
            num_bytes = sum((folder / name).stat().st_size for name in set(places.values()))
            _write_json(folder / _INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": places})
        _write_json(folder / "config.json", config_json(model, str(dtype).removeprefix("torch.")))
        for file in files:
            shutil.copy(file, folder / file.name)


def _require_same_model(checkpoint: Checkpoint, config: RunConfig) -> None:
    if found := weights_differences(checkpoint.manifest.terms, config):
        raise ValueError("\n  - ".join([f"{checkpoint.path} is of another model than its run's config.toml:", *found]))


def _divided(model: Architecture, dtype: torch.dtype) -> Iterator[list[TensorPair]]:
    """The tensors of each file."""
    pairs: list[TensorPair] = []
    num_bytes = 0
    for pair in tensor_pairs(model):
        size = math.prod(pair.shape) * dtype.itemsize
        if pairs and num_bytes + size > _FILE_BYTES:
            yield pairs
            pairs, num_bytes = [], 0
        pairs.append(pair)
        num_bytes += size
    yield pairs


def _read(stored: StoredWeights, pair: TensorPair, dtype: torch.dtype) -> Tensor:
    values = torch.empty(pair.shape, dtype=dtype)
    origin = [0 for _ in pair.shape]
    if pair.layer is None:
        stored.read(pair.key, origin, values)
    else:
        stored.read(pair.key, [pair.layer, *origin], values[None])
    return values


def _tokenizer_files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not found:
        raise ValueError(f"--tokenizer={path} has none of {', '.join(_TOKENIZER_FILES)}; name a folder with some")
    return found


# --------------------------------------------------------------------------------------------------------- import


def import_hf(folder: Path, out: Path) -> Checkpoint:
    """Writes the model of a folder in Hugging Face's format into the new folder `out`, in its own precision.

    Raises ValueError if the folder is incomplete, or the model has no equal here.
    """
    model = architecture_in(_read_json(folder / "config.json"))
    with _opened(folder, model) as tensors, _made_whole(out) as aside:
        precision: Dtype = "bf16" if tensors.is_bf16() else "fp32"
        (aside / "config.toml").write_text(tomli_w.dumps(settings_of(model, precision)))
        config = load_run_config(aside / "config.toml").config
        for file in (folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()):
            (aside / _TOKENIZER).mkdir(exist_ok=True)
            shutil.copy(file, aside / _TOKENIZER / file.name)
        unfinished = aside / FOLDER / "step-00000000.import.tmp"
        unfinished.mkdir(parents=True)
        parts = [tensors.part(pair, _DTYPES[precision]) for pair in tensor_pairs(model)]
        written = write_weights(unfinished, parts)
        files = {name: StoredFile(num_bytes=size, sha256=sha256) for name, (size, sha256) in written.items()}
        found = publish(unfinished, _manifest(config, files), lambda _: None)
    return Checkpoint(path=out / found.path.relative_to(aside), manifest=found.manifest)


def _manifest(config: RunConfig, files: Mapping[str, StoredFile]) -> Manifest:
    return Manifest(
        step=0,
        num_samples=0,
        terms=weights_terms_of(config),
        layout={},
        placement={},
        group=0,
        incarnation=0,
        epoch=0,
        log_head=0,
        version=__version__,
        run_id="",
        files=dict(sorted(files.items())),
        optimizer={"sharding": WEIGHTS_ALONE},
    )


class _Tensors:
    """The tensors in the open files of a folder, by name. Raises ValueError unless they are those of the model."""

    def __init__(self, files: Iterable[Any], model: Architecture, folder: Path) -> None:
        self._slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
        self._model = model
        wanted = {name: shape for pair in tensor_pairs(model) for name, shape in pair.parts.items()}
        if missing := sorted(wanted.keys() - self._slices.keys()):
            raise ValueError(f"{folder} has no tensor {missing[0]}, and lacks {len(missing)} in all")
        for name, found in sorted(self._slices.items()):
            # A tied output layer and frequencies, which follow from config.json, may be stored as well.
            if name not in wanted and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                raise ValueError(f"{folder} has a tensor {name}, which has no place in the model of its config.json")
            if name in wanted and tuple(found.get_shape()) != wanted[name]:
                shape = tuple(found.get_shape())
                raise ValueError(f"{folder}: {name} is of {shape}, and {wanted[name]} by config.json")

    def is_bf16(self) -> bool:
        return {found.get_dtype() for found in self._slices.values()} == {"BF16"}

    def part(self, pair: TensorPair, dtype: torch.dtype) -> WeightsPart:
        leading, layer = ((), ()) if pair.layer is None else ((1,), (pair.layer,))
        sizes = (*leading, *pair.shape)

        def read() -> Tensor:
            return pair.join([self._slices[name][:] for name in pair.parts], self._model).to(dtype).view(sizes)

        return WeightsPart(
            key=pair.key,
            shape=pair.shape if pair.layer is None else (self._model.num_layers, *pair.shape),
            offsets=(*layer, *(0 for _ in pair.shape)),
            sizes=sizes,
            dtype=dtype,
            read=read,
        )


@contextmanager
def _opened(folder: Path, model: Architecture) -> Iterator[_Tensors]:
    index = folder / _INDEX
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder / absent[0]} is missing; only weights in safetensors are read")
    with ExitStack() as stack:
        files = [stack.enter_context(safetensors.safe_open(folder / name, framework="pt")) for name in names]
        yield _Tensors(files, model, folder)


# ---------------------------------------------------------------------------------------------------------- files


@contextmanager
def _made_whole(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` if that succeeds and vanishes otherwise."""
    if out.exists():
        raise ValueError(f"--out={out} exists; choose a folder that does not")
    aside = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_bytes()))
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing; name a folder in Hugging Face's format") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
