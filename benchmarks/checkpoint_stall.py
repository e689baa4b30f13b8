"""How long a checkpoint keeps a group from training: asynchronous beside synchronous, in turn.

Waits are counted: for the copy, and for the files where they are waited for. That writing takes processor time, which
a step may miss where ranks share processors, is not.
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
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import CheckpointRecord

MODEL = ["model.num_layers=6", "model.hidden_size=512", "model.num_attention_heads=8"]
"""About 19 million parameters, so 230 MB with the optimizer's state."""
INTERVAL = 4
WAYS = {"synchronous": "checkpoint.asynchronous=false", "asynchronous": "checkpoint.asynchronous=true"}


def saves_of_a_run(config_file: Path, overrides: list[str], way: str) -> list[CheckpointRecord]:
    """The saves before the last step: no group trains after it."""
    config = load_run_config(config_file, [*overrides, WAYS[way]]).config
    with tempfile.TemporaryDirectory() as scratch:
        start_run(config, Path(scratch) / "run", lambda _: None)
        journal = read_journal(Path(scratch) / "run")
    saves = [record for record in journal.of(CheckpointRecord) if record.step < config.train.steps]
    if any(record.outcome != "saved" for record in saves):
        raise RuntimeError(f"not every checkpoint was saved: {saves}")
    return saves


def measure(config_file: Path, overrides: list[str], pairs: int, steps: int) -> dict[str, Any]:
    settings = [f"train.steps={steps}", "faults.trace=[]", f"checkpoint.interval_steps={INTERVAL}", *MODEL, *overrides]
    saves: dict[str, list[CheckpointRecord]] = {way: [] for way in WAYS}
    for _ in range(pairs):
        for way in WAYS:
            saves[way] += saves_of_a_run(config_file, settings, way)
    figures = {
        way: {
            "num_saves": len(records),
            "num_bytes": records[0].num_bytes,
            "stall_s": statistics.median(record.stall_s for record in records),
            "largest_stall_s": max(record.stall_s for record in records),
            "write_s": statistics.median(record.write_s for record in records),
        }
        for way, records in saves.items()
    }
    ratio = figures["asynchronous"]["stall_s"] / figures["synchronous"]["stall_s"]
    return {**figures, "ratio": ratio, **origin()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--pairs", type=int, default=2, help="runs with saves of either way")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.config, options.set, options.pairs, options.steps)
    if options.json:
        print(json.dumps(result))
        return
    for way in ("synchronous", "asynchronous"):
        print(f"{way:14} " + ", ".join(f"{name} {value:.3g}" for name, value in result[way].items()))
    print(f"stall, asynchronous over synchronous: {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
