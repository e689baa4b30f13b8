"""How long it takes until machines of broken groups train as whole ones, and what that costs the others.

All machines are on this one. With real SIGKILLs single ranks are lost first, whose groups rejoin; then one machine each
of several groups, for good. The pauses of the others at both stand beside each other. The same run without losses says
whether a bit has changed.
"""

import argparse
import itertools
import json
import math
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
from spare_megatron.journal.state.summary import Summary
from spare_megatron.process.reports import GroupRejoined, RankKey, RanksStarted, RunEvent, StepCommitted
from spare_megatron.stacking.layout import GroupId

MOST_STEPS = 100_000
SETTINGS = (  # a model whose ranks share two processors, and yet beat within half a second
    "spare.redundancy=3",
    "spare.microbatches_per_shard=2",
    "spare.rejoins=100",
    "train.micro_batch_size=1",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is lost of how many groups and machines of each: after `rejoins` single ranks, a machine each of the first
    `losses` groups, `steps_between` apart. The group after those loses nothing.
    """

    groups: int
    machines: int
    losses: int
    rejoins: int
    steps_between: int

    @property
    def settings(self) -> list[str]:
        return [
            f"layout.num_groups={self.groups}",
            f"layout.pipeline_parallel={self.machines}",
            f"cluster.num_nodes={self.groups * self.machines}",
            f"model.num_layers={self.machines}",
        ]

    @property
    def victims(self) -> list[RankKey]:
        last = self.groups - 1
        ranks = [(GroupId(last - i % (last - self.losses)), 0) for i in range(self.rejoins)]
        return ranks + [(GroupId(group), group % self.machines) for group in range(self.losses)]

    def num_returns(self, num_kills: int) -> int:
        """Groups that have been admitted after so many kills: k machines that are lost cost k / machines groups."""
        num_lost = max(0, num_kills - self.rejoins)
        return min(num_kills, self.rejoins) + num_lost - math.ceil(num_lost / self.machines)


@dataclass(slots=True)
class Killer:
    """Kills the victims of a scene in turn, each some steps after all groups that can be are whole, and then ends
    the run; without a scene it kills none, and ends it after `last_step`.
    """

    scene: Scene | None = None
    last_step: int | None = None

    pids: dict[RankKey, int] = field(default_factory=dict)
    killed_at_s: list[float] = field(default_factory=list)
    rejoined: list[GroupRejoined] = field(default_factory=list)
    next_step: int = 0
    is_ending: bool = False

    def __post_init__(self) -> None:
        self.next_step = self._steps_between

    @property
    def _steps_between(self) -> int:
        return self.scene.steps_between if self.scene else 0

    def __call__(self, event: RunEvent) -> None:
        match event:
            case RanksStarted(pids=pids):
                self.pids |= pids
            case GroupRejoined(step=step):
                self.rejoined.append(event)
                self.next_step = step + self._steps_between
            case StepCommitted(step=step):
                self._on_commit(step)

    def _on_commit(self, step: int) -> None:
        num_kills = len(self.killed_at_s)
        if self.scene is None or num_kills == len(self.scene.victims):
            is_whole = self.scene is None or len(self.rejoined) == self.scene.num_returns(num_kills)
            if is_whole and not self.is_ending and step >= (self.last_step or self.next_step):
                self.is_ending = True
                self.end_run()
        elif step >= self.next_step and len(self.rejoined) == self.scene.num_returns(num_kills):
            rank = psutil.Process(self.pids[self.scene.victims[num_kills]])
            self.killed_at_s.append(time.time())
            (rank if num_kills < self.scene.rejoins else rank.parent()).send_signal(signal.SIGKILL)
            self.next_step = step + self._steps_between

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


def pauses_of(scene: Scene, killer: Killer, commits: dict[int, dict[int, float]]) -> list[dict[str, float]]:
    """For each return, how much longer than usual the group that loses nothing waited for a commit: the longest time
    from the kill on, and the time before the first commit with the group that has come back.
    """
    times_s = [(step, found[scene.losses]) for step, found in sorted(commits.items()) if scene.losses in found]
    gaps_s = {after: at_s - before_s for (_, before_s), (after, at_s) in itertools.pairwise(times_s)}
    at_s = dict(times_s)
    numbers = [scene.num_returns(number + 1) - 1 for number in range(len(killer.killed_at_s))]
    found = []
    for number, (killed_at_s, rejoined) in enumerate(zip(killer.killed_at_s, numbers, strict=True)):
        if rejoined < 0 or (number and numbers[number - 1] == rejoined):
            continue  # a machine that is lost alone
        step = killer.rejoined[rejoined].step
        window = [other for other in gaps_s if at_s[other] > killed_at_s and other < step + scene.steps_between // 2]
        usual_s = statistics.median(gaps_s[other] for other in window)
        found.append(
            {
                "longest_pause_s": max(gaps_s[other] for other in window) - usual_s,
                "admission_pause_s": gaps_s[step] - usual_s,
            }
        )
    return found


def figures_of(journal: Journal, scene: Scene, killer: Killer) -> dict[str, Any]:
    """From the last loss to the first commit of all groups that can be whole, and the pauses at all returns."""
    killed_at_s, rejoined = killer.killed_at_s[-1], killer.rejoined[-1]
    commits = commits_of(journal)
    first = commits[rejoined.step]
    end_s = min(at_s for group, at_s in first.items() if group != rejoined.member.group)
    witness_s = [found[scene.losses] for _, found in sorted(commits.items()) if scene.losses in found]
    assigned_s = min(
        line.at_s for line in journal.lines if isinstance(line.record, PlacesRecord) and line.at_s > killed_at_s
    )
    started_s = max(
        line.at_s for line in journal.lines if isinstance(line.record, StartRecord) and line.at_s > assigned_s
    )
    pauses = pauses_of(scene, killer, commits)
    kinds = {"rejoin_": pauses[: scene.rejoins], "": pauses[scene.rejoins :]}
    return {
        "groups_before": min(len(found) for found in commits.values()),
        "groups_after": len(first),
        "seconds": end_s - killed_at_s,
        "kill_to_assignment_s": assigned_s - killed_at_s,
        "assignment_to_start_s": started_s - assigned_s,
        "start_to_commit_s": end_s - started_s,
        **{
            f"{kind}{name}": statistics.median(pause[name] for pause in found)
            for kind, found in kinds.items()
            for name in (found[0] if found else ())
        },
        "usual_step_s": statistics.median(after - before for before, after in itertools.pairwise(witness_s)),
        "pauses": pauses,
    }


def train(config_file: Path, settings: list[str], killer: Killer) -> tuple[Summary, Journal]:
    config = load_run_config(config_file, settings).config
    with tempfile.TemporaryDirectory() as scratch:
        summary = start_run(config, Path(scratch) / "run", killer)
        return summary, read_journal(Path(scratch) / "run")


def measure(config_file: Path, overrides: list[str], sharding: str, scene: Scene, num_runs: int) -> dict[str, Any]:
    settings = [*SETTINGS, *SHARDINGS[sharding], *overrides, *scene.settings]
    runs, digests = [], []
    for _ in range(num_runs):
        killer = Killer(scene=scene)
        summary, journal = train(config_file, settings, killer)
        runs.append({**figures_of(journal, scene, killer), "verdict": summary.verdict})
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
        "ratio": median["longest_pause_s"] / median["rejoin_longest_pause_s"],
        "bitwise": is_bitwise,
        "valid": all(run["verdict"] == "valid" for run in runs),
        "sharding": sharding,
        "runs": runs,
        **origin(),
    }


def scene_of(options: argparse.Namespace) -> Scene:
    names = ("groups", "machines", "losses", "rejoins", "steps_between")
    scene = Scene(**{name: getattr(options, name) for name in names})
    if scene.machines < 2 or scene.losses < 2 or scene.rejoins < 1 or scene.groups < scene.losses + 2:
        raise SystemExit(
            f"--machines {scene.machines} --losses {scene.losses} --rejoins {scene.rejoins} --groups {scene.groups}: "
            "at least 2, 2 and 1, and two groups more than losses, one for rejoins and one that loses nothing"
        )
    return scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--sharding", choices=sorted(SHARDINGS), default="stacked", help="of the optimizer state")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--machines", type=int, default=2, help="of each group, with one rank each")
    parser.add_argument("--losses", type=int, default=2, help="machines that are lost for good, of as many groups")
    parser.add_argument("--rejoins", type=int, default=3, help="groups that lose a rank, and rejoin, before")
    parser.add_argument("--steps-between", type=int, default=20, help="from one loss or return to the next loss")
    parser.add_argument("--runs", type=int, default=3, help="figures are medians of so many")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.config, options.set, options.sharding, scene_of(options), options.runs)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if name != "runs":
            print(f"{name:26} {value:.2f}" if isinstance(value, float) else f"{name:26} {value}")


if __name__ == "__main__":
    main()
