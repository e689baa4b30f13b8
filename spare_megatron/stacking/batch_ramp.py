"""The size of the global batch as a function of the step: microbatches per shard, and their sum over steps."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRamp:
    """Microbatches per shard: `start` at first, `increment` more at a time, `largest` from step `steps` on.

    With K = (largest - start) / increment, increase k of K comes at step ceil(k x steps / K), so that all stages are
    equally long but for rounding.
    """

    largest: int
    start: int
    increment: int = 1
    steps: int = 0

    @staticmethod
    def constant(microbatches: int) -> "BatchRamp":
        return BatchRamp(largest=microbatches, start=microbatches)

    def at(self, step: int) -> int:
        """Microbatches per shard in a step.

        >>> ramp = BatchRamp(largest=4, start=1, steps=10)
        >>> [ramp.at(step) for step in range(12)]
        [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]
        """
        if step >= self.steps:
            return self.largest
        return self.start + self.increment * (step * self._num_increases // self.steps)

    def in_units_of(self, size: int) -> "BatchRamp":
        """The ramp that counts units of `size` microbatches, which divides the microbatches of every step.

        >>> BatchRamp(largest=8, start=4, increment=2, steps=10).in_units_of(2)
        BatchRamp(largest=4, start=2, increment=1, steps=10)
        """
        increment = self.increment // size if self.steps else self.increment
        return BatchRamp(largest=self.largest // size, start=self.start // size, increment=increment, steps=self.steps)

    def before(self, step: int) -> int:
        """The sum of `at` over all earlier steps. Cost: O(K).

        >>> BatchRamp(largest=4, start=1, steps=10).before(5)
        6
        """
        return self.largest * step - self.increment * sum(min(step, increase) for increase in self._increases())

    def _increases(self) -> Iterator[int]:
        """The first step after each increase."""
        return (-(-k * self.steps // self._num_increases) for k in range(1, self._num_increases + 1))

    @property
    def _num_increases(self) -> int:
        return (self.largest - self.start) // self.increment
