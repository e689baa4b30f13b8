"""Goodput under the same kills: ours, without rejoin, restarts from checkpoints alone, NVIDIA's in-process restart.

All train the same model on the same data with the same code, and each kill strikes the same group at the same step. The
useful time is what the counted microbatches would have taken without any kill; goodput is that over the wall time from
the first commit to the last.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.peers.environment import ROOT, peer_python
from benchmarks.peers.history import NUM_WARMUP, Event, spread
from benchmarks.peers.peer_run import NvrxTimes, run_peer
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.phases import Phase
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.follow import read_standing
from spare_megatron.journal.records import FaultRecord
from spare_megatron.report.history import history_of
from spare_megatron.runtime.preflight import preflight
from spare_megatron.runtime.run import start_run
from spare_megatron.simulator.calibrate import calibrate
from spare_megatron.simulator.costs import CostModel
from spare_megatron.simulator.replay import replay

OURS, NVRX = "ours", "nvrx"
WAYS: dict[str, list[str]] = {
    OURS: ["spare.rejoins=1000"],
    "without_rejoin": ["spare.rejoins=0"],
    "checkpoint_only": ["spare.redundancy=1", "spare.rejoins=0"],
    NVRX: [],
}
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.BEFORE_REDUCE, Phase.IN_REDUCE, Phase.AFTER_REDUCE)
FIRST_KILL = 10
"""Steps before the first kill, whose median is the time of a step without kills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run came to.

    Attributes:
        wall_s: From the first commit to the last.
        counted: Microbatches in the committed sums of that time, over those that a whole step has.
        quiet_s: Median time between the commits before the first kill.
        kills: Kills that struck.
    """

    wall_s: float
    counted: float
    quiet_s: float
    kills: int


def configure(options: argparse.Namespace, way: str, run: int) -> RunConfig:
    """One way's configuration, with the kills of this run."""
    settings = [
        "layout.pipeline_parallel=1",
        "layout.num_groups=4",
        "model.hidden_size=64",
        "model.seq_length=64",
        "checkpoint.max_restarts=1000",
        f"checkpoint.interval_steps={options.save_every}",
        *options.set,
        f"train.steps={options.steps}",
        *WAYS[way],
        f"faults.trace=[{', '.join(_kills(options, run))}]",
    ]
    if way == NVRX:
        settings = [text for text in settings if not text.startswith("checkpoint.")]
    return load_run_config(options.config, settings).config


def _kills(options: argparse.Namespace, run: int) -> list[str]:
    """Exponential times in steps from kill to kill. At most one group is left out, so that every way can go on."""
    draw = np.random.default_rng(run)
    victims = draw.permutation(4)
    kills, step = [], float(FIRST_KILL)
    for number in range(options.kills):
        step += 1.0 + draw.exponential(options.mean_steps)
        phase = PHASES[draw.integers(len(PHASES))]
        kills.append(f'{{phase="{phase}", step={int(step)}, group={victims[number % 3]}, rank=0}}')
    if step >= options.steps - FIRST_KILL:
        raise SystemExit(f"--steps {options.steps} is too short, the last kill is at step {int(step)}; raise it")
    return kills


def run_once(options: argparse.Namespace, way: str, run: int, folder: Path) -> tuple[Outcome, Journal | None]:
    """One run, and the journal if it is ours."""
    config = configure(options, way, run)
    preflight(config)
    if way == NVRX:
        events = run_peer(peer_python(), config, NvrxTimes(interval_s=0.1, timeout_s=1.0), folder)
        kills = sum(event.kind == "fault" for event in events)
        return outcome_of(commits_of_peer(events, config.spare.microbatches_per_shard * 4), kills), None
    summary = start_run(config, folder, lambda _: None)
    if summary.verdict != "valid" or summary.outcome != "finished":
        raise RuntimeError(f"{folder.name}: {summary.outcome} {summary.outcome_reason}, {summary.reasons}")
    journal = read_journal(folder)
    return outcome_of(commits_of_ours(folder), len(journal.of(FaultRecord))), journal


