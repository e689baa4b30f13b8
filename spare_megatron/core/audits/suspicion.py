"""Finds microbatches whose loss is far from what losses have been: their data or their computation may be wrong.

A loss is compared with the median of the losses of the last 32 steps on this rank. It is suspect if it is not finite,
or further from the median than 12 times the median distance from it. With losses in a normal distribution that is 8
standard deviations; a fall of the loss within these steps widens the distance.
"""

import math
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from spare_megatron.stacking.plans import Numbered

WINDOW_STEPS = 32
LEAST_STEPS = 8
"""Losses are judged after this many steps, unless they are not finite."""

_FACTOR = 12.0
_LEAST_DISTANCE = 0.01
"""Smallest median distance, as a share of the median: losses may all be alike."""


class Suspect(NamedTuple):
    """A microbatch whose loss is suspect, and the median before; 0.0 while there is none."""

    microbatch: Numbered
    loss: float
    median: float


class LossWatch:
    """Judges the mean losses of the microbatches that one rank computes."""

    def __init__(self) -> None:
        self._losses: dict[int, tuple[float, ...]] = {}  # by step, those that are not suspect

    def on_losses(self, step: int, losses: Mapping[Numbered, float]) -> list[Suspect]:
        """The suspects among the microbatches of an attempt; the others are remembered as losses of the step.

        >>> from spare_megatron.stacking.layout import ShardId
        >>> from spare_megatron.stacking.plans import Microbatch
        >>> first, second = (Numbered(Microbatch(ShardId(0), index), index) for index in range(2))
        >>> watch = LossWatch()
        >>> for step in range(8):
        ...     assert watch.on_losses(step, {first: 4.0 + 0.1 * (step % 2), second: 4.2}) == []
        >>> [(suspect.microbatch.number, suspect.loss) for suspect in watch.on_losses(8, {first: 9.0, second: 4.3})]
        [(0, 9.0)]
        """
        before = [loss for other, some in self._losses.items() if other != step for loss in some]
        is_judged = sum(other != step for other in self._losses) >= LEAST_STEPS
        middle = median(before) if before else 0.0
        distance = max(median(abs(loss - middle) for loss in before) if before else 0.0, _LEAST_DISTANCE * abs(middle))
        limit = _FACTOR * distance if is_judged else math.inf
        # The first form catches NaN, too.
        suspects = [
            Suspect(microbatch, loss, middle)
            for microbatch, loss in sorted(losses.items())
            if not (math.isfinite(loss) and abs(loss - middle) <= limit)
        ]
        sound = tuple(loss for microbatch, loss in losses.items() if microbatch not in {one[0] for one in suspects})
        if sound:
            self._losses.pop(step, None)  # the newest comes last, also after a restart
            self._losses[step] = sound
            if len(self._losses) > WINDOW_STEPS:
                del self._losses[next(iter(self._losses))]
        return suspects
