"""What slow groups cost: the step with them over the step without, and how soon the work is dealt by pace.

A run of real processes whose passes sleep (`slow_group_program.py`), with faults of kind `slow`; `optimum` is the least
ratio that whole microbatches allow. With `--quiet-steps` nothing is slow, and what counts is how often paces change;
with `--pairs`, what paces cost: blocks of steps with and without them by turns in one run.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from benchmarks.slow_spells import write_program
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.run import start_run
from spare_megatron.journal.records import PacesRecord, UpdateRecord
from spare_megatron.journal.state.follow import JournalTail
from spare_megatron.tools.simulate.sweep import estimate

WARM_UP_STEPS, SLOW_FROM, LAST_STEPS = 8, 32, 24
"""Steps that count: from the warm-up to the first slow one, then the last ones."""
BLOCK_STEPS = 8


def run(options: argparse.Namespace, folder: Path, num_steps: int) -> tuple[Mapping[int, float], Sequence[PacesRecord]]:
    """Seconds of each step, the longest of any group, and the changes of paces."""
    program = folder.with_suffix(".py")
    write_program(program, sleep_s=options.sleep, block=BLOCK_STEPS if options.pairs else 0)
    faults = [
        f'{{kind="slow", phase="forward", step={SLOW_FROM}, group={group}, rank=0, factor={factor}}}'
        for group, factor in enumerate(() if options.quiet_steps or options.pairs else options.factor)
    ]
    settings = [
        *("name=slow_group", f"program.file={program}"),
        *("model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=1"),
        *("model.seq_length=16", "model.vocab_size=64", "train.micro_batch_size=1", f"train.steps={num_steps}"),
        *(f"layout.num_groups={options.groups}", f"spare.redundancy={min(options.redundancy, options.groups)}"),
        *(f"spare.microbatches_per_shard={options.microbatches}", 'cluster.device="cpu"', "spare.rejoins=0"),
        f"faults.trace=[{', '.join(faults)}]",
        *options.set,
    ]
    summary = start_run(load_run_config(None, settings).config, folder, lambda _: None)
    if summary.verdict != "valid" or summary.steps_committed != num_steps:
        raise RuntimeError(f"{summary.verdict}, {summary.steps_committed} steps: {summary.reasons}")
    steps: dict[int, float] = {}
    changes: dict[int, PacesRecord] = {}
    for line in JournalTail(folder).poll():
        match line.record:
            case UpdateRecord(step=step, step_s=step_s):
                steps[step] = max(step_s, steps.get(step, 0.0))
            case PacesRecord(step=step):  # of all groups the same
                changes[step] = line.record
    return steps, [changes[step] for step in sorted(changes)]


def optimum(num_groups: int, num_microbatches: int, factors: Sequence[float]) -> float:
    """The least makespan of whole microbatches over that without slow groups, trying each end of one.

    >>> optimum(8, 16, [2.0]), optimum(4, 16, [2.0])
    (1.125, 1.1875)
    """
    paces = [*factors, *[1.0] * (num_groups - len(factors))]
    ends = sorted({pace * count for pace in paces for count in range(num_groups * num_microbatches + 1)})
    total = num_groups * num_microbatches
    return next(end for end in ends if sum(int(end / pace + 1e-9) for pace in paces) >= total) / num_microbatches


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        if options.pairs:
            steps, changes = run(
                options, Path(scratch) / "run", 2 * BLOCK_STEPS * (options.pairs + 1) + BLOCK_STEPS + 1
            )
            used_s = [used_of(file) for file in Path(scratch).glob("run.used-*")]
            return price(steps) | processor_price(steps, used_s) | {"changes_of_weights": len(changes)}
        if options.quiet_steps:
            _, changes = run(options, Path(scratch) / "run", options.quiet_steps)
            found = {"steps": options.quiet_steps, "changes_of_weights": len(changes)}
            return found | {"changes": [[change.step, change.permille] for change in changes]}
        steps, changes = run(options, Path(scratch) / "run", SLOW_FROM + options.slow_steps)
    quiet_s = statistics.median(steps[step] for step in range(WARM_UP_STEPS, SLOW_FROM))
    slow_s = statistics.median(list(steps.values())[-LAST_STEPS:])
    dealt_at = [change.step for change in changes if change.step > SLOW_FROM]
    least = optimum(options.groups, options.microbatches, options.factor)
    return {
        "ratio": slow_s / quiet_s,
        "optimum": least,
        "over_optimum": slow_s / quiet_s / least,
        "untreated": steps[SLOW_FROM] / quiet_s,
        "steps_to_deal": dealt_at[0] - SLOW_FROM if dealt_at else None,
        "quiet_step_s": quiet_s,
        "changes": [[change.step, change.permille] for change in changes],
    }


def used_of(file: Path) -> dict[int, float]:
    """Processor seconds that a rank had used when each step began."""
    return {int(step): float(used) for step, used in map(str.split, file.read_text().splitlines())}


def processor_price(steps: Mapping[int, float], used_s: Sequence[Mapping[int, float]]) -> dict[str, Any]:
    """What paces add to the processor time of a rank in a step, over the time of the step: each block with them beside
    those before and after it.
    """
    added = [
        (3 * used[first + BLOCK_STEPS] - 3 * used[first] + used[first - BLOCK_STEPS] - used[first + 2 * BLOCK_STEPS])
        / (2 * BLOCK_STEPS)
        for used in used_s
        for first in range(3 * BLOCK_STEPS, len(steps) - 2 * BLOCK_STEPS, 2 * BLOCK_STEPS)
    ]
    found, step_s = estimate(added), statistics.median(steps.values())
    return {"added_processor_s": found.mean, "ci95": found.ci95, "added_processor_over_step": found.mean / step_s}


def price(steps: Mapping[int, float]) -> dict[str, Any]:
    """Steps with paces over the steps without, by pairs of neighbouring blocks; the first pair warms up."""
    means = [
        statistics.mean(steps[step] for step in range(first, first + BLOCK_STEPS))
        for first in range(2 * BLOCK_STEPS, len(steps) - 2 * BLOCK_STEPS, BLOCK_STEPS)
    ]
    ratios = [measured / free for free, measured in zip(means[::2], means[1::2], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "ratio_of_means": statistics.mean(means[1::2]) / statistics.mean(means[::2]),
        "pairs": len(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--factor", type=float, nargs="+", default=[2.0], help="time per microbatch of each slow group")
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches per shard")
    parser.add_argument("--redundancy", type=int, default=3)
    parser.add_argument("--sleep", type=float, default=0.04, help="seconds of a microbatch")
    parser.add_argument("--slow-steps", type=int, default=48, help="steps from the first slow one on")
    parser.add_argument("--quiet-steps", type=int, default=0, help="steps without slow groups, to count changes in")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of blocks with and without paces, at least 2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        print(json.dumps(result | origin()))
        return
    for name, value in result.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
