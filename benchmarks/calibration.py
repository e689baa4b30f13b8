"""How well a real run predicts its own steps and recoveries, and those of other runs, once its costs are fitted."""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.tools.simulate.calibrate import calibrate
from spare_megatron.tools.simulate.run_replay import RunReplay, replay
from spare_megatron.tools.simulate.scenario import CostModel

LEAST_STEPS = 5
"""Medians over fewer steps are left out of the figures."""
WHAT = {"steps": "median steps", "recovery": "median recovery", "join": "median admission"}


def run_once(config_file: Path, overrides: list[str], seed: int, folder: Path) -> Journal:
    """One run with the losses of the configuration; when and whom they hit follows from the seed."""
    settings = [f"faults.seed={seed}", *overrides]
    summary = start_run(load_run_config(config_file, settings).config, folder, lambda _: None)
    if summary.verdict != "valid" or not summary.recoveries:
        raise RuntimeError(f"seed {seed}: {summary.verdict}, {summary.reasons}, {len(summary.recoveries)} recoveries")
    return read_journal(folder)


def errors_of(result: RunReplay) -> dict[str, list[float]]:
    """Relative errors of the median step for each number of groups, and of the median recovery and join."""
    steps = [step.time.error for step in result.steps if step.num_steps >= LEAST_STEPS]
    found = {"steps": steps}
    for what, prediction in (("recovery", result.median_recovery), ("join", result.median_join)):
        found[what] = [] if prediction is None else [prediction.error]
    return {what: [error for error in errors if error is not None] for what, errors in found.items()}


def figures_of(errors: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Median and largest size of the errors, of what the runs had."""
    found = {}
    for what in WHAT:
        sizes = [abs(error) for one in errors for error in one[what]]
        if sizes:
            found[what] = {"median": statistics.median(sizes), "max": max(sizes), "count": len(sizes)}
    return found


def measure(journals: list[Journal]) -> dict[str, Any]:
    found = [calibrate(journal) for journal in journals]
    pairs = {
        (a, b): replay(journal, CostModel(**costs.costs), costs.scatter)
        for a, costs in enumerate(found)
        for b, journal in enumerate(journals)
    }
    own = [errors_of(result) for (a, b), result in pairs.items() if a == b]
    others = [errors_of(result) for (a, b), result in pairs.items() if a != b]
    return {
        "own": figures_of(own),
        "others": figures_of(others) if others else None,
        "replays": [{"costs_of": a, "losses_of": b, **asdict(result)} for (a, b), result in pairs.items()],
        **origin(),
    }


def print_table(result: dict[str, Any]) -> None:
    print(f"{'relative error':32}{'median':>8}{'largest':>9}{'of':>5}")
    for name, title in (("own", "its own"), ("others", "other runs'")):
        for what, figures in (result[name] or {}).items():
            text = f"{title} {WHAT[what]}"
            print(f"{text:32}{figures['median']:8.1%}{figures['max']:9.1%}{figures['count']:5}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--runs", type=int, default=5, help="runs, each with another seed of its losses")
    parser.add_argument("--run-dir", type=Path, action="append", default=[], help="take this run instead of new ones")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        journals = [read_journal(run_dir) for run_dir in options.run_dir]
        for seed in range(1, 1 + (0 if journals else options.runs)):
            journals.append(run_once(options.config, options.set, seed, Path(scratch) / f"seed-{seed}"))
            print(f"run {seed} of {options.runs} measured", file=sys.stderr)
    result = measure(journals)
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
