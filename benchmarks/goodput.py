"""Goodput under the same kills: ours, without rejoin, restarts from checkpoints alone, torchft, NVIDIA's extension.

With `--slow` nothing is killed. Passes of a tiny model sleep instead, one group's for longer from time to time, in all
ways by the same factor in the same seconds since the first pass of the run (`slow_spells.py`).

All train the same model on the same data with the same code, and each kill strikes the same group at the same moment of
the same step, if it is there; where every loss restarts from a checkpoint, all groups. torchft's groups are started
again at once, as ours are, and from a process that has imported all they need, as ours are; those of NVIDIA's
in-process restart stay away. The useful time is what the microbatches in committed sums would have taken without any
kill, so that a step that lacks a group counts for less; goodput is that over the wall time from the first commit to the
last. By the quiet steps of all runs it holds a way's own overhead against it, and the machine's speed of the minute,
too; by each run's own, before its first kill, it leaves both out, and `peers/fault_free.py` measures the overhead.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.goodput_plot import plot_goodput
from benchmarks.origin import origin
from benchmarks.outcomes import Commit, Outcome, commits_of, outcome_of
from benchmarks.peers.environment import ROOT, peer_python
from benchmarks.peers.history import Event, events_of_journal, spread
from benchmarks.peers.peer_run import PATIENT, NvrxTimes, TorchftTimes, run_peer
from benchmarks.slow_spells import Spell, began_s, draw_spells, write_program
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.preflight import preflight
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.tools.simulate.calibrate import calibrate
from spare_megatron.tools.simulate.run_replay import replay
from spare_megatron.tools.simulate.scenario import CostModel

OURS = "ours"
RESTARTING = "checkpoint_only"
PEERS: dict[str, TorchftTimes | NvrxTimes] = {
    "torchft": TorchftTimes(heartbeat_s=1.0, timeout_s=1.0, restarts=True),
    "nvrx": NvrxTimes(interval_s=0.1, timeout_s=1.0),
}
"""With timeouts as short as these steps allow."""
WAYS: dict[str, list[str]] = {
    OURS: ["spare.rejoins=1000"],
    "without_rejoin": ["spare.rejoins=0"],
    RESTARTING: ["spare.redundancy=1", "spare.rejoins=0"],
    "dealt_evenly": ["spare.deal_by_pace=false"],
    **{peer: [] for peer in PEERS},
}
QUIET_S = 4.0
"""From the first pass on, with `--slow`."""
SLOW_WAYS = (OURS, *PEERS)
"""Compared by default with `--slow`."""
STEPS_AFTER = 10
"""The fewest after the last kill."""
PHASES = (
    FaultPoint.FORWARD,
    FaultPoint.BACKWARD,
    FaultPoint.BEFORE_REDUCE,
    FaultPoint.IN_REDUCE,
    FaultPoint.AFTER_REDUCE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one way.

    Attributes:
        outcome: What it came to.
        commits: Its commits.
        predicted_wall_error: If it is ours, by how much the simulator errs that has been calibrated with it.
    """

    outcome: Outcome
    commits: Sequence[Commit]
    predicted_wall_error: float | None = None


def configure(options: argparse.Namespace, way: str, run: int, program: Path | None = None) -> RunConfig:
    """One way's configuration, with the kills of this run, or with a program whose passes sleep."""
    settings = [
        *("layout.pipeline_parallel=1", "layout.num_groups=4", "model.hidden_size=64", "model.seq_length=64"),
        *("checkpoint.max_restarts=1000", f"checkpoint.interval_steps={options.save_every}"),
        *(() if program is None else _sleeping(program)),
        *options.set,
        f"train.steps={options.steps}",
        *WAYS[way],
    ]
    if program is None:
        settings.append(f"faults.trace=[{', '.join(_kills(options, run, is_of_all=way == RESTARTING))}]")
    if way in PEERS:
        settings = [text for text in settings if not text.startswith("checkpoint.")]
    return load_run_config(options.config, settings).config


def _sleeping(program: Path) -> list[str]:
    """A model that computes next to nothing, so that two processors can show how long its passes sleep."""
    return [
        *("model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=1", "model.seq_length=16"),
        *("model.vocab_size=64", "train.micro_batch_size=1", "checkpoint.interval_steps=0"),
        *("faults.trace=[]", 'data.corpus=""'),
        *("spare.microbatches_per_shard=8", f"program.file={program}"),
    ]


