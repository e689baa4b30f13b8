"""Random faults of a run: drawn from the configuration and its seed alone, such that redundancy can mask all of them.

Faults come as a renewal process in steps, the only clock that all ranks share. Each is of a random kind and hits a
random group among those that may be hit then:

- Its groups have not been hit for `faults.recovery_steps`. As long, a group that may be lost counts as lost: by then a
  corruption has been found, and whoever is started again has been taken in. Who may not be started again stays lost.
- Every shard keeps a host among the other groups, and where parameters may be corrupted the groups that are not hit
  outnumber those that are, so that a majority knows who is right.
- Only one corruption is open at a time: two groups that find the same in one step show a fault of the training.

Where no group may be hit, the fault waits until one may be; where that is never so again, it is left out.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from spare_megatron.config.schema import FaultKind, RunConfig
from spare_megatron.core.phases import Phase
from spare_megatron.core.placement import Placement, make_placement
from spare_megatron.core.topology import GroupId
from spare_megatron.faults.mix import kind_weights
from spare_megatron.faults.trace import PHASES_AFTER_A_LOSS, PHASES_OF_A_MICROBATCH, Fault

FIRST_STEP = 3
"""Before it nobody knows how long a step takes, so that a rank that stands still is found only by a timeout."""

_STREAM = 1  # beside that of the trace
_CORRUPTIONS: tuple[FaultKind, ...] = ("nan", "bit_flip", "param_flip")
_ALWAYS_COSTLY: tuple[FaultKind, ...] = ("kill", "raise", "kill_supervisor", *_CORRUPTIONS)
_LASTING_OR_NOT: tuple[FaultKind, ...] = ("hang", "stop", "cut", "stop_node")
_OF_A_NODE: tuple[FaultKind, ...] = ("cut", "stop_node", "kill_supervisor")
_OF_A_DOMAIN: tuple[FaultKind, ...] = ("kill", "raise", "hang", "stop")
_PHASES = tuple(phase for phase in Phase if phase not in PHASES_AFTER_A_LOSS)
_CORRUPTIBLE_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.BEFORE_REDUCE)
_HARMLESS_INTERVALS = 0.5
"""A pause of this many heartbeat intervals costs no group, also on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """A fault whose groups are still open."""

    kind: FaultKind
    phase: Phase
    seconds: float | None
    bit: int | None
    is_of_domain: bool
    costs: bool
    """Whether it may cost its groups."""


@dataclass(slots=True)
class _Condition:
    """Who may be hit when, after the faults drawn so far."""

    placement: Placement
    needs_majority: bool
    recovery_steps: int
    num_rejoins: int
    hit_until: dict[GroupId, float] = field(default_factory=dict)
    lost_until: dict[GroupId, float] = field(default_factory=dict)
    num_losses: dict[GroupId, int] = field(default_factory=dict)
    corrupt_until: float = 0.0

    def allows(self, draw: _Draw, groups: frozenset[GroupId], step: int) -> bool:
        """Whether the run survives it for sure, and every group is there to be hit."""
        if any(step < self.hit_until.get(group, 0) for group in groups):
            return False
        if draw.kind in _CORRUPTIONS and step < self.corrupt_until:
            return False
        lost = frozenset(group for group, until in self.lost_until.items() if step < until)
        if not draw.costs:
            return True
        everybody = frozenset(GroupId(group) for group in range(self.placement.num_groups))
        left = everybody - lost - groups
        if self.needs_majority and 2 * len(left) <= len(everybody):
            return False
        return bool(left) and not self.placement.uncovered(left)

    def hit(self, draw: _Draw, groups: frozenset[GroupId], step: int) -> None:
        until = step + self.recovery_steps
        for group in groups:
            self.hit_until[group] = until
            if draw.costs:
                self.num_losses[group] = self.num_losses.get(group, 0) + 1
                is_last = self.num_losses[group] > self.num_rejoins or draw.kind in _OF_A_NODE
                self.lost_until[group] = math.inf if is_last else until
                self.hit_until[group] = self.lost_until[group]
        if draw.kind in _CORRUPTIONS:
            self.corrupt_until = until

    def next_change(self, step: int) -> float:
        """The first later step at which more may be allowed; infinity if there is none."""
        later = [until for until in (*self.hit_until.values(), self.corrupt_until) if until > step]
        return min(later, default=math.inf)


