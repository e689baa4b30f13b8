"""How long partitions of the optimizer's state lack a host after a SIGKILL, beside their bytes over the bandwidth.

Copies become hosts with the next commit, so that the second time is longer than the first by up to a step.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.records import RedundancyRecord, RepairRecord
from spare_megatron.journal.state.goodput import full_redundancy_s
from spare_megatron.process.reports import RankKey, RanksStarted, RunEvent, StepCommitted

STEPS_BEFORE = 5
MOST_STEPS = 100_000
MIB = 1 << 20


@dataclass(slots=True)
class Killer:
    """Kills the last group, and ends the run some steps after all partitions have their hosts again."""

    run_dir: Path
    last_group: int
    pids: dict[RankKey, int] = field(default_factory=dict)
    has_killed: bool = False
    ends_at: int = MOST_STEPS

    def __call__(self, event: RunEvent) -> None:
        match event:
            case RanksStarted(pids=pids):
                self.pids |= pids
            case StepCommitted(step=step) if step >= self.ends_at:
                raise KeyboardInterrupt
            case StepCommitted(step=step) if step >= STEPS_BEFORE and not self.has_killed:
                os.kill(next(pid for key, pid in self.pids.items() if key == (self.last_group, 0)), signal.SIGKILL)
                self.has_killed = True
            case StepCommitted(step=step) if self.has_killed and self.ends_at == MOST_STEPS:
                if full_redundancy_s(read_journal(self.run_dir)):
                    self.ends_at = step + STEPS_BEFORE


def figures_of(journal: Journal, bytes_per_s: float) -> dict[str, float]:
    """Of the first loss. A rank fetches one copy after the other, so that the one with the most bytes is the last."""
    since_s = min(line.at_s for line in journal.lines if isinstance(line.record, RedundancyRecord))
    redundancy_s = full_redundancy_s(journal)[0]
    made = [
        line.record
        for line in journal.lines
        if isinstance(line.record, RepairRecord) and line.at_s <= since_s + redundancy_s
    ]
    fetched: Counter[int] = Counter()
    for record in made:
        fetched[record.group] += record.num_bytes
    return {
        "num_copies": len(made),
        "copied_s": max(record.repair_s for record in made),
        "redundancy_s": redundancy_s,
        "expected_s": max(fetched.values()) / bytes_per_s,
    }


def measure(config_file: Path, overrides: list[str], num_runs: int) -> dict[str, Any]:
    settings = [
        f"train.steps={MOST_STEPS}",
        "spare.rejoins=0",
        "faults.trace=[]",
        "layout.pipeline_parallel=1",
        "optimizer.sharding=stacked",
        "optimizer.repair_mib_per_s=2.0",
        "model.hidden_size=256",
        *overrides,
    ]
    config = load_run_config(config_file, settings).config
    losses = []
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory() as scratch:
            run_dir = Path(scratch) / "run"
            killer = Killer(run_dir, config.layout.num_groups - 1)
            try:
                start_run(config, run_dir, killer)
            except KeyboardInterrupt:
                if killer.ends_at == MOST_STEPS:
                    raise
            losses.append(figures_of(read_journal(run_dir), config.optimizer.repair_mib_per_s * MIB))
    figures: dict[str, Any] = {"losses": losses}
    for name in ("copied_s", "redundancy_s"):
        figures[name] = statistics.median(loss[name] for loss in losses)
        ratios = [loss[name] / loss["expected_s"] for loss in losses]
        figures[f"{name}_ratio"] = {"median": statistics.median(ratios), "max": max(ratios)}
    return figures | {"ratio": figures["copied_s_ratio"]["median"]} | origin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.config, options.set, options.runs)
    if options.json:
        print(json.dumps(result))
        return
    for what, name in (("copies whole", "copied_s"), ("all hosts again", "redundancy_s")):
        ratio = result[f"{name}_ratio"]
        print(
            f"{what:16} {result[name]:.2f} s after the loss, {ratio['median']:.2f} of bytes over bandwidth "
            f"(largest {ratio['max']:.2f})"
        )


if __name__ == "__main__":
    main()
