"""Checks a group's own gradients on each rank, bucket by bucket.

Rejects values that are not finite and outlying norms: with n the L2 norm of the sum of k microbatches' gradients in a
bucket, n / k is compared with its median over the last 32 steps. A change of k moves n / k by less than sqrt(k). Wrong
gradients of usual size pass; see docs/protocol_wrong_numbers.md.
"""

import math
import sys
from enum import IntEnum
from statistics import median

WINDOW_STEPS = 32
"""Steps over which the median of the norms is taken."""

LEAST_STEPS = 8
"""Norms are judged after this many steps: a median needs some values."""

_ANY_FINITE = sys.float_info.max


class GradientFinding(IntEnum):
    """A rank's finding about its gradients; the highest in a group counts."""

    SOUND = 0
    OUTLYING = 1
    NOT_FINITE = 2


class UnsoundGradient(Exception):
    """A group's own gradients must not enter the sum: the group is lost.

    The last line of its text is the same for every group: if two raise it, the training is at fault.
    """


class GradientGuard:
    """Judges one rank's gradients in one bucket; `outlier_factor` limits norm / median, 0 judges no norm."""

    def __init__(self, outlier_factor: float) -> None:
        self._factor = outlier_factor
        self._norms: dict[int, float] = {}  # step -> norm per microbatch
        self._last = self._median = 0.0
        self._limit = _ANY_FINITE

    def limit(self, step: int, num_microbatches: int) -> float:
        """The largest sound L2 norm of a sum over microbatches, to be asked before each attempt to reduce it.

        >>> guard = GradientGuard(100.0)
        >>> for step in range(8):
        ...     assert guard.limit(step, num_microbatches=2) == sys.float_info.max
        ...     assert guard.on_norm(step, 2.0, num_microbatches=2) is GradientFinding.SOUND
        >>> guard.limit(8, num_microbatches=2)
        200.0
        """
        before = [value for other, value in self._norms.items() if other != step]
        self._median = median(before) if len(before) >= LEAST_STEPS else 0.0
        is_judged = self._factor and self._median
        limit = self._factor * self._median * max(num_microbatches, 1) if is_judged else _ANY_FINITE
        self._limit = min(limit, _ANY_FINITE)
        return self._limit

    def on_norm(self, step: int, norm: float, num_microbatches: int) -> GradientFinding:
        """Judges the norm of the sum (not finite if a sum is not) by the last `limit`; remembers it if it is sound."""
        self._last = norm / max(num_microbatches, 1)
        if not norm < math.inf:  # negated, so that NaN is caught, too
            return GradientFinding.NOT_FINITE
        if norm > self._limit:
            return GradientFinding.OUTLYING
        if num_microbatches:
            self._norms.pop(step, None)  # the newest comes last, also after a restart
            self._norms[step] = self._last
            if len(self._norms) > WINDOW_STEPS:
                del self._norms[next(iter(self._norms))]
        return GradientFinding.SOUND

    def on_restart(self, step: int) -> None:
        """Training goes on after so many committed steps: forgets those that are computed again."""
        self._norms = {other: norm for other, norm in self._norms.items() if other < step}

    def error(self, finding: GradientFinding, step: int) -> UnsoundGradient:
        """What a rank raises if its group has this finding; the rank's own figures come first."""
        own = f"norm per microbatch in a bucket of this rank {self._last:g}, median before {self._median:g}"
        if finding is GradientFinding.NOT_FINITE:
            found = "is not finite or too large to sum"
            behind = "the training diverged: lower optimizer.learning_rate"
        else:
            found = f"exceeds train.gradient_outlier_factor={self._factor:g} times its median"
            behind = "the data or the model is behind it: raise that"
        return UnsoundGradient(f"{own}\nthe gradient of step {step} {found}; if several groups find it, {behind}")
