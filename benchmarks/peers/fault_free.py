"""What each way costs a step while nothing fails: ours and the peers beside plain Megatron, in turn.

All train the same model on the same data with the same code, a process for each of 4 groups; plain Megatron has as many
data-parallel ranks. Each run's median step is set against that of plain Megatron in the same round, so that the
machine's speed, which drifts from minute to minute, is in both. So is the processor time that all processes of a run
take for a step, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from benchmarks.peers.processor_time import ProcessorTime
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.preflight import preflight
from spare_megatron.journal.files import read_journal
from spare_megatron.tools.bench.bench_throughput import NUM_WARMUP, PLAIN, train_without_losses, training_alone
from spare_megatron.tools.bench.plain_megatron import run_plain
from spare_megatron.tools.simulate.sweep import estimate


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


_STEPS_TO_GO = 5
"""Steps before the end up to which processor time is measured, while no process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds between the ends of successive steps, without those of the start; processor seconds for one of them."""

    step_s: Sequence[float]
    processor_s: float


def steps_of(way: str, config: RunConfig, folder: Path) -> Steps:
    """Trains one run. Raises RuntimeError if something failed in it, though nothing was to."""
    processors = ProcessorTime()
    with processors.sampling():
        ends = _ends_of_steps(way, config, folder)[NUM_WARMUP:]
    measured = ends[:-_STEPS_TO_GO]  # the last sample of a process is older than its end
    spent_s = processors.between(measured[0], measured[-1])
    return Steps(
        step_s=[later - earlier for earlier, later in pairwise(ends)], processor_s=spent_s / (len(measured) - 1)
    )


def _ends_of_steps(way: str, config: RunConfig, folder: Path) -> list[float]:
    if way == PLAIN:
        ends, _ = run_plain(config, len)
        return ends
    per_step = config.spare.microbatches_per_shard * config.layout.num_groups
    commits = commits_of(_events_of(way, config, folder), per_step)
    if short := [commit.step for commit in commits if commit.share < 1]:
        raise RuntimeError(f"{folder.name}: steps {short} lack a group, though nothing was to fail")
    return [commit.at_s for commit in commits]


def _events_of(way: str, config: RunConfig, folder: Path) -> list[Event]:
    if way == OURS:  # its steps would be whole even with a group lost: the others take over
        train_without_losses(config, folder, lambda _: None)
        return events_of_journal(read_journal(folder))
    return run_peer(peer_python(), config, PEERS[way], folder)


def measure(options: argparse.Namespace) -> dict[str, list[Steps]]:
    """The steps of each run of each way, in rounds whose order turns around from one to the next."""
    config = configure(options)
    preflight(config)
    if options.peers:
        peer_python()  # so that making it disturbs no run
    ways = [PLAIN, OURS, *options.peers]
    found: dict[str, list[Steps]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.runs):
            for way in ways if number % 2 == 0 else reversed(ways):
                steps = steps_of(way, config, Path(scratch) / f"{way}-{number}")
                found[way].append(steps)
                step, processors = statistics.median(steps.step_s) * 1e3, steps.processor_s * 1e3
                print(f"round {number}, {way}: {step:.1f} ms a step, {processors:.1f} of processors", file=sys.stderr)
    return found


def summarize(found: dict[str, list[Steps]]) -> dict[str, Any]:
    """Each way's median step and processor time, and what they are of plain Megatron's in the same round."""
    step_s = {way: [statistics.median(run.step_s) for run in runs] for way, runs in found.items()}
    processor_s = {way: [run.processor_s for run in runs] for way, runs in found.items()}
    return {
        "ratio": statistics.median(_over(step_s[OURS], step_s[PLAIN])),
        "step_s": {way: spread(values) for way, values in step_s.items()},
        "over_plain": _over_plain(step_s),
        "processor_s": {way: spread(values) for way, values in processor_s.items()},
        "processor_over_plain": _over_plain(processor_s),
    }


def _over_plain(of_ways: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {way: _over(values, of_ways[PLAIN]) for way, values in of_ways.items() if way != PLAIN}
    return {way: {**spread(values), **asdict(estimate(values)), "rounds": values} for way, values in ratios.items()}


def _over(values: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [value / beside for value, beside in zip(values, plain, strict=True)]


def print_table(result: dict[str, Any]) -> None:
    for title, of_ways, over_plain in (
        ("median step", result["step_s"], result["over_plain"]),
        ("processor time of a step", result["processor_s"], result["processor_over_plain"]),
    ):
        print(title)
        for way, seconds in of_ways.items():
            over = over_plain.get(way)
            beside = "" if over is None else _beside_plain(over)
            print(f"  {way:16} {seconds['median'] * 1e3:8.1f} ms  {beside}")


def _beside_plain(over: dict[str, Any]) -> str:
    rounds = ", ".join(f"{ratio:.3f}" for ratio in over["rounds"])
    within = "" if over["ci95"] is None else f" +- {over['ci95']:.3f}"
    return f"{over['median']:.3f} of plain Megatron's, mean {over['mean']:.3f}{within} ({rounds})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--runs", type=int, default=5, help="rounds, with a run of each way")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["torchft_1s", "nvrx_1s"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps < (least := NUM_WARMUP + _STEPS_TO_GO + 2):
        parser.error(
            f"--steps {options.steps}: the first {NUM_WARMUP} are not measured, nor the processor time of the last "
            f"{_STEPS_TO_GO}; set at least {least}"
        )
    loads = [os.getloadavg()[0]]
    result = summarize(measure(options))
    loads.append(os.getloadavg()[0])
    result |= {"runs": options.runs, "steps": options.steps, "load_average": loads, **origin()}
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
