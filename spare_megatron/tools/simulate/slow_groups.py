"""Groups that compute slower for a while, or whose links are, in virtual time."""

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSpec:
    """Each group turns slow after an exponential time, and is as fast as before after another one.

    ValueError if a value is out of its range.
    """

    group_interval_s: float | None = None
    """Mean seconds until a given group turns slow; None: none ever does."""
    duration_s: float = 3600.0
    """Mean seconds for which it is slow."""
    factor: float = 2.0
    """Its time per microbatch, or for a sum over groups, in times that of the others."""

    def __post_init__(self) -> None:
        for name in ("group_interval_s", "duration_s", "factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name}={value} of slow groups or links has to be above 0, and finite")

    @property
    def share(self) -> float:
        """The share of time in which a given group is slow.

        >>> SlowSpec(group_interval_s=9000.0, duration_s=1000.0).share
        0.1
        """
        if self.group_interval_s is None:
            return 0.0
        return self.duration_s / (self.group_interval_s + self.duration_s)


class SlowGroups:
    """The slow groups of one run. Ask for times in ascending order."""

    def __init__(self, spec: SlowSpec, num_groups: int, rng: np.random.Generator) -> None:
        self._spec = spec
        self._rng = rng
        self._is_slow = np.zeros(num_groups, dtype=np.bool_)
        self._changes_at_s = np.full(num_groups, inf)
        if spec.group_interval_s is not None:
            self._changes_at_s = rng.exponential(spec.group_interval_s, num_groups)

    def factors(self, now_s: float) -> npt.NDArray[np.float64]:
        """The time of each group, in times that of the others."""
        while self._changes_at_s.size and self._changes_at_s.min() <= now_s:
            group = int(self._changes_at_s.argmin())
            self._is_slow[group] ^= True
            mean_s = self._spec.duration_s if self._is_slow[group] else self._spec.group_interval_s
            assert mean_s is not None, "only groups that may turn slow change"
            self._changes_at_s[group] += self._rng.exponential(mean_s)
        return np.where(self._is_slow, self._spec.factor, 1.0)
