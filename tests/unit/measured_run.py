"""The journal of a run as if it had trained, made up line by line."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.journal.files import FORMAT, Line, encode_line
from spare_megatron.journal.records import (
    CheckpointRecord,
    ContributionRecord,
    EndRecord,
    EntryRecord,
    ParamsRecord,
    Record,
    UpdateRecord,
)
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.overview import overview_of
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.tools.report.history import History, history_of

BEGAN_S = 1_795_000_000.0
"""2026-11-18 11:06:40 UTC."""
STEP_S = 2.0
TOKENS, FLOPS, PEAK_TFLOPS = 8192, 4e12, 10.0
ORIGIN: Mapping[str, Any] = {
    "tokens_per_step": TOKENS,
    "flops_per_step": FLOPS,
    "peak_tflops": PEAK_TFLOPS,
    "version": "1.2.3",
    "commit": "0123456789abcdef",
    "host": "node-7",
}
"""What journals have had since format 3."""


def run_record(num_steps: int, origin: Mapping[str, Any] = ORIGIN) -> RunRecord:
    return RunRecord(
        format=FORMAT,
        name="measured",
        num_groups=2,
        ranks_per_group=1,
        redundancy=2,
        microbatches_per_shard=1,
        num_steps=num_steps,
        placement="golomb",
        granularity="microbatch",
        reduce_mode="reproducible",
        faults=[],
        **origin,
    )


def loss_at(step: int) -> float:
    return 5.0 - 0.1 * step


def measured_lines(
    num_steps: int,
    *,
    losses: Mapping[int, float] | None = None,
    params: Mapping[int, str] | None = None,
    origin: Mapping[str, Any] = ORIGIN,
) -> list[Line]:
    """A run of two groups that commits a step every two seconds, and saves in the middle and at the end.

    Args:
        num_steps: Steps of the run.
        losses: Those that are not as `loss_at` says.
        params: Digest of all parameters by the committed steps they hold; one at the end when absent.
        origin: Optional fields of the run's record.
    """
    found = [_line(0.0, run_record(num_steps, origin), "driver")]
    found += committed(range(num_steps), losses or {}, {num_steps: "ab" * 32} if params is None else params)
    for step in (num_steps // 2, num_steps):
        found.append(_line(STEP_S * step + 1.0, saved(step), "group-0000-rank-0"))
    return [*found, _line(STEP_S * num_steps + 1.0, EndRecord(outcome="finished", reason=""), "driver")]


def redone_lines(num_steps: int, kept: int, losses: Mapping[int, float], params: Mapping[int, str]) -> list[Line]:
    """What a run adds that has committed all steps, restarts from a checkpoint after `kept` steps, and does them again.

    Args:
        num_steps: Steps of the run.
        kept: Steps that are not done again.
        losses: As in `measured_lines`, of the second time.
        params: Likewise.
    """
    restart = {"entry": "restart", "step": kept, "members": [(0, 1), (1, 1)]}
    found = [
        _line(STEP_S * num_steps, EntryRecord(group=group, index=num_steps, entry=restart), f"group-{group:04}-rank-0")
        for group in (0, 1)
    ]
    return found + committed(range(kept, num_steps), losses, params, num_before=num_steps + 1 - kept, num_restarts=1)


def committed(
    steps: range, losses: Mapping[int, float], params: Mapping[int, str], num_before: int = 0, num_restarts: int = 0
) -> list[Line]:
    """The lines of both groups for these steps, with so many entries of the log in between."""
    found = []
    for step in steps:
        index = step + num_before
        for group in (0, 1):
            records = list(_step(group, step, index, losses.get(step, loss_at(step))))
            if step + 1 in params:
                digest = params[step + 1]
                records.append(ParamsRecord(group=group, step=step + 1, sha256=digest, num_restarts=num_restarts))
            found += [_line(STEP_S * (index + 1), record, f"group-{group:04}-rank-0") for record in records]
    return found


def saved(step: int) -> CheckpointRecord:
    return CheckpointRecord(
        group=0, step=step, outcome="saved", reason="", num_bytes=12_000_000, stall_s=0.02, write_s=1.5
    )


def _step(group: int, step: int, index: int, loss: float) -> Iterator[Record]:
    work = {str(group): [0]}
    yield ContributionRecord(group=group, step=step, attempt=index, epoch=0, members=[0, 1], microbatches=work)
    yield EntryRecord(group=group, index=index, entry={"entry": "commit", "step": step, "attempt": index})
    yield UpdateRecord(
        group=group,
        step=step,
        attempt=index,
        num_microbatches=2,
        loss=loss,
        grad_norm=loss / 2,
        learning_rate=1e-3 / (step + 1),
        makespan=1,
        step_s=STEP_S,
    )


def _line(after_s: float, record: Record, source: str) -> Line:
    return Line(source=source, at_s=BEGAN_S + after_s, record=record)


def write_journal(run_dir: Path, lines: Sequence[Line]) -> Path:
    """Writes the lines, a file for each writer, and returns the directory."""
    (run_dir / "journal").mkdir(parents=True, exist_ok=True)
    for line in lines:
        with (run_dir / "journal" / f"{line.source}.jsonl").open("a") as file:
            file.write(encode_line(line) + "\n")
    return run_dir


def valid_history(run_state: RunState, now_s: float = 0.0) -> History:
    """The whole history of a run that is proven."""
    return history_of(run_state, overview_of(run_state, now_s, ("valid", ()), window_s=math.inf))
