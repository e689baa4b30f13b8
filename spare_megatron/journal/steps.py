"""What groups tell of each attempt to make a step, in arrays: a long run has too many for objects."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from spare_megatron.journal.paces import RankPaces
from spare_megatron.journal.records import ContributionRecord, UpdateRecord

Array = npt.NDArray[np.float32]
T = TypeVar("T", np.float32, np.float64)

_FIRST_ROWS = 256


class StepTable:
    """Rows are attempts, columns groups.

    Attributes:
        loss: For each attempt, mean cross entropy per token; NaN where nobody told. float64, shape (attempts,).
        grad_norm: Likewise, the norm of the gradient.
        learning_rate: Likewise, the learning rate of the update.
        step_s: Seconds from the step's start to its update; NaN where a group told nothing. Shape (attempts, groups).
        load: Microbatches that a group brought in, likewise.
        paces: How fast ranks computed them.
    """

    def __init__(self, num_groups: int, ranks_per_group: int) -> None:
        self.loss = np.full(_FIRST_ROWS, np.nan)
        self.grad_norm = np.full(_FIRST_ROWS, np.nan)
        self.learning_rate = np.full(_FIRST_ROWS, np.nan)
        self.step_s: Array = np.full((_FIRST_ROWS, num_groups), np.nan, np.float32)
        self.load: Array = np.full((_FIRST_ROWS, num_groups), np.nan, np.float32)
        self.paces = RankPaces(num_groups, ranks_per_group)

    def update(self, record: UpdateRecord) -> None:
        """A group has applied an attempt."""
        self._reserve(record.attempt)
        if np.isnan(self.loss[record.attempt]):
            self.loss[record.attempt] = record.loss
            self.grad_norm[record.attempt] = record.grad_norm
            self.learning_rate[record.attempt] = record.learning_rate
        self.step_s[record.attempt, record.group] = record.step_s
        load = float(self.load[record.attempt, record.group])
        self.paces.take(record.attempt, record.group, record.compute_s, load)

    def contribution(self, record: ContributionRecord, load: int) -> None:
        """A group has brought so many microbatches into an attempt."""
        self._reserve(record.attempt)
        self.load[record.attempt, record.group] = load

    def is_told(self, attempt: int) -> bool:
        """Whether some group has applied it and told of it."""
        return attempt < len(self.loss) and not np.isnan(self.step_s[attempt]).all()

    def _reserve(self, attempt: int) -> None:
        if attempt >= len(self.loss):
            height, width = 2 * attempt, self.load.shape[1]
            self.loss, self.grad_norm = _grown(self.loss, (height,)), _grown(self.grad_norm, (height,))
            self.learning_rate = _grown(self.learning_rate, (height,))
            self.step_s, self.load = _grown(self.step_s, (height, width)), _grown(self.load, (height, width))


def _grown(array: npt.NDArray[T], shape: tuple[int, ...]) -> npt.NDArray[T]:
    """The array at the beginning of a longer one of NaN."""
    grown = np.full(shape, np.nan, array.dtype)
    grown[: len(array)] = array
    return grown
