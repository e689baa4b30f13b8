"""Errors of CUDA and HIP: which show a failed device or may be a bug of the program, and which end the process."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["certain", "ambiguous", "program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceError:
    """A row of device_errors.toml, which says what its fields mean."""

    code: int | None = None
    text: str
    kind: Kind
    is_sticky: bool = False


_TOML = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TABLE = tuple(DeviceError(**row) for row in _TOML["errors"])
FAILED_DEVICE: Mapping[int, str] = {int(xid): text for xid, text in _TOML["failed_device"].items()}
_MEMORY_ERROR = re.compile(r"illegal memory access|unhandled cuda error|peer GPU memory", re.IGNORECASE)
_WANT_OF_MEMORY = re.compile(r"\b(cuda|hip|nccl)\b.*out of memory", re.IGNORECASE | re.DOTALL)


def describe_xid(xid: int) -> str:
    """Names an event and, of a failed device, what it means.

    >>> describe_xid(79), describe_xid(31)
    ('Xid 79 (fallen off the bus)', 'Xid 31')
    """
    return f"Xid {xid}" + (f" ({FAILED_DEVICE[xid]})" if xid in FAILED_DEVICE else "")


def find_device_error(text: str, code: int | None = None) -> DeviceError | None:
    """The row of an error's code or, if that is not known, of its text; None for any other error."""
    text = text.lower()
    known = next((row for row in TABLE if code is not None and row.code == code), None)
    return known or next((row for row in TABLE if row.text in text), None)


def is_ambiguous(text: str) -> bool:
    """Whether a device may be at fault, although the same error mostly is a bug that all groups meet."""
    row = find_device_error(text)
    return row is not None and row.kind == "ambiguous"


def is_memory_error(error: RuntimeError) -> bool:
    """Whether a device met memory that is not its own: a fault of its program, or a peer has freed it in an abort."""
    return _MEMORY_ERROR.search(str(error)) is not None


def is_want_of_memory(error: BaseException) -> bool:
    """Whether a device has no memory left for what was asked of it."""
    return _WANT_OF_MEMORY.search(str(error)) is not None


def error_line(traceback: str) -> str:
    """The last line of a traceback; of an error of a device its own line, because the text ends with advice."""
    lines = traceback.strip().splitlines()
    return next((line for line in reversed(lines) if re.search("(CUDA|HIP) error", line)), lines[-1] if lines else "")


def name_of_code(code: int, text: str) -> str:
    """What the maker calls it, by the text of an error or the name of a platform."""
    return f"{'hip' if re.search('HIP|ROCm', text) else 'cuda'}Error {code}"


def code_of(error: BaseException) -> int | None:
    """The code of a `torch.AcceleratorError`; None of any other error, and where torch gives none."""
    code = getattr(error, "error_code", None)
    return code if isinstance(code, int) else None


def ends_process(error: BaseException) -> bool:
    """Whether nothing more can be done with the device in this process."""
    row = find_device_error(str(error), code_of(error))
    return row is not None and row.is_sticky
