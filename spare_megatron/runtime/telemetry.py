"""Metrics of a run: one JSON line a step in `RUN_DIR/metrics.jsonl`."""

import json
from pathlib import Path

from spare_megatron.journal.files import AppendingFile
from spare_megatron.journal.records import CheckpointRecord
from spare_megatron.runtime.reports import CheckpointTold, GroupRestarted, StepCommitted


class MetricsWriter:
    """Writes each committed step once, as the first group reports it; again if it is computed again after a restart."""

    def __init__(self, run_dir: Path) -> None:
        self._file = AppendingFile(run_dir / "metrics.jsonl")
        self._next_step = 0

    def take(self, event: object) -> None:
        """Writes the event if it is the first word of a step, or tells of a checkpoint."""
        if isinstance(event, CheckpointTold):
            self._file.append(json.dumps(_metrics_of(event.record)) + "\n")
        if isinstance(event, GroupRestarted):
            self._next_step = min(event.step, self._next_step)
        if not isinstance(event, StepCommitted) or event.step < self._next_step:
            return
        self._next_step = event.step + 1
        metrics = {
            "step": event.step,
            "train/loss": event.loss,
            "train/grad_norm": event.grad_norm,
            "spare/groups_alive": event.num_alive,
            "spare/makespan": event.makespan,
            "perf/step_s": round(event.step_s, 6),
        }
        self._file.append(json.dumps(metrics) + "\n")

    def close(self) -> None:
        self._file.close()


def _metrics_of(record: CheckpointRecord) -> dict[str, object]:
    return {
        "step": record.step - 1,  # the last that it holds
        "ckpt/outcome": record.outcome,
        "ckpt/num_bytes": record.num_bytes,
        "ckpt/stall_s": record.stall_s,
        "ckpt/write_s": record.write_s,
    }
