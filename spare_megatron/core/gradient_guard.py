"""Are a group's own gradients fit to enter the sum? Judged on each rank, bucket by bucket, before they do.

A value that is not finite would poison the parameters of all groups, and so would one that is far too large. Neither
needs a reference: the first is wrong anywhere, the second is held against what the same rank has brought lately.

Notes:
    With n the L2 norm of the sum of k microbatches' gradients in a bucket, n / k is compared with the median of n / k
    over the last 32 steps. The sum of k gradients grows like k where they agree and like sqrt(k) where they are
    noise, so that a change of k, as after a loss, moves n / k by less than sqrt(k) and far less than any sensible
    factor. Only large values are judged: small ones do no harm.

    What it catches: flips of a high bit of an exponent, kernels or memory that return garbage. What it cannot catch:
    gradients that are wrong and of usual size, such as after flips of a mantissa or sign bit. Clipping bounds what
    one step of those can do.
"""

from enum import IntEnum
from statistics import median

WINDOW_STEPS = 32
"""Steps of whose norms the median is taken."""

LEAST_STEPS = 8
"""No norm is judged before this many steps: early gradients change fast, and few have no median to speak of."""


class GradientFinding(IntEnum):
    """What a rank finds in its gradients; in a group the highest counts."""

    SOUND = 0
    OUTLYING = 1
    NOT_FINITE = 2


class UnsoundGradient(Exception):
    """A group's own gradients must not enter the sum: the group is lost.

    The last line of its text is the same for every group that finds the same in the same step, so that two of them
    show a fault of the training and not of a group.
    """


class GradientGuard:
    """Judges the gradients of one bucket of one rank.

    Args:
        outlier_factor: How many times the median a norm may be; 0 judges no norm.
    """

    def __init__(self, outlier_factor: float) -> None:
        self._factor = outlier_factor
        self._norms: dict[int, float] = {}  # step -> norm per microbatch
        self._last = self._median = 0.0

    def judge(self, step: int, norm: float, num_microbatches: int) -> GradientFinding:
        """What is to be said of the local sums of a step, before each attempt to reduce them.

        Args:
            step: The step.
            norm: L2 norm of the sums; not finite if any of them is not, or cannot be summed.
            num_microbatches: Microbatches in the sums.

        >>> guard = GradientGuard(100.0)
        >>> [int(guard.judge(step, norm=2.0, num_microbatches=2)) for step in range(8)]
        [0, 0, 0, 0, 0, 0, 0, 0]
        >>> guard.judge(8, norm=202.0, num_microbatches=2)
        <GradientFinding.OUTLYING: 1>
        """
        before = [value for other, value in self._norms.items() if other != step]
        self._median = median(before) if len(before) >= LEAST_STEPS else 0.0
        self._last = norm / max(num_microbatches, 1)
        if not norm < float("inf"):  # in this form it catches NaN too
            return GradientFinding.NOT_FINITE
        if self._factor and self._median and self._last > self._factor * self._median:
            return GradientFinding.OUTLYING
        if num_microbatches:
            self._norms.pop(step, None)  # the newest comes last, also where a restart has gone back
            self._norms[step] = self._last
            if len(self._norms) > WINDOW_STEPS:
                del self._norms[next(iter(self._norms))]
        return GradientFinding.SOUND

    def error(self, finding: GradientFinding, step: int) -> UnsoundGradient:
        """What a rank raises when its group finds this, with the rank's own figures first."""
        own = f"norm per microbatch in a bucket of this rank {self._last:g}, median before {self._median:g}"
        if finding is GradientFinding.NOT_FINITE:
            found = "is not finite or too large to sum"
            behind = "the training diverged: lower optimizer.learning_rate"
        else:
            found = f"exceeds train.gradient_outlier_factor={self._factor:g} times its median"
            behind = "the data or the model is behind it: raise that"
        return UnsoundGradient(f"{own}\nthe gradient of step {step} {found}; if several groups find it, {behind}")
