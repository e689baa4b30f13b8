"""NCCL between groups: all of its settings, and how its communicators are connected and aborted. See docs/gpu.md.

Connecting cannot be aborted and waits forever for a missing member, so members first meet at the store. Blocking mode
stays on, as torch cannot reliably abort in the other. `abort()` may wait for other communicators' kernels, so each runs
in its own thread. An aborted sum looks complete: `comm.communicators` records what it aborts.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.mcore.versions import check_version

_OF_A_RANK: Mapping[str, str] = {
    # A broken reduction would reach the monitors of all groups through the shared store and end their processes.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_OF_A_RANK_UNLESS_SET: Mapping[str, str] = {
    # Megatron relies on a single connection to order the kernels of overlapping transfers.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_RUNTIME_CONNECT": "0",
}
_BETWEEN_GROUPS: Mapping[str, str] = {
    # The executor handles what a lost group breaks; torch must not end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # After an error torch's watchdog would sleep four times as long, for dumps that are disabled; destroying the
    # communicator or posting a sum waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Read by each constructor. The group's own world, built earlier, keeps torch's defaults, which end the process."""
_HERE, _ALL_HERE = "here", "all-here"


class NoLongerWanted(RuntimeError):
    pass


def prepare_process() -> None:
    """Sets NCCL's and torch's environment, before their first use. Raises ImportError for an unsupported NCCL."""
    os.environ.update(_OF_A_RANK)
    for name, value in _OF_A_RANK_UNLESS_SET.items():
        os.environ.setdefault(name, value)
    check_nccl()


def share_gpu(slot: int) -> None:
    """Lets this rank share its GPU with ranks of other `slot`s; call it before the first communicator.

    NCCL refuses two ranks of one host on a device, so each slot poses as a host of its own, and slots exchange data
    over sockets. NCCL_MULTI_RANK_GPU_ENABLE would need NCCL 2.30; torch 2.11 to 2.13 bring 2.28 and 2.29.
    """
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{slot}"


def check_nccl() -> None:
    """Raises ImportError if the NCCL version is not supported. Touches no GPU."""
    check_version("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout: timedelta,
    is_wanted: Callable[[], bool],
) -> Any:
    """Returns a NCCL backend with all connections established; makes `device` current on the calling thread.

    The members meet at `store`, under names never used before, within `timeout` (also the limit of each sum); then
    `is_wanted` is checked. Collective over: all members. Raises NoLongerWanted if `is_wanted` returned False,
    RuntimeError if a member did not come in time or is gone.
    """
    meet(store, size, timeout)
    if not is_wanted():
        raise NoLongerWanted
    torch.cuda.set_device(device)  # of this thread only
    os.environ.update(_BETWEEN_GROUPS)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 1
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def meet(store: dist.Store, size: int, timeout: timedelta) -> None:
    """Waits until `size` members have called this. Raises RuntimeError at the timeout."""
    if store.add(_HERE, 1) == size:
        store.set(_ALL_HERE, "")
    store.wait([_ALL_HERE], timeout)


def coalesced(backend: Any, device: torch.device, post: Callable[[], object]) -> Any:
    """Posts point-to-point transfers as one NCCL group and returns their common work. Raises RuntimeError if it fails.

    Runs in its own thread: a failed group stays open and would hold back all later calls of that thread.
    """
    stream = torch.cuda.current_stream(device)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_coalesce, backend, stream, post).result()


def _coalesce(backend: Any, stream: torch.cuda.Stream, post: Callable[[], object]) -> Any:
    with torch.cuda.stream(stream):
        backend._start_coalescing()
        post()
        return backend._end_coalescing()


def abort(backend: Any) -> threading.Thread:
    """Starts to abort a backend in a new thread. Its kernels end soon; its sums must not be read."""
    thread = threading.Thread(target=_abort_quietly, args=(backend,), name="nccl-abort", daemon=True)
    thread.start()
    return thread


def _abort_quietly(backend: Any) -> None:
    # An abort that times out raises; the communicator is unusable either way.
    with contextlib.suppress(RuntimeError):
        backend.abort()
