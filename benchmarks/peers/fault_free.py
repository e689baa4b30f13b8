"""What each way costs a step while nothing fails: ours and the peers beside plain Megatron, in turn.

All train the same model on the same data with the same code, a process for each of 4 groups; plain Megatron has as many
data-parallel ranks. Each run's median step is set against that of plain Megatron in the same round, so that the
machine's speed, which drifts from minute to minute, is in both.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.origin import origin
from benchmarks.outcomes import commits_of
from benchmarks.peers.compare import OURS, PEERS
from benchmarks.peers.environment import ROOT, peer_python
from benchmarks.peers.history import Event, events_of_journal, spread
from benchmarks.peers.peer_run import run_peer
from spare_megatron.cli.bench_plain import run_plain
from spare_megatron.cli.bench_throughput import NUM_WARMUP, PLAIN, train_without_losses, training_alone
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.preflight import preflight
from spare_megatron.journal.files import read_journal


def configure(options: argparse.Namespace) -> RunConfig:
    """The configuration of every way."""
    settings = [
        "layout.pipeline_parallel=1",
        "model.hidden_size=64",
        "model.seq_length=64",
        *options.set,
        "cluster.device=cpu",
        "layout.num_groups=4",
        f"train.steps={options.steps}",
    ]
    return training_alone(load_run_config(options.config, settings).config)


def steps_of(way: str, config: RunConfig, folder: Path) -> list[float]:
    """Seconds between the ends of successive steps of one run, without those of its start.

    Raises:
        RuntimeError: Something failed in the run, though nothing was to.
    """
    if way == PLAIN:
        ends, _ = run_plain(config)
    else:
        per_step = config.spare.microbatches_per_shard * config.layout.num_groups
        commits = commits_of(_events_of(way, config, folder), per_step)
        if short := [commit.step for commit in commits if commit.share < 1]:
            raise RuntimeError(f"{folder.name}: steps {short} lack a group, though nothing was to fail")
        ends = [commit.at_s for commit in commits]
    return [later - earlier for earlier, later in pairwise(ends[NUM_WARMUP:])]


def _events_of(way: str, config: RunConfig, folder: Path) -> list[Event]:
    if way == OURS:  # its steps would be whole even with a group lost: the others take over
        train_without_losses(config, folder, lambda _: None)
        return events_of_journal(read_journal(folder))
    return run_peer(peer_python(), config, PEERS[way], folder)


def measure(options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """The steps of each run of each way, in rounds whose order turns around from one to the next."""
    config = configure(options)
    preflight(config)
    if options.peers:
        peer_python()  # so that making it disturbs no run
    ways = [PLAIN, OURS, *options.peers]
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.runs):
            for way in ways if number % 2 == 0 else reversed(ways):
                steps = steps_of(way, config, Path(scratch) / f"{way}-{number}")
                found[way].append(steps)
                print(f"round {number}, {way}: {statistics.median(steps) * 1e3:.1f} ms a step", file=sys.stderr)
    return found


def summarize(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Each way's median step, and what it is of plain Megatron's in the same round."""
    medians = {way: [statistics.median(steps) for steps in runs] for way, runs in found.items()}
    ratios = {way: _over(values, medians[PLAIN]) for way, values in medians.items() if way != PLAIN}
    return {
        "ratio": statistics.median(ratios[OURS]),
        "step_s": {way: spread(values) for way, values in medians.items()},
        "over_plain": {way: {**spread(values), "rounds": values} for way, values in ratios.items()},
    }


def _over(values: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [value / beside for value, beside in zip(values, plain, strict=True)]


def print_table(result: dict[str, Any]) -> None:
    for way, step_s in result["step_s"].items():
        over = result["over_plain"].get(way)
        rounds = "" if over is None else ", ".join(f"{ratio:.3f}" for ratio in over["rounds"])
        beside = "" if over is None else f"{over['median']:.3f} of plain Megatron's ({rounds})"
        print(f"{way:16} {step_s['median'] * 1e3:8.1f} ms  {beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--runs", type=int, default=5, help="rounds, with a run of each way")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["torchft_1s", "nvrx_1s"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps < NUM_WARMUP + 2:
        parser.error(f"--steps {options.steps}: the first {NUM_WARMUP} are not measured; set at least {NUM_WARMUP + 2}")
    loads = [os.getloadavg()[0]]
    result = summarize(measure(options))
    loads.append(os.getloadavg()[0])
    result |= {"runs": options.runs, "steps": options.steps, "load_average": loads, **origin()}
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
