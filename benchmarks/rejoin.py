"""How long a lost group stays away, with and without spares, and how long its admission stops the others.

With real SIGKILLs, in runs with and without spares in turn.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run
from spare_megatron.journal.files import Journal, read_journal
from spare_megatron.journal.records import StartRecord, UpdateRecord
from spare_megatron.process.reports import GroupRejoined, RankKey, RanksReady, RanksStarted, RunEvent, StepCommitted
from spare_megatron.stacking.layout import GroupId

STEPS_BETWEEN = 10
"""Steps with all groups before each kill."""
MOST_STEPS = 100_000
VARIANTS = {"without": 0, "with": 1}
"""Spares."""
FIGURES = ("kill_to_ready_s", "kill_to_commit_s", "pause_s")


@dataclass(slots=True)
class Killer:
    """Kills one group after the other, each when the one before has come back and all spares wait, and ends the run
    after the last.
    """

    num_groups: int
    num_kills: int
    num_spares: int
    pids: dict[RankKey, int] = field(default_factory=dict)
    rejoined: list[GroupRejoined] = field(default_factory=list)
    killed_at_s: list[float] = field(default_factory=list)
    ready_at_s: list[float] = field(default_factory=list)
    next_step: int = STEPS_BETWEEN
    spare_bytes: list[int] = field(default_factory=list)

    def __call__(self, event: RunEvent) -> None:
        match event:
            case RanksStarted(pids=pids):
                self.pids |= pids
            case RanksReady() if len(self.ready_at_s) < len(self.killed_at_s):
                self.ready_at_s.append(time.time())
            case GroupRejoined(step=step):
                self.rejoined.append(event)
                self.next_step = step + STEPS_BETWEEN
            case StepCommitted(step=step) if step >= self.next_step and len(self.rejoined) == len(self.killed_at_s):
                num_killed = len(self.killed_at_s)
                if num_killed == self.num_kills:
                    raise KeyboardInterrupt
                victim = psutil.Process(self.pids[GroupId(num_killed % self.num_groups), 0])
                waiting = {process.pid for process in victim.parent().children()} - set(self.pids.values())
                if len(waiting) < self.num_spares:
                    return  # they start a heartbeat later than ranks
                self.spare_bytes += map(own_bytes, waiting)
                self.killed_at_s.append(time.time())
                victim.send_signal(signal.SIGKILL)


def own_bytes(pid: int) -> int:
    """Memory that the process shares with no other (Linux, Documentation/filesystems/proc)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def figures_of(journal: Journal, rejoined: GroupRejoined, killed_at_s: float, ready_at_s: float) -> dict[str, float]:
    """Seconds from the kill until the group waits to be admitted, and to the first commit of all groups; and what the
    others lost by the admission.
    """
    group = rejoined.member.group
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
    back_s = min(at_s[first] for other, at_s in ends.items() if other != group) - killed_at_s
    return {
        "kill_to_ready_s": ready_at_s - killed_at_s,
        "kill_to_commit_s": back_s,
        "pause_s": max(pauses),
    }


def rejoins_of(
    config_file: Path, overrides: list[str], num_kills: int, num_spares: int
) -> tuple[list[dict[str, float]], list[int]]:
    """The figures of all returns of one run, and the memory of each spare as it waited.

    Raises:
        RuntimeError: A group did not come back in the processes that it was to.
    """
    wanted = [f"spare.rejoins={num_kills}", f"spare.spares={num_spares}"]
    settings = [f"train.steps={MOST_STEPS}", *wanted, "faults.trace=[]", *overrides]
    config = load_run_config(config_file, settings).config
    killer = Killer(num_groups=config.layout.num_groups, num_kills=num_kills, num_spares=num_spares)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            start_run(config, Path(scratch) / "run", killer)
        except KeyboardInterrupt:
            if len(killer.rejoined) < num_kills:
                raise
        journal = read_journal(Path(scratch) / "run")
    started = [(record.num_spares, record.num_ranks) for record in journal.of(StartRecord)]
    if any(took != (num_ranks if num_spares else 0) for took, num_ranks in started):
        raise RuntimeError(f"with spare.spares={num_spares} groups took so many spares, of so many ranks: {started}")
    returns = zip(killer.rejoined, killer.killed_at_s, killer.ready_at_s, strict=True)
    return [figures_of(journal, *item) for item in returns], killer.spare_bytes


def measure(config_file: Path, overrides: list[str], num_kills: int, num_pairs: int) -> dict[str, Any]:
    rejoins: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    spare_bytes: list[int] = []
    for _ in range(num_pairs):
        for name, num_spares in VARIANTS.items():
            found, held = rejoins_of(config_file, overrides, num_kills, num_spares)
            rejoins[name] += found
            spare_bytes += held
    figures = {
        name: {"rejoins": found, **{figure: summary(found, figure) for figure in FIGURES}}
        for name, found in rejoins.items()
    }
    medians = [summary(rejoins[name], "kill_to_commit_s")["median"] for name in ("with", "without")]
    return {**figures, "ratio": medians[0] / medians[1], "largest_spare_bytes": max(spare_bytes), **origin()}


def summary(rejoins: list[dict[str, float]], figure: str) -> dict[str, float]:
    values = [rejoin[figure] for rejoin in rejoins]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--kills", type=int, default=8, help="in each run")
    parser.add_argument("--pairs", type=int, default=2, help="runs without and with spares, in turn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.config, options.set, options.kills, options.pairs)
    if options.json:
        print(json.dumps(result))
        return
    for name in VARIANTS:
        for figure in FIGURES:
            of = result[name][figure]
            print(f"{name:8}{figure:18} median {of['median']:.2f}, from {of['min']:.2f} to {of['max']:.2f}")
    print(f"kill to commit, with spares over without: {result['ratio']:.2f}")
    print(f"own memory of a spare: at most {result['largest_spare_bytes'] / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
