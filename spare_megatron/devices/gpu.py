"""What a rank uses of its GPU: streams, events, host memory that the driver knows, and the versions of libraries.

torch's build for AMD answers to the same names. Where it is another library, `torch.version.hip` says so.
"""

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from spare_megatron.machine.gpus.device_errors import name_of_code
from spare_megatron.machine.gpus.gpu import PLATFORMS

TYPE = "cuda"
"""Of devices; `meta` is another."""
Event: TypeAlias = torch.cuda.Event
Stream: TypeAlias = torch.cuda.Stream
stream, current_stream = torch.cuda.stream, torch.cuda.current_stream
set_device, synchronize = torch.cuda.set_device, torch.cuda.synchronize
is_available, init, empty_cache = torch.cuda.is_available, torch.cuda.init, torch.cuda.empty_cache
name_of_device, runtime, nvtx = torch.cuda.get_device_name, torch.cuda.cudart, torch.cuda.nvtx
capability, memory_left = torch.cuda.get_device_capability, torch.cuda.mem_get_info
memory_stats = torch.cuda.memory_stats
matmul = torch.backends.cuda.matmul

_log = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable."""


def platform() -> tuple[str, str]:
    """What torch was built with for GPUs, and its version; empty if torch was built for CPUs."""
    cuda, rocm = PLATFORMS
    return (rocm, torch.version.hip) if torch.version.hip else (cuda, torch.version.cuda or "")


def collective_library() -> tuple[str, str]:
    """The library of sums that is loaded, and its version. Touches no GPU."""
    # torch.cuda.nccl.version() would be that of the library that torch was built with.
    name = "RCCL" if torch.version.hip else "NCCL"
    return name, ".".join(map(str, dist.ProcessGroupNCCL.get_runtime_nccl_version()))


def register(runtime: Any, ranges: Sequence[tuple[int, int]]) -> str:
    """Has the driver know these ranges of host memory, by address and size, so that a device copies into them without a
    buffer between: all of them or, if the driver refuses one, none; then why. `runtime`: what `runtime()` returns.
    """
    for number, one in enumerate(ranges):
        if code := int(runtime.cudaHostRegister(*one, _PORTABLE)):
            unregister(runtime, ranges[:number])
            return f"cudaHostRegister of {sum(size for _, size in ranges)} bytes: {name_of_code(code, platform()[0])}"
    return ""


def unregister(runtime: Any, ranges: Sequence[tuple[int, int]]) -> None:
    for address, _ in ranges:
        if code := int(runtime.cudaHostUnregister(address)):
            _log.warning("cudaHostUnregister: %s", name_of_code(code, platform()[0]))
