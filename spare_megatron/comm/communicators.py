"""The cross-group communicator of a rank, rebuilt in place when the surviving groups change.

A bare c10d backend (gloo or NCCL) on a store prefix that is never reused, so that a lost group breaks nothing else.
gloo's constructor blocks until all members arrive, so it runs in a thread. gloo's `abort()` ends no work, its
destructor waits for it, and it may still write its tensors: all is kept until it has ended. For NCCL see `comm.nccl`.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from spare_megatron.comm import nccl
from spare_megatron.comm.nccl import Call, WarmUp, connecting, no_warm_up
from spare_megatron.comm.transfers import Exchange, SharedBackend, Transfer
from spare_megatron.config.supported_versions import check_names
from spare_megatron.devices import gpu
from spare_megatron.machine.gpus.device_errors import ends_process
from spare_megatron.mcore.model.probe import Probe
from spare_megatron.process.shortages import shortage_in
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore
from spare_megatron.voting.agreement import GroupAgreement
from spare_megatron.voting.fencing import is_connection_error

check_names("torch", dist, "ProcessGroupGloo._allgather_base")  # of all backends

_POLL_S = 0.0005
_PAUSE_S = 0.050
"""Longest sleep between two progress reports while waiting for something that wakes the rank."""
_NUM_TAGS = 1 << 30
_FAILURES = (RuntimeError, MemoryError, OSError)
"""What c10d raises for a broken connection, or for lack of memory, threads or open files."""
MOVED_ON = "the log has moved on"
"""Evidence of a wait that an entry has ended."""
_MAX_RENDEZVOUS = 2
"""Number of latest rendezvous where other members may still be; what this rank left at earlier ones is removed."""


@dataclass(slots=True)
class _Build:
    """A connection that a thread builds or extends; the warm-up transfer under way is the last of `transfers`."""

    result: list[SharedBackend | Exception] = field(default_factory=list)
    """The connection, or the exception that a step of it raised."""
    thread: threading.Thread | None = None
    transfers: list[Transfer] = field(default_factory=list)
    is_wanted: bool = True

    @property
    def is_over(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


@dataclass(kw_only=True)
class CrossGroupCommunicator:
    """The cross-group communicator of rank j = `position` of every group, as one rank sees it across rebuilds.

    The type of `device` selects gloo or NCCL. A build or a reduction takes `timeout_s` at most; a waiting rank reads
    the log every `ask_interval_s` (`store.decision_log.ask_interval_s`) and reports progress to `probe`. `warm_up`
    makes the calls after which NCCL has connected everything, for a number of members.
    """

    group: GroupId
    position: int
    device: torch.device
    store: ControlStore
    timeout_s: float
    ask_interval_s: float
    probe: Probe
    warm_up: WarmUp = no_warm_up

    def __post_init__(self) -> None:
        self._timeout = timedelta(seconds=self.timeout_s)
        self._end_of_work = nccl.EndOfWork(self.device)
        self._connection: SharedBackend | None = None
        self._build: _Build | None = None
        self.members: tuple[GroupId, ...] = (self.group,)
        """The groups of the current communicator, ascending."""
        self._num_shares = 0  # posted to this communicator
        self.num_posted_bytes = 0
        """Of all tensors given to communicators for sums or gathers so far; none while this group is alone."""
        self._in_flight: deque[Transfer] = deque()
        self._linked: set[tuple[GroupId, GroupId]] = set()  # pairs that can send, of which this group is one
        self._aborted: list[SharedBackend] = []  # until their devices are found sound
        self._abandoned: list[Transfer] = []
        self._abandoned_builds: list[_Build] = []
        self._rendezvous: deque[tuple[str, int]] = deque()  # the latest rendezvous, with this rank's index in each
        self.evidence = ""
        """Why the last wait ended without a result."""
        self.error: Exception | None = None
        """The error behind `evidence`, if this rank has met one itself."""
        self.ready_at_s: float | None = None
        """Monotonic time at which the current attempt had its communicator; None before that."""

    def start_build(self, key: int, members: Sequence[GroupId]) -> None:
        """Drops the current communicator and starts to build the next one in a thread."""
        self._abandon()
        self.members, self._num_shares, self._linked = tuple(members), 0, set()
        if self._is_alone:
            return
        self._rendezvous.append((keys.communicator(key, self.position), list(members).index(self.group)))
        former = self._rendezvous.popleft() if len(self._rendezvous) > _MAX_RENDEZVOUS else None
        place = *self._rendezvous[-1], former
        build = self._build = _Build()
        self._run_in_thread(build, lambda: build.result.append(self._construct(build, len(members), *place)))

    def connect_pairs(self, pairs: Collection[tuple[GroupId, GroupId]]) -> None:
        """Connects (sender, receiver) pairs before `post_shares` needs them; sums cannot be posted meanwhile.
        Collective over: the members that are in a new pair. On CPUs all pairs are connected.
        """
        new = [pair for pair in sorted(set(pairs) - self._linked) if self.group in pair and pair[0] != pair[1]]
        self._linked.update(new)
        is_there = self._build is not None or self._connection is not None
        if self.device.type == "cpu" or not new or not is_there:
            return
        index = self.members.index
        call = connecting([(index(sender), index(to)) for sender, to in new], index(self.group), self.device)
        build = self._build or _Build(result=[self._connection] if self._connection is not None else [])
        earlier, self._build, self._connection = build.thread, build, None
        self._run_in_thread(build, lambda: self._extend(build, earlier, call))

    def _run_in_thread(self, build: _Build, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        try:
            thread.start()
            build.thread = thread
        except (RuntimeError, MemoryError) as error:  # the system has no room for another thread
            build.result.append(error)

    def start_attempt(self) -> None:
        """Starts an attempt: clears `evidence`, `error` and `ready_at_s`, and frees abandoned work that has ended."""
        self._sweep()
        self.evidence, self.error, self.ready_at_s = "", None, None

    def is_ready(self) -> bool:
        """Whether sums can be posted now. Never waits."""
        if self._build is not None and self._build.is_over:
            self._take_over(self._build)
        is_there = self._is_alone or self._connection is not None
        if is_there and self.ready_at_s is None:
            self.ready_at_s = time.monotonic()
        return is_there

    def connect(self, is_decided: Callable[[], bool]) -> bool:
        """Waits until sums can be posted; False, with `evidence`, if they cannot. Does not query the log if the
        communicator exists: that would overload the store in large runs.
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
        """Starts to sum shares of a buffer for their recipients, as in `transfers.Share`, and `extras` for all, whose
        completion proves that every member has posted the whole buffer. Collective and returns as `post`, with the same
        recipients.
        """
        index, first_tag = self.members.index, self._num_shares % _NUM_TAGS
        self._num_shares += len(shares)
        ranked = [(values, tuple(map(index, groups))) for values, groups in shares]

        def start(transfer: Transfer, backend: Any) -> None:
            exchange = Exchange(backend, index(self.group), is_polled=self.device.type != "cpu")
            exchange.post(transfer, ranked, extras, first_tag)

        return self._start([*(values for values, _ in shares), extras], start)

    def post_gather(self, received: torch.Tensor, mine: torch.Tensor) -> bool:
        """Starts an all-gather: row i of `received` becomes `mine` of the i-th member. Collective, and returns, as
        `post`.
        """
        return self._post([received, mine], lambda backend: [backend._allgather_base(received.view(-1), mine)])

    def _post(self, tensors: Sequence[torch.Tensor], start: Callable[[Any], Sequence[Any]]) -> bool:
        def post(transfer: Transfer, backend: Any) -> None:
            transfer.works = start(backend)

        return self._start(tensors, post)

    def _start(self, tensors: Sequence[torch.Tensor], start: Callable[[Transfer, Any], None]) -> bool:
        connection = self._connection
        transfer = Transfer(connection=connection, tensors=tensors)
        if self._is_alone or connection is not None:
            self._in_flight.append(transfer)  # first, as a lost member may block posting: `abort_sum` must find it
        if self._is_alone:
            return True
        if connection is None:
            return False  # an earlier sum has broken it
        self.num_posted_bytes += sum(tensor.nbytes for tensor in tensors)
        try:
            self._begin(transfer, connection, start)
        except _FAILURES as error:
            return self.give_up(error)
        return True

    def _begin(self, transfer: Transfer, connection: SharedBackend, start: Callable[[Transfer, Any], None]) -> None:
        with connection.using() as backend:
            if self.device.type != "cpu":
                transfer.preceding = nccl.event_now()
            start(transfer, backend)

    def poll(self) -> int:
        """Number of posted sums, in order, that have completed since the last call. Never waits. If a connection is
        broken, all other sums are given up and `evidence` is set.
        """
        num_complete = 0
        try:
            while self._in_flight and self._in_flight[0].advance():
                self._in_flight.popleft()
                num_complete += 1
            for transfer in self._in_flight:
                transfer.advance()
        except _FAILURES as error:
            self.give_up(error)
        return num_complete

    def wait(self, is_decided: Callable[[], bool]) -> bool:
        """Waits until the first sum in flight has ended, with or without success. False, with `evidence`, if the log
        has a newer entry, the timeout expires or no sum is in flight.
        """
        if not self._in_flight:
            return False
        return self._wait(self._has_ended, self._pause, is_decided) or self.give_up()

    def _has_ended(self) -> bool:
        """Whether the first sum in flight has ended, with or without success."""
        try:
            return all([transfer.advance() for transfer in self._in_flight][:1])
        except _FAILURES as error:
            self.give_up(error)
            return True

    def _pause(self, longest_s: float) -> None:
        first = self._in_flight[0]
        if self.device.type != "cpu":
            self._end_of_work.wait(first.works[-1], longest_s)  # its works end in order
        else:
            first.pause(longest_s)

    def reduce(self, buffer: torch.Tensor, is_decided: Callable[[], bool]) -> bool:
        """Sums one buffer in place; unless it returns True, the buffer must never be reused. Collective as `post`."""
        self.start_attempt()
        return self.connect(is_decided) and self.post(buffer) and self.wait(is_decided) and self.poll() == 1

    def give_up(self, error: Exception | None = None) -> Literal[False]:
        """Abandons the communicator and all sums in flight, as failed with `error` or as obsolete. Returns False, or
        raises an error after which this process cannot use its device.
        """
        if error is not None:
            self._require_device(error)
            self.evidence, self.error = f"connection: {_first_line(error)}", error
        self.evidence = self.evidence or MOVED_ON
        self._drop_connection()
        return False

    def first_in_flight(self) -> Transfer | None:
        """The oldest sum in flight, for `abort_sum`; None on CPUs, which abort none. Callable from any thread."""
        return next(iter(self._all_in_flight()), None)

    def first_waiting(self) -> Transfer | None:
        """The oldest sum in flight that is not complete, as far as torch's watchdog knows. Callable from any thread."""
        return next((transfer for transfer in self._all_in_flight() if transfer.is_waiting), None)

    def abort_sum(self, in_flight: Transfer, reason: str = MOVED_ON) -> None:
        """Aborts a sum's communicator; `poll` then counts none of its sums. Callable from any thread; never waits."""
        self._abort(in_flight.connection, reason)

    @property
    def may_break_device(self) -> bool:
        """Whether a memory error of the device may be due to communicators that are being aborted, here or at peers."""
        return any(connection.may_break_device for connection in self._aborted)

    def _all_in_flight(self) -> list[Transfer]:
        if self.device.type == "cpu":
            return []
        build = self._build
        return [*self._in_flight, *([] if build is None else build.transfers[-1:])]

    @property
    def _is_alone(self) -> bool:
        return len(self.members) == 1

    def _construct(
        self, build: _Build, size: int, name: str, rank: int, former: tuple[str, int] | None
    ) -> SharedBackend | Exception:
        """Runs in the build's thread. Returns the connection, or the exception for the main thread to read."""
        try:
            store = self.store.rendezvous(name, rank, self.timeout_s, former)
            if self.device.type == "cpu":
                gloo = dist.ProcessGroupGloo(store, rank, size, self._timeout)
                return SharedBackend(gloo, self.device, self.timeout_s)
            backend = nccl.connect(
                store, rank, size, device=self.device, timeout=self._timeout, is_wanted=lambda: build.is_wanted
            )
            connection = SharedBackend(backend, self.device, self.timeout_s)
            self._rehearse(build, connection, self.warm_up(size))
        except Exception as error:  # noqa: BLE001  (handled in the rank's main thread)
            return self._why_failed(error)
        return connection

    def _extend(self, build: _Build, earlier: threading.Thread | None, call: Call) -> None:
        """Runs in the build's thread, after an earlier one."""
        if earlier is not None:
            earlier.join()
        connection = build.result[0]
        if isinstance(connection, SharedBackend):
            try:
                self._rehearse(build, connection, [call])
            except Exception as error:  # noqa: BLE001  (handled in the rank's main thread)
                build.result[0] = self._why_failed(error)

    def _rehearse(self, build: _Build, connection: SharedBackend, calls: Iterable[Call]) -> None:
        """Makes calls in which NCCL connects, one by one, as a kernel must not wait while a later call connects."""

        def start(call: Call) -> Callable[[Transfer, Any], None]:
            def post(transfer: Transfer, backend: Any) -> None:
                transfer.works = [call.start(backend)]

            return post

        connection.is_connecting = True
        try:
            with nccl.own_stream(self.device):
                for call in calls:
                    build.transfers[:] = [transfer := Transfer(connection=connection, tensors=call.tensors)]
                    self._begin(transfer, connection, start(call))
                    while not transfer.advance():
                        if not build.is_wanted:
                            raise nccl.NoLongerWanted
                        time.sleep(_POLL_S)
        except Exception as error:
            self._abort(connection, str(error) or MOVED_ON)
            raise
        build.transfers.clear()
        connection.is_connecting = False

    def _why_failed(self, error: Exception) -> Exception:
        """The error without its frames, whose cycle with the build would keep the store open."""
        if self.device.type != "cpu" and not isinstance(error, nccl.NoLongerWanted):
            with contextlib.suppress(RuntimeError):
                gpu.empty_cache()  # NCCL may lack the memory that torch holds; the next attempt builds again
        return error.with_traceback(None)

    def _finish_build(self, is_decided: Callable[[], bool]) -> bool:
        """Waits for a build under way. Returns whether there is a communicator."""
        if self._build is None:
            return self._connection is not None
        build, thread = self._build, self._build.thread
        if thread is not None and (is_decided() or not self._wait(lambda: build.is_over, thread.join, is_decided)):
            return False
        return self._take_over(build)

    def find_error(self) -> Exception | None:
        """`error`, or that of a build that fails at once although this rank no longer waits for it."""
        build = self._build
        if self.error is None and build is not None:
            if build.thread is not None:
                build.thread.join(_PAUSE_S)
            if build.is_over and isinstance(build.result[0], Exception):
                self._take_over(build)
        return self.error

    def _take_over(self, build: _Build) -> bool:
        self._build = None
        self._abandoned += build.transfers
        result = build.result[0]
        if isinstance(result, Exception):
            self._require_device(result)
            self.evidence, self.error = f"rebuild: {_first_line(result)}", result
            return False
        self._connection = result
        return True

    def _require_device(self, error: Exception) -> None:
        """Raises the error if every later use of the device would fail, too: another communicator would not help."""
        if self.device.type != "cpu" and ends_process(error):
            raise error

    def _wait(
        self, is_done: Callable[[], bool], pause: Callable[[float], object], is_decided: Callable[[], bool]
    ) -> bool:
        """Waits for `is_done`; returns False if a newer log entry or the timeout comes first."""
        longest_s = min(self.ask_interval_s, _PAUSE_S)
        ask_log_at_s = time.monotonic() + self.ask_interval_s
        end_s = time.monotonic() + self.timeout_s
        while not is_done():
            pause(longest_s)
            self.probe.progress()
            if time.monotonic() >= end_s:  # gloo has its own timeout, NCCL's is not visible to a poller
                self.evidence = f"no end within reduce.timeout_s={self.timeout_s:g}"
                return False
            if time.monotonic() >= ask_log_at_s:
                if is_decided():
                    return is_done()
                ask_log_at_s = time.monotonic() + self.ask_interval_s
        return True

    def _abandon(self) -> None:
        if self._build is not None:
            self._build.is_wanted = False
            self._abandoned_builds.append(self._build)
            self._build = None
        self._drop_connection()

    def _drop_connection(self) -> None:
        """Keeps everything in flight until it has ended, and aborts the backend where possible (NCCL)."""
        self._abandoned += self._in_flight
        self._in_flight.clear()
        if self._connection is not None:
            self._abandoned.append(Transfer(connection=self._connection))
            self._abort(self._connection, MOVED_ON)
            self._connection = None

    def _abort(self, connection: SharedBackend | None, reason: str) -> None:
        if self.device.type != "cpu" and connection is not None and not connection.end_reason:
            self._aborted.append(connection)
            connection.abort(reason)

    def _sweep(self) -> None:
        self._aborted = [connection for connection in self._aborted if connection.may_break_device]
        self._abandoned = [transfer for transfer in self._abandoned if transfer.may_write]
        for build in self._abandoned_builds:
            if build.is_over:
                self._abandoned += build.transfers
                if isinstance(build.result[0], SharedBackend):
                    self._abort(build.result[0], MOVED_ON)
        self._abandoned_builds = [build for build in self._abandoned_builds if not build.is_over]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def report_incomplete(communicator: CrossGroupCommunicator, agreement: GroupAgreement, head: int) -> str:
    """Reports in the store that this rank posts no more before entry `head`, so that no other waits for it. Returns
    which resource this rank lacks, if that is why. `communicator.evidence` becomes the failure, or the first that any
    rank has reported.
    """
    lacking = _lacking(communicator.error)
    if lacking:
        communicator.evidence += f" ({lacking})"
    first = agreement.report_broken(head, communicator.evidence)
    if communicator.evidence != MOVED_ON:
        return lacking
    communicator.evidence = first
    return _lacking(communicator.find_error())


def _lacking(error: Exception | None) -> str:
    return "" if error is None or is_connection_error(error) else shortage_in(error)
