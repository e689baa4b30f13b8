"""The table of SPARe's paper (arXiv 2603.00357) beside simulations with this system's own controller.

    OMP_NUM_THREADS=1 python benchmarks/paper_table.py [--json] [--seeds 5] [--steps 10000] [--out FILE]
    OMP_NUM_THREADS=1 python benchmarks/paper_table.py --sweep-redundancy 2..20 --seeds 20 --steps 2000 --out FILE

Everything is simulated, nothing measured, the paper's figures too. What the paper has is simulated at the paper's
redundancy; of the other policies the best of a few is shown. A second table says what keeps each from 1.0. With
--sweep-redundancy only SPARe with whole shards is simulated, at each of these. `ratio` is the paper's time to train
with SPARe over ours with the last policy, both over the failure-free time.
"""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.cli.command import explained_errors
from spare_megatron.cli.console import RunConsole
from spare_megatron.formats.quantities import parse_redundancies
from spare_megatron.machine.interrupts import INTERRUPTED
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.scenario_presets import PUBLISHED, PublishedPoint, load_scenario
from spare_megatron.tools.simulate.simulate_jobs import ResultFile, default_jobs, simulate_all
from spare_megatron.tools.simulate.sweep import Estimate, SweepFigures, cases_of, given_up, summarize
from spare_megatron.tools.simulate.world import CAUSES

SIZES = (200, 600, 1000)
REJOIN = {"repair_s": 600.0, "costs.join_s": 30.0}
OVERLAPPED = {"repair_s": 600.0, "costs.join_s": 1.0, "costs.save_s": 1.5}
NUM_MACHINES = 75_000
"""600,000 GPUs in machines of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way to train.

    Attributes:
        name: Shown in the table.
        settings: What differs from the preset.
        redundancies: The best of these counts; none: that of the paper.
        published_policy: The policy of the paper that it stands beside.
    """

    name: str
    settings: dict[str, Any]
    redundancies: tuple[int, ...] = ()
    published_policy: str | None = None

    def published(self, num_groups: int) -> PublishedPoint | None:
        """The paper's point for it."""
        found = (p for p in PUBLISHED if (p.num_groups, p.policy) == (num_groups, self.published_policy))
        return next(found, None)


MICROBATCH = {"granularity": "microbatch"}
RE_FORMED = {**MICROBATCH, **OVERLAPPED, "microbatches_per_shard": 64, "repair_s": None, "reform_s": 60.0}
WHOLE_SHARDS = Row(name="SPARe, whole shards", settings={"granularity": "stack"}, published_policy="spare")
ROWS = (
    Row(name="checkpoint-only", settings={"policy": "checkpoint_only"}, redundancies=(1,)),
    Row(name="replication, the paper's r", settings={"policy": "replication"}, published_policy="replication"),
    Row(name="replication, its best r", settings={"policy": "replication"}, redundancies=(2, 3, 4)),
    WHOLE_SHARDS,
    Row(name="microbatches, m = 16", settings=MICROBATCH, redundancies=(4, 5, 6)),
    Row(name="+ groups back after 10 min, pause 30 s", settings={**MICROBATCH, **REJOIN}, redundancies=(3, 4)),
    Row(name="+ join 1 s, saves 1.5 s", settings={**MICROBATCH, **OVERLAPPED}, redundancies=(3, 4)),
    Row(
        name="+ m = 64",
        settings={**MICROBATCH, **OVERLAPPED, "microbatches_per_shard": 64},
        redundancies=(3, 4),
    ),
    Row(name="groups re-formed after 60 s, no repair, hosts only", settings=RE_FORMED, redundancies=(8, 12, 16)),
    Row(name="the same, all groups read all data", settings={**RE_FORMED, "last_resort": True}, redundancies=(8,)),
    Row(
        name="+ repair after 10 min",
        settings={**RE_FORMED, "last_resort": True, "repair_s": 600.0},
        redundancies=(8,),
    ),
    Row(
        name="+ 8 spare machines",
        settings={**RE_FORMED, "last_resort": True, "repair_s": 600.0, "num_spares": 8},
        redundancies=(8,),
    ),
    Row(
        name="repair after 10 min, m = 128",
        settings={**RE_FORMED, "last_resort": True, "repair_s": 600.0, "microbatches_per_shard": 128},
        redundancies=(8,),
    ),
)


def sweep_rows(redundancies: Sequence[int]) -> tuple[Row, ...]:
    """SPARe with whole shards, a row for every redundancy."""
    return tuple(replace(WHOLE_SHARDS, redundancies=(r,)) for r in redundancies)


