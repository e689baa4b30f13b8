"""What an evaluation costs beside the forward passes that it consists of, in processor time of a rank: those of the
model alone, and as training makes them, with the batch that is read and Megatron's schedule, which sends activations.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.actions import ComputeStep, ReportEvaluation
from spare_megatron.driver.run import start_run
from spare_megatron.mcore.evaluator import Evaluator
from spare_megatron.mcore.model.program import ForwardPasses
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank, train_step
from spare_megatron.state.rank_context import RankContext

NUM_WARMUP = 2
"""Evaluations at the start of a run that are not measured."""


class _Clock:
    """Processor time of a rank's evaluations, and of what they call."""

    def __init__(self, spec: RankSpec) -> None:
        self._file = spec.run_dir / f"timed-{spec.name}.jsonl"
        self._began_s = 0.0
        self._spent_s: dict[str, float] = {}
        self._num_evaluations = 0

    def watch(self, evaluator: Evaluator) -> None:
        for chunk in evaluator.chunks:
            vars(chunk.module)["forward"] = self._timed("passes", chunk.module.forward)
        ForwardPasses.run = self._timed("as_in_training", ForwardPasses.run)  # type: ignore[method-assign]
        vars(evaluator)["_forward"] = self._timed("calls", evaluator._forward)
        vars(evaluator.pipeline)["run"] = self._timed("schedule", evaluator.pipeline.run)

    def start(self) -> None:
        self._began_s, self._spent_s = time.process_time(), {}

    def end(self) -> None:
        self._num_evaluations += 1
        if self._num_evaluations > NUM_WARMUP:
            spent = self._spent_s
            line = {
                "evaluation": time.process_time() - self._began_s,
                "as_in_training": spent["schedule"] - spent["calls"] + spent["as_in_training"],
                "passes": spent["passes"],
            }
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.process_time()
            result = function(*args, **kwargs)
            self._spent_s[name] = self._spent_s.get(name, 0.0) + time.process_time() - began_s
            return result

        return timed


def _train_timed(ctx: RankContext, components: train_step.Components) -> Any:
    clock, reports = _Clock(ctx.spec), components.reports
    clock.watch(ctx.trainer.evaluator)
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
    parts = ("evaluation", "as_in_training", "passes")
    return {
        "ratio": statistics.median(line["evaluation"] / line["passes"] for line in lines),
        "ratio_to_training": statistics.median(line["evaluation"] / line["as_in_training"] for line in lines),
        **{f"{part}_s": statistics.median(line[part] for line in lines) for part in parts},
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
        f"an evaluation: {result['evaluation_s'] * 1e3:.1f} ms of a rank, {result['ratio']:.3f} of its forward passes, "
        f"{result['ratio_to_training']:.3f} of them as training makes them"
    )


if __name__ == "__main__":
    main()
