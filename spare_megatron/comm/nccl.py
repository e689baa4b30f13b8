"""NCCL between groups: all of its settings, and how its communicators are connected and aborted. See docs/gpu.md.

Connecting cannot be aborted and waits forever for a missing member, so members first meet at the store. Blocking mode
stays on, as torch cannot reliably abort in the other. `abort()` may wait for other communicators' kernels, so each runs
in its own thread. An aborted sum looks complete: `comm.transfers` records what it aborts.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spare_megatron.config.supported_versions import check_names, check_version
from spare_megatron.config.training.run_sizes import MOST_CHANNELS
from spare_megatron.devices import gpu
from spare_megatron.process.processes import leave, say
from spare_megatron.process.reports import ExitCode

if dist.is_nccl_available():  # builds for CPUs have none of it
    check_names(
        "torch",
        dist,
        "ProcessGroupNCCL.Options._timeout",
        "ProcessGroupNCCL.Options.config",
        "ProcessGroupNCCL.NCCLConfig.blocking",
        "ProcessGroupNCCL.NCCLConfig.max_ctas",
        "ProcessGroupNCCL.get_runtime_nccl_version",
        "ProcessGroupNCCL.eager_connect_single_device",
        "ProcessGroupNCCL.abort",
        "ProcessGroupNCCL._start_coalescing",
        "ProcessGroupNCCL._end_coalescing",
        "Work.block_current_stream",
        "Work.get_future_result",
    )

_BETWEEN_GROUPS: Mapping[str, str] = {
    # The executor handles what a lost group breaks; torch must not end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Nor must its watchdog, when it meets an error of CUDA: the rank ends itself, with a cause (`ends_process`).
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # After an error torch's watchdog would sleep four times as long, for dumps that are disabled; destroying the
    # communicator or posting a sum waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Read by each constructor. The group's own world, built earlier, keeps torch's defaults, which end the process."""
_HERE, _ALL_HERE = "here", "all-here"
_PRIORITY_OF_WAITS = -1
"""torch has a pool of 32 streams for each priority, which it hands out in turn; nothing else here uses this one."""

_SUCCESS = 0
"""`WorkResult.SUCCESS` of torch, which hands out the number."""
_LONGEST_CALL_S = 2.0
"""An abort waits this long for a call to return: one that takes longer waits for a kernel that only an abort ends."""


_LONGEST_SILENCE_S = 30.0
"""torch's watchdog notes the end of a work within 0.1 s, or later while CUDA is busy; after this time it has ended."""


class NoLongerWanted(RuntimeError):
    pass


def share_gpu(slot: int) -> None:
    """Lets this rank share its GPU with other `slot`s; call it before the first communicator. NCCL refuses two ranks of
    one host on a device, so each slot poses as a host of its own; a setting for that needs NCCL 2.30.
    """
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{slot}"


def check_nccl() -> None:
    """Raises ImportError if the NCCL that is loaded is not supported. Touches no GPU."""
    check_version(*gpu.collective_library())


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout: timedelta,
    is_wanted: Callable[[], bool],
) -> Any:
    """Returns a NCCL backend, to be warmed up (`warm_up`); makes `device` current. The members meet at `store`,
    under names never used before, within `timeout`. Collective over: all members. NoLongerWanted: `is_wanted` is False
    then. RuntimeError: a member is late or gone.
    """
    meet(store, size, timeout)
    if not is_wanted():
        raise NoLongerWanted
    gpu.set_device(device)  # of this thread only
    os.environ.update(_BETWEEN_GROUPS)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 1
    options.config.max_ctas = MOST_CHANNELS  # their buffers are memory that the model lacks, twice during a rebuild
    # torch hands out the 32 streams of a pool in turn. That of the other priority is Megatron's: the stream of a later
    # communicator would be that of the group's own collectives.
    options.is_high_priority_stream = True
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def meet(store: dist.Store, size: int, timeout: timedelta) -> None:
    """Waits until `size` members have called this. Raises RuntimeError at the timeout."""
    if store.add(_HERE, 1) == size:
        store.set(_ALL_HERE, "")
    store.wait([_ALL_HERE], timeout)