def spells_of(options: argparse.Namespace, run: int) -> list[Spell]:
    """When which group is slow in this run of every way."""
    return draw_spells(run, num_groups=4, quiet_s=QUIET_S, mean_gap_s=options.mean_gap, mean_s=options.mean_spell)


def _kills(options: argparse.Namespace, run: int, *, is_of_all: bool = False) -> list[str]:
    """Exponential times in steps from kill to kill. At most one group is left out, so that every way can go on.

    `is_of_all`: each kill strikes all groups, for one that is left would pause instead of starting again.
    """
    draw = np.random.default_rng(run)
    victims = draw.permutation(4)
    kills, step = [], float(options.quiet_steps)
    for number in range(options.kills):
        step += 1.0 + draw.exponential(options.mean_steps)
        phase = PHASES[draw.integers(len(PHASES))]
        groups = range(4) if is_of_all else [victims[number % 3]]
        kills += [f'{{phase="{phase}", step={int(step)}, group={group}, rank=0}}' for group in groups]
    if step >= options.steps - STEPS_AFTER:
        raise SystemExit(f"--steps {options.steps} is too short, the last kill is at step {int(step)}; raise it")
    return kills


def run_once(options: argparse.Namespace, way: str, run: int, folder: Path) -> Run:
    """One run.

    Raises:
        RuntimeError: It did not come to its end, or is not proven.
    """
    program = folder.with_suffix(".py") if options.slow else None
    spells = spells_of(options, run) if program is not None else []
    if program is not None:
        write_program(program, sleep_s=options.sleep, spells=spells)
    config = configure(options, way, run, program)
    per_step = config.spare.microbatches_per_shard * config.layout.num_groups
    preflight(config)
    error = None
    if way in PEERS:
        events = run_peer(peer_python(), config, (PEERS if program is None else PATIENT)[way], folder)
    else:
        events, error = _run_ours(config, folder, is_predicted=way == OURS and program is None)
    quiet_until_s = math.inf if program is None else began_s(program) + spells[0].from_s
    outcome, commits = outcome_of(events, per_step, quiet_until_s), commits_of(events, per_step)
    return Run(outcome=outcome, commits=commits, predicted_wall_error=error)


def _run_ours(config: RunConfig, folder: Path, *, is_predicted: bool) -> tuple[list[Event], float | None]:
    """The events of a run of ours, and by how much its predicted wall time errs. Raises as `run_once`."""
    summary = start_run(config, folder, lambda _: None)
    if summary.verdict != "valid" or summary.outcome != "finished":
        raise RuntimeError(f"{folder.name}: {summary.outcome} {summary.outcome_reason}, {summary.reasons}")
    journal = read_journal(folder)
    return events_of_journal(journal), predicted_wall_error(journal) if is_predicted else None


def predicted_wall_error(journal: Journal) -> float | None:
    """By how much the wall time errs that the simulator predicts with the costs of the same run."""
    found = calibrate(journal)
    return replay(journal, CostModel(**found.costs), found.scatter).wall.error


def run_all(options: argparse.Namespace) -> tuple[dict[str, list[Run]], list[str]]:
    """Interleaved runs, whose order turns around from run to run; and where those failed that did, with a traceback."""
    runs: dict[str, list[Run]] = {way: [] for way in options.ways}
    failed: list[str] = []
    for number in () if options.slow else range(options.runs):
        _kills(options, number)  # no run is measured in vain where the last one would be too short
    if set(options.ways) & set(PEERS):
        peer_python()  # so that making it disturbs no run
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.runs):
            for way in options.ways if number % 2 == 0 else reversed(options.ways):
                began_s = time.monotonic()
                try:
                    run = run_once(options, way, number, Path(scratch) / f"{way}-{number}")
                except Exception:  # noqa: BLE001  (whatever it is, hours of other runs are not lost for it)
                    failed.append(f"run {number}, {way}: {traceback.format_exc().rstrip()}")
                    print(failed[-1], file=sys.stderr)
                    continue
                runs[way].append(run)
                print(f"run {number}, {way}, {time.monotonic() - began_s:.0f} s: {run.outcome}", file=sys.stderr)
    return runs, failed


