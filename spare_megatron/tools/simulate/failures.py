"""When which groups are lost, and which of them or of their links are slow for a while, in virtual time."""

from dataclasses import dataclass, replace
from math import gamma, inf
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import BoolArray
from spare_megatron.tools.plan.slow_group_costs import SlowRate

FailureKind = Literal["system", "group", "node", "domain", "trace"]
UNNAMED = "simulated"
"""Cause of a loss of which nothing else is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Groups lost together."""

    at_s: float
    groups: tuple[GroupId, ...]
    """Ascending; groups that are down already are not lost again."""
    machine: str | None = None
    """The one that is lost, in the place of groups: with the group that it stands in by then, if any."""
    domain: range | None = None
    """Likewise the machines that are lost together, by number."""
    repair_s: float | None = None
    """Seconds until repaired, if the cause or the trace says so."""
    cause: str = UNNAMED


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCause:
    """A cause of losses. ValueError if a value is out of its range."""

    name: str
    """One word, for the journal and tables."""
    weight: float
    """Its share of all losses, in any unit, such as counts."""
    repair_s: float | None = None
    """Seconds from such a loss until the hardware works again; None takes the scenario's repair_s."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < inf:
            raise ValueError(f"failures.mix.{self.name}.weight={self.weight} has to be above 0 and finite")
        if not (self.repair_s or 0) >= 0:
            raise ValueError(f"failures.mix.{self.name}.repair_s={self.repair_s} has to be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineDomain:
    """Racks or power domains, whose machines are lost together wherever they stand. ValueError: out of range."""

    name: str
    """The cause of its losses."""
    machines: int
    """Machines of consecutive numbers that form one domain, spares included."""
    mean_s: float
    """Mean seconds between the losses of one domain, exponential, whether or not its machines are up."""
    repair_s: float | None = None
    """As of a cause. Machines that are away already come back when they would have."""

    def __post_init__(self) -> None:
        if not (self.machines >= 1 and 0 < self.mean_s < inf and (self.repair_s or 0) >= 0):
            raise ValueError(
                f"failures.domains.{self.name} needs machines of 1 or more, mean_s above 0 and finite, repair_s of "
                f"0 or more: not {self.machines}, {self.mean_s}, {self.repair_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSpec:
    """A failure process. All clocks start at 0: with a shape below 1 the first losses come faster than in the long run.

    Raises ValueError if values are out of their range or do not belong to the kind, or if the trace is empty.
    """

    kind: FailureKind = "system"
    """system: losses of random groups, at a rate in proportion to the groups that take part. group: each group has a
    clock, which starts anew when it comes back. node: each node of a group has one; the first that runs out loses the
    group, and only that node is replaced. The others' clocks stop while the group is down: a node ages by the work it
    does. domain: each domain (rack) has a clock and loses all its groups together; it always runs, since power fails
    with or without work. trace: the losses of `trace`."""
    mean_s: float = inf
    """Mean seconds between losses: of the system while all groups take part, of one group, node, or domain. Not used
    by a trace."""
    shape: float = 1.0
    """Weibull shape of these times; 1 is exponential, below 1 bursts."""
    nodes_per_group: int = 1
    groups_per_domain: int = 1
    """Groups of consecutive ids that form one domain, for the kind domain."""
    mix: tuple[LossCause, ...] = ()
    """Causes of the losses, each drawn independently of all else. A trace names its own."""
    domains: tuple[MachineDomain, ...] = ()
    """Lost beside single machines, where groups are re-formed."""
    trace: tuple[Loss, ...] = ()

    def __post_init__(self) -> None:
        if not (self.mean_s > 0 and self.shape > 0):
            raise ValueError(
                f"failures.mean_s={self.mean_s} and failures.shape={self.shape} have to be above 0 "
                "(mean_s=inf: no failures)"
            )
        for name, kind in (("nodes_per_group", "node"), ("groups_per_domain", "domain")):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"failures.{name}={value} has to be 1 or more")
            if value > 1 and self.kind != kind:
                raise ValueError(
                    f"failures.{name}={value} belongs to the kind {kind}; set failures.kind or leave it out"
                )
        if self.kind == "trace" and not self.trace:
            raise ValueError("failures.kind is trace, but the trace is empty: set failures.trace_file (--trace)")
        if self.domains and self.kind != "system":
            raise ValueError(f"failures.domains are lost beside failures.kind system, not {self.kind}; leave them out")
        if self.kind != "trace" and self.trace:
            raise ValueError(f"failures.kind is {self.kind}, which has no trace: set it to trace, or no trace_file")
        if self.trace and self.mix:
            raise ValueError("failures.mix is of no use to a trace, whose losses name their causes; leave it out")
        if any(not (loss.at_s >= 0 and (loss.repair_s or 0) >= 0) for loss in self.trace):
            raise ValueError("the trace has a negative time")

    def mean_interval_s(self, num_groups: int) -> float:
        """Mean seconds per lost group, anywhere, while all groups take part."""
        match self.kind:
            case "system":
                return self.mean_s
            case "group":
                return self.mean_s / num_groups
            case "node":
                return self.mean_s / (num_groups * self.nodes_per_group)
            case "domain":
                return self.mean_s / num_groups  # per lost group: a domain loses all its groups at once
            case "trace":
                return max(self.trace[-1].at_s, 1.0) / sum(len(loss.groups) or 1 for loss in self.trace)

    def mean_repair_s(self, otherwise_s: float | None) -> float | None:
        """Mean repair time over all causes or the trace, `otherwise_s` for those without one; None if some are never
        repaired.
        """
        if not (self.mix or self.trace):
            return otherwise_s
        times_s = [otherwise_s if one.repair_s is None else one.repair_s for one in self.mix or self.trace]
        known_s = [time_s for time_s in times_s if time_s is not None]
        if len(known_s) < len(times_s):
            return None
        return float(np.average(known_s, weights=[cause.weight for cause in self.mix] or None))

    @property
    def machine_names(self) -> list[str]:
        """Of the machines that the trace names, ascending."""
        return sorted({loss.machine for loss in self.trace if loss.machine is not None})


class FailureProcess(Protocol):
    """A sequence of losses. During a restart nothing is lost and clocks stand still."""

    def next_s(self) -> float:
        """When the next loss is due; infinite if never."""

    def strike(self, is_up: BoolArray, /) -> Loss:
        """Returns the next loss, of groups that are up, possibly none, and draws the one after it."""

    def came_back(self, _now_s: float, _groups: tuple[GroupId, ...], _is_up: BoolArray, /) -> None:
        """These groups take part again; those that are up include them already. Changes nothing by default."""
        return

    def restarted(self, began_s: float, now_s: float, came_back: tuple[GroupId, ...], /) -> None:
        """All groups take part, including these that were down, after a restart from `began_s` to `now_s`."""


def make_process(spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> FailureProcess:
    """The process of a specification but for its domains, with a generator of its own."""
    match spec.kind:
        case "system":
            return SystemWide(spec, num_groups, rng)
        case "group" | "node":
            return PerNode(spec, num_groups, rng)
        case "domain":
            return PerDomain(spec, num_groups, rng)
        case "trace":
            return ReplayedLosses(spec)


def _draw(spec: FailureSpec, rng: np.random.Generator) -> float:
    """A Weibull time of the given mean: mean = scale * Gamma(1 + 1 / shape)."""
    if spec.mean_s == inf:
        return inf
    return float(spec.mean_s / gamma(1 + 1 / spec.shape) * rng.weibull(spec.shape))


class _Causes:
    """Draws causes from a separate stream, so that a mix changes no time of a loss."""

    def __init__(self, spec: FailureSpec, rng: np.random.Generator) -> None:
        self._mix = spec.mix
        self._rng = rng.spawn(1)[0]
        self._upto = np.cumsum([cause.weight for cause in spec.mix])

    def loss(self, at_s: float, groups: tuple[GroupId, ...]) -> Loss:
        """The loss of these groups, with a drawn cause."""
        if not self._mix:
            return Loss(at_s=at_s, groups=groups)
        index = int(np.searchsorted(self._upto, self._rng.random() * self._upto[-1], side="right"))
        cause = self._mix[index]
        return Loss(at_s=at_s, groups=groups, repair_s=cause.repair_s, cause=cause.name)


class SystemWide:
    """A renewal process whose clock runs at the share of groups that take part."""

    def __init__(self, spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> None:
        self._spec, self._num_groups, self._rng = spec, num_groups, rng
        self._causes = _Causes(spec, rng)
        self._left = _draw(spec, rng)  # seconds until the next loss with all groups up
        self._since_s = 0.0
        self._rate = 1.0

    def next_s(self) -> float:
        return self._since_s + self._left / self._rate if self._rate > 0 else inf

    def strike(self, is_up: BoolArray) -> Loss:
        at_s = self.next_s()
        groups = np.flatnonzero(is_up)
        victim = GroupId(int(groups[self._rng.integers(groups.size)]))
        self._left, self._since_s, self._rate = _draw(self._spec, self._rng), at_s, (groups.size - 1) / self._num_groups
        return self._causes.loss(at_s, (victim,))

    def came_back(self, now_s: float, _groups: tuple[GroupId, ...], is_up: BoolArray) -> None:
        self._run_until(now_s)
        self._rate = int(is_up.sum()) / self._num_groups

    def restarted(self, began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        self._run_until(began_s)
        self._since_s, self._rate = now_s, 1.0

    def _run_until(self, now_s: float) -> None:
        self._left = max(self._left - (now_s - self._since_s) * self._rate, 0.0)
        self._since_s = now_s


class WithDomains:
    """Losses of single machines, and of whole domains at a constant rate, by a stream of their own."""

    def __init__(
        self, alone: FailureProcess, domains: tuple[MachineDomain, ...], num_machines: int, rng: np.random.Generator
    ) -> None:
        self._alone, self._domains, self._num_machines, self._rng = alone, domains, num_machines, rng
        self._mean_s = [one.mean_s / -(-num_machines // one.machines) for one in domains]
        self._due_s = rng.exponential(self._mean_s)

    def next_s(self) -> float:
        return min(self._alone.next_s(), float(self._due_s.min()))

    def strike(self, is_up: BoolArray) -> Loss:
        if self._alone.next_s() <= self._due_s.min():
            return self._alone.strike(is_up)
        index = int(self._due_s.argmin())
        at_s, domain = float(self._due_s[index]), self._domains[index]
        self._due_s[index] += self._rng.exponential(self._mean_s[index])
        first = int(self._rng.integers(-(-self._num_machines // domain.machines))) * domain.machines
        machines = range(first, min(first + domain.machines, self._num_machines))
        return Loss(at_s=at_s, groups=(), domain=machines, repair_s=domain.repair_s, cause=domain.name)

    def came_back(self, now_s: float, groups: tuple[GroupId, ...], is_up: BoolArray) -> None:
        self._alone.came_back(now_s, groups, is_up)

    def restarted(self, began_s: float, now_s: float, came_back: tuple[GroupId, ...]) -> None:
        self._alone.restarted(began_s, now_s, came_back)
        self._due_s += now_s - began_s


class PerNode:
    """Each node has a clock that, on running out, takes its group down; a group may be one node. While a group is down
    its nodes' clocks stand still. `Fleet` decides when it is repaired.
    """

    def __init__(self, spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> None:
        self._spec, self._rng = spec, rng
        self._causes = _Causes(spec, rng)
        times_s = [_draw(spec, rng) for _ in range(num_groups * spec.nodes_per_group)]
        # For each node: when its clock runs out, or the rest of the clock while its group is down.
        self._nodes_s = np.array(times_s).reshape(num_groups, spec.nodes_per_group)
        self._due_s = self._nodes_s.min(axis=1)  # when the group is lost; infinite while it is down

    def next_s(self) -> float:
        return float(self._due_s.min())

    def strike(self, _is_up: BoolArray) -> Loss:
        group = int(self._due_s.argmin())
        at_s = float(self._due_s[group])
        self._nodes_s[group] -= at_s
        self._due_s[group] = inf
        return self._causes.loss(at_s, (GroupId(group),))

    def came_back(self, now_s: float, groups: tuple[GroupId, ...], _is_up: BoolArray) -> None:
        for group in groups:
            left_s = self._nodes_s[group]
            left_s[left_s.argmin()] = _draw(self._spec, self._rng)  # the replaced node's clock had run out
            left_s += now_s
            self._due_s[group] = left_s.min()

    def restarted(self, began_s: float, now_s: float, came_back: tuple[GroupId, ...]) -> None:
        self._nodes_s[self._due_s < inf] += now_s - began_s
        self._due_s += now_s - began_s
        self.came_back(now_s, came_back, np.ones(self._due_s.size, dtype=np.bool_))


class PerDomain(FailureProcess):
    """Each domain loses all its groups at the times of a renewal process of its own."""

    def __init__(self, spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> None:
        self._spec, self._rng, self._num_groups = spec, rng, num_groups
        self._causes = _Causes(spec, rng)
        self._due_s = np.array([_draw(spec, rng) for _ in range(-(-num_groups // spec.groups_per_domain))])

    def next_s(self) -> float:
        return float(self._due_s.min())

    def strike(self, is_up: BoolArray) -> Loss:
        domain = int(self._due_s.argmin())
        at_s = float(self._due_s[domain])
        self._due_s[domain] = at_s + _draw(self._spec, self._rng)
        size = self._spec.groups_per_domain
        ids = range(domain * size, min((domain + 1) * size, self._num_groups))
        return self._causes.loss(at_s, tuple(GroupId(group) for group in ids if is_up[group]))

    def restarted(self, began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        self._due_s += now_s - began_s


class ReplayedLosses(FailureProcess):
    """The losses of a trace at their times. A restart absorbs those that fall into it, but machines that the trace has
    away at its end are lost once more.
    """

    def __init__(self, spec: FailureSpec) -> None:
        self._losses = sorted(spec.trace, key=lambda loss: loss.at_s)
        self._next = 0

    def next_s(self) -> float:
        return self._losses[self._next].at_s if self._next < len(self._losses) else inf

    def strike(self, is_up: BoolArray) -> Loss:
        loss = self._losses[self._next]
        self._next += 1
        groups = tuple(sorted({group for group in loss.groups if is_up[group]}))
        return replace(loss, groups=groups)

    def restarted(self, _began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        while self.next_s() <= now_s:
            self._next += 1
        away = [
            replace(loss, at_s=now_s, repair_s=end_s - now_s)
            for loss in self._losses[: self._next]
            if loss.machine is not None and (end_s := loss.at_s + (loss.repair_s or 0.0)) > now_s
        ]
        self._losses, self._next = [*away, *self._losses[self._next :]], 0


class SlowGroups:
    """The slow groups of one run. Ask for times in ascending order."""

    def __init__(self, rate: SlowRate, num_groups: int, rng: np.random.Generator) -> None:
        self._rate = rate
        self._rng = rng
        self._is_slow = np.zeros(num_groups, dtype=np.bool_)
        self._changes_at_s = np.full(num_groups, inf)
        if rate.group_interval_s is not None:
            self._changes_at_s = rng.exponential(rate.group_interval_s, num_groups)

    def factors(self, now_s: float) -> npt.NDArray[np.float64]:
        """The time of each group, in times that of the others."""
        while self._changes_at_s.size and self._changes_at_s.min() <= now_s:
            group = int(self._changes_at_s.argmin())
            self._is_slow[group] ^= True
            mean_s = self._rate.duration_s if self._is_slow[group] else self._rate.group_interval_s
            assert mean_s is not None, "only groups that may turn slow change"
            self._changes_at_s[group] += self._rng.exponential(mean_s)
        return np.where(self._is_slow, self._rate.factor, 1.0)

    def replace(self, group: GroupId, now_s: float) -> float:
        """Another machine takes the place of a slow one. Returns when that is as fast as before."""
        assert self._rate.group_interval_s is not None, "only groups that may turn slow are replaced"
        until_s = float(self._changes_at_s[group])
        self._is_slow[group] = False
        self._changes_at_s[group] = now_s + self._rng.exponential(self._rate.group_interval_s)
        return until_s
