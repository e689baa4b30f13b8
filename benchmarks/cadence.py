"""What real runs lose to saves and rework with `checkpoint.cadence = "optimal"`, and with fixed intervals, same kills.

Every loss is one of all state, as there is one group, and strikes at the same step in every run.
`ratio` is what the optimal cadence loses over what the best fixed interval does. A few kills say little: one that
strikes just before a save costs all of an interval, one just after it nothing. `expected_ratio` therefore takes the
saves as they were made and, in place of the rework that this draw of the kills caused, its mean over all draws: each
step is struck with the same probability, and what it costs is the steps since the newest save. It compares shares of
the useful time, for the machine's speed changes from run to run, and with it what steps and saves take. Besides, each
journaled decision is held against a numerical search for the interval of the highest availability, for the times that
the decision names.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.records import CadenceRecord, CheckpointRecord, FaultRecord
from spare_megatron.journal.state.follow import run_state_of
from spare_megatron.tools.plan.plan import availability

OPTIMAL = "optimal"
NUM_GROUPS = 1
FIRST_KILL = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run came to.

    Attributes:
        saves_s: Training stood still for saves.
        rework_s: Went into steps that were computed again.
        mean_rework_s: The mean of that over all draws of the kills, for these saves.
        saves: Checkpoints that became visible.
        kills: That struck.
        wall_s: From start to end.
        step_s: A quiet step.
        useful_s: Committed steps, each counted with a quiet step's time at most.
        goodput: Useful time over the wall time.
        decisions: Intervals that the run chose, in seconds.
        decision_error: Largest relative difference of one of them from the interval of the highest availability.
    """

    saves_s: float
    rework_s: float
    mean_rework_s: float
    saves: int
    kills: int
    wall_s: float
    step_s: float
    useful_s: float
    goodput: float
    decisions: list[float]
    decision_error: float

    @property
    def lost_s(self) -> float:
        return self.saves_s + self.rework_s

    @property
    def expected_share(self) -> float:
        """Of saves and of the mean rework, over useful time."""
        return (self.saves_s + self.mean_rework_s) / self.useful_s


def configure(options: argparse.Namespace, way: str, run: int) -> RunConfig:
    """The configuration of one way, with the kills of this run."""
    cadence = [f"checkpoint.interval_s={way}"]
    if way == OPTIMAL:
        cadence = ["checkpoint.cadence=optimal", f"checkpoint.group_life_s={options.group_life}"]
    settings = [
        "layout.pipeline_parallel=1",
        f"layout.num_groups={NUM_GROUPS}",
        "model.hidden_size=64",
        "model.seq_length=64",
        "spare.redundancy=1",
        "spare.rejoins=0",
        "checkpoint.max_restarts=1000",
        "checkpoint.asynchronous=false",
        *options.set,
        f"train.steps={options.steps}",
        f"faults.trace=[{', '.join(draw_kills(options, run))}]",
        *cadence,
    ]
    return load_run_config(options.config, settings).config


def draw_kills(options: argparse.Namespace, run: int) -> list[str]:
    """Entries of `faults.trace`, 1 and an exponential number of steps apart."""
    draw = np.random.default_rng(run)
    kills, step = [], float(FIRST_KILL)
    while (step := step + 1.0 + draw.exponential(options.mean_steps)) < options.steps - 1:
        kills.append(f'{{phase="forward", step={int(step)}, group=0, rank=0}}')
    return kills


def run_once(config: RunConfig, folder: Path, mean_steps: float) -> Outcome:
    """Trains, and reads off the journal what it cost."""
    summary = start_run(config, folder, lambda _: None)
    if (summary.verdict, summary.outcome) != ("valid", "finished"):
        raise RuntimeError(f"{folder.name}: {summary.outcome} {summary.outcome_reason}, {summary.reasons}")
    return outcome_of(read_journal(folder), config.train.steps, mean_steps)


