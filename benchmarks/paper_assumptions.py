"""What SPARe's paper (arXiv 2603.00357) may have assumed: its table under one assumption after another.

    OMP_NUM_THREADS=1 python benchmarks/paper_assumptions.py [--json] [--seeds 1] [--steps 10000]

The paper leaves open what its simulation does in some places, and its figures for replication differ from ours. Each
line changes one assumption and nothing else, the last five several together; no number is fitted. Availability stands
twice: with the time of saves, restarts and rework taken off, and with rework counted as time in operation. `ratio` is
ours over the paper's time to train, for the reading. Everything is simulated, nothing measured.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import gamma
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.paper_model import paper_cadence_s
from spare_megatron.cli.console import RunConsole
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import BoolArray, IntArray, make_placement
from spare_megatron.tools.plan.facts import CheckpointTimes
from spare_megatron.tools.simulate.engine import IsWhole, disjoint_sets, run_replication
from spare_megatron.tools.simulate.failures import FailureProcess, FailureSpec, Loss, make_process
from spare_megatron.tools.simulate.fleet import Fleet
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.scenario_presets import PUBLISHED, PublishedPoint, load_scenario
from spare_megatron.tools.simulate.spare_run import SpareRun
from spare_megatron.tools.simulate.world import Result, World

_LOSSES, _REPAIRS, _JITTER = range(10, 13)
CHECKPOINT = CheckpointTimes(save_s=60.0, restart_s=3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A reading of the paper; every default is what the presets have.

    Attributes:
        name: Shown in the table.
        settings: Settings of the scenario, for a point of the paper.
        hosts_overlap: Replication places shards as SPARe does, so that any r dead hosts of a shard end the run.
        rate_falls: Losses are as rare as the groups that are left are few.
        losses_in_restarts: Groups are lost while a restart is under way, too, and are down when it ends.
        clocks_restart: Every group's Weibull clock begins anew at a restart (with failures.kind = "group").
        jitter: What draws a factor of its own: "step", once for all groups; "group", a group's compute of a step;
            "shard", a group's compute of each shard. Of the latter two the slowest group counts, and T_0 has none.
        loss_costs_shard: Under replication a step with a loss computes one more shard.
    """

    name: str
    settings: Callable[[PublishedPoint], dict[str, Any]] = field(default=lambda _point: {})
    hosts_overlap: bool = False
    rate_falls: bool = True
    losses_in_restarts: bool = False
    clocks_restart: bool = False
    jitter: str = "step"
    loss_costs_shard: bool = False


def _mtbf_cadence(_point: PublishedPoint) -> dict[str, Any]:
    return {"save_interval_s": paper_cadence_s(300.0, CHECKPOINT)}


def _closed_form_cadence(point: PublishedPoint) -> dict[str, Any]:
    """T_f = mu m with the paper's mu = Gamma(1/r) / r * N^(1 - 1/r)."""
    r = point.redundancy
    losses = gamma(1 / r) / r * point.num_groups ** (1 - 1 / r)
    return {"save_interval_s": paper_cadence_s(losses * 300.0, CHECKPOINT)}


def _group_clocks(point: PublishedPoint) -> dict[str, Any]:
    return {"failures.kind": "group", "failures.mean_s": 300.0 * point.num_groups}


def _consecutive(_point: PublishedPoint) -> dict[str, Any]:
    return {"placement": "consecutive"}


DEFAULT = Assumption(name="as in the presets")
READING = Assumption(
    name="reading: hosts overlap, jitter of shards, losses in restarts",
    hosts_overlap=True,
    jitter="shard",
    losses_in_restarts=True,
)
ASSUMPTIONS = (
    DEFAULT,
    replace(DEFAULT, name="hosts overlap", hosts_overlap=True),
    replace(DEFAULT, name="losses in restarts", losses_in_restarts=True),
    replace(DEFAULT, name="jitter of each group", jitter="group"),
    replace(DEFAULT, name="jitter of each shard", jitter="shard"),
    replace(DEFAULT, name="rate does not fall", rate_falls=False),
    replace(DEFAULT, name="a loss costs a shard", loss_costs_shard=True),
    replace(DEFAULT, name="a clock per group", settings=_group_clocks),
    replace(DEFAULT, name="these begin anew at restarts", settings=_group_clocks, clocks_restart=True),
    replace(DEFAULT, name="cadence of mu m", settings=_closed_form_cadence),
    replace(DEFAULT, name="cadence of the MTBF", settings=_mtbf_cadence),
    replace(DEFAULT, name="reduction 2 s", settings=lambda _: {"costs.reduce_s": 2.0}),
    replace(DEFAULT, name="reduction 10 s", settings=lambda _: {"costs.reduce_s": 10.0}),
    replace(DEFAULT, name="consecutive hosts", settings=_consecutive),
    replace(READING, name="hosts overlap, losses in restarts", jitter="step"),
    READING,
    replace(READING, name="the reading, jitter of groups", jitter="group"),
    replace(READING, name="the reading, consecutive hosts", settings=_consecutive),
    replace(READING, name="the reading, consecutive hosts, jitter of steps", settings=_consecutive, jitter="step"),
)