def coalesced(backend: Any, device: torch.device, post: Callable[[], object]) -> Any:
    """Posts point-to-point transfers as one NCCL group, whose work it returns, in a thread of its own: a failed group
    stays open and would hold back all later calls of that thread. Raises RuntimeError then.
    """
    stream = gpu.current_stream(device)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_coalesce, backend, stream, post).result()


def _coalesce(backend: Any, stream: gpu.Stream, post: Callable[[], object]) -> Any:
    with gpu.stream(stream):
        backend._start_coalescing()
        post()
        return backend._end_coalescing()


class EndOfWork:
    """Wakes a waiting thread when a work's kernels have ended: as NCCL has no callbacks, a short thread waits for an
    event on a stream of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: gpu.Stream | None = None
        self._work: Any = None
        self._has_ended = threading.Event()

    def wait(self, work: Any, longest_s: float) -> None:
        """Waits up to `longest_s` for the end of a work, with or without success."""
        if self._work is not work:
            self._work, self._has_ended = work, threading.Event()
            event = self._event_after(work)
            threading.Thread(target=self._run, args=(event, self._has_ended), daemon=True).start()
        if self._has_ended.wait(longest_s):
            self._work = None  # it holds its tensors

    def _event_after(self, work: Any) -> gpu.Event:
        if self._stream is None:
            self._stream = gpu.Stream(self._device, priority=_PRIORITY_OF_WAITS)
        event = gpu.Event(blocking=True)  # waiting for it takes no processor
        with gpu.stream(self._stream):
            work.block_current_stream()  # on the device: the stream waits, not this thread
            event.record()
        return event

    def _run(self, event: gpu.Event, has_ended: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # polling the work raises it
            gpu.set_device(self._device)  # of this thread only
            event.synchronize()
        has_ended.set()


def finish(work: Any) -> None:
    """Makes the current stream wait for a work that has ended. Raises RuntimeError if it failed. Not by `work.wait()`,
    which after an error aborts the communicator on the calling thread.
    """
    result = work.get_future_result()  # has an error before the work counts as ended, a success up to 0.1 s later
    if result.done() and result.value() != _SUCCESS:
        raise RuntimeError(f"a sum of NCCL failed (WorkResult {result.value()}); torch has logged the error")
    work.block_current_stream()


class WatchdogCheck:
    """Finds that torch's watchdog of a communicator has ended, as it does in silence after an error of CUDA: then
    `get_future_result()` never completes.
    """

    def __init__(self) -> None:
        self._oldest: Any = None
        """Result of a work that has ended, until the watchdog has noted it. It holds no tensors."""
        self._since_s = 0.0

    def on_end(self, work: Any, now_s: float) -> None:
        """Called with each work that has ended. Raises RuntimeError if an earlier one was not noted in time."""
        if self._oldest is not None and not self._oldest.done():
            if now_s - self._since_s > _LONGEST_SILENCE_S:
                raise RuntimeError(f"torch's watchdog has noted no end of a sum for {_LONGEST_SILENCE_S:g} s")
            return
        self._oldest, self._since_s = work.get_future_result(), now_s


def has_result(work: Any) -> bool:
    """Whether torch's watchdog has seen a work end. Unlike `is_completed`, this never waits while it holds the GIL."""
    return bool(work.get_future_result().done())


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Makes `device` and a stream of its own current on this thread; what was issued before comes first."""
    gpu.set_device(device)
    stream = gpu.Stream(device)
    stream.wait_stream(gpu.current_stream(device))
    with gpu.stream(stream):
        yield


def event_now() -> gpu.Event:
    """An event after all work given to the current stream. `query` keeps the GIL, `synchronize` does not."""
    event = gpu.Event(blocking=True)
    event.record()
    return event


class Abort:
    """Aborts a backend in a thread; its sums must not be read. Other threads hold `calls` while they are inside NCCL.
    `is_patient`: waits for the call under way however long it takes. An abort that takes longer than `limit_s` ends the
    process: it costs one group, which would otherwise hold up all others.
    """

    def __init__(
        self,
        backend: Any,
        calls: threading.Lock,
        device: torch.device,
        *,
        limit_s: float,
        is_patient: bool = False,
    ) -> None:
        self._limit_s = limit_s
        self.has_ended = False
        self.is_harmless = False
        """Whether the device has done everything issued until the end of the communicator without an error."""
        timeout_s = -1.0 if is_patient else _LONGEST_CALL_S
        self.thread = threading.Thread(
            target=self._run, args=(backend, calls, timeout_s, device), name="nccl-abort", daemon=True
        )
        self.thread.start()

    def _run(self, backend: Any, calls: threading.Lock, timeout_s: float, device: torch.device) -> None:
        if calls.acquire(timeout=timeout_s):
            calls.release()  # no other call follows: the connection is marked
        # torch's own limit is none: it raises after the communicator's timeout, but the destructor of its std::future
        # first waits for the abort (ProcessGroupNCCL::abort).
        limit = threading.Timer(self._limit_s, self._leave)
        limit.name, limit.daemon = "nccl-abort-limit", True
        limit.start()
        with contextlib.suppress(RuntimeError):  # the communicator is unusable either way
            backend.abort()
        limit.cancel()
        self.has_ended = True
        with contextlib.suppress(RuntimeError):
            gpu.synchronize(device)
            self.is_harmless = True

    def _leave(self) -> None:
        say(f"an abort of NCCL has not returned within reduce.timeout_s={self._limit_s:g}", err=True)
        leave(ExitCode.ABORT_HUNG)


# ------------------------------------------------------------------------------------------------------------- warm-up
# NCCL connects an algorithm, by function and number of bytes, and a pair of members in the first call; while members
# are lost, that would block.


class Call(NamedTuple):
    """A call to a backend, which returns its work, and the tensors that it reads and writes."""

    tensors: Sequence[torch.Tensor]
    start: Callable[[Any], Any]


WarmUp = Callable[[int], Iterable[Call]]
"""The calls for a number of members, the same on all of them. Collective over: all members."""


def no_warm_up(_size: int) -> Iterable[Call]:
    return ()


def warm_up(new_buffer: Callable[[], torch.Tensor], size: int, *, is_stacked: bool) -> Sequence[Call]:
    """All-reduces of up to the size of a buffer, of the current stream; for stacked state also a reduce and
    all-gathers.
    """

    def all_reduce(values: torch.Tensor) -> Call:
        return Call([values], lambda backend: backend.allreduce([values], dist.AllreduceOptions()))

    def all_gather(received: torch.Tensor, sent: torch.Tensor) -> Call:
        return Call([received, sent], lambda backend: backend._allgather_base(received, sent))

    buffer = new_buffer()
    calls = [all_reduce(buffer[:count]) for count in _doubling(len(buffer))]
    if is_stacked:
        calls.append(Call([buffer], lambda backend: backend.reduce([buffer[:1]], dist.ReduceOptions())))  # in a ring
        calls += [all_gather(buffer[: size * n], buffer[-n:]) for n in _doubling(len(buffer) // (size + 1))]
    return calls


def _doubling(largest: int) -> Iterator[int]:
    """1, 2, 4 and so on, and the largest; nothing if that is 0."""
    if largest:
        yield from (1 << exponent for exponent in range((largest - 1).bit_length()))
        yield largest


def connecting(pairs: Sequence[tuple[int, int]], rank: int, device: torch.device) -> Call:
    """Sends an element in each (sender, receiver) pair, of which the member with index `rank` is one."""
    sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)

    def start(backend: Any) -> Any:
        def post() -> None:
            for sender, receiver in pairs:
                if sender == rank:
                    backend.send([sent], receiver, 0)
                else:
                    backend.recv([received], sender, 0)

        return coalesced(backend, device, post)

    return Call([sent, received], start)
