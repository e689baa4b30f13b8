"""What lanes inside a group cost and save: ours beside plain Megatron, and bytes over groups, by lanes.

Plain Megatron has as many data-parallel ranks, its DistributedOptimizer over all of them, and reduces gradients during
the backward pass as ours does. The global batch is the same at all numbers of lanes.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.checks.validate import on_device
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.run import look_at_machine
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.tools.bench.bench_throughput import (
    NUM_WARMUP,
    measure,
    problems_of,
    train_without_losses,
    training_alone,
)

STEPS_OF_BYTES = 4
"""Steps of a run that counts bytes: the first also holds those of building communicators, if any."""


def bytes_over_groups(config: RunConfig, num_lanes: int) -> int:
    """Bytes that a rank gives to the sums of a step over groups, as the run has journaled them."""
    layout = dataclasses.replace(config.layout, data_parallel=num_lanes)
    train = dataclasses.replace(config.train, steps=STEPS_OF_BYTES)
    config = dataclasses.replace(config, layout=layout, train=train)
    with tempfile.TemporaryDirectory(prefix="spare-bench-") as scratch:
        folder = Path(scratch) / "run"
        train_without_losses(config, folder, lambda _: None)
        records = [line.record for line in read_journal(folder).lines if line.source == "group-0000-rank-0"]
    found = [record.bytes_over_groups for record in records if isinstance(record, UpdateRecord)]
    assert len(found) == STEPS_OF_BYTES
    return int(statistics.median(found[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/wide_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2], help="lanes at which bytes are counted")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind; 0 counts bytes alone")
    parser.add_argument("--steps", type=int, default=NUM_WARMUP + 20, help="steps of each run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = [f"train.steps={options.steps}", "optimizer.warmup_steps=0", "reduce.overlap=true", *options.set]
    config = training_alone(load_run_config(options.config, settings).config)
    config = on_device(config, look_at_machine(config))
    if problems := list(problems_of(config, has_plain=True)):
        parser.error("; ".join(problems))
    sent = {num_lanes: bytes_over_groups(config, num_lanes) for num_lanes in options.lanes}
    result: dict[str, object] = {"bytes_over_groups": sent, "lanes": config.layout.data_parallel}
    if options.pairs:
        found = measure(config, options.pairs, has_plain=True, report=lambda text: print(text, file=sys.stderr))
        ours, plain = found.speeds["ours"], found.speeds["plain"]
        result |= {
            "ratio": found.ratio,
            "ratio_of_each_pair": list(found.ratios),
            "ours_step_s": ours.step_s,
            "plain_step_s": plain.step_s,
            "ours_host_bytes": ours.memory.host_bytes,
            "plain_host_bytes": plain.memory.host_bytes,
            "ours_device_bytes": ours.memory.device_bytes,
            "plain_device_bytes": plain.memory.device_bytes,
            "steps_measured": ours.num_steps,
        }
    if options.json:
        print(json.dumps(result | origin()))
        return
    for num_lanes, num_bytes in sent.items():
        print(f"{num_lanes} lanes: {num_bytes / 2**20:.2f} MiB over groups per rank and step")
    if options.pairs:
        print(f"step with {config.layout.data_parallel} lanes over plain Megatron's: {result['ratio']:.4f}")


if __name__ == "__main__":
    main()
