"""Plans, resumes and summarizes sweeps of simulations. A case is one scenario with one seed; its digest, which covers
the code, identifies it in a file of results, so that results of other scenarios or code are never taken over.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from scipy.special import stdtrit

from spare_megatron.formats.codec import decode, encode
from spare_megatron.stacking.order import Granularity
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.scenario import Scenario, SimulatedPolicy
from spare_megatron.tools.simulate.spare_run import Clock
from spare_megatron.tools.simulate.world import Result, Stalled
from spare_megatron.version import code_digest

_CONFIDENCE = 0.95
_CODE = ("stacking", "core", "tools/plan", "tools/simulate")
"""Packages whose code determines the result of a simulation."""


Variant = tuple[SimulatedPolicy, Granularity]
"""A policy and its granularity, which matters only to "spare"."""

VARIANTS: Sequence[Variant] = (
    ("checkpoint_only", "stack"),
    ("replication", "stack"),
    ("spare", "stack"),
    ("spare", "microbatch"),
)


def variant_name(policy: str, granularity: str) -> str:
    """A short name for tables and legends.

    >>> variant_name("spare", "stack"), variant_name("checkpoint_only", "stack")
    ('spare, stack', 'checkpoint-only')
    """
    return f"{policy}, {granularity}" if policy == "spare" else policy.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    scenario: Scenario
    seed: int

    @property
    def digest(self) -> str:
        """Identifies the case among all scenarios, seeds and versions of the code."""
        return hashlib.sha256(f"{code_digest(*_CODE)} {self.seed} {self.scenario!r}".encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The result of one simulation. Further attributes are those of its scenario and of `world.Result`."""

    digest: str
    name: str
    policy: str
    granularity: str
    num_groups: int
    redundancy: int
    """1 for checkpoint_only."""
    seed: int
    num_steps: int = 0
    end_s: float = 0.0
    failure_free_s: float = 0.0
    time_to_train_ratio: float = 0.0
    availability: float = 0.0
    goodput: float = 0.0
    restarts: int = 0
    state_wipe_outs: int = 0
    pauses: int = 0
    losses: int = 0
    losses_by_cause: dict[str, int] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    """What each cause adds to the ratio, which is 1 without losses and saves."""
    decision_s: float = 0.0
    wall_s: float = 0.0
    """Real seconds of the simulation."""
    stalled: str = ""
    """Why the run was given up, in which case there are no figures; else empty."""


