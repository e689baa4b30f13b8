"""Transfers of a cross-group communicator that are under way, and how a sum comes to some of the members alone."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.comm import nccl


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketShare:
    """Values that are summed over all members, in their place, for some of them.

    Attributes:
        values: A range of a buffer. Where the sum does not come, it holds anything afterwards.
        recipients: Indices of the members that get the sum, the one first that sends it to the others; all if empty.
    """

    values: torch.Tensor
    recipients: tuple[int, ...] = ()


@dataclass(slots=True)
class Transfer:
    """A sum or a gathering under way. All of it must live until the work has ended.

    Attributes:
        backend: What carries it.
        works: What has to end.
        tensors: What may be written until then.
        follow: Posts what comes after that.
    """

    backend: Any
    works: Sequence[Any] = ()
    tensors: Sequence[torch.Tensor] = ()
    follow: Callable[[], Sequence[Any]] | None = None
    is_over: bool = False
    _awaited: tuple[Any, threading.Event] | None = None

    def advance(self) -> bool:
        """Posts what follows, if it is time. Returns whether all has ended well.

        Raises:
            RuntimeError: The connection is broken.
        """
        while not self.is_over and all(work.is_completed() for work in self.works):
            for work in self.works:
                work.wait()  # raises what went wrong
            self.is_over = self.follow is None
            if self.follow is not None:
                post, self.follow = self.follow, None
                self.works = post()
        return self.is_over

    def pause(self, longest_s: float) -> None:
        """Waits for the end of the first work that has not ended, so long at most; of gloo's alone.

        Looking again and again instead would cost those their processor who compute what is waited for.
        """
        work = next((work for work in self.works if not work.is_completed()), None)
        if work is None:
            return
        if self._awaited is None or self._awaited[0] is not work:
            ends = threading.Event()
            work.get_future().add_done_callback(lambda _: ends.set())
            self._awaited = work, ends
        if self._awaited[1].wait(longest_s):
            with contextlib.suppress(RuntimeError):  # `advance` tells
                work.wait()  # it ends in a moment

    @property
    def may_write(self) -> bool:
        """Whether some transfer has not ended."""
        return not all(work.is_completed() for work in self.works)


class Exchange:
    """How shares of one buffer are summed and sent by one member, in the same order on all of them.

    Args:
        backend: Connects the members.
        rank: Index of this one.
        is_polled: Whether transfers between two members tell a poller of their end: NCCL's do, gloo's do not.
    """

    def __init__(self, backend: Any, rank: int, *, is_polled: bool) -> None:
        self._backend = backend
        self._rank = rank
        self._is_polled = is_polled

    def post(self, transfer: Transfer, shares: Sequence[BucketShare], extras: torch.Tensor, first_tag: int) -> None:
        """Starts to sum shares, and for everybody some extras.

        A tag of its own for each share, the same on all members, tells apart what is sent of several buffers: which of
        two sums comes first may differ from member to member.

        With NCCL everything is posted at once, for the stream keeps the order. With gloo a sum is sent when it is here.
        """
        transfer.works = self._sums(shares, extras)
        if self._is_polled:
            transfer.works = [*transfer.works, *self._copies(shares, first_tag)]
        else:
            transfer.follow = lambda: self._copies(shares, first_tag)

    def _sums(self, shares: Sequence[BucketShare], extras: torch.Tensor) -> list[Any]:
        works = []
        for share in shares:
            if share.recipients:
                options = dist.ReduceOptions()
                options.rootRank, options.rootTensor = share.recipients[0], 0
                works.append(self._backend.reduce([share.values], options))
            else:
                works.append(self._backend.allreduce([share.values], dist.AllreduceOptions()))
        # Whoever has it knows that all members have posted this buffer, which a sum for others does not tell.
        works.append(self._backend.allreduce([extras], dist.AllreduceOptions()))
        return works

    def _copies(self, shares: Sequence[BucketShare], first_tag: int) -> list[Any]:
        """From who has the sum to who gets it, too."""
        sent = [
            (share.values, share.recipients[0], other, tag)
            for tag, share in enumerate(shares, first_tag)
            for other in share.recipients[1:]
            if self._rank in (share.recipients[0], other)
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
        # Outside of such a block torch makes a communicator for each pair. Inside it NCCL connects two members, too, in
        # the call that posts their first transfer: `comm.sum_watch` ends what a lost one holds up there.
        return [nccl.coalesced(self._backend, sent[0][0].device, post)]


class _Awaited:
    """Works whose end shows only to who waits for them, which a thread does."""

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
