"""How a step, its commit, an epoch change, memory and descriptors grow with the groups, each of them a process here.

All groups share the processors of this machine, so that they compute one after the other, and the time of a whole step
says nothing of a cluster. What does: the processor time of one group's process in a step, what passes from the last
vote until the last group knows of the commit, how long after a SIGKILL there is a communicator of the groups that are
left (or after the last of them has computed, if that was later), and what a process holds. Each curve is fitted to c
N^k, N being the groups.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.peers.history import spread
from benchmarks.power_law import fit_if_any
from benchmarks.rejoin import own_bytes
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.records import EntryRecord, UpdateRecord, VoteRecord
from spare_megatron.journal.state.recoveries import find_recoveries
from spare_megatron.process.reports import RanksStarted, RunEvent, StepCommitted

MODEL = ["model.num_layers=2", "model.hidden_size=64", "model.seq_length=64", "layout.pipeline_parallel=1"]
NUM_WARMUP = 3
"""Steps at the start of a run that are not measured."""
NUM_AFTER = 3
"""Steps after the kill."""
MOST_STEPS = 100_000
FIGURES = {
    "step_s": "step, all groups on these processors",
    "processor_s": "processor time of a group in a step",
    "commit_s": "last vote to the last group's knowing",
    "epoch_change_s": "kill to a new communicator",
    "rank_bytes": "own memory of a group's process",
    "supervisor_bytes": "own memory of the supervisor",
    "descriptors": "open descriptors of a group's process",
}


@dataclass(slots=True)
class Meter:
    """Looks at the processes of a run after the warm-up and before it kills one, and ends the run some steps later."""

    last_step: int
    victim: int
    pids: dict[int, int] = field(default_factory=dict)
    """Group -> its process."""
    looks: list[tuple[float, float]] = field(default_factory=list)
    """Wall-clock time, and processor time of all groups so far."""
    held: dict[str, float] = field(default_factory=dict)
    ends_at: int | None = None

    def __call__(self, event: RunEvent) -> None:
        match event:
            case RanksStarted(pids=pids):
                self.pids |= {int(group): pid for (group, _), pid in pids.items()}
            case StepCommitted(step=step) if step >= NUM_WARMUP and not self.looks:
                self._look()
            case StepCommitted(step=step) if step > self.last_step and not self.held:
                self._look()
                self.held = held_by([psutil.Process(pid) for pid in self.pids.values()])
                psutil.Process(self.pids[self.victim]).kill()
            case StepCommitted(step=step, num_alive=num_alive) if num_alive < len(self.pids):
                if self.ends_at is None:
                    self.ends_at = step + NUM_AFTER
                elif step >= self.ends_at:
                    raise KeyboardInterrupt

    def _look(self) -> None:
        times = [psutil.Process(pid).cpu_times() for pid in self.pids.values()]
        self.looks.append((time.time(), sum(spent.user + spent.system for spent in times)))


def held_by(ranks: Sequence[psutil.Process]) -> dict[str, float]:
    """What the processes of the groups and their supervisor hold."""
    return {
        "rank_bytes": max(own_bytes(rank.pid) for rank in ranks),
        "supervisor_bytes": own_bytes(ranks[0].ppid()),
        "descriptors": max(rank.num_fds() for rank in ranks),
    }


def figures_of(journal: Journal, meter: Meter, steps: range) -> dict[str, float]:
    """Medians over these steps of the whole step, the slowest group's, and of its commit; and the epoch change."""
    slowest = [max(record.step_s for record in journal.of(UpdateRecord) if record.step == step) for step in steps]
    voted: dict[int, list[float]] = defaultdict(list)
    known: dict[int, list[float]] = defaultdict(list)
    for line in journal.lines:
        match line.record:
            case VoteRecord(step=step):
                voted[step].append(line.at_s)
            case EntryRecord(entry={"entry": "commit", "step": int(step)}):
                known[step].append(line.at_s)
    # When the looks were, in steps: the driver receives a step some time after it.
    ended_s = [max(known[step]) for step in sorted(known)]
    looked_at = np.interp([at_s for at_s, _ in meter.looks], ended_s, sorted(known))
    spent_s = meter.looks[1][1] - meter.looks[0][1]
    recovery = find_recoveries(journal)[0]
    return {
        "step_s": statistics.median(slowest),
        "processor_s": spent_s / float(looked_at[1] - looked_at[0]) / len(meter.pids),
        "commit_s": statistics.median(max(known[step]) - max(voted[step]) for step in steps),
        "epoch_change_s": recovery.detect_s + recovery.agree_s + recovery.rebuild_s,
        **meter.held,
    }


def run_once(options: argparse.Namespace, num_groups: int, run: int, folder: Path) -> dict[str, float]:
    """The figures of one run, with one kill."""
    settings = [
        *MODEL,
        "spare.redundancy=2",
        "spare.microbatches_per_shard=2",
        "spare.rejoins=0",
        "faults.trace=[]",
        *options.set,
        f"layout.num_groups={num_groups}",
        f"train.steps={MOST_STEPS}",
    ]
    steps = range(NUM_WARMUP, NUM_WARMUP + options.steps)
    meter = Meter(last_step=steps[-1], victim=run % num_groups)
    try:
        start_run(load_run_config(options.config, settings).config, folder, meter)
    except KeyboardInterrupt:
        if meter.ends_at is None:
            raise
    return figures_of(read_journal(folder), meter, steps)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs of each number of groups in turn; medians over runs, fitted."""
    found: dict[int, list[dict[str, float]]] = {num_groups: [] for num_groups in options.groups}
    with tempfile.TemporaryDirectory() as scratch:
        for run in range(options.runs):
            for num_groups in options.groups:
                found[num_groups].append(run_once(options, num_groups, run, Path(scratch) / f"{num_groups}-{run}"))
                print(f"run {run}, {num_groups} groups: {found[num_groups][-1]}", file=sys.stderr)
    curves = {}
    for name in FIGURES:
        points = {num_groups: spread([figures[name] for figures in runs]) for num_groups, runs in found.items()}
        medians = [point["median"] for point in points.values()]
        # Processor time is counted in hundredths of a second, and so may be none of a short run.
        curves[name] = {"points": points, "law": fit_if_any(list(points), medians)}
    return {"groups": options.groups, "runs": options.runs, "steps": options.steps, "curves": curves, **origin()}


def print_table(result: dict[str, Any]) -> None:
    print(f"{'':46}" + "".join(f"{num_groups:>10}" for num_groups in result["groups"]) + "   N^k, k   off by")
    for name, title in FIGURES.items():
        curve, unit = result["curves"][name], 1e3 if name.endswith("_s") else 1.0
        medians = [point["median"] * unit for point in curve["points"].values()]
        law = "" if curve["law"] is None else "{exponent:9.2f}{largest_error:9.1%}".format(**curve["law"])
        print(f"{title + (', ms' if name.endswith('_s') else ''):46}" + "".join(f"{m:10.4g}" for m in medians) + law)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4, 6, 8, 12])
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured in each run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each number of groups")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result)) if options.json else print_table(result)


if __name__ == "__main__":
    main()
