"""Evaluations in a history: what groups find with their parameters, and what an observer expects of all of them."""

from collections.abc import Iterable
from hashlib import sha256

from spare_megatron.core.log.loss_sums import SetSum
from spare_megatron.stacking.plans import Microbatch

SET = "held out"


def loss_of(params: str, microbatch: Microbatch) -> int:
    return int.from_bytes(sha256(f"{params}|{tuple(microbatch)}".encode()).digest()[:5], "big")


class EvaluationSums:
    """What one group has computed of an evaluation."""

    def __init__(self) -> None:
        self._losses: list[int] = []

    def begin(self) -> None:
        """From zero sums."""
        self._losses = []

    def add(self, params: str, work: Iterable[Microbatch]) -> None:
        self._losses += [loss_of(params, item) for item in work]

    def sums(self) -> tuple[SetSum, ...]:
        return (SetSum(SET, sum(self._losses), len(self._losses)),)
