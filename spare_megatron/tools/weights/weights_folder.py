"""What exports and imports of weights have in common, whatever the format.

Both hold a few tensors in memory, and make a folder visible by one rename. An import looks like the directory of a run:
`config.toml`, and a checkpoint of step 0 that has weights alone.
"""

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from torch import Tensor

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_tensors import ModelTensor, model_tensors
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import weights_differences, weights_terms_of
from spare_megatron.formats.codec import json_object
from spare_megatron.mcore.weights import StoredWeights, WeightsPart, stacked_part, write_weights
from spare_megatron.state.checkpoint import checkpoint_folder
from spare_megatron.version import __version__

Dtype = Literal["fp32", "bf16"]
DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
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

CONFIG_JSON, GENERATION_JSON = TOKEN_ID_FILES = ("config.json", "generation_config.json")
"""Hugging Face's files that name ids of special tokens; an import keeps them beside the tokenizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """`dtype` is that of the parameters if None; `tokenizer` a folder with its files, a file, or that of an import.

    `per_layer` says for Megatron's format that layers have names of their own (its `non_homogeneous_layers`).
    """

    dtype: Dtype | None = None
    tokenizer: Path | None = None
    per_layer: bool = False


class Export:
    """The weights of a checkpoint, in the type asked for, and the tokenizer's files that go with them.

    Raises ValueError if the checkpoint is of another model than the settings, or the tokenizer has no files.
    """

    def __init__(self, checkpoint: checkpoint_folder.Checkpoint, config: RunConfig, options: ExportOptions) -> None:
        if found := weights_differences(checkpoint.manifest.terms, config):
            where = f"{checkpoint.path} is of another model than its run's config.toml:"
            raise ValueError("\n  - ".join([where, *found]))
        imported = _tokenizer_beside(checkpoint.path)
        self._tokenizer = _tokenizer_files(options.tokenizer) if options.tokenizer else _files_in(imported)
        begun_with = _tokenizer_beside(Path(config.checkpoint.load_weights or checkpoint.path))
        origins = [folder for folder in (options.tokenizer, imported, begun_with) if folder]
        named = (folder for folder in origins if any((folder / name).is_file() for name in TOKEN_ID_FILES))
        self._origin = next(named, begun_with)
        self._stored = StoredWeights(checkpoint.path)
        if config.program.file and (key := _foreign(self._stored, config)):
            raise ValueError(
                f"{checkpoint.path}: {key} is none of the tensors of the GPT of [model]: program.file="
                f"{config.program.file} built another model, which no format has; export it by a script of yours"
            )
        self.dtype = DTYPES[options.dtype or config.model.precision]

    def read(self, tensor: ModelTensor) -> Tensor:
        return self._stored.read_tensor(tensor, torch.float32 if tensor.is_buffer else self.dtype)

    def described(self, name: str) -> dict[str, Any]:
        """A file with ids of special tokens, from the tokenizer's folder or from the import that the run began with;
        empty without one. Raises ValueError for one that cannot be read.
        """
        file = self._origin / name
        return json_object(file) if file.is_file() else {}

    def copy_tokenizer(self, folder: Path) -> None:
        for file in self._tokenizer:
            shutil.copy(file, folder / file.name)


def _tokenizer_beside(checkpoint: Path) -> Path:
    return checkpoint.absolute().parent.parent / _TOKENIZER


def has_tokenizer(folder: Path) -> bool:
    return bool(_files_in(folder))


def _files_in(folder: Path) -> list[Path]:
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _foreign(stored: StoredWeights, config: RunConfig) -> str:
    """A tensor that only the checkpoint or only the model of the settings has, or in which they differ; else empty."""
    tensors = {one.key: one for one in model_tensors(config)}
    names = {name for name in stored.names() if not name.startswith("optimizer.")}
    if apart := names ^ tensors.keys():
        return min(apart)
    for key, one in tensors.items():
        shape = stored.shape(key)
        is_alike = shape[1:] == (one.shape[1:] if one.layer is None else one.shape)  # rows may pad the vocabulary
        if not is_alike or (one.layer is not None and shape[0] != config.model.num_layers):
            return key
    return ""


def _tokenizer_files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else _files_in(path)
    if not found:
        raise ValueError(f"--tokenizer={path} has none of {', '.join(_TOKENIZER_FILES)}; name a folder with some")
    return found


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
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


Reader = Callable[[ModelTensor], Tensor]
"""Reads a tensor of a model from a foreign folder."""


def precision_of(stored: Mapping[str, object], folder: Path) -> Dtype:
    """The precision that holds tensors of these types exactly. Raises ValueError for numbers of other types."""
    for name, dtype in sorted(stored.items()):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{folder}: {name} is stored as {dtype}; only fp32, bf16 and fp16 can be imported: convert quantized "
                f"weights back to one of these"
            )
    kinds = {dtype for name, dtype in stored.items() if not name.endswith("_correction_bias")}  # fp32 in every model
    return "bf16" if kinds == {torch.bfloat16} else "fp32"


def write_import(
    source: Path, out: Path, settings: Mapping[str, Any], reader_of: Callable[[RunConfig], Reader]
) -> checkpoint_folder.Checkpoint:
    """Writes weights, the settings of their model and the tokenizer's files of `source` into the new folder `out`.

    `reader_of` is asked once, with the configuration of these settings, and raises ValueError if the weights are not
    those of that model.
    """
    with made_whole(out) as aside:
        (aside / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
        config = load_run_config(aside / "config.toml").config
        read = reader_of(config)
        described = (source / name for name in TOKEN_ID_FILES)
        for file in [*_files_in(source), *(file for file in described if file.is_file())]:
            (aside / _TOKENIZER).mkdir(exist_ok=True)
            shutil.copy(file, aside / _TOKENIZER / file.name)
        found = _write_checkpoint(aside, config, read)
    return checkpoint_folder.Checkpoint(path=out / found.path.relative_to(aside), manifest=found.manifest)


def _write_checkpoint(run_dir: Path, config: RunConfig, read: Reader) -> checkpoint_folder.Checkpoint:
    unfinished = run_dir / checkpoint_folder.FOLDER / "step-00000000.import.tmp"
    unfinished.mkdir(parents=True)
    dtype = DTYPES[config.model.precision]

    def part(tensor: ModelTensor) -> WeightsPart:
        kind = torch.float32 if tensor.is_buffer else dtype
        return stacked_part(tensor, config.model.num_layers, kind, lambda: read(tensor).to(kind))

    parts = [part(each) for each in model_tensors(config)]
    files = checkpoint_folder.stored(write_weights(unfinished, parts))
    manifest = checkpoint_folder.Manifest(
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
        optimizer={"sharding": checkpoint_folder.WEIGHTS_ALONE},
    )
    return checkpoint_folder.publish(unfinished, manifest, lambda _: None)