def summarize(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Goodput of each way that has runs, beside ours, and what its kills cost.

    The time of a step without kills is the median of all runs, so that no way gains by being slow without them.
    """
    runs = {way: found for way, found in runs.items() if found}
    quiet_s = statistics.median(run.outcome.quiet_s for found in runs.values() for run in found)
    goodputs = {
        way: [run.outcome.counted * quiet_s / run.outcome.wall_s for run in found] for way, found in runs.items()
    }
    own = {way: [run.outcome.goodput_by_own_steps for run in found] for way, found in runs.items()}
    ours = statistics.median(goodputs[OURS]) if OURS in goodputs else None
    return {
        "quiet_step_s": quiet_s,
        "ways": {
            way: {
                "goodput": spread(goodputs[way]),
                "goodput_by_own_steps": spread(own[way]),
                "ratio": None if ours is None else ours / statistics.median(goodputs[way]),
                "kills": sum(len(run.outcome.to_commit_s) for run in found),
                **{
                    name: spread(values) if values else None
                    for name, values in (
                        ("quiet_s", [run.outcome.quiet_s for run in found]),
                        ("to_commit_s", [value for run in found for value in run.outcome.to_commit_s]),
                        ("longest_gap_s", [value for run in found for value in run.outcome.longest_gap_s]),
                        ("pause_s", [value for run in found for value in run.outcome.pause_s]),
                        ("thrown_away", [run.outcome.thrown_away for run in found]),
                    )
                },
                "goodputs": goodputs[way],
                "goodputs_by_own_steps": own[way],
                "outcomes": [asdict(run.outcome) for run in found],
            }
            for way, found in runs.items()
        },
        "predicted_wall_error": [run.predicted_wall_error for run in runs.get(OURS, ())],
    }


def print_table(result: dict[str, Any]) -> None:
    columns = (
        "goodput",
        "by its own steps",
        "ours over it",
        "kills",
        "step",
        "to commit",
        "longest gap",
        "pause of a return",
        "thrown away",
    )
    print(f"{'':16}" + "".join(f"{column:>21}" for column in columns))
    for way, found in result["ways"].items():
        row = ["{median:.1%} ({min:.1%}, {max:.1%})".format(**found[of]) for of in ("goodput", "goodput_by_own_steps")]
        row += ["" if found["ratio"] is None else f"{found['ratio']:.2f}", str(found["kills"])]
        for name in ("quiet_s", "to_commit_s", "longest_gap_s", "pause_s"):
            of = found[name]
            row.append("" if of is None else "{median:.2f} s ({max:.2f})".format(**of))
        row.append("{median:g} ({max})".format(**found["thrown_away"]))
        print(f"{way:16}" + "".join(f"{text:>21}" for text in row))
    errors = [f"{error:+.1%}" for error in result["predicted_wall_error"] if error is not None]
    print(f"medians (goodput: least and largest; else: largest); a quiet step: {result['quiet_step_s']:.4f} s")
    if errors:
        print(f"wall time of ours as the simulator, calibrated with the run, predicts it: {', '.join(errors)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind, each with kills of its own")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--kills", type=int, default=6, help="kills in each run")
    parser.add_argument("--quiet-steps", type=int, default=20, help="steps before the first kill can come")
    parser.add_argument("--mean-steps", type=float, default=30.0, help="mean number of steps from kill to kill")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--slow", action="store_true", help="slow groups instead of kills")
    parser.add_argument("--sleep", type=float, default=0.015, help="with --slow: seconds that a microbatch sleeps")
    parser.add_argument("--mean-gap", type=float, default=2.0, help="with --slow: mean seconds without a slow group")
    parser.add_argument("--mean-spell", type=float, default=8.0, help="with --slow: mean seconds that a group is slow")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="by default all that the trace concerns")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw useful steps over time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.ways = options.ways or (SLOW_WAYS if options.slow else [way for way in WAYS if way != "dealt_evenly"])
    loads = [os.getloadavg()[0]]
    runs, failed = run_all(options)
    if not any(runs.values()):
        raise SystemExit("no run came to its end:\n" + "\n".join(failed))
    loads.append(os.getloadavg()[0])
    named = ("runs", "steps", "sleep", "mean_gap", "mean_spell") if options.slow else ("runs", "steps", "kills")
    terms = {name: getattr(options, name) for name in named}
    result = {**terms, **summarize(runs), "failed": failed, "load_average": loads, **origin()}
    print(json.dumps(result)) if options.json else print_table(result)
    if options.plot is not None:
        curves = {way: found[0].commits for way, found in runs.items() if found}
        goodputs = {way: found["goodputs"] for way, found in result["ways"].items()}
        trace = "slow groups" if options.slow else "kills"
        title = f"goodput under the same {trace}, " + "{commit}, {machine}, {date}".format(**result)
        plot_goodput(options.plot, curves, goodputs, result["quiet_step_s"], title)
    if failed:
        raise SystemExit(f"{len(failed)} runs did not come to their end")


if __name__ == "__main__":
    main()