def scenarios_of(row: Row, num_groups: int, num_steps: int) -> tuple[Scenario, ...]:
    base = {"policy": "spare", "num_steps": num_steps, **row.settings}
    if "reform_s" in row.settings:
        base["machines_per_group"] = NUM_MACHINES // num_groups
    point = row.published(num_groups)
    redundancies = row.redundancies or (() if point is None else (point.redundancy,))
    return tuple(load_scenario(f"paper_n{num_groups}", {**base, "redundancy": r}) for r in redundancies)


def best_of(figures: Sequence[SweepFigures]) -> SweepFigures | None:
    return min(figures, key=lambda one: one.time_to_train_ratio.mean, default=None)


def table(
    rows: Sequence[Row], num_steps: int, num_seeds: int, num_jobs: int, out: ResultFile | None
) -> list[dict[str, Any]]:
    """A line for every number of groups and way to train."""
    console = RunConsole(stderr=True)
    cells = [(n, row, scenarios_of(row, n, num_steps)) for n in SIZES for row in rows]
    scenarios = [scenario for _, _, found in cells for scenario in found]
    results = simulate_all(cases_of(dict.fromkeys(scenarios), num_seeds), num_jobs=num_jobs, console=console, out=out)
    for reason in given_up(results.values()):
        console.line(f"given up: {reason}")
    lines = []
    for n, row, found in cells:
        best, point = best_of(summarize(found, num_seeds, results)), row.published(n)
        line: dict[str, Any] = {"name": row.name, "paper": None if point is None else asdict(point)}
        lines.append(line | ({"num_groups": n} if best is None else asdict(best) | {"name": row.name}))
    return lines


def print_table(lines: Sequence[dict[str, Any]]) -> None:
    """Ours beside the paper's."""
    rows = [("N", "policy", "r", "time to train", "availability", "paper: r", "time to train", "availability", "ours")]
    for line in lines:
        paper, ours, theirs = line["paper"], ("", "given up", ""), ("", "", "", "")
        if "redundancy" in line:
            up = shown(line["availability"], 100) + "%"
            ours = (str(line["redundancy"]), shown(line["time_to_train_ratio"], 1), up)
        if paper is not None:
            ratio = paper["time_to_train_ratio"]
            off = line["time_to_train_ratio"]["mean"] / ratio - 1 if "redundancy" in line else None
            theirs = (
                str(paper["redundancy"]),
                f"{ratio:.2f}",
                f"{paper['availability']:.2%}",
                "" if off is None else f"{off:+.1%}",
            )
        rows.append((str(line["num_groups"]), line["name"], *ours, *theirs))
    print_columns(rows)


def print_terms(lines: Sequence[dict[str, Any]]) -> None:
    """What each cause adds to 1.0."""
    counted = [line for line in lines if "terms" in line]
    causes = [cause for cause in CAUSES if any(round(line["terms"][cause], 3) for line in counted)]
    rows = [("N", "policy", "r", *causes)]
    for line in counted:
        terms = (f"{line['terms'][cause]:.3f}" for cause in causes)
        rows.append((str(line["num_groups"]), line["name"], str(line["redundancy"]), *terms))
    print_columns(rows)


def print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Rows as wide as their widest."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shown(estimate: dict[str, float | None], factor: int) -> str:
    mean, ci95 = estimate["mean"], estimate["ci95"]
    assert mean is not None
    if ci95 is None:
        return f"{mean * factor:.2f}"
    if factor == 1:
        return f"{mean:.2f} +- {ci95:.2f}"
    low, high = Estimate(mean=mean, ci95=ci95).share_interval()  # no share is above 100%
    return f"{mean * factor:.2f} ({low * factor:.2f} to {high * factor:.2f})"


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
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of each scenario, seeded from 0.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps to commit; the paper has 10,000.")] = 10_000,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one per processor when absent.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep results in this file, and go on from there.")] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep-redundancy", metavar="FROM..TO", help="SPARe with whole shards at these.")
    ] = None,
) -> None:
    """Print the paper's table beside simulations of every policy."""
    came_from = origin()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with explained_errors("paper_table"):
        try:
            rows = ROWS if sweep is None else sweep_rows(parse_redundancies(sweep, most=min(SIZES)))
            lines = table(rows, steps, seeds, jobs or default_jobs(), None if out is None else ResultFile(out))
        except KeyboardInterrupt:
            print("paper_table: interrupted" + ("" if out is None else f"; goes on from {out}"), file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        facts = {"kind": "simulated", "steps": steps, "seeds": seeds}
        print(json.dumps({**came_from, **facts, "ratio": ratios(lines), "rows": lines}, indent=2))
        return
    print(f"simulated, not measured; {steps} steps, {seeds} seeds, +- half a 95% confidence interval")
    print(f"{came_from['machine']}; commit {came_from['commit']}; {came_from['date']}\n")
    print_table(lines)
    print("\nwhat each cause adds to 1.0\n")
    print_terms(lines)


if __name__ == "__main__":
    typer.run(main)
