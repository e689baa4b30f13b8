"""What is wrong with the settings of metrics."""

import importlib.util
import re
from collections.abc import Iterator

from spare_megatron.config.schema import MetricsConfig

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def metrics_problems(metrics: MetricsConfig) -> Iterator[str]:
    """Every reason why metrics cannot go where they are wanted."""
    wanted = {"metrics.tensorboard": metrics.tensorboard, "metrics.wandb_project": metrics.wandb_project}
    for name, value in wanted.items():
        package = name.partition(".")[2].partition("_")[0]
        if value and importlib.util.find_spec(package) is None:
            yield (
                f"{name}={value} needs the package {package}, which is not installed: "
                "pip install 'spare_megatron[metrics]', or remove the setting"
            )
    if metrics.run_id and not _ID.fullmatch(metrics.run_id):
        yield (
            f"metrics.run_id={metrics.run_id!r} is no id for Weights & Biases: "
            "at most 64 letters, digits, hyphens and underscores"
        )
    if metrics.peak_tflops is not None and not metrics.peak_tflops > 0:
        yield f"metrics.peak_tflops={metrics.peak_tflops} must be above 0"
