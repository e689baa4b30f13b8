"""How long a lost group stays away, and how long taking it in again stops the others, with real SIGKILLs."""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.records import LossRecord, UpdateRecord
from spare_megatron.runtime.reports import GroupRejoined, RankKey, RanksStarted, RunEvent, StepCommitted
from spare_megatron.runtime.run import start_run

STEPS_BETWEEN = 10
"""Steps with all groups before each kill."""
MOST_STEPS = 100_000


@dataclass(slots=True)
class Killer:
    """Kills one group after the other, each when the one before has come back, and ends the run after the last."""

    num_groups: int
    num_kills: int
    pids: dict[RankKey, int] = field(default_factory=dict)
    rejoined: list[GroupRejoined] = field(default_factory=list)
    num_killed: int = 0
    next_step: int = STEPS_BETWEEN

    def __call__(self, event: RunEvent) -> None:
        match event:
            case RanksStarted(pids=pids):
                self.pids |= pids
            case GroupRejoined(step=step):
                self.rejoined.append(event)
                self.next_step = step + STEPS_BETWEEN
            case StepCommitted(step=step) if step >= self.next_step and len(self.rejoined) == self.num_killed:
                if self.num_killed == self.num_kills:
                    raise KeyboardInterrupt
                group = self.num_killed % self.num_groups
                os.kill(next(pid for key, pid in self.pids.items() if key == (group, 0)), signal.SIGKILL)
                self.num_killed += 1


def figures_of(journal: Journal, rejoined: GroupRejoined) -> dict[str, float]:
    """Seconds from the fence of the life before to the first commit of all groups, and what the others lost by it."""
    group, incarnation = rejoined.member
    (fenced_at_s,) = [
        line.at_s
        for line in journal.lines
        if isinstance(line.record, LossRecord)
        and (line.record.group, line.record.incarnation) == (group, incarnation - 1)
    ]
    ends: dict[int, dict[int, float]] = defaultdict(dict)
    for line in journal.lines:
        if isinstance(line.record, UpdateRecord):
            ends[line.record.group][line.record.step] = line.at_s
    first = rejoined.step
    whole = range(first + 1, first + STEPS_BETWEEN)
    pauses = []
    for other, at_s in ends.items():
        if other != group and first - 1 in at_s:
            usual_s = statistics.median(at_s[step] - at_s[step - 1] for step in whole if step in at_s)
            pauses.append(at_s[first] - at_s[first - 1] - usual_s)
    back_s = min(at_s[first] for other, at_s in ends.items() if other != group) - fenced_at_s
    return {"fence_to_commit_s": back_s, "pause_s": max(pauses)}


def measure(config_file: Path, overrides: list[str], num_kills: int) -> dict[str, object]:
    settings = [f"train.steps={MOST_STEPS}", f"spare.rejoins={num_kills}", "faults.trace=[]", *overrides]
    config = load_run_config(config_file, settings).config
    killer = Killer(num_groups=config.layout.num_groups, num_kills=num_kills)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            start_run(config, Path(scratch) / "run", killer)
        except KeyboardInterrupt:
            if len(killer.rejoined) < num_kills:
                raise
        journal = read_journal(Path(scratch) / "run")
    rejoins = [figures_of(journal, rejoined) for rejoined in killer.rejoined]
    figures: dict[str, object] = {"num_rejoins": len(rejoins), "rejoins": rejoins}
    for name in ("fence_to_commit_s", "pause_s"):
        values = [rejoin[name] for rejoin in rejoins]
        figures[name] = {"median": statistics.median(values), "max": max(values)}
    return figures | origin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.config, options.set, options.kills)
    if options.json:
        print(json.dumps(result))
        return
    for name in ("fence_to_commit_s", "pause_s"):
        print(f"{name:20} median {result[name]['median']:.2f}, longest {result[name]['max']:.2f}")


if __name__ == "__main__":
    main()
