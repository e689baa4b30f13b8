"""Metrics for Weights & Biases."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spare_megatron.metrics.sink import Value


class WandbSink:
    """One run of a project, which goes on under the same id when the training does. Files in `RUN_DIR/wandb`.

    Without a key (`WANDB_API_KEY`, or `wandb login`) it stays offline, for `wandb sync` later; `WANDB_MODE` rules.

    Args:
        run_dir: Of the run.
        project: Its project.
        run_id: The same for all runs that continue one training.
        name: Its name.
        settings: The resolved configuration, for its page.
    """

    def __init__(self, run_dir: Path, project: str, run_id: str, name: str, settings: Mapping[str, Any]) -> None:
        import wandb

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
        # Its own count of steps only grows, ours goes back when steps are computed again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, Value]) -> None:
        self._run.log({name: value for name, value in values.items() if not isinstance(value, str)})

    def close(self) -> None:
        self._run.finish()