_COUNTS = ("restarts", "losses", "state_wipe_outs", "pauses")
_KEPT = [field.name for field in fields(CaseResult) if hasattr(Result, field.name) and field.name != "terms"]
"""What a case keeps of `world.Result` as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean, and half the width of its 95% confidence interval by Student's t; None with fewer than two samples."""

    mean: float
    ci95: float | None

    def share_interval(self) -> tuple[float, float]:
        """The interval of a share, cut to 0 and 1; the mean alone with fewer than two samples.

        >>> Estimate(mean=0.75, ci95=0.5).share_interval()
        (0.25, 1.0)
        """
        half = self.ci95 or 0.0
        return max(0.0, self.mean - half), min(1.0, self.mean + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFigures:
    """Means over the seeds of one scenario; the first nine fields are a contract of `spare simulate --json`."""

    policy: str
    granularity: str
    num_groups: int
    redundancy: int
    seeds: int
    time_to_train_ratio: Estimate
    availability: Estimate
    restarts: float
    losses: float
    state_wipe_outs: float
    pauses: float
    losses_by_cause: dict[str, float]
    goodput: Estimate
    name: str
    terms: dict[str, float]
    """What each cause adds to the ratio on average; their sum is the ratio - 1."""
    decision_s: float
    wall_s: float
    """Real seconds of all simulations together, as is decision_s."""


def unsimulated(base: Scenario, policy: SimulatedPolicy) -> str:
    """The setting of losses or slow groups that is not simulated with this policy; empty if all are."""
    if base.failures.domains and policy != "spare":
        return "failures.domains"
    return "slow.group_interval_s" if base.slow.group_interval_s is not None and policy == "replication" else ""


def grid(base: Scenario, variants: Sequence[Variant], redundancies: Sequence[int]) -> tuple[Scenario, ...]:
    """The base scenario for every redundancy and variant that is not `unsimulated`; once for checkpoint_only, which has
    no redundancy.
    """
    return tuple(
        replace(
            base,
            policy=policy,
            granularity=granularity,
            redundancy=redundancy,
            last_resort=base.last_resort and granularity == "microbatch",
            reform_s=base.reform_s if policy == "spare" else None,
            further_groups=base.further_groups if (policy, granularity) == ("spare", "microbatch") else 0,
            notice_s=base.notice_s if policy == "spare" else 0.0,
            history_s=base.history_s if policy == "spare" else 0.0,
            least_machines=base.least_machines if policy == "spare" else None,
            num_spares=0 if policy == "checkpoint_only" else base.num_spares,
        )
        for policy, granularity in variants
        if not unsimulated(base, policy)
        for redundancy in ((1,) if policy == "checkpoint_only" else redundancies)
    )


def cases_of(scenarios: Iterable[Scenario], num_seeds: int) -> tuple[Case, ...]:
    """Every scenario with seeds from 0, all of one seed before the next, so that early results cover the sweep."""
    listed = tuple(scenarios)
    return tuple(Case(scenario=scenario, seed=seed) for seed in range(num_seeds) for scenario in listed)


def run_case(case: Case, clock: Clock) -> CaseResult:
    """Simulates a case; `clock` gives the real seconds of the simulation and its decisions."""
    scenario, began_s = case.scenario, clock()
    found: dict[str, Any]
    try:
        result = simulate(scenario, case.seed, clock=clock)
        found = {name: getattr(result, name) for name in _KEPT} | {"terms": result.excess()}
    except Stalled as stalled:
        found = {"stalled": str(stalled)}
    return CaseResult(
        digest=case.digest,
        name=scenario.name,
        policy=scenario.policy,
        granularity=scenario.granularity,
        num_groups=scenario.num_groups,
        redundancy=scenario.hosts_per_shard,
        seed=case.seed,
        **found,
        wall_s=clock() - began_s,
    )


def encode_result(result: CaseResult) -> str:
    """The result as JSON, without a line end."""
    return encode(result)


def decode_results(text: str) -> dict[str, CaseResult]:
    """Digest -> result of every line; ValueError if one is none. A last line without its end is cut off and ignored."""
    results: dict[str, CaseResult] = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            result = decode(line, CaseResult)
        except ValueError as error:
            raise ValueError(f"line {number} is no result of a simulation: {line[:60]}") from error
        results[result.digest] = result
    return results


def estimate(samples: Sequence[float]) -> Estimate:
    """Mean and confidence of independent samples: half width t(0.975, n - 1) s / sqrt(n), s the standard deviation.

    >>> round(estimate([1.0, 2.0, 3.0]).ci95 or 0.0, 4)
    2.4841
    >>> estimate([1.5])
    Estimate(mean=1.5, ci95=None)
    """
    n = len(samples)
    mean = float(np.mean(samples))
    if n < 2:
        return Estimate(mean=mean, ci95=None)
    quantile = float(stdtrit(n - 1, (1 + _CONFIDENCE) / 2))
    return Estimate(mean=mean, ci95=quantile * float(np.std(samples, ddof=1)) / math.sqrt(n))


def figures_of(results: Sequence[CaseResult]) -> SweepFigures:
    """The figures of one scenario over its results, at least one."""
    first = results[0]
    return SweepFigures(
        policy=first.policy,
        granularity=first.granularity,
        num_groups=first.num_groups,
        redundancy=first.redundancy,
        seeds=len(results),
        time_to_train_ratio=estimate([result.time_to_train_ratio for result in results]),
        availability=estimate([result.availability for result in results]),
        **{name: float(np.mean([getattr(result, name) for result in results])) for name in _COUNTS},
        losses_by_cause=_means([result.losses_by_cause for result in results]),
        goodput=estimate([result.goodput for result in results]),
        name=first.name,
        terms=_means([result.terms for result in results]),
        decision_s=sum(result.decision_s for result in results),
        wall_s=sum(result.wall_s for result in results),
    )


def _means(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each entry; an absent entry counts as 0."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: float(np.mean([sample.get(name, 0.0) for sample in samples])) for name in names}


def summarize(
    scenarios: Iterable[Scenario], num_seeds: int, results: Mapping[str, CaseResult]
) -> tuple[SweepFigures, ...]:
    """The figures of every scenario of which no seed was given up."""
    found: list[SweepFigures] = []
    for scenario in scenarios:
        cases = (Case(scenario=scenario, seed=seed) for seed in range(num_seeds))
        own = [results[case.digest] for case in cases]
        if not any(result.stalled for result in own):
            found.append(figures_of(own))
    return tuple(found)


def given_up(results: Iterable[CaseResult]) -> tuple[str, ...]:
    """Why simulations were given up, one line per scenario and reason."""
    reasons = (
        f"{variant_name(result.policy, result.granularity)}, r = {result.redundancy}: {result.stalled}"
        for result in results
        if result.stalled
    )
    return tuple(dict.fromkeys(reasons))
