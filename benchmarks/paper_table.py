"""The table of SPARe's paper (arXiv 2603.00357) beside simulations with this system's own controller.

    OMP_NUM_THREADS=1 python benchmarks/paper_table.py [--json] [--seeds 3] [--steps 10000] [--out FILE]

Everything is simulated, nothing measured, the paper's figures too. Of each policy the best of a few redundancies is
shown. `ratio` is the paper's time to train with SPARe over ours with the last policy, both over the failure-free time.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.simulate_jobs import ResultFile, default_jobs, simulate_all
from spare_megatron.simulator.presets import load_scenario
from spare_megatron.simulator.published import PUBLISHED
from spare_megatron.simulator.scenario import Scenario
from spare_megatron.simulator.sweep import Figures, cases_of, given_up, summarize

SIZES = (200, 600, 1000)
REJOIN = {"repair_s": 600.0, "costs.join_s": 30.0}
OVERLAPPED = {"repair_s": 600.0, "costs.join_s": 1.0, "costs.save_s": 1.5, "microbatches_per_shard": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way to train: its settings, and the redundancies of which the best counts."""

    name: str
    settings: dict[str, Any]
    redundancies: tuple[int, ...]
    published_policy: str | None = None


ROWS = (
    Row(name="checkpoint-only", settings={"policy": "checkpoint_only"}, redundancies=(1,)),
    Row(name="replication", settings={"policy": "replication"}, redundancies=(2, 3, 4)),
    Row(
        name="replication as published",
        settings={"policy": "replication"},
        redundancies=(3,),
        published_policy="replication",
    ),
    Row(name="SPARe, whole shards", settings={"granularity": "stack"}, redundancies=(8, 9), published_policy="spare"),
    Row(name="microbatches, m = 16", settings={"granularity": "microbatch"}, redundancies=(4, 5, 6)),
    Row(
        name="+ groups back after 10 min, pause 30 s",
        settings={"granularity": "microbatch", **REJOIN},
        redundancies=(3, 4),
    ),
    Row(
        name="+ join 1 s, saves 1.5 s, m = 64",
        settings={"granularity": "microbatch", **OVERLAPPED},
        redundancies=(3, 4),
    ),
)


def scenarios_of(row: Row, num_groups: int, num_steps: int) -> tuple[Scenario, ...]:
    base = {"policy": "spare", "num_steps": num_steps, **row.settings}
    return tuple(load_scenario(f"paper_n{num_groups}", {**base, "redundancy": r}) for r in row.redundancies)


def best_of(figures: Sequence[Figures]) -> Figures | None:
    return min(figures, key=lambda one: one.time_to_train_ratio.mean, default=None)


def table(
    num_steps: int, num_seeds: int, num_jobs: int, out: ResultFile | None, console: Console
) -> list[dict[str, Any]]:
    """A line for every number of groups and way to train."""
    cells = [(n, row, scenarios_of(row, n, num_steps)) for n in SIZES for row in ROWS]
    scenarios = [scenario for _, _, found in cells for scenario in found]
    results = simulate_all(cases_of(dict.fromkeys(scenarios), num_seeds), num_jobs=num_jobs, console=console, out=out)
    for reason in given_up(results.values()):
        console.print(f"given up: {reason}", soft_wrap=True, highlight=False)
    lines = []
    for n, row, found in cells:
        best = best_of(summarize(found, num_seeds, results))
        line: dict[str, Any] = {"name": row.name, "paper": paper_of(n, row)}
        lines.append(line | ({"num_groups": n} if best is None else asdict(best) | {"name": row.name}))
    return lines


def paper_of(num_groups: int, row: Row) -> dict[str, Any] | None:
    points = [p for p in PUBLISHED if (p.num_groups, p.policy) == (num_groups, row.published_policy)]
    return asdict(points[0]) if points else None


def print_table(lines: Sequence[dict[str, Any]]) -> None:
    head = ("N", "policy", "r", "time to train", "availability", "paper: r", "time to train", "availability")
    rows = [head]
    for line in lines:
        paper = line["paper"]
        theirs = ("", "", "")
        if paper is not None:
            ratio, up = f"{paper['time_to_train_ratio']:.2f}", f"{paper['availability']:.2%}"
            theirs = (str(paper["redundancy"]), ratio, up)
        ours = ("", "given up", "")
        if "redundancy" in line:
            ours = (
                str(line["redundancy"]),
                shown(line["time_to_train_ratio"], 1),
                shown(line["availability"], 100) + "%",
            )
        rows.append((str(line["num_groups"]), line["name"], *ours, *theirs))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shown(estimate: dict[str, float | None], factor: int) -> str:
    mean, ci95 = estimate["mean"], estimate["ci95"]
    assert mean is not None
    return f"{mean * factor:.2f}" + ("" if ci95 is None else f" +- {ci95 * factor:.2f}")


def ratios(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The paper's SPARe over the last of our policies, by number of groups."""
    found = {}
    for n in SIZES:
        ours = [line["time_to_train_ratio"]["mean"] for line in lines if line["num_groups"] == n and "seeds" in line]
        paper = next(p.time_to_train_ratio for p in PUBLISHED if (p.num_groups, p.policy) == (n, "spare"))
        if ours:
            found[str(n)] = paper / ours[-1]
    return found


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of each scenario, seeded from 0.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps to commit; the paper has 10,000.")] = 10_000,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one per processor when absent.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep results in this file, and go on from there.")] = None,
) -> None:
    """Print the paper's table beside simulations of every policy."""
    came_from = origin()
    with explained_errors("paper_table"):
        kept = None if out is None else ResultFile(out)
        lines = table(steps, seeds, jobs or default_jobs(), kept, Console(stderr=True))
    if as_json:
        facts = {"kind": "simulated", "steps": steps, "seeds": seeds}
        print(json.dumps({**came_from, **facts, "ratio": ratios(lines), "rows": lines}, indent=2))
        return
    print(f"simulated, not measured; {steps} steps, {seeds} seeds, +- half a 95% confidence interval")
    print(f"{came_from['machine']}; commit {came_from['commit']}; {came_from['date']}\n")
    print_table(lines)


if __name__ == "__main__":
    typer.run(main)
