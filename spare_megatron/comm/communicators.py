"""The cross-group communicator of one rank: built aside, used out of place, abandoned without waiting.

Rank j of every group belongs to the j-th cross-group communicator. It is a bare c10d backend on a store prefix
that is never used twice, registered in no world, so that a dead group breaks nothing else.

What gloo makes necessary (found by measuring):
    its constructor blocks until every member is there, so it runs in a thread with a store connection of its own;
    abort() ends no work in flight and the destructor waits for it, so what is abandoned is kept until it has ended;
    abandoned work may still write its tensor, so that is kept with it and never used again.
What NCCL makes necessary is in `comm.nccl`.
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
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.interface import ControlStore

_POLL_S = 0.0005
_PAUSE_S = 0.050
"""Longest wait without a sign of life, where what is waited for wakes the rank up."""
_NUM_TAGS = 1 << 30
_MOST_MET = 2
"""Rendezvous at which others may still be: what this rank has left at earlier ones is removed."""


@dataclass(slots=True)
class _Build:
    """A communicator on its way, in a thread."""

    thread: threading.Thread
    result: list[Any] = field(default_factory=list)
    """The backend, or the exception that its constructor raised."""
    is_wanted: bool = True


class CrossGroupCommunicator:
    """The j-th cross-group communicator as one rank sees it, over its rebuilds.

    Args:
        group: This rank's group.
        position: j, this rank's index inside its group.
        device: Where the tensors are; decides between gloo and NCCL.
        store: The control store, for the rendezvous.
        timeout_s: Longest wait for a build or a reduction.
        ask_interval_s: How often it looks at the log while it waits (`store.decision_log.ask_interval_s`).
        probe: Told when the reduction is in flight, and that the rank is there while it waits.
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
        self._backend: Any = None
        self._build: _Build | None = None
        self._members: tuple[GroupId, ...] = (group,)
        self._num_shares = 0  # posted to this communicator
        self._in_flight: deque[Transfer] = deque()
        self._ended: Any = None  # the last backend that was
        self._abandoned: list[Transfer] = []
        self._abandoned_builds: list[_Build] = []
        self._met: deque[tuple[str, int]] = deque()  # the last rendezvous, each with this rank's number there
        self.evidence = ""
        """Why the last wait ended without a result."""
        self.ready_at_s: float | None = None
        """Monotonic time at which the last reduction had its communicator; None if it never had."""

    def begin_build(self, key: int, members: Sequence[GroupId]) -> None:
        """Lets go of the present communicator and begins to build the next one in the background."""
        self._let_go()
        self._members, self._num_shares = tuple(members), 0
        if self._is_alone:
            return
        self._met.append((f"communicator/{key}/{self._position}", list(members).index(self._group)))
        build = _Build(
            thread=threading.Thread(
                target=lambda *where: build.result.append(self._construct(build, len(members), *where)),
                args=(*self._met[-1], self._met.popleft() if len(self._met) > _MOST_MET else None),
            )
        )
        build.thread.daemon = True
        build.thread.start()
        self._build = build

    def begin(self) -> None:
        """Begins an attempt: what was said of the last one is forgotten."""
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
        """Waits until sums can be posted. False, with evidence, if they never can.

        Where they can already, nobody is asked: of thousands of ranks, in every step, that is more than a store serves,
        and a sum that comes nevertheless counts.
        """
        if not self._is_alone and not self._finish_build(is_decided):
            return self.give_up()
        return self.is_ready()

    def post(self, tensor: torch.Tensor) -> bool:
        """Starts to sum the tensor over all members, in its place.

        Collective over: rank j of every member group, in the same order of tensors. The tensor belongs to the
        communicator until `poll` or `wait` has counted it, and for ever if it is given up: a transfer may still
        write it.

        Returns:
            False, with evidence, if the connection is broken.
        """
        return self._post([tensor], lambda backend: [backend.allreduce([tensor], dist.AllreduceOptions())])

    def post_shares(self, shares: Sequence[tuple[torch.Tensor, Sequence[GroupId]]], extras: torch.Tensor) -> bool:
        """Starts to sum shares of a buffer over all members, each for some of them, and for everybody some extras.

        Collective over: rank j of every member group, in the same order, with the same recipients. The tensors belong
        to the communicator as in `post`.

        Args:
            shares: Values, and who gets their sum in their place, first who sends it to the others; all if empty. Where
                it does not come, they hold anything afterwards.
            extras: When it is complete here, everybody has posted all of this.

        Returns:
            False, with evidence, if the connection is broken.
        """
        index, first_tag = self._members.index, self._num_shares % _NUM_TAGS
        self._num_shares += len(shares)
        ranked = [BucketShare(values=values, recipients=tuple(map(index, groups))) for values, groups in shares]

        def start(transfer: Transfer) -> None:
            exchange = Exchange(transfer.backend, index(self._group), is_polled=self._device.type == "cuda")
            exchange.post(transfer, ranked, extras, first_tag)

        return self._start([*(values for values, _ in shares), extras], start)

    def post_gather(self, received: torch.Tensor, mine: torch.Tensor) -> bool:
        """Starts to send a tensor to all members and to fill a row of another from each, in the order of the members.

        Collective over: rank j of every member group. Both tensors belong to the communicator as in `post`.

        Returns:
            False, with evidence, if the connection is broken.
        """
        return self._post([received, mine], lambda backend: [backend._allgather_base(received.view(-1), mine)])

    def _post(self, tensors: Sequence[torch.Tensor], start: Callable[[Any], Sequence[Any]]) -> bool:
        def post(transfer: Transfer) -> None:
            transfer.works = start(transfer.backend)

        return self._start(tensors, post)

    def _start(self, tensors: Sequence[torch.Tensor], start: Callable[[Transfer], None]) -> bool:
        transfer = Transfer(backend=self._backend, tensors=tensors)
        if self._is_alone or self._backend is not None:
            self._in_flight.append(transfer)  # before it is posted: what a lost member holds up can be ended
        if self._is_alone:
            return True
        if self._backend is None:
            return False  # it has broken meanwhile
        try:
            start(transfer)
        except RuntimeError as error:
            return self.give_up(error)
        return True

    def poll(self) -> int:
        """How many of the posted sums are complete since the last call, in their order. Never waits.

        All others are given up, with evidence, once a connection is broken.
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
        """Posts what follows, if it is time. Returns whether all has ended well.

        Raises:
            RuntimeError: It has not ended well.
        """
        is_over = transfer.advance()
        # Not before: it looks complete from then on, and another thread may end it at any moment.
        if transfer.backend is not None and transfer.backend is self._ended:
            raise RuntimeError("ended, for nobody needed it any more")
        return is_over

    def wait(self, is_decided: Callable[[], bool]) -> bool:
        """Waits until the first of the sums in flight has ended, in whatever way; `poll` says which.

        Returns:
            False, with evidence, if `is_decided` said that the log has moved on, so that nobody needs them any more, or
            if none is in flight, all having been given up.
        """
        if not self._in_flight:
            return False
        return self._wait(self._has_ended, self._pause, is_decided) or self.give_up()

    def _has_ended(self) -> bool:
        """Whether the first transfer in flight has, in whatever way."""
        try:
            return all([self._advance(transfer) for transfer in self._in_flight][:1])
        except RuntimeError as error:
            self.give_up(error)
            return True

    def _pause(self, longest_s: float) -> None:
        """Waits a little for the end of the first transfer in flight."""
        if self._device.type == "cuda" or not self._in_flight:
            time.sleep(_POLL_S)  # NCCL tells nobody
        else:
            self._in_flight[0].pause(longest_s)

    def reduce(self, buffer: torch.Tensor, is_decided: Callable[[], bool]) -> bool:
        """Sums one buffer over all members, in place of the buffer.

        Collective over: rank j of every member group. The buffer belongs to the communicator when the result is False.

        Returns:
            True if the sum is complete on this rank; False if a connection broke, or if `is_decided` said that the
            log has moved on.
        """
        self.begin()
        return self.connect(is_decided) and self.post(buffer) and self.wait(is_decided) and self.poll() == 1

    def give_up(self, error: RuntimeError | None = None) -> Literal[False]:
        """Gives up all sums in flight: a connection broke, or nobody needs them any more if there is no error."""
        if error is not None:
            self.evidence = f"connection: {str(error).splitlines()[0]}"
        self.evidence = self.evidence or "the log has moved on"
        self._drop_backend()
        return False

    def first_in_flight(self) -> object | None:
        """The first of the posted sums that have not been counted; the same object as long as it is. From any thread.

        On GPUs alone: `end` is of no use elsewhere.
        """
        try:
            return self._in_flight[0] if self._device.type == "cuda" else None
        except IndexError:
            return None

    def end(self, in_flight: object) -> None:
        """Ends what `first_in_flight` has given, and all that goes with it. From any thread; not to wait is up to them.

        None of these sums is counted by `poll` any more.
        """
        assert isinstance(in_flight, Transfer), "one of `first_in_flight`"
        self._end(in_flight.backend)

    @property
    def _is_alone(self) -> bool:
        return len(self._members) == 1

    def _construct(self, build: _Build, size: int, name: str, rank: int, former: tuple[str, int] | None) -> Any:
        """The new backend, or the exception: it is read in the rank's own thread."""
        try:
            store = self._store.rendezvous(name, rank, self._timeout.total_seconds(), former)
            if self._device.type == "cuda":
                return nccl.connect(
                    store, rank, size, device=self._device, timeout=self._timeout, is_wanted=lambda: build.is_wanted
                )
            return dist.ProcessGroupGloo(store, rank, size, self._timeout)
        except Exception as error:  # noqa: BLE001  (raised where it can be handled: in the rank's thread)
            # Without its frames: this one holds the build, which holds the error, so that they and the store would stay
            # open until cyclic garbage is collected.
            return error.with_traceback(None)

    def _finish_build(self, is_decided: Callable[[], bool]) -> bool:
        """Whether there is a communicator to use, after waiting for the one being built."""
        if self._build is None:
            return self._backend is not None
        build = self._build
        if is_decided() or not self._wait(lambda: not build.thread.is_alive(), build.thread.join, is_decided):
            return False
        return self._take_over(build)

    def _take_over(self, build: _Build) -> bool:
        """Whether what was built can be used."""
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
        """Waits for is_done, pause by pause; False if the log was decided first, or the time is over."""
        longest_s = min(self._ask_interval_s, _PAUSE_S)
        ask_log_at_s = time.monotonic() + self._ask_interval_s
        end_s = time.monotonic() + self._timeout.total_seconds()
        while not is_done():
            pause(longest_s)
            self._probe.progress()
            if time.monotonic() >= end_s:  # gloo keeps time by itself, NCCL does not tell a poller
                self.evidence = f"no end within reduce.timeout_s={self._timeout.total_seconds():g}"
                return False
            if time.monotonic() >= ask_log_at_s:
                if is_decided():
                    return is_done()
                ask_log_at_s = time.monotonic() + self._ask_interval_s
        return True

    def _let_go(self) -> None:
        if self._build is not None:
            self._build.is_wanted = False
            self._abandoned_builds.append(self._build)
            self._build = None
        self._drop_backend()

    def _drop_backend(self) -> None:
        """Keeps what is in flight, whatever becomes of it; where that can be ended, it is."""
        self._abandoned += self._in_flight
        self._in_flight.clear()
        if self._backend is not None:
            self._abandoned.append(Transfer(backend=self._backend))
            self._end(self._backend)
            self._backend = None

    def _end(self, backend: Any) -> None:
        """Ends a backend and all of its sums, where that is possible."""
        if self._device.type == "cuda" and backend is not None and backend is not self._ended:
            self._ended = backend
            nccl.end(backend)

    def _sweep(self) -> None:
        """Frees what was abandoned and has ended since."""
        self._abandoned = [transfer for transfer in self._abandoned if transfer.may_write]
        for build in self._abandoned_builds:
            is_done = not build.thread.is_alive()
            if is_done and self._device.type == "cuda" and not isinstance(build.result[0], Exception):
                nccl.end(build.result[0])
        self._abandoned_builds = [build for build in self._abandoned_builds if build.thread.is_alive()]
