"""Sinks for the metrics of a run, and a wrapper that keeps a slow or failing sink away from the run."""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from spare_megatron.journal.files import AppendingFile, OnHeld

Value = float | int | str
"""A number, or a word, which only the JSON lines file takes."""


CLOSE_TIMEOUT_S = 30.0
"""Longest wait at the end of a run for a sink that has not taken everything."""


REST_S = 2.0
"""Pause of a sink that has taken all there was. Handling steps together halves the cost of each where threads and
processes wake up for it."""


_MOST_WAITING = 4096


class MetricsSink(Protocol):
    """Takes the metrics of steps."""

    def write(self, values: Mapping[str, Value]) -> None:
        """Takes the values of one step, `step` among them. A step that is computed again is written again."""

    def close(self) -> None:
        """Makes everything that was written visible to readers."""


class DetachedSink:
    """Runs a sink in a thread: it never blocks its caller. `on_failure` gets the reason when the sink fails, in the
    thread, and from `close`, which waits `close_timeout_s` at most, for what the sink lacks.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricsSink],
        on_failure: Callable[[str], None],
        *,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        rest_s: float = REST_S,
    ) -> None:
        self._name = name
        self._open_sink = open_sink
        self._on_failure = on_failure
        self._close_timeout_s = close_timeout_s
        self._rest_s = rest_s
        self._waiting: queue.Queue[Mapping[str, Value] | None] = queue.Queue(_MOST_WAITING)
        self._num_dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, values: Mapping[str, Value]) -> None:
        try:
            self._waiting.put_nowait(values)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        ends_at_s = time.monotonic() + self._close_timeout_s
        self._closing.set()
        with contextlib.suppress(queue.Full):  # the thread is alive then
            self._waiting.put(None, timeout=self._close_timeout_s)
            self._thread.join(max(0.0, ends_at_s - time.monotonic()))
        if self._thread.is_alive():
            waited = f"{self._close_timeout_s:g} s"
            self._on_failure(f"{self._name} has not taken everything within {waited} and is left behind")
        if self._num_dropped:
            self._on_failure(f"{self._name} was too slow for {self._num_dropped} steps, which it lacks")

    def _run(self) -> None:
        values: Mapping[str, Value] | None = {}
        try:
            sink = self._open_sink()
            while (values := self._waiting.get()) is not None:
                sink.write(values)
                if self._waiting.empty():
                    self._closing.wait(self._rest_s)
            sink.close()
        except Exception as error:  # noqa: BLE001  (whatever it is, it must not end the run)
            self._on_failure(f"{self._name} takes no more metrics: {type(error).__name__}: {error}")
            while values is not None:  # the sink may have failed to close
                values = self._waiting.get()


OnStep = Callable[[Mapping[str, Value], bool], None]
"""Gets the metrics of a step, and whether the step is new: a restart repeats the steps that it has undone."""


class StepHook:
    """Passes the metrics of steps to a function of the user."""

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step
        self._next_step = 0

    def write(self, values: Mapping[str, Value]) -> None:
        if "train/loss" in values:  # not of a checkpoint
            step = int(values["step"])
            self._on_step(dict(values), step >= self._next_step)
            self._next_step = max(self._next_step, step + 1)

    def close(self) -> None:
        pass


class JsonlSink:
    """Appends to `RUN_DIR/metrics.jsonl`, and waits for a full disk as the journal does."""

    def __init__(self, run_dir: Path, on_held: OnHeld | None = None) -> None:
        self._file = AppendingFile(run_dir / "metrics.jsonl", on_held)

    def write(self, values: Mapping[str, Value]) -> None:
        self._file.append(json.dumps(dict(values)) + "\n")

    def close(self) -> None:
        self._file.close()


FLUSH_INTERVAL_S = 10
"""Seconds until a step is in the file at the latest."""


class TensorBoardSink:
    """Writes event files under `RUN_DIR/tensorboard`; a step that is computed again appears twice. One event has all
    values of a step: TensorBoard's own `Writer` makes one of each, with metadata, and takes ten times as long.
    """

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=FLUSH_INTERVAL_S)

    def write(self, values: Mapping[str, Value]) -> None:
        written = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if name != "step" and not isinstance(value, str)
        ]
        summary = self._summary(value=written)
        self._writer.add_event(self._event(wall_time=time.time(), step=int(values["step"]), summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, with files in `RUN_DIR/wandb`; offline without a key, unless `WANDB_MODE` says other.
    `run_id`: the same for all runs that continue one training. `settings`: shown with the run.
    """

    def __init__(self, run_dir: Path, project: str, run_id: str, name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        self._end_service = wandb.teardown
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self._run = wandb.init(
            dir=str(run_dir),
            project=project,
            id=run_id,
            name=name,
            config=dict(settings),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        # Its own step count only grows; ours goes back when steps are computed again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, Value]) -> None:
        self._run.log({name: value for name, value in values.items() if not isinstance(value, str)})

    def close(self) -> None:
        self._run.finish()
        self._end_service()  # `finish` does not wait for the service to write the rest of the file
