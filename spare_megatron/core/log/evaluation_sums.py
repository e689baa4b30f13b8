"""Evaluation while training: when it is due, and the exact sums that the groups' votes carry and the log adds up.

A vote on an evaluation carries the losses of all microbatches that the group has computed in it, so no gradient is
communicated and a loss costs a patch. Integers make the value independent of who computed what.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

FRACTION_BITS = 32
"""A microbatch's loss is rounded once, to a multiple of 2^-32 nats."""


class SetSum(NamedTuple):
    """Sums over microbatches of one validation set.

    `loss`: cross entropy over the tokens that count, in 2^-32 nats; None if that of any microbatch is not finite.
    """

    name: str
    loss: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPolicy:
    """`microbatches_per_shard` are those of all validation sets in one evaluation."""

    every_steps: int
    microbatches_per_shard: int

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether an evaluation follows the commit that makes this many committed steps.

        >>> policy = EvaluationPolicy(every_steps=4, microbatches_per_shard=1)
        >>> [step for step in range(8) if policy.is_due(step, is_last=step == 7)]
        [4, 7]
        """
        return is_last or (step > 0 and step % self.every_steps == 0)


def added(sums: Iterable[Iterable[SetSum]]) -> tuple[SetSum, ...]:
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