def draw_faults(config: RunConfig) -> tuple[Fault, ...]:
    """The random faults of a run, in the order of their steps; none if `faults.mean_steps` is absent.

    The last `faults.recovery_steps` are spared: what happens there might be found only after the run.

    Args:
        config: A configuration without problems.
    """
    faults = config.faults
    if faults.mean_steps is None:
        return ()
    spare, weights = config.spare, kind_weights(config)
    num_groups = config.layout.num_groups
    condition = _Condition(
        placement=make_placement(spare.placement, num_groups, spare.redundancy, spare.groups_per_domain),
        needs_majority="param_flip" in weights,
        recovery_steps=faults.recovery_steps,
        num_rejoins=spare.rejoins,
    )
    end = config.train.steps - faults.recovery_steps
    at = float(FIRST_STEP)
    drawn: list[Fault] = []
    for gap, rng in _gaps(config):
        at += gap
        if at >= end:
            return tuple(drawn)
        found = _place(config, condition, _draw(config, weights, rng), int(at), end, rng)
        drawn += found
        at = max(at, float(found[0].step)) if found else at
    raise AssertionError("the gaps never end")


def _gaps(config: RunConfig) -> Iterator[tuple[float, np.random.Generator]]:
    """Steps to the next fault, and the generator for all else of that fault."""
    faults = config.faults
    mean = faults.mean_steps or 0.0
    gaps = np.random.default_rng([faults.seed, _STREAM])
    for index in itertools.count():
        share = gaps.exponential()
        if faults.distribution == "weibull":
            # An exponential variable to the power of 1 / shape is a Weibull one, of mean Gamma(1 + 1 / shape).
            share = share ** (1 / faults.shape) / math.gamma(1 + 1 / faults.shape)
        yield mean * share, np.random.default_rng([faults.seed, _STREAM, index])


def _draw(config: RunConfig, weights: dict[FaultKind, float], rng: np.random.Generator) -> _Draw:
    faults = config.faults
    kind = list(weights)[rng.choice(len(weights), p=list(weights.values()))]
    lasts = kind in _ALWAYS_COSTLY or (kind in _LASTING_OR_NOT and rng.random() < 0.5)
    seconds = None if lasts else float(faults.max_seconds * (1.0 - rng.random()))
    jump = -1.0 if kind == "clock_jump" and rng.random() < 0.5 else 1.0
    phases = _CORRUPTIBLE_PHASES if kind in ("nan", "bit_flip") else _PHASES
    if config.layout.pipeline_parallel == 1:
        phases = tuple(phase for phase in phases if phase not in (Phase.SEND, Phase.RECEIVE))
    num_bits = 64 if kind == "bit_flip" and config.reduce.mode == "reproducible" else 32
    is_harmless = kind in ("disk_full", "clock_jump", "stop_store") or (
        seconds is not None and seconds <= _HARMLESS_INTERVALS * config.control.heartbeat_interval_s
    )
    return _Draw(
        kind=kind,
        phase=phases[rng.integers(len(phases))],
        seconds=None if seconds is None else jump * seconds,
        bit=int(rng.integers(num_bits)) if kind in ("bit_flip", "param_flip") else None,
        is_of_domain=lasts and kind in _OF_A_DOMAIN and bool(rng.random() < faults.domain_share),
        costs=not is_harmless,
    )


def _place(
    config: RunConfig, condition: _Condition, draw: _Draw, step: int, end: int, rng: np.random.Generator
) -> list[Fault]:
    """The fault in the groups it hits, at the first step from this one on that allows it; empty if none does."""
    while step < end:
        groups = [GroupId(group) for group in range(config.layout.num_groups)]
        allowed = [group for group in groups if condition.allows(draw, _groups_of(config, draw, group), step)]
        if allowed:
            aim = allowed[rng.integers(len(allowed))]
            struck = _groups_of(config, draw, aim)
            condition.hit(draw, struck, step)
            victims = sorted(struck) if draw.is_of_domain else [aim]
            return [_fault(config, draw, group, step, rng) for group in victims]
        later = condition.next_change(step)
        if math.isinf(later):
            return []
        step = math.ceil(later)
    return []


def _groups_of(config: RunConfig, draw: _Draw, group: GroupId) -> frozenset[GroupId]:
    """The groups that the fault strikes when it is aimed at this one."""
    layout, spare = config.parallel, config.spare
    if draw.is_of_domain:
        first = group - group % spare.groups_per_domain
        members = range(first, min(first + spare.groups_per_domain, layout.num_groups))
        return frozenset(GroupId(member) for member in members)
    if draw.kind in _OF_A_NODE:
        nodes = {layout.node_of(group, rank) for rank in range(layout.ranks_per_group)}
        return frozenset(other for node in nodes for other in layout.groups_on(node))
    return frozenset({group})


def _fault(config: RunConfig, draw: _Draw, group: GroupId, step: int, rng: np.random.Generator) -> Fault:
    num_times = config.spare.microbatches_per_shard if draw.phase in PHASES_OF_A_MICROBATCH else 1
    return Fault(
        step=step,
        group=group,
        rank=int(rng.integers(config.parallel.ranks_per_group)),
        phase=draw.phase,
        kind=draw.kind,
        seconds=draw.seconds,
        bit=draw.bit,
        ordinal=1 + int(rng.integers(num_times)),
    )
