"""What snapshots keep a step from, and how much sooner a restart has its state from memory than from storage.

Steps: runs with snapshots and without in turn; of each the median step, all groups waiting for the slowest. Restarts: a
wipe-out after the last snapshot, and one after a checkpoint of the same step; loading alone, the slowest group of each.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.records import RestartRecord, SnapshotRecord, UpdateRecord

MODEL = ["model.num_layers=6", "model.hidden_size=512", "model.num_attention_heads=8"]
"""About 19 million parameters, so 230 MB with the optimizer's state."""
LAYOUT = [
    "layout.num_groups=2",
    "cluster.num_nodes=2",
    "layout.pipeline_parallel=1",
    "spare.redundancy=1",
    "spare.microbatches_per_shard=1",
]
EVERY = 4
WARM_UP = 3
"""Steps that do not count: the first are slower, with snapshots and without."""
WAYS = {
    "memory": [f"snapshot.every_steps={EVERY}"],
    "storage": [f"checkpoint.interval_steps={EVERY}", "checkpoint.asynchronous=false"],
}


def journal_of_a_run(config_file: Path, overrides: list[str]) -> Journal:
    config = load_run_config(config_file, overrides).config
    with tempfile.TemporaryDirectory() as scratch:
        summary = start_run(config, Path(scratch) / "run", lambda _: None)
        if (summary.outcome, summary.verdict) != ("finished", "valid"):
            raise RuntimeError(f"the run is of no use: {summary.outcome_reason} {summary.reasons}")
        return read_journal(Path(scratch) / "run")


def steps_of(journal: Journal) -> list[float]:
    """Seconds of every step after the warm-up, each of the slowest group."""
    slowest: dict[int, float] = {}
    for record in journal.of(UpdateRecord):
        slowest[record.step] = max(record.step_s, slowest.get(record.step, 0.0))
    return [step_s for step, step_s in slowest.items() if step >= WARM_UP]


def measure_steps(config_file: Path, settings: list[str], pairs: int, steps: int) -> dict[str, Any]:
    with_s: list[float] = []
    without_s: list[float] = []
    copies: list[SnapshotRecord] = []
    for _ in range(pairs):
        for overrides, found_s in ((WAYS["memory"], with_s), ([], without_s)):
            journal = journal_of_a_run(config_file, [*settings, f"train.steps={steps}", *overrides])
            found_s += steps_of(journal)
            copies += [record for record in journal.of(SnapshotRecord) if record.step > WARM_UP]
    if not copies or not all(record.is_kept for record in copies):
        raise RuntimeError(f"not every snapshot was kept: {copies}")
    return {
        "mean_step_s": statistics.mean(without_s),
        "mean_step_with_snapshots_s": statistics.mean(with_s),
        "median_step_s": statistics.median(without_s),
        "num_copies": len(copies),
        "num_bytes": copies[0].num_bytes,
        "stall_s": statistics.median(record.stall_s for record in copies),
        "largest_stall_s": max(record.stall_s for record in copies),
        "copy_s": statistics.median(record.copy_s for record in copies),
    }


def measure_restarts(config_file: Path, settings: list[str], pairs: int) -> dict[str, Any]:
    faults = ", ".join(f'{{phase="forward", step={EVERY + 1}, group={group}}}' for group in (0, 1))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    stood_still: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(pairs):
        for way, overrides in WAYS.items():
            common = [f"train.steps={EVERY + 3}", f"faults.trace=[{faults}]", "checkpoint.max_restarts=1"]
            journal = journal_of_a_run(config_file, [*settings, *common, *overrides])
            records = journal.of(RestartRecord)
            if not records or {(record.loaded_from, record.step) for record in records} != {(way, EVERY)}:
                raise RuntimeError(f"the run did not start again from {way}: {records}")
            found[way].append(max(record.load_s for record in records))
            stood_still[way].append(max(record.restart_s for record in records))
    return {
        way: {"load_s": statistics.median(found[way]), "restart_s": statistics.median(stood_still[way])} for way in WAYS
    }


def measure(config_file: Path, overrides: list[str], pairs: int, steps: int) -> dict[str, Any]:
    settings = ["faults.trace=[]", "spare.rejoins=0", *MODEL, *LAYOUT, *overrides]
    step_figures = measure_steps(config_file, settings, pairs, steps)
    restarts = measure_restarts(config_file, settings, pairs)
    share = step_figures["stall_s"] / step_figures["median_step_s"]
    ratio = restarts["memory"]["load_s"] / restarts["storage"]["load_s"]
    return {"steps": step_figures, "stall_share_of_a_step": share, "restarts": restarts, "ratio": ratio, **origin()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--pairs", type=int, default=2, help="runs of either way, for each of the two questions")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.config, options.set, options.pairs, options.steps)
    if options.json:
        print(json.dumps(result))
        return
    print("steps    " + ", ".join(f"{name} {value:.3g}" for name, value in result["steps"].items()))
    print(f"stall of a copy over a median step: {result['stall_share_of_a_step']:.2%}")
    for way, figures in result["restarts"].items():
        print(f"{way:8} " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    print(f"loading, memory over storage: {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
