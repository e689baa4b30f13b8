"""What it costs to judge a group's gradients, to take the checksums of its sums, and to digest its state.

Beside a whole step, in processor time, in which other work on the machine does not count. SHA-256 of the parameters,
which a run takes only at its end, is measured beside.
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
from spare_megatron.driver.run import start_run
from spare_megatron.mcore.gradients import checksums
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank, train_step
from spare_megatron.state.rank_context import RankContext

NUM_WARMUP = 3
"""Steps at the start of a run that are not measured."""
_PARTS = ("norm", "checksum", "hash", "rest", "sha256")
_COMPARED = ("hash", "rest")
"""What is not done in every step of a run."""
_update_model = train_step.update_model


class _Clock:
    """Processor time of a rank's steps and of what is measured in them."""

    def __init__(self, trainer: Any) -> None:
        self._spent_s = dict.fromkeys(_PARTS, 0.0)
        self._began_s = time.process_time()
        self.lines: list[str] = []
        trainer.slabs[0].gradients.norm = self._timed("norm", trainer.slabs[0].gradients.norm)
        vars(checksums)["checksum"] = self._timed("checksum", checksums.checksum)
        trainer.params_digest = self._timed("hash", trainer.params_digest)
        trainer.rest_of_state = self._timed("rest", trainer.rest_of_state)
        self._sha256 = self._timed("sha256", trainer.params_sha256)

    def _timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began_s = time.process_time()
            answer = call(*arguments)
            self._spent_s[what] += time.process_time() - began_s
            return answer

        return run

    def update_model(self, *parts: Any) -> None:
        _update_model(*parts)
        step_s = time.process_time() - self._began_s
        self._sha256()
        self.lines.append(json.dumps({**self._spent_s, "step": step_s}))
        self._spent_s, self._began_s = dict.fromkeys(_PARTS, 0.0), time.process_time()


def _train_timed(ctx: RankContext, components: Any) -> Any:
    clock = _Clock(ctx.trainer)
    vars(train_step)["update_model"] = clock.update_model
    end = train_step.train(ctx, components)
    file = ctx.spec.run_dir / f"timed-{ctx.spec.name}.jsonl"
    file.write_text("\n".join(clock.lines[NUM_WARMUP:]) + "\n")
    return end


def run_timed_rank(spec: RankSpec, reports: Connection) -> None:
    """Runs in a rank's process."""
    vars(rank)["train"] = _train_timed
    rank.run_rank(spec, reports)


def measure(config: RunConfig) -> dict[str, Any]:
    """Medians over all steps of all ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        summary = start_run(config, folder, lambda _: None, rank_main=run_timed_rank)
        assert summary.verdict == "valid", summary.reasons
        lines = [json.loads(line) for file in folder.glob("timed-*") for line in file.read_text().splitlines()]
    for line in lines:
        line["step"] -= sum(line[what] for what in _COMPARED)
    shares = {what: statistics.median(line[what] / line["step"] for line in lines) for what in _PARTS[:-1]}
    return {
        **{f"{what}_share": share for what, share in shares.items()},
        **{f"{what}_s": statistics.median(line[what] for line in lines) for what in (*_PARTS, "step")},
        "steps_measured": len(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--steps", type=int, default=20, help="steps of the run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    overrides = ["faults.trace=[]", f"train.steps={options.steps}", "train.params_check_every_steps=1", *options.set]
    result = measure(load_run_config(options.config, overrides).config) | origin()
    if options.json:
        print(json.dumps(result))
        return
    print(f"processor time of a rank's step: {result['step_s'] * 1e3:.1f} ms without comparisons")
    for what, text in (
        ("norm", "judging its gradients"),
        ("checksum", "checksums of its sums"),
        ("hash", "digest of its parameters"),
        ("rest", "digest of its other state"),
    ):
        print(f"{text}: {result[f'{what}_s'] * 1e3:.2f} ms, {result[f'{what}_share']:.2%} of it")
    print(f"SHA-256 of them: {result['sha256_s'] * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
