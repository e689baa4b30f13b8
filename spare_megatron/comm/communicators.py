"""The cross-group communicator of a rank, rebuilt in place when the surviving groups change.

A bare c10d backend (gloo or NCCL) on a store prefix that is never reused, so that a lost group breaks nothing else.
gloo's constructor blocks until all members arrive, so it runs in a thread. gloo's `abort()` ends no work, its
destructor waits for it, and it may still write its tensors: all is kept until it has ended. For NCCL see `comm.nccl`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from spare_megatron.comm import nccl
from spare_megatron.comm.transfers import BucketShare, Exchange, Transfer
from spare_megatron.mcore.probe import Probe
from spare_megatron.mcore.versions import check_names
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore

check_names("torch", dist, "ProcessGroupGloo._allgather_base")  # of all backends

_PAUSE_S = 0.050
"""Longest sleep between two progress reports while waiting for something that wakes the rank."""
_NUM_TAGS = 1 << 30
_MAX_RENDEZVOUS = 2
"""Number of latest rendezvous where other members may still be; what this rank left at earlier ones is removed."""


@dataclass(slots=True)
class _Build:
    thread: threading.Thread
    result: list[Any] = field(default_factory=list)
    """The backend, or the exception that its constructor raised."""
    is_wanted: bool = True


class CrossGroupCommunicator:
    """The cross-group communicator of rank j = `position` of every group, as one rank sees it across rebuilds.

    The type of `device` selects gloo or NCCL. A build or a reduction takes `timeout_s` at most; a waiting rank reads
    the log every `ask_interval_s` (`store.decision_log.ask_interval_s`) and reports progress to `probe`.
    """

    def __init__(
        self,
        *,
        group: GroupId,
        position: int,
        device: torch.device,
        store: ControlStore,
        timeout_s: float,
        ask_interval_s: float,
        probe: Probe,
    ) -> None:
        self._group = group
        self._position = position
        self._device = device
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._ask_interval_s = ask_interval_s
        self._probe = probe
        self._end_of_work = nccl.EndOfWork(device)
        self._backend: Any = None
        self._build: _Build | None = None
        self._members: tuple[GroupId, ...] = (group,)
        self._num_shares = 0  # posted to this communicator
        self._in_flight: deque[Transfer] = deque()
        self._aborted: Any = None  # the last backend that was aborted
        self._abandoned: list[Transfer] = []
        self._abandoned_builds: list[_Build] = []
        self._rendezvous: deque[tuple[str, int]] = deque()  # the latest rendezvous, with this rank's index in each
        self.evidence = ""
        """Why the last wait ended without a result."""
        self.ready_at_s: float | None = None
        """Monotonic time at which the current attempt had its communicator; None before that."""

    @property
    def members(self) -> tuple[GroupId, ...]:
        """The groups of the current communicator, ascending."""
        return self._members

    def start_build(self, key: int, members: Sequence[GroupId]) -> None:
        """Drops the current communicator and starts to build the next one in a thread."""
        self._abandon()
        self._members, self._num_shares = tuple(members), 0
        if self._is_alone:
            return
        self._rendezvous.append((keys.communicator(key, self._position), list(members).index(self._group)))
        former = self._rendezvous.popleft() if len(self._rendezvous) > _MAX_RENDEZVOUS else None
        build = _Build(
            thread=threading.Thread(
                target=lambda *where: build.result.append(self._construct(build, len(members), *where)),
                args=(*self._rendezvous[-1], former),
            )
        )
        build.thread.daemon = True
        build.thread.start()
        self._build = build

    def start_attempt(self) -> None:
        """Starts an attempt: clears `evidence` and `ready_at_s`, and frees abandoned work that has ended."""
        self._sweep()
        self.evidence, self.ready_at_s = "", None

    def is_ready(self) -> bool:
        """Whether sums can be posted now. Never waits."""
        if self._build is not None and not self._build.thread.is_alive():
            self._take_over(self._build)
        is_there = self._is_alone or self._backend is not None
        if is_there and self.ready_at_s is None:
            self.ready_at_s = time.monotonic()
        return is_there

    def connect(self, is_decided: Callable[[], bool]) -> bool:
        """Waits until sums can be posted. Returns False and sets `evidence` if they cannot.

        Does not query the log if the communicator exists: that would overload the store in large runs.
        """
        if not self._is_alone and not self._finish_build(is_decided):
            return self.give_up()
        return self.is_ready()

    def post(self, tensor: torch.Tensor) -> bool:
        """Starts to sum a tensor over all members, in place. False, with `evidence`, if the connection is broken.

        Collective over: rank j of every member group, in the same order. The tensor belongs to the communicator until
        `poll` has counted it; one that is given up must never be reused, as a transfer may still write it.
        """
        return self._post([tensor], lambda backend: [backend.allreduce([tensor], dist.AllreduceOptions())])

    def post_shares(self, shares: Sequence[tuple[torch.Tensor, Sequence[GroupId]]], extras: torch.Tensor) -> bool:
        """Starts to sum shares of a buffer for their recipients, and `extras` for all. Returns as `post` does.

        Recipients are as in `BucketShare`; completion of `extras` proves that every member has posted the whole buffer.
        Collective over: rank j of every member group, in the same order, with the same recipients.
        """
        index, first_tag = self._members.index, self._num_shares % _NUM_TAGS
        self._num_shares += len(shares)
        ranked = [BucketShare(values=values, recipients=tuple(map(index, groups))) for values, groups in shares]

        def start(transfer: Transfer) -> None:
            exchange = Exchange(transfer.backend, index(self._group), is_polled=self._device.type == "cuda")
            exchange.post(transfer, ranked, extras, first_tag)

        return self._start([*(values for values, _ in shares), extras], start)

    def post_gather(self, received: torch.Tensor, mine: torch.Tensor) -> bool:
        """Starts an all-gather: row i of `received` becomes `mine` of the i-th member. Returns as `post` does.

        Collective over: rank j of every member group. Both tensors belong to the communicator as in `post`.
        """
        return self._post([received, mine], lambda backend: [backend._allgather_base(received.view(-1), mine)])

    def _post(self, tensors: Sequence[torch.Tensor], start: Callable[[Any], Sequence[Any]]) -> bool:
        def post(transfer: Transfer) -> None:
            transfer.works = start(transfer.backend)

        return self._start(tensors, post)

    def _start(self, tensors: Sequence[torch.Tensor], start: Callable[[Transfer], None]) -> bool:
        transfer = Transfer(backend=self._backend, tensors=tensors)
        if self._is_alone or self._backend is not None:
            self._in_flight.append(transfer)  # first, as a lost member may block posting: `abort_sum` must find it
        if self._is_alone:
            return True
        if self._backend is None:
            return False  # an earlier sum has broken it
        try:
            start(transfer)
        except RuntimeError as error:
            return self.give_up(error)
        return True

    def poll(self) -> int:
        """Number of posted sums, in posting order, that have completed since the last call. Never waits.

        If a connection is broken, all other sums are given up and `evidence` is set.
        """
        num_complete = 0
        try:
            while self._in_flight and self._advance(self._in_flight[0]):
                self._in_flight.popleft()
                num_complete += 1
            for transfer in self._in_flight:
                self._advance(transfer)
        except RuntimeError as error:
            self.give_up(error)
        return num_complete

    def _advance(self, transfer: Transfer) -> bool:
        """`Transfer.advance`, but raises RuntimeError if the communicator was aborted."""
        is_over = transfer.advance()
        # Checked afterwards: an aborted sum looks complete, and another thread may abort it at any moment.
        if transfer.backend is not None and transfer.backend is self._aborted:
            raise RuntimeError("aborted: the log has moved on")
        return is_over

    def wait(self, is_decided: Callable[[], bool]) -> bool:
        """Waits until the first sum in flight has ended; `poll` then reports whether it succeeded.

        Returns False, with `evidence`, if the log has a newer entry, the timeout expires or no sum is in flight.
        """
        if not self._in_flight:
            return False
        return self._wait(self._has_ended, self._pause, is_decided) or self.give_up()

    def _has_ended(self) -> bool:
        """Whether the first sum in flight has ended, with or without success."""
        try:
            return all([self._advance(transfer) for transfer in self._in_flight][:1])
        except RuntimeError as error:
            self.give_up(error)
            return True

    def _pause(self, longest_s: float) -> None:
        first = self._in_flight[0]
        if self._device.type == "cuda":
            self._end_of_work.wait(first.works[-1], longest_s)  # its works end in order
        else:
            first.pause(longest_s)

    def reduce(self, buffer: torch.Tensor, is_decided: Callable[[], bool]) -> bool:
        """Sums one buffer in place; returns whether the sum is complete. If not, the buffer must never be reused.

        Collective over: rank j of every member group.
        """
        self.start_attempt()
        return self.connect(is_decided) and self.post(buffer) and self.wait(is_decided) and self.poll() == 1

    def give_up(self, error: RuntimeError | None = None) -> Literal[False]:
        """Abandons the communicator and all sums in flight, as failed with `error` or as obsolete. Returns False."""
        if error is not None:
            self.evidence = f"connection: {str(error).splitlines()[0]}"
        self.evidence = self.evidence or "the log has moved on"
        self._drop_backend()
        return False

    def first_in_flight(self) -> object | None:
        """The oldest sum in flight, for `abort_sum`; None on CPUs, which abort none. Callable from any thread."""
        try:
            return self._in_flight[0] if self._device.type == "cuda" else None
        except IndexError:
            return None

    def abort_sum(self, in_flight: object) -> None:
        """Aborts a sum's communicator; `poll` then counts none of its sums. Callable from any thread; never waits."""
        assert isinstance(in_flight, Transfer), "one of `first_in_flight`"
        self._abort_backend(in_flight.backend)

    @property
    def _is_alone(self) -> bool:
        return len(self._members) == 1

    def _construct(self, build: _Build, size: int, name: str, rank: int, former: tuple[str, int] | None) -> Any:
        """Runs in the build's thread. Returns the backend, or the exception for the main thread to read."""
        try:
            store = self._store.rendezvous(name, rank, self._timeout.total_seconds(), former)
            if self._device.type == "cuda":
                return nccl.connect(
                    store, rank, size, device=self._device, timeout=self._timeout, is_wanted=lambda: build.is_wanted
                )
            return dist.ProcessGroupGloo(store, rank, size, self._timeout)
        except Exception as error:  # noqa: BLE001  (handled in the rank's main thread)
            # Without its frames: they form a cycle with the build, which would keep the store open until it is
            # garbage-collected.
            return error.with_traceback(None)

    def _finish_build(self, is_decided: Callable[[], bool]) -> bool:
        """Waits for a build under way. Returns whether there is a communicator."""
        if self._build is None:
            return self._backend is not None
        build = self._build
        if is_decided() or not self._wait(lambda: not build.thread.is_alive(), build.thread.join, is_decided):
            return False
        return self._take_over(build)

    def _take_over(self, build: _Build) -> bool:
        self._build = None
        result = build.result[0]
        if isinstance(result, Exception):
            self.evidence = f"rebuild: {result}"
            return False
        self._backend = result
        return True

    def _wait(
        self, is_done: Callable[[], bool], pause: Callable[[float], object], is_decided: Callable[[], bool]
    ) -> bool:
        """Waits for `is_done`; returns False if a newer log entry or the timeout comes first."""
        longest_s = min(self._ask_interval_s, _PAUSE_S)
        ask_log_at_s = time.monotonic() + self._ask_interval_s
        end_s = time.monotonic() + self._timeout.total_seconds()
        while not is_done():
            pause(longest_s)
            self._probe.progress()
            if time.monotonic() >= end_s:  # gloo has its own timeout, NCCL's is not visible to a poller
                self.evidence = f"no end within reduce.timeout_s={self._timeout.total_seconds():g}"
                return False
            if time.monotonic() >= ask_log_at_s:
                if is_decided():
                    return is_done()
                ask_log_at_s = time.monotonic() + self._ask_interval_s
        return True

    def _abandon(self) -> None:
        if self._build is not None:
            self._build.is_wanted = False
            self._abandoned_builds.append(self._build)
            self._build = None
        self._drop_backend()

    def _drop_backend(self) -> None:
        """Keeps everything in flight until it has ended, and aborts the backend where possible (NCCL)."""
        self._abandoned += self._in_flight
        self._in_flight.clear()
        if self._backend is not None:
            self._abandoned.append(Transfer(backend=self._backend))
            self._abort_backend(self._backend)
            self._backend = None

    def _abort_backend(self, backend: Any) -> None:
        if self._device.type == "cuda" and backend is not None and backend is not self._aborted:
            self._aborted = backend
            nccl.abort(backend)

    def _sweep(self) -> None:
        self._abandoned = [transfer for transfer in self._abandoned if transfer.may_write]
        for build in self._abandoned_builds:
            is_done = not build.thread.is_alive()
            if is_done and self._device.type == "cuda" and not isinstance(build.result[0], Exception):
                nccl.abort(build.result[0])
        self._abandoned_builds = [build for build in self._abandoned_builds if build.thread.is_alive()]
