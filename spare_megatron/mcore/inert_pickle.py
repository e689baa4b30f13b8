"""Reads the pickled parts of a checkpoint without running code: unknown classes become inert objects. A folder of
weights may come from anywhere, and Megatron's own readers of `common.pt` and `.metadata` may run what is in them.
"""

import argparse
import collections
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_VALUES: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # type: ignore[attr-defined]
}
"""Beside types of numbers, and the classes with which torch describes a checkpoint."""

_DESCRIPTIONS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class Inert:
    """An object of a class that is not loaded; has the attributes that the file gives it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __new__(cls, *_args: object, **_kwargs: object) -> "Inert":
        return super().__new__(cls)

    def __call__(self, *_args: object, **_kwargs: object) -> "Inert":
        return Inert()

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass


class InertUnpickler(pickle.Unpickler):
    """Finds what describes tensors and settings, and puts `Inert` in the place of everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in _DESCRIPTIONS:
            found = vars(__import__(module, fromlist=[name])).get(name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        return Inert


@contextmanager
def named_damage(where: str | Path) -> Iterator[None]:
    """Turns errors of reading a damaged pickle into a ValueError of one line that names the place."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{where} is missing") from error
    except OSError:
        raise
    except Exception as error:
        lines = [*str(error).splitlines(), ""]
        reason = "".join(letter for letter in f"{type(error).__name__}: {lines[0]:.100}" if letter.isprintable())
        raise ValueError(f"{where} cannot be read: {reason}") from error


def _load(file: IO[bytes], **options: Any) -> Any:
    return InertUnpickler(file, **options).load()


def read_pickled(file: Path | IO[bytes]) -> Any:
    """What `torch.save` wrote; `named_damage` is for what it raises."""
    reader = SimpleNamespace(Unpickler=InertUnpickler, load=_load, __name__=__name__)
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=reader)


def read_metadata(file: Path) -> Metadata:
    """The description of a checkpoint's tensors and files. Raises ValueError if it is not one."""
    with named_damage(file), file.open("rb") as stream:
        found: Metadata = _load(stream)
        for key, entry in found.state_dict_metadata.items():
            if not isinstance(key, str):
                raise TypeError("the key of a tensor is not text")
            if isinstance(entry, TensorStorageMetadata):
                _require_sizes(entry)
    return found


def _require_sizes(entry: TensorStorageMetadata) -> None:
    boxes = [part for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes)]
    if not all(type(number) is int and number >= 0 for part in (entry.size, *boxes) for number in part):
        raise TypeError("the sizes of a tensor are not numbers")
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise TypeError("the type of a tensor is not one of torch's")
