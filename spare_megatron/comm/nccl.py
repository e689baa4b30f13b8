"""NCCL between groups: its settings, and how a communicator is made and ended. Nothing else sets an option of it.

What it takes, read in the sources of torch 2.13 and NCCL 2.30:
    Connecting cannot be ended. `eager_connect_single_device` is back when NCCL is, and until then torch has no
        communicator that `abort()` would find. NCCL waits for ever for a member that never comes, and finds out by
        itself only about one whose connection breaks. So members meet at the store first; who is lost in the moments
        after that leaves others a thread that waits, with nothing but its sockets, until the process ends.
    NCCL's mode without blocking would let `abort()` in. It stays off, as in torch itself, which takes a hang of NCCL
        2.26 for its reason: torch asks how far connecting is with the lock of the communicator in its hands, which
        `abort()` waits for; `abort()` then raises, since NCCL has not ended yet; and every sum starts a thread.
    From NCCL 2.22 on the first sum of each algorithm connects, in the call that posts it, where a rank that waits for
        a dead one reads no log. NCCL_RUNTIME_CONNECT=0 has everything connected from the start, for more memory.
    `abort()` waits for NCCL, which frees memory and so may wait for kernels of other communicators: those that hang
        need an abort of their own. So each has a thread.
    A sum that was aborted looks complete afterwards, so that somebody has to remember.
    A kernel that waits for a lost member may hold up what the GPU is asked for after it (`comm.sum_watch`).
    `dist.shrink_group` is no way around: it is for groups that are registered in a world, and where a member is dead
        it destroys the old communicator, which waits for that member from NCCL 2.31 on.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.mcore.versions import check_version

_OF_A_RANK: Mapping[str, str] = {
    # A broken reduction anywhere would reach the monitors of all groups through the one store, and end them.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_OF_A_RANK_UNLESS_SET: Mapping[str, str] = {
    # Megatron orders the kernels of overlapping transfers by there being one connection.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_RUNTIME_CONNECT": "0",
}
_BETWEEN_GROUPS: Mapping[str, str] = {
    # What a lost group breaks here is the executor's to handle.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # After an error torch's watchdog sleeps four times as long, for dumps that nobody makes. Whoever destroys the
    # communicator waits for it, and so does whoever posts a sum.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Read by each constructor: the group's own world, built before, keeps the defaults that end the process."""
_HERE, _ALL_HERE = "here", "all-here"


class NoLongerWanted(RuntimeError):
    """Nobody needs the communicator that was being made."""


def prepare_process() -> None:
    """Sets what NCCL and torch read when their first communicator is made, and checks NCCL's version.

    Raises:
        ImportError: It is another version than those supported.
    """
    os.environ.update(_OF_A_RANK)
    for name, value in _OF_A_RANK_UNLESS_SET.items():
        os.environ.setdefault(name, value)
    check_nccl()


def check_nccl() -> None:
    """Nothing when NCCL can be used. Asks no GPU.

    Raises:
        ImportError: It is another version than those supported.
    """
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
    """A backend of torch's whose connections are all there. It is made current on no thread but the caller's own.

    Collective over: all members.

    Args:
        store: Where the members meet; nobody else has ever used its names.
        rank: Of this member.
        size: Members.
        device: The GPU.
        timeout: Longest wait for the other members to come to the store, and for a sum.
        is_wanted: Asked when the members have met.

    Raises:
        NoLongerWanted: It is not wanted any more.
        RuntimeError: A member has not come, or is gone.
    """
    meet(store, size, timeout)
    if not is_wanted():
        raise NoLongerWanted
    torch.cuda.set_device(device)  # this thread's own
    os.environ.update(_BETWEEN_GROUPS)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 1
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def meet(store: dist.Store, size: int, timeout: timedelta) -> None:
    """Returns when so many members have called this.

    Raises:
        RuntimeError: Some have not come in time.
    """
    if store.add(_HERE, 1) == size:
        store.set(_ALL_HERE, "")
    store.wait([_ALL_HERE], timeout)


def coalesced(backend: Any, device: torch.device, post: Callable[[], object]) -> Any:
    """Posts transfers between two members as one, and returns the work of all.

    In a thread of its own: torch and NCCL count by thread which groups of calls are open, and one that breaks stays
    open, so that nothing would leave that thread any more, nor what the rank's own group is to be sent.

    Raises:
        RuntimeError: The connection is broken.
    """
    stream = torch.cuda.current_stream(device)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_coalesce, backend, stream, post).result()


def _coalesce(backend: Any, stream: torch.cuda.Stream, post: Callable[[], object]) -> Any:
    with torch.cuda.stream(stream):
        backend._start_coalescing()
        post()
        return backend._end_coalescing()


def end(backend: Any) -> threading.Thread:
    """Begins to abort a backend, in a thread of its own: its kernels end soon, and nobody may look at its sums."""
    thread = threading.Thread(target=_abort, args=(backend,), name="nccl-abort", daemon=True)
    thread.start()
    return thread


def _abort(backend: Any) -> None:
    # It gives up in its own time and says so; the communicator is of no use either way.
    with contextlib.suppress(RuntimeError):
        backend.abort()
