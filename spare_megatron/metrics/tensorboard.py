"""Metrics for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path

from spare_megatron.metrics.sink import Value

FLUSH_INTERVAL_S = 10
"""After which a step is in the file at the latest, for who watches."""


class TensorBoardSink:
    """Writes event files under `RUN_DIR/tensorboard`. A step that is computed again appears twice there.

    A step is one event with all of its values. TensorBoard's `Writer` makes an event of each value, with what kind of
    value it is, which takes ten times as long: 2.5 ms of a core a step in place of 0.2.
    """

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=FLUSH_INTERVAL_S)

    def write(self, values: Mapping[str, Value]) -> None:
        told = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if name != "step" and not isinstance(value, str)
        ]
        summary = self._summary(value=told)
        self._writer.add_event(self._event(wall_time=time.time(), step=int(values["step"]), summary=summary))

    def close(self) -> None:
        self._writer.close()
