"""What it costs that a group goes on with fewer pipeline stages, after one machine is lost for good.

All machines are on this one; passes sleep for each layer of a stage (`slow_group_program.py`), so that paces are those
of stages on devices of their own. A SIGKILL ends the only machine that is lost. `ratio` is the step with the smaller
group over the step before, `optimum` the least that whole microbatches allow. A second run without
`layout.least_pipeline_parallel` loses a machine each of two groups, of which one is whole again. The first run without
losses, and without sleeps, says whether a bit has changed.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.reform import MOST_STEPS, Killer, Scene, commits_of, digests_of, figures_of, train
from benchmarks.slow_spells import write_program
from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import EntryRecord
from spare_megatron.stacking.paces import PipelineTimes

WARM_UP_STEPS = 3
"""After the start, and after groups come in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerScene(Scene):
    """A machine each of the first groups is lost, and each of these goes on without it."""

    def num_returns(self, num_kills: int) -> int:
        return num_kills


def optimum(options: argparse.Namespace) -> float:
    """The least step with one group that lacks a machine over that without losses."""
    times = PipelineTimes(num_layers=options.layers, num_shards=options.groups, num_microbatches=options.microbatches)
    others = [options.machines] * (options.groups - 1)
    return times.step_time([*others, options.machines - 1]) / times.step_time([*others, options.machines])


def settings_of(options: argparse.Namespace, program: Path) -> list[str]:
    return [
        *("name=shapes", f"program.file={program}", 'cluster.device="cpu"', "faults.trace=[]"),
        *(f"model.num_layers={options.layers}", "model.hidden_size=32", "model.num_attention_heads=2"),
        *("model.seq_length=16", "model.vocab_size=64", "train.micro_batch_size=1", f"train.steps={MOST_STEPS}"),
        *(f"spare.redundancy={min(3, options.groups)}", f"spare.microbatches_per_shard={options.microbatches}"),
        *("spare.rejoins=100", "reduce.mode=reproducible", "train.params_check_every_steps=1"),
        f"control.heartbeat_interval_s={options.heartbeat}",
        *options.set,
    ]


def scene_of(options: argparse.Namespace, kind: type[Scene], losses: int) -> Scene:
    return kind(groups=options.groups, machines=options.machines, losses=losses, rejoins=0, steps_between=options.steps)


def median_steps(commits: dict[int, dict[int, float]], witness: int, killed_at_s: float, joined: int) -> list[float]:
    """Median seconds of a step of this group before the kill, and from the step `joined` on, without warm-ups."""
    at_s = {step: found[witness] for step, found in sorted(commits.items()) if witness in found}
    lasted_s = {after: at_s[after] - at_s[before] for before, after in itertools.pairwise(at_s)}
    before = [lasted_s[step] for step in lasted_s if step >= WARM_UP_STEPS and at_s[step] < killed_at_s]
    after = [lasted_s[step] for step in lasted_s if step >= joined + WARM_UP_STEPS]
    return [statistics.median(before), statistics.median(after)]


def stages_admitted(journal: Journal) -> set[int]:
    """What the log says of the stages of members that have come back."""
    entries: Sequence[Any] = [record.entry for record in journal.of(EntryRecord)]
    return {stages for entry in entries for stages in entry.get("stages", ())}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    smaller, whole = scene_of(options, SmallerScene, 1), scene_of(options, Scene, 2)
    least = f"layout.least_pipeline_parallel={options.machines - 1}"
    with tempfile.TemporaryDirectory() as scratch:
        slept, fast = Path(scratch) / "sleeps.py", Path(scratch) / "fast.py"
        write_program(slept, sleep_s=options.sleep, is_per_layer=True)
        write_program(fast, sleep_s=0.0)
        killer = Killer(scene=smaller)
        settings = [*smaller.settings, *settings_of(options, slept)]
        summary, journal = train(options.config, [*settings, least], killer)
        others = Killer(scene=whole)
        whole_summary, whole_journal = train(options.config, settings, others)
        plain = Killer(last_step=max(digests_of(journal)))
        reference = digests_of(train(options.config, [*smaller.settings, *settings_of(options, fast), least], plain)[1])
    if stages_admitted(journal) != {options.machines - 1}:
        raise RuntimeError(f"the group that lost a machine came back with stages {stages_admitted(journal)}")
    commits, own = commits_of(journal), digests_of(journal)
    before_s, after_s = median_steps(commits, 1, killer.killed_at_s[-1], killer.rejoined[-1].step)
    figures = {"smaller": figures_of(journal, smaller, killer), "whole": figures_of(whole_journal, whole, others)}
    return {
        "ratio": after_s / before_s,
        "optimum": optimum(options),
        "over_optimum": after_s / before_s / optimum(options),
        "step_s": before_s,
        "seconds": figures["smaller"]["seconds"],
        "seconds_over_whole": figures["smaller"]["seconds"] / figures["whole"]["seconds"],
        "longest_pause_s": figures["smaller"]["longest_pause_s"],
        "bitwise": all(len(found) == 1 and reference[step] == found for step, found in own.items()),
        "valid": [summary.verdict, whole_summary.verdict] == ["valid"] * 2,
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--machines", type=int, default=4, help="of each group, with one stage of one rank each")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches per shard")
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of a microbatch in each layer")
    parser.add_argument("--steps", type=int, default=12, help="before the loss, and after the return")
    parser.add_argument("--heartbeat", type=float, default=0.5, help="control.heartbeat_interval_s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.machines < 3 or options.groups < 3 or options.steps <= 2 * WARM_UP_STEPS:
        parser.error("at least 3 machines, of which 2 stages are left, 3 groups and 7 steps")
    result = measure(options)
    if options.json:
        print(json.dumps(result | origin()))
        return
    for name, value in result.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
