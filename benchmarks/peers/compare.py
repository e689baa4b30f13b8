"""From the loss of groups to the next committed step on the others: ours beside the peers, in turn.

All train the same model on the same data with the same code, a process for each of 4 groups, and are hit by the same
faults at the same microbatch of the same step.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.origin import origin
from benchmarks.peers.environment import ROOT, peer_python
from benchmarks.peers.history import Cost, Event, cost_of, events_of_journal, spread
from benchmarks.peers.peer_run import NvrxTimes, TorchftTimes, run_peer
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.preflight import preflight
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import read_journal

FAULTS = {"kill": ("kill", 1), "stop": ("stop", 1), "two_kills": ("kill", 2)}
"""What happens, and to how many groups of the same step."""
HIT_STEP, NUM_STEPS = 8, 18
PEERS: dict[str, TorchftTimes | NvrxTimes] = {
    "torchft_1s": TorchftTimes(heartbeat_s=1.0, timeout_s=1.0),
    "torchft_5s": TorchftTimes(heartbeat_s=1.0, timeout_s=5.0),
    "torchft_5s_beat": TorchftTimes(heartbeat_s=5.0, timeout_s=5.0),
    "nvrx_1s": NvrxTimes(interval_s=1.0, timeout_s=2.0),
    "nvrx_100ms": NvrxTimes(interval_s=0.1, timeout_s=1.0),
}
"""torchft: a heartbeat like ours and timeouts as short as these steps allow; the timeout of its example; its heartbeat.
NVIDIA's extension: its default intervals, and a tenth of them, with timeouts as short as these and the steps allow."""
OURS = "ours"


def configure(config_file: Path, overrides: Sequence[str], fault: str, run: int) -> RunConfig:
    """One run's configuration; who is hit goes around with the number of the run, which also draws the microbatch."""
    kind, num_hit = FAULTS[fault]
    trace = ", ".join(
        f'{{phase="before_reduce", step={HIT_STEP}, group={(run + which) % 4}, kind="{kind}"}}'
        for which in range(num_hit)
    )
    settings = [
        "layout.pipeline_parallel=1",
        "model.hidden_size=64",
        "model.seq_length=64",
        *overrides,
        "layout.num_groups=4",
        f"train.steps={NUM_STEPS}",
        f"faults.seed={run}",
        f"faults.trace=[{trace}]",
    ]
    return load_run_config(config_file, settings).config


def run_once(way: str, config: RunConfig, folder: Path) -> list[Event]:
    """One run of ours or of a peer, whose sample index is there already."""
    if way != OURS:
        return run_peer(peer_python(), config, PEERS[way], folder)
    summary = start_run(config, folder, lambda _: None)
    if summary.verdict != "valid":
        raise RuntimeError(f"{folder.name}: {summary.verdict}, {summary.reasons}")
    return events_of_journal(read_journal(folder))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Interleaved runs; the order turns around from run to run."""
    ways = [OURS, *options.peers]
    costs: dict[str, dict[str, list[Cost]]] = {fault: {way: [] for way in ways} for fault in options.faults}
    loads: list[float] = []
    if options.peers:
        peer_python()  # so that making it disturbs no run
    with tempfile.TemporaryDirectory() as scratch:
        for run, fault in itertools.product(range(options.runs), options.faults):
            config = configure(options.config, options.set, fault, run)
            preflight(config)
            for way in ways if run % 2 == 0 else reversed(ways):
                cost = cost_of(run_once(way, config, Path(scratch) / f"{fault}-{run}-{way}"), FAULTS[fault][1])
                costs[fault][way].append(cost)
                loads.append(os.getloadavg()[0])
                print(f"{fault}, run {run}, {way}: {cost}", file=sys.stderr)
    return {
        "runs": options.runs,
        "faults": {fault: summarize(costs_of_ways) for fault, costs_of_ways in costs.items()},
        "load_average": spread(loads),
        "peers": {way: asdict(PEERS[way]) for way in options.peers},
    }


def summarize(ways: dict[str, list[Cost]]) -> dict[str, Any]:
    """Medians and spread of what one kind of fault cost, and our time over each peer's."""
    medians = {way: statistics.median(cost.to_commit_s for cost in costs) for way, costs in ways.items()}
    return {
        **{
            way: {
                **{field.name: spread([getattr(cost, field.name) for cost in costs]) for field in fields(Cost)},
                "runs": [asdict(cost) for cost in costs],
            }
            for way, costs in ways.items()
        },
        "ratio": {way: medians[OURS] / median for way, median in medians.items() if way != OURS},
    }


def print_table(result: dict[str, Any]) -> None:
    print(
        f"{'fault':10} {'':17} {'to commit, s':>22} {'discarded':>10} {'again':>6} {'counted':>8}   step before, after"
    )
    for fault, ways in result["faults"].items():
        for way in [OURS, *result["peers"]]:
            figures = ways[way]
            time_s = "{median:8.3f} ({min:.3f} to {max:.3f})".format(**figures["to_commit_s"])
            others = [
                figures[name]["median"]
                for name in ("steps_discarded", "microbatches_recomputed", "microbatches_counted")
            ]
            steps = [figures[name]["median"] * 1e3 for name in ("step_before_s", "step_after_s")]
            print(
                f"{fault:10} {way:17} {time_s:>24} {others[0]:8g} {others[1]:6g} {others[2]:8g}   "
                f"{steps[0]:.0f}, {steps[1]:.0f} ms"
            )
    if result["ratio"] is not None:
        print(f"ratio {result['ratio']:.4f} (ours over the fastest peer's, {next(iter(result['faults']))})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind for each fault")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="what happens")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["torchft_1s", "nvrx_1s", "nvrx_100ms"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options)
    first = result["faults"][options.faults[0]]
    result |= {"ratio": max(first["ratio"].values(), default=None), **origin()}
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
