"""What telemetry costs a step: every sink and the spans of all ranks, on and off in turn within one run.

Pairs of steps with it and without it follow each other as on, off, off, on, so that what drifts is in both: the longer
the blocks, the more of the machine's own moods is in a ratio. A step is sent while the next one is computed, so it is
sent where that one is with telemetry. Sinks with threads of their own take steps in lots, which might fall into any
step; here they get a lot when two pairs of steps with telemetry begin: four steps, no more than they have in life where
a step takes half a second. The processor time of a step that is reported to all of them is measured apart, too. With
`--hanging` there is one more sink, which never comes back from the first step that it is given.
Also: what 100,000 steps leave in the memory of the process that reports them to the sinks.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.driver import run
from spare_megatron.driver.run import run_record
from spare_megatron.driver.telemetry import Telemetry, open_sinks
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.observe.metrics import DetachedSink, MetricsSink, Value
from spare_megatron.process import span_ring
from spare_megatron.process.reports import Message, StepCommitted
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank

BLOCK_STEPS = 2
ROUND_STEPS = 4 * BLOCK_STEPS
"""On, off, off, on."""
NUM_WARMUP = 4 * ROUND_STEPS
LOT_STEPS = ROUND_STEPS // 2
SINKS = ("tensorboard", "wandb")


def is_on(step: int) -> bool:
    return step // BLOCK_STEPS % 4 in (0, 3)


class _Gated:
    """A sink that is given a step where the next one is with telemetry; in lots, if it has a thread of its own."""

    def __init__(self, sink: MetricsSink) -> None:
        self._sink = sink
        self._lot: list[Mapping[str, Value]] = []

    def write(self, values: Mapping[str, Value]) -> None:
        during = int(values["step"]) + 1
        if not is_on(during):
            return
        self._lot.append(values)
        if not isinstance(self._sink, DetachedSink) or not is_on(during - 1):
            self._hand_on()

    def close(self) -> None:
        self._hand_on()
        self._sink.close()

    def _hand_on(self) -> None:
        for values in self._lot:
            self._sink.write(values)
        self._lot.clear()


class _Hanging:
    """A sink that never finishes a step, like a service that does not answer."""

    def write(self, values: Mapping[str, Value]) -> None:  # noqa: ARG002  (the interface of all sinks)
        threading.Event().wait()

    def close(self) -> None:
        """Never called: the sink hangs before."""


def run_gated_rank(spec: RankSpec, reports: Connection) -> None:
    """Runs in a rank's process: no span is written in the other steps."""
    add = span_ring.SpanRecorder._add

    def gated(recorder: span_ring.SpanRecorder, *arguments: Any) -> None:
        if is_on(recorder.step):
            add(recorder, *arguments)

    span_ring.SpanRecorder._add = gated  # type: ignore[assignment,method-assign]
    rank.run_rank(spec, reports)


def step_ratios(config: RunConfig, *, hangs: bool) -> dict[str, Any]:
    """Steps with telemetry over those without, round by round; one sink more hangs, if asked for."""
    left_behind: list[str] = []

    def open_all(*arguments: Any) -> list[MetricsSink]:
        sinks = open_sinks(*arguments, rest_s=0.0)  # the blocks make the lots
        if hangs:
            sinks.append(DetachedSink("hanging", _Hanging, left_behind.append, close_timeout_s=1.0))
        return [_Gated(sink) for sink in sinks]

    vars(run)["open_sinks"] = open_all
    lost: list[object] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        began_s = time.monotonic()
        try:
            summary = run.start_run(config, folder, lost.append, rank_main=run_gated_rank)
        finally:
            vars(run)["open_sinks"] = open_sinks
        wall_s = time.monotonic() - began_s
        assert summary.verdict == "valid", summary.reasons
        texts = [event.text for event in lost if isinstance(event, Message)]
        assert not [text for text in texts if "metrics.jsonl" in text], "a sink is missing in the figures"
        assert bool(left_behind) is hangs, left_behind
        updates = [
            (line.record.step, line.at_s)
            for line in read_journal(folder).lines
            if isinstance(line.record, UpdateRecord) and line.record.group == 0
        ]
    step_s = {step: at_s - before_s for (_, before_s), (step, at_s) in pairwise(sorted(updates))}
    return {**ratio_of(step_s), "step_s": statistics.median(step_s.values()), "wall_s": wall_s}


