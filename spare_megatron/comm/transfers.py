"""Transfers of a cross-group communicator in flight, and sums that only some members receive."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.comm import nccl

Share = tuple[torch.Tensor, Sequence[int]]
"""A range of a buffer, summed in place over all members, and its recipients: member indices, first the one that sends
the sum to the others; empty means all. It is undefined afterwards on those that do not receive it."""


class SharedBackend:
    """A backend, with the lock under which threads post to it and poll it: NCCL is not thread-safe. `abort` (NCCL only)
    frees memory that a call under way may use, so it waits for that call and admits no other.
    """

    def __init__(self, backend: Any, device: torch.device, abort_limit_s: float) -> None:
        self.backend = backend
        self.end_reason = ""
        """Why it was aborted; empty if it was not."""
        self.is_connecting = False
        """Whether a call under way may wait for a member that never comes; an abort then waits as long."""
        self._device = device
        self._abort_limit_s = abort_limit_s
        self._watchdog = nccl.WatchdogCheck()
        self._calls = threading.Lock()
        self._abort: nccl.Abort | None = None

    @contextlib.contextmanager
    def using(self) -> Iterator[Any]:
        """Posts and polls are made in this context. Raises RuntimeError if the connection was aborted."""
        with self._calls:
            self.require()
            yield self.backend

    def require(self) -> None:
        """Raises RuntimeError if the connection was aborted."""
        if self.end_reason:
            raise RuntimeError(f"aborted: {self.end_reason}")

    def abort(self, reason: str) -> None:
        """Starts to abort the backend, unless that has been done. Never waits. Callable from any thread."""
        if not self.end_reason:
            self.end_reason = reason
            self._abort = nccl.Abort(
                self.backend,
                self._calls,
                self._device,
                limit_s=self._abort_limit_s,
                is_patient=self.is_connecting,
            )

    @property
    def is_ending(self) -> bool:
        """Whether the backend was aborted and has not ended; its works must not be asked, as they hold the GIL."""
        return bool(self.end_reason) and not (self._abort is not None and self._abort.has_ended)

    @property
    def may_break_device(self) -> bool:
        """Whether the device may still report an access to memory that this abort, or a peer's, has freed."""
        return bool(self.end_reason) and not (self._abort is not None and self._abort.is_harmless)

    def finish(self, work: Any) -> None:
        """Makes the current stream wait for a work that has ended. Raises RuntimeError if it failed, or if the watchdog
        of the connection has ended.
        """
        if self._device.type != "cpu":
            nccl.finish(work)
            self._watchdog.on_end(work, time.monotonic())
        else:
            work.wait()


@dataclass(slots=True)
class Transfer:
    """A sum or an all-gather in flight, which may write `tensors` and must live until its works have ended.

    `connection` is None for a rank that is alone. `follow` posts the transfers that follow once `works` have ended.
    `preceding`: a CUDA event after all work that the device was given before this transfer, on GPUs.
    """

    connection: SharedBackend | None
    works: Sequence[Any] = ()
    tensors: Sequence[torch.Tensor] = ()
    follow: Callable[[], Sequence[Any]] | None = None
    is_over: bool = False
    preceding: Any = None
    _awaited: tuple[Any, threading.Event] | None = None

    def advance(self) -> bool:
        """Posts what follows, if due. Returns whether all is complete. Raises RuntimeError on a broken connection."""
        if self.connection is None:
            return True
        with self.connection.using():
            is_over = self._advance(self.connection)
        self.connection.require()  # an aborted work looks complete, and another thread may abort it at any moment
        return is_over

    def _advance(self, connection: SharedBackend) -> bool:
        while not self.is_over and all(work.is_completed() for work in self.works):
            for work in self.works:
                connection.finish(work)
            self.is_over = self.follow is None
            if self.follow is not None:
                post, self.follow = self.follow, None
                self.works = post()
        return self.is_over

    def pause(self, longest_s: float) -> None:
        """Waits up to `longest_s` for the first work that has not ended (gloo only), without using the processor."""
        work = next((work for work in self.works if not work.is_completed()), None)
        if work is None:
            return
        if self._awaited is None or self._awaited[0] is not work:
            ends = threading.Event()
            work.get_future().add_done_callback(lambda _: ends.set())
            self._awaited = work, ends
        if self._awaited[1].wait(longest_s):
            with contextlib.suppress(RuntimeError):  # `advance` raises it
                work.wait()  # its future is done slightly before the work itself

    @property
    def may_write(self) -> bool:
        """Whether some work has not ended and may still write its tensors."""
        if self.connection is None:
            return False
        return self.connection.is_ending or not all(work.is_completed() for work in self.works)

    @property
    def is_waiting(self) -> bool:
        """Whether some work has not ended, a little late; NCCL only. Never blocks, and may be called by any thread."""
        if self.connection is None:
            return False
        if self.connection.end_reason:
            return self.connection.is_ending
        return not all(nccl.has_result(work) for work in self.works)


class Exchange:
    """Sums and forwards the shares of one buffer on member `rank`. `is_polled`: NCCL's point-to-point works report
    their end.
    """

    def __init__(self, backend: Any, rank: int, *, is_polled: bool) -> None:
        self._backend = backend
        self._rank = rank
        self._is_polled = is_polled

    def post(self, transfer: Transfer, shares: Sequence[Share], extras: torch.Tensor, first_tag: int) -> None:
        """Starts to sum the shares for their recipients, and `extras` for all members, each with a tag equal on all:
        buffers may complete in different orders. NCCL's stream keeps the order; with gloo a sum is forwarded once it is
        here.
        """
        if self._is_polled:
            # As one batch: NCCL starts a kernel for all of them.
            sums = nccl.coalesced(self._backend, extras.device, lambda: self._sums(shares, extras))
            transfer.works = [sums, *self._copies(shares, first_tag)]
        else:
            transfer.works = self._sums(shares, extras)
            transfer.follow = lambda: self._copies(shares, first_tag)

    def _sums(self, shares: Sequence[Share], extras: torch.Tensor) -> list[Any]:
        works = []
        for values, recipients in shares:
            if recipients:
                options = dist.ReduceOptions()
                options.rootRank, options.rootTensor = recipients[0], 0
                works.append(self._backend.reduce([values], options))
            else:
                works.append(self._backend.allreduce([values], dist.AllreduceOptions()))
        # Its completion proves that all members have posted this buffer; a sum that only others receive does not.
        works.append(self._backend.allreduce([extras], dist.AllreduceOptions()))
        return works

    def _copies(self, shares: Sequence[Share], first_tag: int) -> list[Any]:
        """Forwards each sum from its first recipient to the others."""
        sent = [
            (values, recipients[0], other, tag)
            for tag, (values, recipients) in enumerate(shares, first_tag)
            for other in recipients[1:]
            if self._rank in (recipients[0], other)
        ]
        if not sent:
            return []

        def post() -> list[Any]:
            return [
                self._backend.send([values], other, tag)
                if self._rank == owner
                else self._backend.recv([values], owner, tag)
                for values, owner, other, tag in sent
            ]

        if not self._is_polled:
            return [_Awaited(post())]
        # Outside a coalescing block torch makes a communicator for each pair.
        return [nccl.coalesced(self._backend, sent[0][0].device, post)]


class _Awaited:
    """Wraps works that report their end only to `wait()`: a thread waits for them."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._error: RuntimeError | None = None
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._future.set_result(None)

    def get_future(self) -> "torch.futures.Future[None]":
        return self._future

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
