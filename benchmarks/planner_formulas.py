"""The planner's formulas beside Monte Carlo and exact enumeration, and their errors.

    OMP_NUM_THREADS=1 python benchmarks/planner_formulas.py [--json] [--samples 4000] [--seed 0] [--most-groups 1000]

Losses are random on Golomb placements; makespans and patches are those of stacking.reorder and
stacking.stack_reorder. An error
is formula / Monte Carlo - 1; `noise` is the standard error of the Monte Carlo mean, relative to it.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from scipy.integrate import trapezoid

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.paper_model import (
    asymptotic_endured_losses,
    mean_makespan,
    mean_overhead,
    paper_redundancy,
    paper_time_to_train,
)
from spare_megatron.core.saves.survival import FloatArray, endured_losses, optimal_cadence_s
from spare_megatron.stacking.placement import IntArray, make_placement
from spare_megatron.tools.plan.domains import (
    LossIntervals,
    consecutive_domains,
    coverage_over_time,
    domain_coverage_probabilities,
    equivalent_domain_repair,
    hosts_per_domain,
)
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts, Policy
from spare_megatron.tools.plan.overhead import StepTimes, least_makespans, patch_stacks
from spare_megatron.tools.plan.plan import (
    availability,
    best_availability,
    closed_form_redundancy,
    optimize,
    predict,
)
from spare_megatron.tools.plan.readmission import RejoinTimes, absence, equivalent_repair, num_down_with_spares
from spare_megatron.tools.plan.repair import RepairTimes, survival
from tests.oracle import monte_carlo

SIZES = (200, 600, 1000)
REDUNDANCIES = range(2, 21)
NUM_MICROBATCHES = 16
REDUCE_S = {200: 2.0, 600: 6.0, 1000: 10.0}
CHECKPOINT = CheckpointTimes(save_s=60.0, restart_s=3600.0)
PUBLISHED = {200: (2.92, 9), 600: (2.49, 8), 1000: (2.34, 9)}
"""Least time-to-train ratio, and r, in the simulation of arXiv 2603.00357."""

Row = dict[str, Any]


def compared(formula: float, samples: FloatArray | IntArray) -> Row:
    mean = float(np.mean(samples))
    noise = float(np.std(samples) / np.sqrt(len(samples)) / mean)
    return {"formula": formula, "monte_carlo": mean, "error": formula / mean - 1, "noise": noise}


def generator(seed: int, *case: int) -> np.random.Generator:
    return np.random.default_rng([seed, *case])


def step_times(num_groups: int) -> StepTimes:
    return StepTimes(shard_s=64.0, reduce_s=REDUCE_S[num_groups], loss_interval_s=300.0)


def endurance_rows(sizes: Sequence[int], num_samples: int, seed: int) -> Iterator[Row]:
    for n in sizes:
        for r in REDUNDANCIES:
            hosts = make_placement("golomb", n, r).host_array
            # The spread of L falls with r, so low r need more samples for the same noise.
            samples = monte_carlo.endured_samples(hosts, n, num_samples * 4 // min(r, 4), generator(seed, n, r))
            row: Row = {"num_groups": n, "redundancy": r, **compared(endured_losses(n, r), samples)}
            asymptotic = asymptotic_endured_losses(n, r)
            yield {**row, "asymptotic": asymptotic, "asymptotic_error": asymptotic / float(samples.mean()) - 1}


def s_bar_rows(sizes: Sequence[int], num_samples: int, seed: int) -> Iterator[Row]:
    """SPARe's S_bar beside the mean of c(k), k below the losses endured, in each random order of losses.

    Three readings: at floor(mu) as published, against the mean over the states before each loss endured (`error`) and
    with the state after the last one, too (`error_with_last`); and at the mean of the losses endured that was counted
    (`error_at_counted_mu`). Real reorders exceed c(k) by less than 0.01% on average here (`overhead`).
    """
    for n in sizes:
        least = least_makespans(n)
        before = np.concatenate(([0.0], np.cumsum(least)))
        for r in REDUNDANCIES:
            hosts = make_placement("golomb", n, r).host_array
            endured = monte_carlo.endured_samples(hosts, n, num_samples, generator(seed, n, r))
            some = endured[endured > 0]
            row: Row = {"num_groups": n, "redundancy": r, **compared(mean_overhead(n, r), before[some] / some)}
            with_last = float((before[endured + 1] / (endured + 1)).mean())
            row["error_with_last"] = row["formula"] / with_last - 1
            at_counted = float(least[: int(endured.mean())].mean())
            yield {**row, "error_at_counted_mu": at_counted / row["monte_carlo"] - 1}


def overhead_rows(sizes: Sequence[int], num_samples: int, seed: int) -> Iterator[Row]:
    for n in sizes:
        for r in (4, 8, 12, 20):
            placement = make_placement("golomb", n, r)
            rng = generator(seed, n, r)
            endured = monte_carlo.endured_samples(placement.host_array, n, num_samples, rng)
            num_sequences = max(num_samples // 400, 1)
            case: Row = {"num_groups": n, "redundancy": r}
            depths = monte_carlo.depth_samples(placement, num_sequences, rng)
            per_sequence = counted(n, 1, endured, depths, is_pooled=False)
            yield {"what": "S_bar", **case, **compared(mean_overhead(n, r), per_sequence)}
            pooled = counted(n, 1, endured, depths, is_pooled=True)
            yield {"what": "depth", **case, **compared(mean_makespan(n, r), pooled)}
            pairs = monte_carlo.makespan_samples(placement, NUM_MICROBATCHES, num_sequences, rng)
            pooled = counted(n, NUM_MICROBATCHES, endured, [span for span, _ in pairs], is_pooled=True)
            yield {"what": "makespan", **case, **compared(mean_makespan(n, r, NUM_MICROBATCHES), pooled)}
            yield {"what": "patch", **case, **patch_compared(n, r, [patch for _, patch in pairs])}


def counted(
    n: int, m: int, endured: IntArray, sequences: Sequence[IntArray | FloatArray], *, is_pooled: bool
) -> FloatArray:
    """Samples of the mean makespan until wipe-out: of the least possible one, plus the mean excess of real reorders.

    The excess is small, so few reorders do (their noise is not in that of the samples); how many losses are endured
    varies much and is cheap to sample. Pooled means weigh every count of losses alike, others every sequence.
    """
    least = least_makespans(n, m)
    excess = [s - least[: len(s)] for s in sequences]
    total = np.cumsum(least)[endured]
    if is_pooled:
        return total / (endured + 1).mean() + float(np.concatenate(excess).mean())
    return total / (endured + 1) + float(np.mean([e.mean() for e in excess]))


def patch_compared(n: int, r: int, patches: list[FloatArray]) -> Row:
    """Patches of all losses that were no wipe-out, beside the formula at the same counts of losses."""
    expected = patch_stacks(n, r, NUM_MICROBATCHES)
    formula = float(np.concatenate([expected[: len(p)] for p in patches]).mean())
    return compared(formula, np.concatenate(patches))


def repair_rows(num_samples: int, seed: int) -> Iterator[Row]:
    for n, r, down in ((13, 3, 0.1), (31, 2, 0.01), (31, 3, 0.1), (60, 2, 0.1), (60, 4, 0.3), (200, 3, 0.05)):
        repair = RepairTimes(group_interval_s=1.0, repair_s=down / (1 - down))
        placement = make_placement("golomb", n, r)
        samples = monte_carlo.repair_samples_s(placement, repair, num_samples, generator(seed, n, r))
        case: Row = {"num_groups": n, "redundancy": r, "down_share": down}
        yield {**case, **compared(survival(n, r, repair).mean_s, samples)}


def spares_rows(num_samples: int, seed: int) -> Iterator[Row]:
    """Time to a wipe-out with a pool of spares, and the mean absence."""
    for n, r, num_spares in ((31, 3, 0), (31, 3, 2), (31, 3, 4), (60, 3, 2), (60, 3, 4)):
        rejoin = RejoinTimes(repair_s=60.0, transfer_s=5.0, num_spares=num_spares)
        away = absence(n, 600.0, rejoin)
        placement = make_placement("golomb", n, r)
        num_runs = max(num_samples // 10, 10)
        lived_s, absences_s = monte_carlo.spares_samples_s(placement, 600.0, rejoin, num_runs, generator(seed, n, r))
        found = survival(n, r, equivalent_repair(r, num_down_with_spares(n, away, rejoin), 600.0))
        case: Row = {"num_groups": n, "redundancy": r, "num_spares": num_spares}
        case |= {"absence_s": away.repair_s, "absence_counted_s": float(absences_s.mean())}
        yield {**case, **compared(found.mean_s, lived_s)}


def domain_repair_rows(num_samples: int, seed: int) -> Iterator[Row]:
    n, size, absence_s = 60, 3, 60.0
    domain_of = consecutive_domains(n, size)
    intervals = LossIntervals(group_s=1200.0, domain_s=2400.0)
    for is_apart in (True, False):
        for r in (2, 3, 4) if is_apart else (2, 3):
            placement = make_placement("golomb", n, r, size if is_apart else 1)
            away = equivalent_domain_repair(hosts_per_domain(placement, domain_of), intervals, absence_s)
            drawn = (max(num_samples // 10, 10), generator(seed, n, r))
            samples_s = monte_carlo.domain_repair_samples_s(placement, domain_of, intervals, absence_s, drawn)
            case: Row = {"num_groups": n, "redundancy": r, "apart": is_apart}
            yield {**case, **compared(survival(n, r, away).mean_s, samples_s)}


def mean_time_s(counts: IntArray, intervals: LossIntervals) -> float:
    """Mean seconds until a wipe-out, with groups and domains that never come back."""
    times_s, covered = coverage_over_time(counts, intervals)
    return float(trapezoid(covered, times_s))


def domain_rows(num_samples: int, seed: int) -> Iterator[Row]:
    n, size = 200, 4
    cases = {"beside each other": np.arange(n) // size, "far apart": np.arange(n) % (n // size)}
    for kind in ("golomb", "consecutive"):
        for name, domain_of in cases.items():
            for r in (3, 5, 8):
                placement = make_placement(kind, n, r)
                counts = hosts_per_domain(placement, domain_of)
                rng = generator(seed, n, r)
                case: Row = {"placement": kind, "domains": name, "redundancy": r}
                samples = monte_carlo.endured_samples(domain_of[placement.host_array], n // size, num_samples, rng)
                if samples.any():
                    endured = float(domain_coverage_probabilities(counts)[1:].sum())
                    yield {"what": "endured domains", **case, **compared(endured, samples)}
                intervals = LossIntervals(group_s=200.0, domain_s=200.0)
                times_s = monte_carlo.domain_samples_s(placement, domain_of, intervals, num_samples, rng)
                yield {"what": "time", **case, **compared(mean_time_s(counts, intervals), times_s)}


def availability_rows(num_samples: int, seed: int) -> Iterator[Row]:
    for time_to_failure_s in (9e3, 3e4, 9e4, 3e5):
        best = best_availability(60.0, time_to_failure_s, 3600.0)
        plan_s = np.random.default_rng(seed).exponential(time_to_failure_s, num_samples * 25)
        cadence_s = optimal_cadence_s(60.0, time_to_failure_s)
        measured = monte_carlo.availability_sample(cadence_s, CHECKPOINT, plan_s)
        assert abs(best - availability(cadence_s, 60.0, time_to_failure_s, 3600.0)) < 1e-9
        yield {"time_to_failure_s": time_to_failure_s, "cadence_s": cadence_s, **compared(best, np.array([measured]))}


def optimum_rows(sizes: Sequence[int], num_cycles: int, seed: int) -> Iterator[Row]:
    for n in sizes:
        times = step_times(n)
        facts = ClusterFacts(
            num_groups=n,
            times=times,
            checkpoint=CHECKPOINT,
            num_microbatches=NUM_MICROBATCHES,
            rejoin=RejoinTimes(repair_s=600.0),
        )
        for policy in ("stack", "microbatch", "rejoin"):
            plan = optimize(facts, policy)
            row: Row = {"num_groups": n, "policy": policy, "redundancy": plan.redundancy}
            row |= {"ratio": plan.time_to_train_ratio, "availability": plan.availability}
            if policy != "rejoin":
                row |= {"simulated": simulated_ratio(facts, policy, plan.redundancy, num_cycles, seed)}
                row |= {"error": row["ratio"] / row["simulated"] - 1}
            yield row
        published, at = PUBLISHED[n]
        r_star = closed_form_redundancy(n)
        yield {
            "num_groups": n,
            "policy": "SPARe's model",
            "redundancy": paper_redundancy(n, 300.0, CHECKPOINT),
            "closed_form_redundancy": r_star,
            "J": paper_time_to_train(n, r_star, 300.0, CHECKPOINT),
            "J_with_patches": paper_time_to_train(n, r_star, 300.0, CHECKPOINT, times),
            "published_simulation": published,
            "published_redundancy": at,
            "plan_error": predict(facts, "stack", at).time_to_train_ratio / published - 1,
        }


def simulated_ratio(facts: ClusterFacts, policy: Policy, redundancy: int, num_cycles: int, seed: int) -> float:
    n, m = facts.num_groups, facts.num_microbatches if policy == "microbatch" else 1
    rng = generator(seed, n, redundancy)
    hosts = make_placement("golomb", n, redundancy).host_array
    run = monte_carlo.SimulatedRun(
        times=facts.times, checkpoint=facts.checkpoint, cadence_s=predict(facts, policy, redundancy).cadence_s
    )
    wipe_out_after = monte_carlo.endured_samples(hosts, n, num_cycles, rng) + 1
    return monte_carlo.simulated_time_to_train(
        wipe_out_after, least_makespans(n, m), patch_stacks(n, redundancy, m), run, rng
    )


def print_table(title: str, rows: list[Row]) -> None:
    print(f"{title}: " + "; ".join(errors_of(rows, key) for key in rows[0] if "error" in key))
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names]
    for row in rows:
        cells.append([f"{v:.4g}" if isinstance(v, float) else str(v) for v in (row.get(name, "") for name in names)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    print(flush=True)


def errors_of(rows: list[Row], key: str) -> str:
    errors = np.abs([row[key] for row in rows if key in row]) * 100
    return f"{key}: mean {errors.mean():.2f}%, largest {errors.max():.2f}%"


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    samples: Annotated[int, typer.Option(help="Random orders of losses per case.")] = 4000,
    seed: Annotated[int, typer.Option(help="Seed of all of them.")] = 0,
    most_groups: Annotated[int, typer.Option(help="Leave out what has more groups.")] = SIZES[-1],
) -> None:
    """Print every formula beside Monte Carlo."""
    came_from = origin()
    sizes = [n for n in SIZES if n <= most_groups]
    parts = {
        "endurance": endurance_rows(sizes, samples, seed),
        "S_bar": s_bar_rows(sizes, samples, seed),
        "optimum": optimum_rows(sizes, max(samples // 40, 10), seed),
        "availability": availability_rows(samples, seed),
        "domains": domain_rows(samples, seed),
        "repair": repair_rows(samples, seed),
        "spares": spares_rows(samples, seed),
        "domains and repair": domain_repair_rows(samples, seed),
        "overhead": overhead_rows(sizes, samples, seed),
    }
    if as_json:
        print(json.dumps({**came_from, **{name: list(rows) for name, rows in parts.items()}}, indent=2))
        return
    print(f"{came_from['machine']}, one used; commit {came_from['commit']}\n")
    for name, rows in parts.items():
        print_table(name, list(rows))


if __name__ == "__main__":
    typer.run(main)
