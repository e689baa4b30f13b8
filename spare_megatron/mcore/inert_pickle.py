"""Reads the pickled parts of a checkpoint without running code: unknown classes become inert objects.

A folder of weights may come from anywhere, and Megatron's own reader of `common.pt` and `.metadata` runs what is in
them. Unknown ones also are classes of packages that are not installed here.
"""

import argparse
import collections
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

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


def _load(file: IO[bytes], **options: Any) -> Any:
    return InertUnpickler(file, **options).load()


def read_common(file: Path) -> dict[str, Any]:
    """The content of `common.pt`. Raises ValueError if it is not one."""
    reader = SimpleNamespace(Unpickler=InertUnpickler, load=_load, __name__=__name__)
    try:
        found = torch.load(file, map_location="cpu", weights_only=False, pickle_module=reader)
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no dictionary")
    return found


def read_metadata(file: Path) -> Metadata:
    """The description of a checkpoint's tensors and files. Raises ValueError if it is not one."""
    try:
        with file.open("rb") as stream:
            found = _load(stream)
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (pickle.UnpicklingError, EOFError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(getattr(found, "state_dict_metadata", None), dict):
        raise ValueError(f"{file} describes no checkpoint")
    return found  # type: ignore[no-any-return]
