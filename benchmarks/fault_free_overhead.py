"""What redundancy costs while nothing fails: ours beside plain Megatron, in turn, on the same model and data.

Plain Megatron's optimizer is its DistributedOptimizer where ours is stacked, and its gradients are reduced during the
backward pass where ours are.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.plain_megatron import train_plain
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.runtime.preflight import preflight
from spare_megatron.runtime.processes import end_child, fork_server, start_child, start_embedded_store
from spare_megatron.runtime.run import start_run

NUM_WARMUP = 5
"""Steps at the start of each run that are not measured."""


def step_times_of_ours(config: RunConfig, folder: Path) -> list[float]:
    """Seconds between the ends of successive steps, at group 0."""
    summary = start_run(config, folder, lambda _: None)
    assert summary.verdict == "valid", summary.reasons
    lines = [line for line in read_journal(folder).lines if line.source == "group-0000-rank-0"]
    return _intervals([line.at_s for line in lines if isinstance(line.record, UpdateRecord)])


def step_times_of_plain(config: RunConfig) -> list[float]:
    """Seconds between the ends of successive steps, at rank 0."""
    context = fork_server()
    preflight(config)
    store, spec = start_embedded_store(context, config.control.listen_address)
    ranks = [
        start_child(context, f"plain-{rank}", train_plain, config, rank, spec)
        for rank in range(config.parallel.num_ranks)
    ]
    try:
        ends = ranks[0].reports.recv()
        for child in ranks:
            child.process.join(60)
        return _intervals(ends)
    finally:
        for child in [*ranks, store]:
            end_child(child)


def _intervals(ends: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(ends[NUM_WARMUP:], ends[NUM_WARMUP + 1 :], strict=False)]


def measure(config: RunConfig, num_pairs: int) -> dict[str, object]:
    """Interleaved runs, the order changing from pair to pair."""
    ours: list[float] = []
    plain: list[float] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(num_pairs):
            times: dict[str, list[float]] = {}
            for which in ("plain", "ours") if pair % 2 == 0 else ("ours", "plain"):
                is_ours = which == "ours"
                times[which] = (
                    step_times_of_ours(config, Path(scratch) / str(pair)) if is_ours else step_times_of_plain(config)
                )
            ours += times["ours"]
            plain += times["plain"]
            ratios.append(statistics.median(times["ours"]) / statistics.median(times["plain"]))
            print(f"pair {pair}: ratio {ratios[-1]:.4f}", file=sys.stderr)
    return {
        "ratio": statistics.median(ours) / statistics.median(plain),
        "ratio_of_each_pair": ratios,
        "ours_step_s": statistics.median(ours),
        "plain_step_s": statistics.median(plain),
        "steps_measured": len(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    overrides = ["faults.trace=[]", f"train.steps={options.steps}", *options.set]
    result = measure(load_run_config(options.config, overrides).config, options.pairs)
    result |= origin()
    if options.json:
        print(json.dumps(result))
        return
    print(f"median step: ours {result['ours_step_s'] * 1e3:.1f} ms, plain {result['plain_step_s'] * 1e3:.1f} ms")
    print(f"ratio {result['ratio']:.4f} (pairs: {', '.join(f'{r:.3f}' for r in result['ratio_of_each_pair'])})")


if __name__ == "__main__":
    main()
