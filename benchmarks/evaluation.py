"""What an evaluation costs beside the forward passes that it consists of, in processor time of a rank."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.actions import ComputeStep, ReportEvaluation
from spare_megatron.driver.run import start_run
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank, train_step
from spare_megatron.state.rank_context import RankContext

NUM_WARMUP = 2
"""Evaluations at the start of a run that are not measured."""


class _Clock:
    """Processor time of a rank's evaluations, and of the passes through its chunks in them."""

    def __init__(self, spec: RankSpec) -> None:
        self._file = spec.run_dir / f"timed-{spec.name}.jsonl"
        self._began_s = self._pass_began_s = self._passes_s = 0.0
        self._num_evaluations = 0

    def watch(self, trainer: Any) -> None:
        for chunk in trainer.chunks:
            chunk.module.register_forward_pre_hook(lambda *_: self._start_pass())
            chunk.module.register_forward_hook(lambda module, *_: self._end_pass(is_counted=not module.training))

    def start(self) -> None:
        self._began_s, self._passes_s = time.process_time(), 0.0

    def end(self) -> None:
        self._num_evaluations += 1
        if self._num_evaluations > NUM_WARMUP:
            line = {"passes": self._passes_s, "evaluation": time.process_time() - self._began_s}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _start_pass(self) -> None:
        self._pass_began_s = time.process_time()

    def _end_pass(self, *, is_counted: bool) -> None:
        if is_counted:
            self._passes_s += time.process_time() - self._pass_began_s


def _train_timed(ctx: RankContext, components: train_step.Components) -> Any:
    clock, reports = _Clock(ctx.spec), components.reports
    clock.watch(ctx.trainer)
    compute_step, report = train_step.compute_step, reports.send_evaluation

    def compute_timed(ctx: RankContext, components: train_step.Components, action: ComputeStep) -> None:
        if action.plan.is_evaluation:
            clock.start()
        compute_step(ctx, components, action)

    def report_timed(action: ReportEvaluation) -> None:
        report(action)
        clock.end()

    vars(train_step)["compute_step"] = compute_timed
    vars(reports)["send_evaluation"] = report_timed
    return train_step.train(ctx, components)


def run_timed_rank(spec: RankSpec, reports: Connection) -> None:
    """Runs in a rank's process."""
    vars(rank)["train"] = _train_timed
    rank.run_rank(spec, reports)


def measure(config: RunConfig) -> dict[str, Any]:
    """Medians over all evaluations of all ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        summary = start_run(config, folder, lambda _: None, rank_main=run_timed_rank)
        assert summary.verdict == "valid", summary.reasons
        lines = [json.loads(line) for file in folder.glob("timed-*") for line in file.read_text().splitlines()]
    return {
        "ratio": statistics.median(line["evaluation"] / line["passes"] for line in lines),
        "evaluation_s": statistics.median(line["evaluation"] for line in lines),
        "passes_s": statistics.median(line["passes"] for line in lines),
        "evaluations_measured": len(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--steps", type=int, default=20, help="steps of the run, each followed by an evaluation")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps <= NUM_WARMUP:
        parser.error(f"train.steps={options.steps} leaves nothing to measure; set --steps to more than {NUM_WARMUP}")
    overrides = ["faults.trace=[]", f"train.steps={options.steps}", "eval.every_steps=1", "data.split=9,1"]
    result = measure(load_run_config(options.config, [*overrides, *options.set]).config) | origin()
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"an evaluation: {result['evaluation_s'] * 1e3:.1f} ms of a rank, {result['ratio']:.3f} of its forward passes"
    )


if __name__ == "__main__":
    main()