class Renewals:
    """Losses of the whole system as the product has them, but for what is assumed."""

    def __init__(self, spec: FailureSpec, num_groups: int, assumption: Assumption, rng: np.random.Generator) -> None:
        self._spec, self._num_groups, self._assumption, self._rng = spec, num_groups, assumption, rng
        self._num_up = num_groups
        self._now_s, self._left_s = 0.0, self._draw()  # left: until the next loss if all groups took part

    def _draw(self) -> float:
        scale_s = self._spec.mean_s / gamma(1 + 1 / self._spec.shape)
        return float(scale_s * self._rng.weibull(self._spec.shape))

    @property
    def _rate(self) -> float:
        return self._num_up / self._num_groups if self._assumption.rate_falls else 1.0

    def next_s(self) -> float:
        return self._now_s + self._left_s / self._rate

    def strike(self, is_up: BoolArray) -> Loss:
        at_s, groups = self.next_s(), np.flatnonzero(is_up)
        victim = GroupId(int(self._rng.choice(groups)))
        self._now_s, self._left_s, self._num_up = at_s, self._draw(), max(groups.size - 1, 1)
        return Loss(at_s=at_s, groups=(victim,))

    def came_back(self, _now_s: float, _groups: tuple[GroupId, ...], _is_up: BoolArray) -> None:
        raise AssertionError("groups return at restarts alone")

    def restarted(self, began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        self._left_s = max(self._left_s - (began_s - self._now_s) * self._rate, 0.0)
        self._now_s = began_s if self._assumption.losses_in_restarts else now_s
        self._num_up = self._num_groups


class FreshClocks:
    """A clock for each group, of which all begin anew at a restart."""

    def __init__(self, spec: FailureSpec, num_groups: int, rng: np.random.Generator) -> None:
        self._spec, self._num_groups, self._rng = spec, num_groups, rng
        self._process, self._began_s = make_process(spec, num_groups, rng), 0.0

    def next_s(self) -> float:
        return self._began_s + self._process.next_s()

    def strike(self, is_up: BoolArray) -> Loss:
        loss = self._process.strike(is_up)
        return replace(loss, at_s=self._began_s + loss.at_s)

    def came_back(self, _now_s: float, _groups: tuple[GroupId, ...], _is_up: BoolArray) -> None:
        raise AssertionError("groups return at restarts alone")

    def restarted(self, _began_s: float, now_s: float, _came_back: tuple[GroupId, ...]) -> None:
        self._process, self._began_s = make_process(self._spec, self._num_groups, self._rng), now_s


class AssumedWorld(World):
    """The simulated world under an assumption."""

    def __init__(self, scenario: Scenario, seed: int, assumption: Assumption) -> None:
        super().__init__(scenario, seed)
        self._assumption = assumption
        losses, repairs, self._noise = (np.random.default_rng([seed, n]) for n in (_LOSSES, _REPAIRS, _JITTER))
        self.fleet = Fleet(scenario, self._process(losses), repairs)
        if assumption.jitter != "step":
            costs = scenario.costs
            self.failure_free_s = scenario.num_steps * (costs.compute_s + costs.reduce_s)

    def _process(self, rng: np.random.Generator) -> FailureProcess:
        spec, n = self.scenario.failures, self.scenario.num_groups
        if self._assumption.clocks_restart:
            return FreshClocks(spec, n, rng)
        if spec.kind == "system":
            return Renewals(spec, n, self._assumption, rng)
        return make_process(spec, n, rng)

    def compute(self, step: int, stacks: float) -> None:
        """As for all groups alike, or as long as the slowest group takes."""
        if self._assumption.jitter == "step":
            super().compute(step, stacks)
            return
        costs, num_up = self.scenario.costs, int(self.fleet.is_up.sum())
        # The sum of n independent factors N(1, s^2) is n N(1, s^2 / n).
        spread = costs.jitter / (stacks**0.5 if self._assumption.jitter == "shard" else 1.0)
        slowest = 1.0 + spread * float(self._noise.standard_normal(num_up).max())
        self.ledger.spend("compute", costs.compute_s)
        self.ledger.spend("extra_compute", costs.compute_s * (stacks - 1))
        self.ledger.spend("jitter", costs.compute_s * stacks * (slowest - 1))

    def lost_meanwhile(self) -> list[GroupId]:
        lost = super().lost_meanwhile()
        if lost and self._assumption.loss_costs_shard and self.scenario.policy == "replication":
            self.ledger.spend("patch", self.scenario.costs.compute_s)
        return lost


def simulate_assumed(point: PublishedPoint, assumption: Assumption, num_steps: int, seed: int) -> Result:
    """A run at a point of the paper."""
    base = {"granularity": "stack", "policy": point.policy, "redundancy": point.redundancy, "num_steps": num_steps}
    scenario = load_scenario(f"paper_n{point.num_groups}", {**base, **assumption.settings(point)})
    world = AssumedWorld(scenario, seed, assumption)
    if point.policy == "replication":
        run_replication(world, coverage(scenario, assumption))
    else:
        SpareRun(world, None, None).run()
    return world.result(decision_s=0.0)


def coverage(scenario: Scenario, assumption: Assumption) -> IsWhole:
    """What replication needs to go on."""
    if not assumption.hosts_overlap:
        return disjoint_sets(scenario)
    hosts: IntArray = make_placement(scenario.placement, scenario.num_groups, scenario.redundancy).host_array
    return lambda is_up: bool(is_up[hosts].any(axis=1).all())


def figures(point: PublishedPoint, assumption: Assumption, num_steps: int, num_seeds: int) -> dict[str, Any]:
    """Means over the seeds, beside the paper's."""
    results = [simulate_assumed(point, assumption, num_steps, seed) for seed in range(num_seeds)]
    ratio = mean(result.time_to_train_ratio for result in results)
    idle_s = [result.terms["save"] + result.terms["restart"] for result in results]
    return {
        "assumption": assumption.name,
        "paper": asdict(point),
        "time_to_train_ratio": ratio,
        "over_paper": ratio / point.time_to_train_ratio,
        "availability": mean(result.availability for result in results),
        "availability_with_rework": mean(1 - s / result.end_s for s, result in zip(idle_s, results, strict=True)),
        "restarts": mean(result.restarts for result in results),
        "losses": mean(result.losses for result in results),
    }


def wanted() -> Iterator[tuple[PublishedPoint, Assumption]]:
    """What each point is simulated under: what changes nothing for its policy is left out."""
    for point in PUBLISHED:
        seen: set[Assumption] = set()
        for assumption in ASSUMPTIONS:
            effect = replace(assumption, name="")
            if point.policy != "replication":
                effect = replace(effect, hosts_overlap=False, loss_costs_shard=False)
            elif effect.settings is _consecutive and not effect.hosts_overlap:
                continue
            if effect not in seen:
                seen.add(effect)
                yield point, assumption


def print_table(lines: Sequence[dict[str, Any]]) -> None:
    """A block for every point of the paper."""
    for point in PUBLISHED:
        theirs = f"{point.time_to_train_ratio:.2f}, available {point.availability:.1%}"
        print(f"\n{point.policy}, N = {point.num_groups}, r = {point.redundancy}: the paper has {theirs}")
        for line in lines:
            if line["paper"] == asdict(point):
                up = f"{line['availability']:.1%}, with rework {line['availability_with_rework']:.1%}"
                off = f"{line['over_paper'] - 1:+.1%}"
                print(f"  {line['assumption']:64s} {line['time_to_train_ratio']:5.2f} {off:>7s}  {up}")


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of each line, seeded from 0.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps to commit; the paper has 10,000.")] = 10_000,
) -> None:
    """Print the paper's table under one assumption after another."""
    came_from, console = origin(), RunConsole(stderr=True)
    todo = tuple(wanted())
    lines = []
    for number, (point, assumption) in enumerate(todo, start=1):
        text = f"{number}/{len(todo)}  {point.policy}, N = {point.num_groups}: {assumption.name}"
        console.line(text)
        lines.append(figures(point, assumption, steps, seeds))
    if as_json:
        reading = [line for line in lines if line["assumption"] == READING.name]
        ratio = {f"{a['paper']['policy']} {a['paper']['num_groups']}": a["over_paper"] for a in reading}
        facts = {"kind": "simulated", "steps": steps, "seeds": seeds}
        print(json.dumps({**came_from, **facts, "ratio": ratio, "rows": lines}, indent=2))
        return
    print(f"simulated, not measured; {steps} steps, {seeds} seeds")
    print(f"{came_from['machine']}; commit {came_from['commit']}; {came_from['date']}")
    print_table(lines)


if __name__ == "__main__":
    typer.run(main)
