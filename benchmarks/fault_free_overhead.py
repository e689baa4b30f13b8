"""What redundancy costs while nothing fails: ours beside plain Megatron, in turn, on the same model and data.

The figures of `spare bench throughput` for the demo's model: plain Megatron's optimizer is its DistributedOptimizer
where ours is stacked, and its gradients are reduced during the backward pass where ours are.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.tools.bench.bench_throughput import measure, problems_of, training_alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = training_alone(load_run_config(options.config, [f"train.steps={options.steps}", *options.set]).config)
    if problems := list(problems_of(config, has_plain=True)):
        parser.error("; ".join(problems))
    found = measure(config, options.pairs, has_plain=True, report=lambda text: print(text, file=sys.stderr))
    ours, plain = found.speeds["ours"], found.speeds["plain"]
    if options.json:
        result = {
            "ratio": found.ratio,
            "ratio_of_each_pair": list(found.ratios),
            "ratio_of_means": found.ratio_of_means,
            "ours_step_s": ours.step_s,
            "plain_step_s": plain.step_s,
            "ours_mean_step_s": ours.mean_step_s,
            "plain_mean_step_s": plain.mean_step_s,
            "steps_measured": ours.num_steps,
        }
        print(json.dumps(result | origin()))
        return
    print(f"median step: ours {ours.step_s * 1e3:.1f} ms, plain {plain.step_s * 1e3:.1f} ms")
    print(f"mean step: ours {ours.mean_step_s * 1e3:.1f} ms, plain {plain.mean_step_s * 1e3:.1f} ms")
    pairs = ", ".join(f"{ratio:.3f}" for ratio in found.ratios)
    print(f"ratio {found.ratio:.4f} (pairs: {pairs}), of means {found.ratio_of_means:.4f}")


if __name__ == "__main__":
    main()
