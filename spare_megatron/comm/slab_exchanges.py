"""The sums of all slabs of a rank over the groups: each slab has a communicator, window and buckets of its own.

In every group the slabs are posted last ones first, as their gradients are ready, so that groups with pipelines of
several lengths never wait for each other in a circle (docs/protocol_sums.md, Order of posts).
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from spare_megatron.comm.bucket_exchange import BucketExchange
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.core.log.actions import AttemptReduce
from spare_megatron.core.log.gradient_guard import GradientFinding, UnsoundGradient
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.mcore.trainer import GroupTrainer


class SlabExchanges:
    """The exchanges of a rank, given in layer order; what is not described is as in `BucketExchange`, for all."""

    def __init__(self, trainer: GroupTrainer, exchanges: Sequence[BucketExchange]) -> None:
        self._trainer = trainer
        self._exchanges = exchanges[::-1]
        self._by_position = {one.position: one for one in exchanges}

    @property
    def is_early(self) -> bool:
        return all(one.is_early for one in self._exchanges)

    @property
    def is_complete(self) -> bool:
        return all(one.is_complete for one in self._exchanges)

    @property
    def has_given_up(self) -> bool:
        return any(one.has_given_up for one in self._exchanges)

    @property
    def num_complete(self) -> Mapping[int, int]:
        """By position."""
        return {position: one.num_complete for position, one in self._by_position.items()}

    @property
    def communicator(self) -> CrossGroupCommunicator:
        """The first over which sums have ended early; else that of the last slab."""
        return next((one for one in self._exchanges if one.has_given_up), self._exchanges[0]).communicator

    @property
    def evidence(self) -> str:
        """Why sums have ended early; empty if all are complete."""
        return next(filter(None, (one.communicator.evidence for one in self._exchanges)), "")

    @property
    def ready_at_s(self) -> float | None:
        """When the attempt had all communicators; None before that."""
        known = [at for one in self._exchanges if (at := one.communicator.ready_at_s) is not None]
        return max(known) if len(known) == len(self._exchanges) else None

    @property
    def squares(self) -> Mapping[str, float] | None:
        """Of stacked state, with which a rank has one slab."""
        return self._exchanges[0].squares

    @property
    def at_hand(self) -> torch.Tensor | None:
        return next((one.at_hand for one in self._exchanges if one.at_hand is not None), None)

    def loss_sum(self) -> LossSum | None:
        """The summed loss; None if the attempt is incomplete or another stage has it."""
        return self._trainer.loss_sum() if self.is_complete else None

    def term_sums(self) -> list[LossSum | None]:
        """The same of each further term of the loss."""
        sums = self._trainer.term_sums()
        return sums if self.is_complete else [None] * len(sums)

    def start_attempt(self, action: AttemptReduce) -> None:
        for one in self._exchanges:
            one.start_attempt(action)

    def commit(self) -> int:
        return sum(one.commit() for one in self._exchanges)

    def measure_all(self, num_computed: int) -> None:
        for one in self._exchanges:
            one.measure_all(num_computed)

    def judge(self) -> GradientFinding:
        """The worst."""
        return max(one.judge() for one in self._exchanges)

    def error(self, finding: GradientFinding) -> UnsoundGradient:
        return next((one for one in self._exchanges if one.finding is finding), self._exchanges[0]).error(finding)

    def first_wrong_sums(self) -> Mapping[int, int]:
        """By position, of those that have any."""
        found = {position: one.first_wrong_sum() for position, one in self._by_position.items()}
        return {position: bucket for position, bucket in found.items() if bucket is not None}

    def wrong_numbers(self) -> str:
        return next(filter(None, (one.wrong_numbers() for one in self._exchanges)), "")

    def begin_early(self, num_computed: int) -> None:
        for one in self._exchanges:
            one.begin_early(num_computed)

    def send_ready(self, position: int, num_ready: int, is_decided: Callable[[], bool]) -> None:
        self._by_position[position].send_ready(num_ready, is_decided)

    def sum_rest(self, is_decided: Callable[[], bool]) -> None:
        """Slab by slab, until one has given up."""
        for one in self._exchanges:
            one.sum_rest(is_decided)
            if one.has_given_up:
                return
