"""Metrics for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from spare_megatron.metrics.sink import Value


class TensorBoardSink:
    """Writes event files under `RUN_DIR/tensorboard`. A step that is computed again appears twice there."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run_dir / "tensorboard"))

    def write(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if name != "step" and not isinstance(value, str):
                self._writer.add_scalar(name, value, step=int(values["step"]))

    def close(self) -> None:
        self._writer.close()
