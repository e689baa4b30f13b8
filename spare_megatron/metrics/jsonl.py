"""Metrics as a file: one JSON object a step."""

import json
from collections.abc import Mapping
from pathlib import Path

from spare_megatron.journal.files import AppendingFile, OnHeld
from spare_megatron.metrics.sink import Value


class JsonlSink:
    """Appends to `metrics.jsonl`; a full disk is outlasted as the journal outlasts it."""

    def __init__(self, run_dir: Path, on_held: OnHeld | None = None) -> None:
        self._file = AppendingFile(run_dir / "metrics.jsonl", on_held)

    def write(self, values: Mapping[str, Value]) -> None:
        self._file.append(json.dumps(dict(values)) + "\n")

    def close(self) -> None:
        self._file.close()
