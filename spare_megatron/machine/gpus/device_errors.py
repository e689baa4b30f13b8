"""Errors of CUDA: whether they show a failed device or may be a bug of the program, and which ones end the process."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["certain", "ambiguous", "program"]
"""`certain`: a failed device, which no other group meets by computing the same. `ambiguous`: mostly a bug, sometimes a
device. `program`: a bug."""


@dataclass(frozen=True, slots=True)
class DeviceError:
    """A row of the table. `code`: of cudaError (driver_types.h); None of a library's status. `text`: what messages of
    torch and NCCL hold, in lower case (cudaGetErrorString). `is_sticky`: later calls of CUDA in the process fail, too.
    """

    code: int | None
    text: str
    kind: Kind
    is_sticky: bool


TABLE = (
    DeviceError(46, "busy or unavailable", "certain", False),
    DeviceError(100, "no cuda-capable device", "certain", False),
    DeviceError(214, "ecc error", "certain", True),
    # The longer text first: it names NVLink, too. A killed peer of the node may be behind it (voting.fencing).
    DeviceError(226, "invalid access of peer gpu memory over nvlink", "certain", True),
    DeviceError(220, "nvlink error", "certain", True),
    DeviceError(714, "hardware stack error", "certain", True),
    DeviceError(802, "system not yet initialized", "certain", False),
    DeviceError(700, "illegal memory access", "ambiguous", True),
    DeviceError(702, "launch timed out", "ambiguous", True),
    DeviceError(715, "illegal instruction", "ambiguous", True),
    DeviceError(716, "misaligned address", "ambiguous", True),
    DeviceError(717, "operation not supported on global/shared address space", "ambiguous", True),
    DeviceError(718, "invalid program counter", "ambiguous", True),
    DeviceError(719, "unspecified launch failure", "ambiguous", True),
    DeviceError(None, "cublas_status_execution_failed", "ambiguous", False),
    DeviceError(None, "cudnn_status_execution_failed", "ambiguous", False),
    DeviceError(710, "device-side assert", "program", True),
)
"""Sticky are those of which CUDA's reference (Runtime API, cudaError) says that the process must be terminated, and
uncorrectable errors of memory and links."""


_MEMORY_ERROR = re.compile(r"illegal memory access|unhandled cuda error|peer GPU memory", re.IGNORECASE)

FAILED_DEVICE: Mapping[int, str] = {
    48: "uncorrectable memory error",
    62: "halted microcontroller",
    64: "memory row that cannot be replaced",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "no answer of its system processor",
    120: "error of its system processor",
    140: "unrecovered memory error",
}
"""Xid events of the driver (NVIDIA's Xid catalog) by which a device has failed, whatever exception CUDA raises. Others,
13 and 31 among them, mostly follow from a bug of the program.
"""


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


def error_line(traceback: str) -> str:
    """The last line of a traceback; of an error of CUDA its own line, because the text ends with advice."""
    lines = traceback.strip().splitlines()
    return next((line for line in reversed(lines) if "CUDA error" in line), lines[-1] if lines else "")


def name_of_code(code: int) -> str:
    return f"cudaError {code}"


def code_of(error: BaseException) -> int | None:
    """The code of a `torch.AcceleratorError`; None of any other error, and where torch gives none."""
    code = getattr(error, "error_code", None)
    return code if isinstance(code, int) else None


def ends_process(error: BaseException) -> bool:
    """Whether nothing more can be done with the device in this process."""
    row = find_device_error(str(error), code_of(error))
    return row is not None and row.is_sticky
