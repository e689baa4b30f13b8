"""When which groups are lost, in virtual time."""

from dataclasses import dataclass
from math import gamma, inf
from typing import Literal, Protocol

import numpy as np

from spare_megatron.core.placement import BoolArray
from spare_megatron.core.topology import GroupId

FailureKind = Literal["system", "group", "domain", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Groups lost together.

    Attributes:
        at_s: When.
        groups: The groups, ascending. Those that are down already are not lost again.
        repair_s: Seconds until they are repaired, where the trace says so.
    """

    at_s: float
    groups: tuple[GroupId, ...]
    repair_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSpec:
    """A failure process.

    Attributes:
        kind: "system": losses come from all groups together, at a rate in proportion to the groups that take part;
            the victim is any of them. "group": each group has a clock of its own, which starts anew when it comes
            back. "domain": each domain (rack) has one, and all of its groups are lost together. "trace": `trace`.
        mean_s: Mean seconds between losses: of the whole system while all groups take part, of one group, of one
            domain. Not used by a trace.
        shape: Shape of the Weibull distribution of these times; 1 is exponential, below 1 bursts.
        groups_per_domain: Groups of consecutive ids that make up one domain.
        trace: The losses of kind "trace", ascending in time.

    Raises:
        ValueError: A value is out of its range, or the trace is empty.
    """

    kind: FailureKind = "system"
    mean_s: float = inf
    shape: float = 1.0
    groups_per_domain: int = 1
    trace: tuple[Loss, ...] = ()

    def __post_init__(self) -> None:
        if not (self.mean_s > 0 and self.shape > 0):
            raise ValueError(
                f"failures.mean_s={self.mean_s} and failures.shape={self.shape} have to be above 0 "
                "(mean_s=inf: no failures)"
            )
        if self.groups_per_domain < 1:
            raise ValueError(f"failures.groups_per_domain={self.groups_per_domain} has to be 1 or more")
        if self.kind == "trace" and not self.trace:
            raise ValueError("failures.kind is trace, but the trace is empty: name a file with losses")
        if any(not (loss.at_s >= 0 and (loss.repair_s or 0) >= 0) for loss in self.trace):
            raise ValueError("the trace has a negative time")

    def mean_interval_s(self, num_groups: int) -> float:
        """Mean seconds between two losses anywhere while all groups take part."""
        match self.kind:
            case "system":
                return self.mean_s
            case "group":
                return self.mean_s / num_groups
            case "domain":
                return self.mean_s / num_groups  # a domain takes all its groups at once
            case "trace":
                return max(self.trace[-1].at_s, 1.0) / sum(len(loss.groups) for loss in self.trace)


class FailureProcess(Protocol):
    """Losses one after another. While a restart is under way nothing is lost and clocks stand still."""

    def next_s(self) -> float:
        """When the next loss is due; infinite if never."""

    def strike(self, is_up: BoolArray, /) -> Loss:
        """The next loss, of groups that are up, perhaps none; the one after it is drawn."""

    def came_back(self, now_s: float, groups: tuple[GroupId, ...], is_up: BoolArray, /) -> None:
        """These groups take part again; `is_up` counts them in already."""

    def restarted(self, began_s: float, now_s: float, came_back: tuple[GroupId, ...], /) -> None:
        """All groups take part, these again, after a restart from `began_s` to `now_s`."""


def make_process(spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> FailureProcess:
    """The process that a specification describes, seeded by a generator of its own."""
    match spec.kind:
        case "system":
            return SystemWide(spec, num_groups, rng)
        case "group":
            return PerGroup(spec, num_groups, rng)
        case "domain":
            return PerDomain(spec, num_groups, rng)
        case "trace":
            return Replay(spec)


def _draw(spec: FailureSpec, rng: np.random.Generator) -> float:
    """A Weibull time of the given mean: mean = scale * Gamma(1 + 1 / shape)."""
    if spec.mean_s == inf:
        return inf
    return float(spec.mean_s / gamma(1 + 1 / spec.shape) * rng.weibull(spec.shape))


class SystemWide:
    """A renewal process whose clock runs at the share of groups that take part."""

    def __init__(self, spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> None:
        self._spec, self._num_groups, self._rng = spec, num_groups, rng
        self._left = _draw(spec, rng)  # seconds until the next loss if all groups took part
        self._since_s = 0.0
        self._rate = 1.0

    def next_s(self) -> float:
        return self._since_s + self._left / self._rate if self._rate > 0 else inf

    def strike(self, is_up: BoolArray) -> Loss:
        at_s = self.next_s()
        groups = np.flatnonzero(is_up)
        victim = GroupId(int(groups[self._rng.integers(groups.size)]))
        self._left, self._since_s, self._rate = _draw(self._spec, self._rng), at_s, (groups.size - 1) / self._num_groups
        return Loss(at_s=at_s, groups=(victim,))

    def came_back(self, now_s: float, _groups: tuple[GroupId, ...], is_up: BoolArray) -> None:
        self._run_until(now_s)
        self._rate = int(is_up.sum()) / self._num_groups

    def restarted(self, began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        self._run_until(began_s)
        self._since_s, self._rate = now_s, 1.0

    def _run_until(self, now_s: float) -> None:
        self._left = max(self._left - (now_s - self._since_s) * self._rate, 0.0)
        self._since_s = now_s


class PerGroup:
    """Each group is lost at a time of its own, drawn when it comes up. Repair is the fleet's affair."""

    def __init__(self, spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> None:
        self._spec, self._rng = spec, rng
        self._due_s = np.array([_draw(spec, rng) for _ in range(num_groups)])

    def next_s(self) -> float:
        return float(self._due_s.min())

    def strike(self, _is_up: BoolArray) -> Loss:
        group = int(self._due_s.argmin())
        at_s = float(self._due_s[group])
        self._due_s[group] = inf
        return Loss(at_s=at_s, groups=(GroupId(group),))

    def came_back(self, now_s: float, groups: tuple[GroupId, ...], _is_up: BoolArray) -> None:
        for group in groups:
            self._due_s[group] = now_s + _draw(self._spec, self._rng)

    def restarted(self, began_s: float, now_s: float, came_back: tuple[GroupId, ...]) -> None:
        self._due_s += now_s - began_s
        for group in came_back:
            self._due_s[group] = now_s + _draw(self._spec, self._rng)


class PerDomain:
    """Each domain loses all of its groups at the times of a renewal process of its own."""

    def __init__(self, spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> None:
        self._spec, self._rng, self._num_groups = spec, rng, num_groups
        self._due_s = np.array([_draw(spec, rng) for _ in range(-(-num_groups // spec.groups_per_domain))])

    def next_s(self) -> float:
        return float(self._due_s.min())

    def strike(self, is_up: BoolArray) -> Loss:
        domain = int(self._due_s.argmin())
        at_s = float(self._due_s[domain])
        self._due_s[domain] = at_s + _draw(self._spec, self._rng)
        size = self._spec.groups_per_domain
        ids = range(domain * size, min((domain + 1) * size, self._num_groups))
        return Loss(at_s=at_s, groups=tuple(GroupId(group) for group in ids if is_up[group]))

    def came_back(self, _now_s: float, _groups: tuple[GroupId, ...], _is_up: BoolArray) -> None:
        pass

    def restarted(self, began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        self._due_s += now_s - began_s


class Replay:
    """The losses of a trace at their times. Those that fall into a restart are absorbed by it."""

    def __init__(self, spec: FailureSpec) -> None:
        self._losses = sorted(spec.trace, key=lambda loss: loss.at_s)
        self._next = 0

    def next_s(self) -> float:
        return self._losses[self._next].at_s if self._next < len(self._losses) else inf

    def strike(self, is_up: BoolArray) -> Loss:
        loss = self._losses[self._next]
        self._next += 1
        groups = tuple(sorted({group for group in loss.groups if is_up[group]}))
        return Loss(at_s=loss.at_s, groups=groups, repair_s=loss.repair_s)

    def came_back(self, _now_s: float, _groups: tuple[GroupId, ...], _is_up: BoolArray) -> None:
        pass

    def restarted(self, _began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        while self.next_s() <= now_s:
            self._next += 1