def ratio_of(step_s: Mapping[int, float]) -> dict[str, Any]:
    """Steps with telemetry over those without: the mean over whole rounds after the warm-up, and how sure it is.

    Args:
        step_s: Seconds of every step but the first.
    """
    logs = [_log_ratio(step_s, first) for first in range(NUM_WARMUP, max(step_s) - ROUND_STEPS + 2, ROUND_STEPS)]
    error = statistics.stdev(logs) / len(logs) ** 0.5
    return {"ratio": math.exp(statistics.fmean(logs)), "ratio_ci95": 1.96 * error, "rounds": len(logs)}


def _log_ratio(step_s: Mapping[int, float], first: int) -> float:
    """Logarithm of the geometric mean of a round's steps with telemetry over that of those without."""
    logs = {step: math.log(step_s[step]) for step in range(first, first + ROUND_STEPS)}
    return statistics.fmean(logs[step] for step in logs if is_on(step)) - statistics.fmean(
        logs[step] for step in logs if not is_on(step)
    )


def memory_growth(config: RunConfig, num_steps: int) -> dict[str, Any]:
    """Resident memory of a process that sends so many steps to every sink: after a tenth of them, and what came on top.

    It waits for the sinks after each lot, so that nothing is dropped. The processor time is that of all steps but the
    first tenth, of the sinks' own processes, too.
    """
    process = psutil.Process()
    lost: list[object] = []
    with tempfile.TemporaryDirectory() as scratch:
        sinks = open_sinks(config, Path(scratch), lost.append, rest_s=0.0)
        telemetry = Telemetry(config, run_record(config, (), {"commit": "", "code": ""}), sinks)
        began_s, before, spent_before_s = time.monotonic(), 0, 0.0
        for step in range(num_steps):
            telemetry.on_event(_committed(step))
            if step % LOT_STEPS == 0:
                _await_all(sinks)
            if step == num_steps // 10:
                before, spent_before_s = process.memory_info().rss, _processor_s(process)
        processor_s = (_processor_s(process) - spent_before_s) / (num_steps - 1 - num_steps // 10)
        grown = process.memory_info().rss - before
        spent_s = time.monotonic() - began_s
        telemetry.close()
    return {
        "memory_bytes": before,
        "memory_growth_bytes": grown,
        "reported_s": spent_s,
        "reported_processor_s": processor_s,
        "lost": [str(one) for one in lost],
    }


def _await_all(sinks: list[MetricsSink]) -> None:
    while any(isinstance(sink, DetachedSink) and sink._waiting.qsize() for sink in sinks):
        time.sleep(0.001)


def _processor_s(process: psutil.Process) -> float:
    """What it and the processes under it have had so far."""
    spent = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(times.user + times.system for times in spent)


def _committed(step: int) -> StepCommitted:
    update = UpdateRecord(
        group=0,
        step=step,
        attempt=step,
        num_microbatches=16,
        loss=5.0,
        grad_norm=1.5,
        learning_rate=1e-3,
        makespan=4,
        step_s=0.5,
    )
    return StepCommitted(
        update=update,
        num_alive=4,
        split_s={Operation.COMPUTE: 0.3, Operation.VOTE: 0.05, Operation.UPDATE: 0.01},
        head=step,
        epoch=0,
        num_recomputed=0,
        recoveries=(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/run/demo_cpu.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--steps", type=int, default=1600, help="steps of the run")
    parser.add_argument("--reported-steps", type=int, default=100_000, help="steps for the memory; 0 leaves it out")
    parser.add_argument("--hanging", action="store_true", help="one more sink, which hangs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    there = [name for name in SINKS if find_spec(name) is not None]
    wanted = {"tensorboard": "metrics.tensorboard=true", "wandb": 'metrics.wandb_project="telemetry"'}
    overrides = [
        "faults.trace=[]",
        'metrics.run_id="telemetry"',
        f"train.steps={options.steps}",
        *(wanted[name] for name in there),
        *options.set,
    ]
    config = load_run_config(options.config, overrides).config
    with contextlib.redirect_stdout(sys.stderr):
        sinks = ["jsonl", "spans", *there, *(["hanging"] if options.hanging else [])]
        result: dict[str, Any] = {"sinks": sinks, **step_ratios(config, hangs=options.hanging)}
        if options.reported_steps:
            result |= memory_growth(config, options.reported_steps)
    if options.json:
        print(json.dumps(result | origin()))
        return
    print(f"sinks: {', '.join(result['sinks'])}")
    print(f"step with over without: {result['ratio']:.4f} +- {result['ratio_ci95']:.4f} ({result['rounds']} rounds)")
    if options.reported_steps:
        print(f"processor time of a step that is reported: {result['reported_processor_s'] * 1e3:.2f} ms")
        print(f"memory: {result['memory_bytes'] / 1e6:.0f} MB, and {result['memory_growth_bytes'] / 1e6:.1f} MB more")


if __name__ == "__main__":
    main()
