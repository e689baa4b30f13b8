"""The loss of a step or microbatch: a sum over the tokens that count, and their number."""

from typing import NamedTuple


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
