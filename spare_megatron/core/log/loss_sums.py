"""Sums of losses: of a step over its tokens, and exact ones of an evaluation, which votes carry and the log adds up.

A vote on an evaluation carries the losses of all microbatches that the group has computed in it, so no gradient is
communicated and a loss costs a patch. Integers make the value independent of who computed what.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

FRACTION_BITS = 32
"""A microbatch's loss is rounded once, to a multiple of 2^-32 nats."""


class LossSum(NamedTuple):
    """The cross entropy summed over the tokens that count for it (nats), and how many they are: exactly, as an integer.

    >>> LossSum(6.0, 3).mean, LossSum(0.0, 0).mean
    (2.0, 0.0)
    """

    total: float
    num_tokens: int

    @property
    def divisor(self) -> int:
        """Divides sums over the tokens to means. 1 if none counts: the sums, loss and gradients, are 0 then."""
        return max(self.num_tokens, 1)

    @property
    def mean(self) -> float:
        return self.total / self.divisor


class SetSum(NamedTuple):
    """Sums over microbatches of one validation set."""

    name: str
    loss: int | None
    """Cross entropy over the tokens that count, in 2^-32 nats; None if that of any microbatch is not finite."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPolicy:
    every_steps: int
    microbatches_per_shard: int
    """Of all validation sets in one evaluation."""

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether an evaluation follows the commit that makes this many committed steps.

        >>> policy = EvaluationPolicy(every_steps=4, microbatches_per_shard=1)
        >>> [step for step in range(8) if policy.is_due(step, is_last=step == 7)]
        [4, 7]
        """
        return is_last or (step > 0 and step % self.every_steps == 0)


Rows = Sequence[Sequence[Any]]
"""`SetSum`s, or what JSON has of them."""


def added(sums: Iterable[Rows]) -> tuple[SetSum, ...]:
    """The sums of each set over all groups, in the order in which the sets first occur.

    >>> added([[SetSum("a", 3, 1), SetSum("b", None, 1)], [SetSum("a", 4, 2), SetSum("b", 5, 3)]])
    (SetSum(name='a', loss=7, num_tokens=3), SetSum(name='b', loss=None, num_tokens=4))
    """
    found: dict[str, SetSum] = {}
    for name, loss, num_tokens in (one for of_group in sums for one in of_group):
        _, before, num_before = found.get(name, (name, 0, 0))
        whole = None if before is None or loss is None else before + loss
        found[name] = SetSum(name, whole, num_before + num_tokens)
    return tuple(found.values())


def mean_loss(sums: Rows) -> float:
    """Mean cross entropy per token over these sets, in nats; NaN if it is not finite or nothing was counted.

    >>> mean_loss([("a", 3 << 32, 1), ("b", 5 << 32, 3)])
    2.0
    """
    num_tokens = sum(num for _, _, num in sums)
    losses = [loss for _, loss, _ in sums if loss is not None]
    # Division of integers rounds once.
    return sum(losses) / (num_tokens << FRACTION_BITS) if num_tokens and len(losses) == len(sums) else math.nan


def losses_of(sums: Rows) -> dict[str, float]:
    """`mean_loss` of each set."""
    return {one[0]: mean_loss([one]) for one in sums}