def outcome_of(commits: Sequence[tuple[int, float, float]], kills: int) -> Outcome:
    """From the step, the time and the share of counted microbatches of each commit, in the order of their times.

    A step that was committed again after a restart counts once.
    """
    quiet = [later[1] - earlier[1] for earlier, later in itertools.pairwise(commits[NUM_WARMUP:FIRST_KILL])]
    return Outcome(
        wall_s=commits[-1][1] - commits[0][1],
        counted=sum({step: share for step, _, share in commits[1:]}.values()),
        quiet_s=statistics.median(quiet),
        kills=kills,
    )


def commits_of_ours(folder: Path) -> list[tuple[int, float, float]]:
    steps = history_of(read_standing(folder), verdict="", now_s=0.0).steps
    return [(step, ended_s, 1.0) for step, ended_s in zip(steps.step.tolist(), steps.ended_s.tolist(), strict=True)]


def commits_of_peer(events: Sequence[Event], per_step: int) -> list[tuple[int, float, float]]:
    """When the first group knew of each commit."""
    first: dict[int, Event] = {}
    for event in events:
        if event.kind == "committed":
            first.setdefault(event.step, event)
    return [(step, event.at_s, event.num_microbatches / per_step) for step, event in sorted(first.items())]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Interleaved runs; the order turns around from run to run."""
    outcomes: dict[str, list[Outcome]] = {way: [] for way in options.ways}
    predictions: list[float | None] = []
    loads: list[float] = []
    if NVRX in options.ways:
        peer_python()  # so that making it disturbs no run
    with tempfile.TemporaryDirectory() as scratch:
        for run in range(options.runs):
            for way in options.ways if run % 2 == 0 else reversed(options.ways):
                outcome, journal = run_once(options, way, run, Path(scratch) / f"{way}-{run}")
                outcomes[way].append(outcome)
                loads.append(os.getloadavg()[0])
                print(f"run {run}, {way}: {outcome}", file=sys.stderr)
                if way == OURS and journal is not None:
                    predictions.append(replay(journal, CostModel(**calibrate(journal).costs)).wall.error)
    quiet_s = statistics.median(outcome.quiet_s for found in outcomes.values() for outcome in found)
    goodputs = {way: [o.counted * quiet_s / o.wall_s for o in found] for way, found in outcomes.items()}
    ours = statistics.median(goodputs[OURS]) if OURS in goodputs else None
    return {
        "runs": options.runs,
        "steps": options.steps,
        "kills": options.kills,
        "quiet_step_s": quiet_s,
        "ways": {
            way: {
                "goodput": spread(goodputs[way]),
                "ratio": None if ours is None else ours / statistics.median(goodputs[way]),
                "outcomes": [asdict(outcome) for outcome in found],
            }
            for way, found in outcomes.items()
        },
        "predicted_wall_error": predictions,
        "load_average": spread(loads),
        **origin(),
    }


def print_table(result: dict[str, Any]) -> None:
    print(f"{'':18}{'goodput':>26}{'ours over it':>14}{'kills that struck':>20}")
    for way, found in result["ways"].items():
        goodput = "{median:8.1%} ({min:.1%} to {max:.1%})".format(**found["goodput"])
        ratio = "" if found["ratio"] is None else f"{found['ratio']:.2f}"
        print(f"{way:18}{goodput:>26}{ratio:>14}{sum(o['kills'] for o in found['outcomes']):>20}")
    errors = [f"{error:+.1%}" for error in result["predicted_wall_error"] if error is not None]
    print(f"wall time of ours as the simulator, calibrated with the run, predicts it: {', '.join(errors)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind, each with kills of its own")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--kills", type=int, default=6, help="kills in each run")
    parser.add_argument("--mean-steps", type=float, default=30.0, help="mean number of steps from kill to kill")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    result = measure(options := parser.parse_args())
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