def outcome_of(journal: Journal, steps: int, mean_steps: float) -> Outcome:
    """The figures of a run of so many steps that has ended, with a kill every `mean_steps` steps on average."""
    goodput = run_state_of(journal).goodput(now_s=0.0)
    assert goodput is not None, "a finished run has steps"
    saved = [record for record in journal.of(CheckpointRecord) if record.outcome == "saved"]
    decisions = [record for record in journal.of(CadenceRecord) if record.interval_s]
    return Outcome(
        saves_s=sum(record.stall_s for record in saved),
        rework_s=goodput.lost_s.get("rework", 0.0),
        mean_rework_s=goodput.step_s * mean_rework(sorted(record.step for record in saved), steps) / (1 + mean_steps),
        saves=len(saved),
        kills=len(journal.of(FaultRecord)),
        wall_s=goodput.wall_s,
        step_s=goodput.step_s,
        useful_s=goodput.useful_s,
        goodput=goodput.goodput,
        decisions=[round(record.interval_s, 3) for record in decisions],
        decision_error=max((abs(record.interval_s / best_interval_s(record) - 1) for record in decisions), default=0.0),
    )


def mean_rework(saved: Sequence[int], steps: int) -> float:
    """Steps that one kill at each step of a run would have computed again, in all.

    Args:
        saved: What each checkpoint holds, committed steps, ascending; each is whole before the next step begins.
        steps: Of the run.
    """
    first_kill = FIRST_KILL + 1
    newest = [0, *saved]
    return float(sum(step - newest[bisect_right(newest, step) - 1] for step in range(first_kill, steps - 1)))


def best_interval_s(record: CadenceRecord) -> float:
    """The interval of the highest availability, by search; it is the same for every time of a restart."""

    def lost(interval_s: float) -> float:
        return -availability(interval_s, record.save_s, record.time_to_wipe_out_s, 0.0)

    most_s = record.save_s + record.time_to_wipe_out_s
    found = minimize_scalar(lost, bounds=(record.save_s, most_s), method="bounded", options={"xatol": 1e-9 * most_s})
    return float(found.x)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Interleaved runs; the order turns around from run to run."""
    ways = [OPTIMAL, *map(str, options.intervals)]
    outcomes: dict[str, list[Outcome]] = {way: [] for way in ways}
    loads = []
    with tempfile.TemporaryDirectory() as scratch:
        for run in range(options.runs):
            for way in ways if run % 2 == 0 else reversed(ways):
                outcome = run_once(configure(options, way, run), Path(scratch) / f"{way}-{run}", options.mean_steps)
                outcomes[way].append(outcome)
                loads.append(os.getloadavg()[0])
                print(f"run {run}, {way}: {outcome}", file=sys.stderr)
    lost_s = {way: statistics.fmean(outcome.lost_s for outcome in found) for way, found in outcomes.items()}
    shares = {way: statistics.fmean(outcome.expected_share for outcome in found) for way, found in outcomes.items()}
    return {
        "ratio": _ratio(lost_s),
        "expected_ratio": _ratio(shares),
        "lost_s": lost_s,
        "expected_shares": shares,
        "decision_error": max(outcome.decision_error for outcome in outcomes[OPTIMAL]),
        "outcomes": {way: [asdict(outcome) for outcome in found] for way, found in outcomes.items()},
        "load_average": {"min": min(loads), "max": max(loads)},
        **origin(),
    }


def _ratio(lost: dict[str, float]) -> float:
    return lost[OPTIMAL] / min(found for way, found in lost.items() if way != OPTIMAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--intervals", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0], help="fixed ones, seconds")
    parser.add_argument("--group-life", type=float, default=60.0, help="prior of the optimal cadence, seconds")
    parser.add_argument("--runs", type=int, default=1, help="runs of each way, each with kills of its own")
    parser.add_argument("--steps", type=int, default=1500, help="steps of each run")
    parser.add_argument("--mean-steps", type=float, default=80.0, help="mean number of steps from kill to kill")
    parser.add_argument("--json", action="store_true")
    result = measure(options := parser.parse_args())
    if options.json:
        print(json.dumps(result))
        return
    for way, found in result["outcomes"].items():
        saves_s, rework_s, kills = (sum(outcome[key] for outcome in found) for key in ("saves_s", "rework_s", "kills"))
        print(f"{way:>8} {saves_s:6.2f} s in saves, {rework_s:6.2f} s of rework, {kills} kills")
    print(f"optimal over the best fixed interval: {result['ratio']:.2f}")
    print(f"the same with the mean rework of all draws of the kills: {result['expected_ratio']:.2f}")
    print(f"decisions off the interval of the highest availability by at most {result['decision_error']:.1e}")


if __name__ == "__main__":
    main()
