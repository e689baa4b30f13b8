"""How long it takes until machines of two broken groups train as one group, and what that costs the others.

Four groups of two machines each, on this one: the first machine of group 0 and the second of group 1 are killed for
good, with real SIGKILLs. The same run without losses says whether a bit has changed.
"""

import argparse
import itertools
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
from spare_megatron.journal.records import ParamsRecord, PlacesRecord, StartRecord, UpdateRecord
from spare_megatron.journal.summary import Summary
from spare_megatron.process.reports import GroupRejoined, RankKey, RanksStarted, RunEvent, StepCommitted
from spare_megatron.stacking.layout import GroupId

NUM_GROUPS = 4
LOST: tuple[RankKey, RankKey] = ((GroupId(0), 0), (GroupId(1), 1))
"""One rank of each machine that is lost."""
FIRST_KILL, STEPS_BETWEEN, STEPS_AFTER = 20, 30, 20
MOST_STEPS = 100_000
SETTINGS = (  # a model whose eight ranks share two processors, and yet are heard within half a second
    f"layout.num_groups={NUM_GROUPS}",
    "layout.pipeline_parallel=2",
    "cluster.num_nodes=8",
    "spare.redundancy=3",
    "spare.microbatches_per_shard=2",
    "train.micro_batch_size=1",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.seq_length=32",
    "reduce.mode=reproducible",
    "control.heartbeat_interval_s=0.5",
    "faults.trace=[]",
    "train.params_check_every_steps=1",
    f"train.steps={MOST_STEPS}",
)
SHARDINGS = {
    "replicated": ("optimizer.sharding=replicated",),
    "stacked": ("optimizer.sharding=stacked", "optimizer.redundancy=3"),
}


@dataclass(slots=True)
class Killer:
    """Kills one machine, and another one some steps later, and ends the run some steps after the return of a group; or
    kills none, and ends it after `last_step`.
    """

    last_step: int | None = None

    pids: dict[RankKey, int] = field(default_factory=dict)
    killed_at_s: list[float] = field(default_factory=list)
    rejoined: list[GroupRejoined] = field(default_factory=list)
    next_step: int = FIRST_KILL
    is_ending: bool = False

    def __call__(self, event: RunEvent) -> None:
        match event:
            case RanksStarted(pids=pids):
                self.pids |= pids
            case GroupRejoined(step=step):
                self.rejoined.append(event)
                self.last_step = step + STEPS_AFTER
            case StepCommitted(step=step) if self.last_step is not None:
                if step >= self.last_step and not self.is_ending:
                    self.is_ending = True
                    self.end_run()
            case StepCommitted(step=step) if step >= self.next_step and len(self.killed_at_s) < len(LOST):
                supervisor = psutil.Process(self.pids[LOST[len(self.killed_at_s)]]).parent()
                self.killed_at_s.append(time.time())
                supervisor.send_signal(signal.SIGKILL)
                self.next_step = step + STEPS_BETWEEN

    def end_run(self) -> None:
        """Asks all supervisors to end it with the step under way."""
        for supervisor in {psutil.Process(pid).parent() for pid in self.pids.values() if psutil.pid_exists(pid)}:
            if supervisor is not None:
                supervisor.send_signal(signal.SIGUSR1)


def digests_of(journal: Journal) -> dict[int, set[str]]:
    """Committed steps -> digests of the parameters."""
    found: dict[int, set[str]] = defaultdict(set)
    for record in journal.of(ParamsRecord):
        found[record.step].add(record.digest)
    return found


def commits_of(journal: Journal) -> dict[int, dict[int, float]]:
    """Step -> group -> when the group had applied its commit."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for line in journal.lines:
        if isinstance(line.record, UpdateRecord):
            found[line.record.step][line.record.group] = line.at_s
    return found


def figures_of(journal: Journal, killer: Killer) -> dict[str, Any]:
    """From the second loss to the first commit of three groups, and the survivors' longest time between commits."""
    killed_at_s, (rejoined, *others) = killer.killed_at_s[-1], killer.rejoined
    if others or rejoined.member.group not in (0, 1):
        raise RuntimeError(f"one group was to come back, not {killer.rejoined}")
    commits = commits_of(journal)
    first = commits[rejoined.step]
    end_s = min(at_s for group, at_s in first.items() if group != rejoined.member.group)
    times_s = [commits[step][2] for step in sorted(commits)]
    gaps_s = [(after, after - before) for before, after in itertools.pairwise(times_s)]
    usual_s = statistics.median(gap_s for after, gap_s in gaps_s if after < killer.killed_at_s[0])
    pauses_s = [gap_s - usual_s for after, gap_s in gaps_s if after > killed_at_s]
    assigned_s = min(line.at_s for line in journal.lines if isinstance(line.record, PlacesRecord))
    started_s = max(
        line.at_s for line in journal.lines if isinstance(line.record, StartRecord) and line.at_s > assigned_s
    )
    return {
        "groups_before": min(len(commits[step]) for step in commits if step < rejoined.step),
        "groups_after": len(first),
        "seconds": end_s - killed_at_s,
        "kill_to_assignment_s": assigned_s - killed_at_s,
        "assignment_to_start_s": started_s - assigned_s,
        "start_to_commit_s": end_s - started_s,
        "longest_pause_s": max(pauses_s),
        "admission_pause_s": first[2] - commits[rejoined.step - 1][2] - usual_s,
        "usual_step_s": usual_s,
    }


def train(config_file: Path, settings: list[str], killer: Killer) -> tuple[Summary, Journal]:
    config = load_run_config(config_file, settings).config
    with tempfile.TemporaryDirectory() as scratch:
        summary = start_run(config, Path(scratch) / "run", killer)
        return summary, read_journal(Path(scratch) / "run")


def measure(config_file: Path, overrides: list[str], sharding: str, num_runs: int) -> dict[str, Any]:
    settings = [*SETTINGS, *SHARDINGS[sharding], *overrides]
    runs, digests = [], []
    for _ in range(num_runs):
        killer = Killer()
        summary, journal = train(config_file, settings, killer)
        runs.append({**figures_of(journal, killer), "verdict": summary.verdict})
        digests.append(digests_of(journal))
    plain = Killer(last_step=max(max(found) for found in digests))
    whole = digests_of(train(config_file, [*settings, "cluster.num_nodes=1"], plain)[1])
    is_bitwise = all(whole[step] == own and len(own) == 1 for found in digests for step, own in found.items())
    median = {
        name: statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
        if isinstance(value, int | float)
    }
    return {
        **median,
        "bitwise": is_bitwise,
        "valid": all(run["verdict"] == "valid" for run in runs),
        "sharding": sharding,
        "runs": runs,
        **origin(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--sharding", choices=sorted(SHARDINGS), default="stacked", help="of the optimizer state")
    parser.add_argument("--runs", type=int, default=3, help="figures are medians of so many")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.config, options.set, options.sharding, options.runs)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if name != "runs":
            print(f"{name:22} {value:.2f}" if isinstance(value, float) else f"{name:22} {value}")


if __name__ == "__main__":
    main()
