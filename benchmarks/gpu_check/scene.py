"""What a part of the check is given, and how it reports."""

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

SPARE = "from spare_megatron.__main__ import main; main()"
"""The command `spare`, which is not installed where only PYTHONPATH leads to the package."""


class NotRun(Exception):
    """The part makes no sense on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a part runs. `folder` is its own; what it reports is on disk at once, and outlives a part that is killed.

    Attributes:
        is_dry: In short form on a CPU, which exercises the same code.
        rows: Lines of the final table: what was measured, and the figure.
    """

    folder: Path
    is_dry: bool
    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)

    @property
    def corpus(self) -> Path:
        """Path prefix of the text that all parts train on; the first part writes it."""
        return self.folder.parent / "text"

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda:0"

    def report(self, row: tuple[str, str] | None = None, **figures: Any) -> None:
        self.figures.update(figures)
        if row is not None:
            self.rows.append(row)
        write_json(self.folder / "result.json", {"figures": self.figures, "rows": self.rows})

    def settings(self, *of_gpu: str, tiny: tuple[str, ...] = ()) -> list[str]:
        """Overrides of a preset: those given, and in a dry run a tiny model on the CPU."""
        common = ["spare.rejoins=0", f"data.corpus={self.corpus}", "optimizer.warmup_steps=0", *of_gpu]
        return [*common, *_TINY, *tiny] if self.is_dry else [*common, "cluster.device=gpu"]


_TINY = (
    "cluster.device=cpu",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.seq_length=32",
    "model.vocab_size=256",
    "model.precision=fp32",
    "train.micro_batch_size=1",
    "spare.microbatches_per_shard=2",
    "control.heartbeat_interval_s=4",
)


def write_json(file: Path, content: Any) -> None:
    """Replaces the file at once, so that no reader finds a half of it."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(file)


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def python_version() -> str:
    return platform.python_version()
