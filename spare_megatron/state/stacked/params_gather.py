"""One rank's part in gathering all parameters after each group has updated its own state partitions. Parameters that
contradict the checksum that comes with them (`mcore.gradients.digests`) have not arrived.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from spare_megatron.comm.bucket_exchange import Staging
from spare_megatron.comm.communicators import report_incomplete
from spare_megatron.core.log.actions import GatherParams
from spare_megatron.core.log.bucket_window import MAX_STAGED
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.gradients.digests import words_digest
from spare_megatron.mcore.optimizer.stacked_optimizer import StackedOptimizer
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.state_partitions import GatherShare, Round, gather_rounds
from spare_megatron.state.rank_context import RankContext
from spare_megatron.store.interface import StoreLost

_WORD_BYTES = 8
_CHECK_WORDS = 2
"""Words of a row's checksum."""


class ParamsGather:
    """Gathers one rank's parameters from the groups that own them."""

    def __init__(self, ctx: RankContext, optimizer: StackedOptimizer, staging: Staging) -> None:
        self._ctx = ctx
        self._optimizer, self._staging = optimizer, staging
        [self._communicator] = ctx.communicators
        self._wrong: list[torch.Tensor] = []  # whether what has arrived in this gather is, on the device

    def run(self, action: GatherParams) -> None:
        """Sends the parameters that this group owns; takes over those of others if it lacks any. Sets `lacks_params`.

        Ends once the next log entry is written or a rank reports a broken gather. Raises StoreLost only then, as no
        group can resume without the parameters that match its updated partitions. Collective over: rank j of every
        member group, and all ranks of the group.
        """
        lost: StoreLost | None = None
        head, members = self._ctx.controller.head, self._communicator.members

        def is_over() -> bool:
            nonlocal lost
            if lost is None:
                try:
                    return self._ctx.agreement.is_over(head)
                except StoreLost as error:
                    lost = error
            return False

        self._ctx.probe(FaultPoint.BEFORE_GATHER)
        self._ctx.progress.gather_failure = ""
        evidence = "another rank of the group could not gather"
        with self._ctx.probe.during(Operation.REDUCE):
            is_complete = len(members) == 1 or self._exchange(action, members, is_over)
            if not is_complete and lost is None:
                self._ctx.progress.gather_failure = report_incomplete(self._communicator, self._ctx.agreement, head)
                evidence = self._communicator.evidence
        with self._ctx.probe.during(Operation.SETTLE):
            is_broken = bool(self._ctx.agreement.highest(int(not is_complete)))
        if is_broken:
            # Groups that have everything use this communicator for something else next.
            self._communicator.give_up()
            self._ctx.progress.gather_evidence = evidence
        self._ctx.progress.lacks_params = self._ctx.progress.lacks_params and is_broken
        if lost is not None:
            raise lost

    def _exchange(self, action: GatherParams, members: Sequence[GroupId], is_over: Callable[[], bool]) -> bool:
        self._communicator.start_attempt()
        if not self._communicator.connect(is_over):
            return False
        partitions = self._optimizer.partitions
        lengths = [partitions.length(number) for number in partitions.numbers]
        # One row per member for received parameters and one for those sent. Received ones are copied out, because
        # abandoned transfers may still write into their buffer.
        num_rows, itemsize = len(members) + 1, self._optimizer.values_dtype.itemsize
        num_words = self._staging.num_bytes // (num_rows * _WORD_BYTES)
        num_words = min(num_words, _CHECK_WORDS - (-max(lengths) * itemsize // _WORD_BYTES))
        width = (num_words - _CHECK_WORDS) * _WORD_BYTES // itemsize
        shape = (num_rows, num_words)
        rounds = gather_rounds([owner.group for owner in action.owners], members, lengths, width)
        self._wrong = []
        mine = members.index(self._ctx.member.group)
        posted: deque[tuple[Round, torch.Tensor]] = deque()
        for number, sent in enumerate(rounds):
            if len(posted) == MAX_STAGED and not self._receive(posted, shape, is_over):
                return False
            staging = self._staging.acquire()
            rows = _rows(staging, shape)
            share = sent[mine]
            if share is not None:
                self._optimizer.read_values(share.partition, share.start, self._values(rows[-1], share))
                rows[-1, -_CHECK_WORDS:].copy_(words_digest(rows[-1, :-_CHECK_WORDS]))
            if number == len(rounds) - 1:
                self._ctx.probe(FaultPoint.IN_GATHER)
            if not self._communicator.post_gather(rows[:-1], rows[-1]):
                return False
            posted.append((sent, staging))
        while posted:
            if not self._receive(posted, shape, is_over):
                return False
        if self._wrong and bool(torch.stack(self._wrong).any()):
            self._communicator.evidence = "gathered parameters contradict their checksums"
            return False
        return True

    def _receive(
        self, posted: deque[tuple[Round, torch.Tensor]], shape: tuple[int, int], is_over: Callable[[], bool]
    ) -> bool:
        """Waits for the oldest round in flight and copies out what has arrived; False if it breaks."""
        if not self._communicator.wait(is_over):
            return False
        for _ in range(num_come := self._communicator.poll()):
            sent, staging = posted.popleft()
            for share, row in zip(sent, _rows(staging, shape)[:-1], strict=True):
                if share is not None and self._ctx.progress.lacks_params:
                    self._wrong.append((row[-_CHECK_WORDS:] != words_digest(row[:-_CHECK_WORDS])).any())
                    self._optimizer.write_values(share.partition, share.start, self._values(row, share))
            self._staging.release(staging)
        return bool(num_come)

    def _values(self, row: torch.Tensor, share: GatherShare) -> torch.Tensor:
        return row[:-_CHECK_WORDS].view(self._optimizer.values_dtype)[: share.stop - share.start]


def _rows(staging: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Rows of parameters, each with the checksum behind it, as 64-bit words."""
    num_bytes = _WORD_BYTES * shape[0] * shape[1]
    return staging.view(torch.uint8)[:num_bytes].view(torch.int64).view(shape)
