"""How the controller's decisions and simulated runs grow: processor time of one core, and memory.

    OMP_NUM_THREADS=1 python benchmarks/growth_simulated.py [--json] [--granularity microbatch] [--curves groups steps]

Decisions: who owns what after one more loss, in random states before a wipe-out, the patch of that loss, and the way
straight from the initial state to such a state.

Simulated runs have the parameters of SPARe's paper, 600,000 GPUs of which one is lost every 5 minutes, whatever the
number of groups that they make up. Each is in a process of its own, what that has imported is not counted. Setting up
is a run of one step, a step without a loss what further steps take where nothing is lost, and a loss what the same
steps take beyond that where groups are lost, with restarts and steps that are done again.

Each figure is fitted to c x^k, x being what the curve is named after.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.power_law import fit_if_any
from benchmarks.reorder import loss_order, reorder, survivors_of
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import Work
from spare_megatron.stacking.reorder import patch_work
from spare_megatron.stacking.stack_reorder import initial_order, reorder_stacks
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.scenario_presets import load_scenario
from spare_megatron.tools.simulate.world import Result

T = TypeVar("T")
REDUNDANCY = 9
"""That of the paper with 1000 groups."""
STEPS_TIMES = (0.5, 1, 2, 4, 8)
LOSSES_TIMES = (0.25, 0.5, 1, 2, 4)
"""Losses for each second, in those of the paper."""
REDUNDANCIES = (3, 6, 9, 12, 18)
CURVES = ["groups", "steps", "losses", "redundancy"]
DECISIONS = {
    "loss_s": "one loss, microbatches",
    "loss_p99_s": "the slowest 1% of these",
    "patch_s": "patch of that loss",
    "stack_loss_s": "one loss, whole shards",
    "stack_loss_p99_s": "the slowest 1% of these",
}
RUNS = {
    "losses": "losses",
    "restarts": "restarts",
    "setup_s": "setting up",
    "step_s": "a step without a loss",
    "loss_s": "a loss",
    "loss_decision_s": "of that in the controller",
    "run_s": "the whole run",
    "memory_bytes": "most memory",
}


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Processor seconds of this thread, and what was asked for."""
    began_s = time.thread_time()
    found = call()
    return time.thread_time() - began_s, found


def decision_figures(num_groups: int, num_samples: int, seed: int) -> dict[str, float]:
    """Medians and 99th percentiles over random states."""
    placement = make_placement("golomb", num_groups, REDUNDANCY)
    rng = np.random.default_rng([seed, num_groups])
    stacks = initial_order(placement)
    found: dict[str, list[float]] = {name: [] for name in ("loss_s", "patch_s", "stack_loss_s")}
    for _ in range(num_samples):
        order, endured = loss_order(placement, rng)
        num_lost = int(rng.integers(1, endured + 1))
        before, after = survivors_of(order, num_lost - 1), survivors_of(order, num_lost)
        loss_s, _ = timed(partial(reorder, placement, after))
        orphans = Work(reorder(placement, before).owners).of(GroupId(int(order[num_lost - 1])))
        patch_s, _ = timed(partial(patch_work, placement, after, orphans))
        stacked = reorder_stacks(placement, before, stacks)
        stack_loss_s, _ = timed(partial(reorder_stacks, placement, after, stacked.order))
        for name, spent_s in zip(found, (loss_s, patch_s, stack_loss_s), strict=True):
            found[name].append(spent_s)
    medians = {name: statistics.median(times_s) for name, times_s in found.items()}
    p99 = {f"{name[:-2]}_p99_s": float(np.percentile(found[name], 99)) for name in ("loss_s", "stack_loss_s")}
    return {name: (medians | p99)[name] for name in DECISIONS}


def run_figures(scenario: Scenario, seed: int) -> dict[str, float]:
    """What a run takes in this process, which has to be a fresh one."""
    nothing_lost = replace(scenario, failures=replace(scenario.failures, mean_s=inf))
    spent(replace(nothing_lost, num_groups=scenario.redundancy, num_steps=1), seed)  # loads what is loaded on demand
    Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted from here on
    before = most_memory()
    setup_s, _ = spent(replace(nothing_lost, num_steps=1), seed)
    quiet_s, quiet = spent(nothing_lost, seed)
    run_s, run = spent(scenario, seed)
    losses = max(run.losses, 1)
    return {
        "losses": run.losses,
        "restarts": run.restarts,
        "setup_s": setup_s,
        "step_s": (quiet_s - setup_s) / max(scenario.num_steps - 1, 1),
        "loss_s": (run_s - quiet_s) / losses,
        "loss_decision_s": (run.decision_s - quiet.decision_s) / losses,
        "run_s": run_s,
        "memory_bytes": most_memory() - before,
    }


def spent(scenario: Scenario, seed: int) -> tuple[float, Result]:
    """Processor seconds of a simulated run, and what came of it."""
    return timed(partial(simulate, scenario, seed, clock=time.thread_time))


def most_memory() -> int:
    """The most bytes that this process has held (Linux, Documentation/filesystems/proc)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def scenarios_of(curve: str, options: argparse.Namespace) -> dict[float, Scenario]:
    """The points of a curve by what is varied: those but of groups with as many groups as is asked."""
    settings = {"granularity": options.granularity, "redundancy": REDUNDANCY, "num_steps": options.steps}
    base = replace(load_scenario("paper_n1000", settings), num_groups=options.at)
    match curve:
        case "groups":
            return {num_groups: replace(base, num_groups=num_groups) for num_groups in options.groups}
        case "steps":
            counts = [round(options.steps * times) for times in STEPS_TIMES]
            return {num_steps: replace(base, num_steps=num_steps) for num_steps in counts}
        case "losses":
            rates = {times: replace(base.failures, mean_s=base.failures.mean_s / times) for times in LOSSES_TIMES}
            return {times: replace(base, failures=failures) for times, failures in rates.items()}
        case _:
            return {redundancy: replace(base, redundancy=redundancy) for redundancy in REDUNDANCIES}


def measure_runs(curve: str, options: argparse.Namespace) -> dict[str, Any]:
    """Every point with every seed."""
    found: dict[float, list[dict[str, float]]] = {}
    context = get_context("forkserver")
    context.set_forkserver_preload(["spare_megatron.tools.simulate.engine", "benchmarks.reorder"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for number, scenario in scenarios_of(curve, options).items():
            found[number] = list(pool.map(partial(run_figures, scenario), range(options.seeds)))
            print(f"{curve} {number:g}: {found[number]}", file=sys.stderr)
    return curve_of(found, RUNS)


def curve_of(found: dict[float, list[dict[str, float]]], names: Iterable[str]) -> dict[str, Any]:
    """Medians of each figure at each point, and the law of these."""
    medians = {name: [statistics.median(one[name] for one in figures) for figures in found.values()] for name in names}
    laws = {name: fit_if_any(list(found), values) for name, values in medians.items()}
    return {"x": list(found), "figures": {name: {"medians": medians[name], "law": laws[name]} for name in names}}


def print_curve(curve: dict[str, Any], name: str, titles: dict[str, str]) -> None:
    """A line for each figure."""
    print(f"{name:36}" + "".join(f"{number:>10g}" for number in curve["x"]) + f"{'c':>12}{'k':>7}   off by")
    for key, figure in curve["figures"].items():
        factor, unit = (1e3, ", ms") if key.endswith("_s") else (1e-6, ", MB") if key.endswith("_bytes") else (1, "")
        cells = "".join(f"{median * factor:10.4g}" for median in figure["medians"])
        law = figure["law"]
        fitted = "" if law is None else f"{law['coefficient'] * factor:12.3g}{law['exponent']:7.2f}"
        print(f"{titles[key] + unit:36}{cells}{fitted}" + ("" if law is None else f"{law['largest_error']:9.1%}"))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[100, 300, 1000, 3000, 10_000])
    parser.add_argument("--samples", type=int, default=200, help="random states for each number of groups; 0: none")
    parser.add_argument("--curves", nargs="*", choices=CURVES, default=CURVES)
    parser.add_argument("--at", type=int, default=1000, help="groups, where something else is varied")
    parser.add_argument("--steps", type=int, default=500, help="steps of a run, where they are not varied")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each point")
    parser.add_argument("--granularity", choices=["stack", "microbatch"], default="stack", help="of simulated runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    came_from = origin()
    states = {float(n): [decision_figures(n, options.samples, seed=0)] for n in options.groups if options.samples}
    decisions = curve_of(states, DECISIONS)
    curves = {name: measure_runs(name, options) for name in options.curves}
    if options.json:
        print(json.dumps({**came_from, "decisions": decisions, "curves": curves}))
        return
    print_curve(decisions, "decisions, groups", DECISIONS)
    for name, curve in curves.items():
        print_curve(curve, name, RUNS)


if __name__ == "__main__":
    main()
