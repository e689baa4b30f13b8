"""The figures in `summary.json`, from the journal of a run alone."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from spare_megatron.formats.output import NotWritten, real_paths, whole_file
from spare_megatron.formats.quantities import format_bytes
from spare_megatron.journal.files import Journal, decode_line
from spare_megatron.journal.fold import LastLosses
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.journal_view import Attempts, JournalView, Steps
from spare_megatron.journal.proofs.audit_history import Spoiled, UndoneSteps, find_spoiled, find_undone
from spare_megatron.journal.proofs.proof import check, fold_view
from spare_megatron.journal.records import EndRecord, EntryRecord, ParamsRecord, Record, RepairRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.goodput import full_redundancy_s
from spare_megatron.journal.state.recoveries import Recovery, read_recoveries

NOT_RUN = "not run"
"""Verdict on a journal that has not been checked."""

UNKNOWN = "unknown"
"""Outcome of a run whose journal has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Contents of `summary.json`; None: not counted, as the journal was too long to be read at the end."""

    verdict: str
    """Of `spare check`, or NOT_RUN."""
    reasons: tuple[str, ...]
    outcome: str
    outcome_reason: str
    steps_committed: int
    steps_lost: int | None = None
    """Commits that restarts and undos made void (rework)."""
    restarts: int | None = None
    """Restarts after a wipe-out."""
    groups_lost: int | None = None
    """Incarnations that were fenced."""
    groups_rejoined: int | None = None
    """Incarnations of groups that came back and voted."""
    microbatches_recomputed: int | None = None
    """`Recoveries.num_recomputed`."""
    final_loss: float | None = None
    eval: LastLosses = field(default_factory=dict)
    """Validation set -> `step` (committed ones) and `loss` of its last evaluation; no loss if it was not finite."""
    params_sha256: str | None = None
    """Of the parameters at the end; None also if no group was left to record it."""
    spoiled: Spoiled | None = None
    """What groups that were found wrong have left in the parameters."""
    undone: tuple[UndoneSteps, ...] = ()
    """What was computed again for what they had left there."""
    recoveries: tuple[Recovery, ...] = ()
    slices_repaired: int = 0
    """Copies of state partitions that replaced lost ones."""
    slices_moved: int = 0
    """Copies of state partitions made to even out what groups hold, mostly after a group came back."""
    full_redundancy_s: tuple[float, ...] = ()
    """Seconds from each loss of copies until all state partitions had all of their hosts again."""
    steps_left: int = 0


def sum_up(view: JournalView) -> Summary:
    """Figures of an ended run."""
    counts = _Counts()
    verdict = check(view, counts)
    rare = Journal(lines=tuple(view.rare))
    recoveries = read_recoveries(rare)
    runs = rare.of(RunRecord)
    left = [run.num_steps - run.first_step - verdict.steps_committed for run in runs]
    ends, entries = rare.of(EndRecord), view.entries.values()
    fenced = {(entry["group"], entry.get("incarnation", 0)) for entry in entries if entry["entry"] == "fence"}
    fold = fold_view(view, runs[0]) if runs else None
    summary = Summary(
        verdict=verdict.verdict,
        reasons=verdict.reasons,
        outcome=UNKNOWN,
        outcome_reason="the journal has no end",
        steps_committed=verdict.steps_committed,
        steps_lost=sum(entry["entry"] == "commit" for entry in entries) - verdict.steps_committed,
        restarts=sum(entry["entry"] == "restart" for entry in entries),
        groups_lost=len(fenced),
        groups_rejoined=len(counts.rejoined),
        microbatches_recomputed=recoveries.num_recomputed,
        final_loss=None if counts.update is None else counts.update.loss,
        eval=fold.last_losses() if fold else {},
        params_sha256=None if counts.params is None else counts.params.sha256 or None,
        spoiled=find_spoiled(view, runs[0], fold) if fold else None,
        undone=tuple(find_undone(fold)) if fold else (),
        recoveries=recoveries.found(),
        slices_repaired=sum(not record.is_move for record in rare.of(RepairRecord)),
        slices_moved=sum(record.is_move for record in rare.of(RepairRecord)),
        full_redundancy_s=full_redundancy_s(rare),
        steps_left=sum(left),
    )
    return with_end(summary, ends[0]) if ends else summary


def with_end(summary: Summary, end: EndRecord) -> Summary:
    """Adds the outcome, and steps of a run that ended well which the driver counted and the journal lacks."""
    num_missing = 0
    if end.outcome in ("finished", "stopped") and end.steps_committed is not None:
        num_missing = max(0, end.steps_committed - summary.steps_committed)
    return replace(
        summary,
        outcome=end.outcome,
        outcome_reason=end.reason,
        steps_committed=summary.steps_committed + num_missing,
        steps_left=summary.steps_left - num_missing,
        final_loss=None if num_missing else summary.final_loss,
        eval={} if num_missing else summary.eval,
        params_sha256=None if num_missing else summary.params_sha256,
    )


class _Counts:
    """Figures counted while a journal is checked; `rejoined` has (group, incarnation) of groups that voted again."""

    def __init__(self) -> None:
        self.update: UpdateRecord | None = None
        self.params: ParamsRecord | None = None
        self.rejoined: set[tuple[int, int]] = set()

    def add_part(self, part: Attempts | Steps) -> None:
        if isinstance(part, Steps):
            records = [*([self.params] if self.params else ()), *part.params]
            self.params = max(records, key=lambda each: (each.num_restarts, each.step, each.sha256), default=None)
            return
        updates = [*([self.update] if self.update else ()), *(record for _, record in part.updates)]
        self.update = max(updates, key=lambda record: record.attempt, default=None)
        self.rejoined |= {(record.group, record.incarnation) for _, record in part.votes if record.incarnation}


PROOF_S = 60.0
"""Limit for reading the journal at the end of the run: a job out of time has no more before it is requeued."""


_MOST_TAILS = 8

_TAIL_BYTES = 1 << 20


def conclude(
    run_dir: Path,
    end: EndRecord | None = None,
    *,
    run: RunRecord | None = None,
    proof_s: float = math.inf,
    interruptible: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Summary:
    """Sums the run up and writes `summary.json`; several nodes may do so at once.

    `end` and `run` are the last and first record: on a full disk the journal may lack the end, and the summary may not
    be written. The journal is read for `proof_s` at most, and no longer than `PROOF_S`, in an `interruptible` block: a
    KeyboardInterrupt there goes on once the summary is written.
    """
    limit_s, interrupt = min(proof_s, PROOF_S), None
    try:
        try:
            with interruptible():
                summary = sum_up(JournalIndex(run_dir, until_s=time.monotonic() + limit_s))
        except (TimeoutError, KeyboardInterrupt) as error:
            interrupt = error if isinstance(error, KeyboardInterrupt) else None
            summary = _unproven_summary(run_dir, limit_s)
    except (OSError, ValueError) as error:
        summary = _unread_summary(error, run, end)
    if summary.outcome == UNKNOWN and end is not None:
        summary = with_end(summary, end)
    summary = replace(summary, reasons=tuple(map(real_paths, summary.reasons)))
    try:
        with whole_file("--run-dir", run_dir / "summary.json") as file:
            file.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
    except NotWritten as error:
        reason = f"summary.json was not written: {error.reason}"
        summary = dataclasses.replace(summary, reasons=(*summary.reasons, reason))
    if interrupt is not None:
        raise interrupt
    return summary


def _unread_summary(error: Exception, run: RunRecord | None, end: EndRecord | None) -> Summary:
    num_steps = 0 if end is None else end.steps_committed or 0
    return Summary(
        verdict="unknown",
        reasons=(f"the journal cannot be read: {error}",),
        outcome=UNKNOWN,
        outcome_reason="the journal cannot be read",
        steps_committed=num_steps,
        steps_left=0 if run is None else run.num_steps - run.first_step - num_steps,
    )


def _unproven_summary(run_dir: Path, limit_s: float) -> Summary:
    files = list((run_dir / "journal").glob("*.jsonl"))
    num_bytes = sum(path.stat().st_size for path in files)
    with (run_dir / "journal" / "driver.jsonl").open("rb") as driver:
        run = decode_line(driver.readline().decode()).record
    assert isinstance(run, RunRecord), "the driver writes the run's terms first"
    ranks = sorted((path for path in files if path.name.startswith("group-")), key=lambda path: path.stat().st_mtime)
    others = [path for path in files if not path.name.startswith("group-")]
    ends = [record for path in others for record in _last_records(path) if isinstance(record, EndRecord)]
    leaders = [path for path in reversed(ranks) if path.stat().st_size][:_MOST_TAILS]
    entries = {r.index: r.entry for path in leaders for r in _last_records(path) if isinstance(r, EntryRecord)}
    commits = [index for index, entry in entries.items() if entry["entry"] == "commit"]
    num_steps = entries[max(commits)]["step"] + 1 if commits else run.first_step
    summary = Summary(
        verdict=NOT_RUN,
        reasons=(
            f"{format_bytes(num_bytes)} of journal take more than {limit_s:.0f} s to prove: spare check {run_dir}",
        ),
        outcome=UNKNOWN,
        outcome_reason="the journal has no end",
        steps_committed=num_steps - run.first_step,
        steps_left=run.num_steps - num_steps,
    )
    return with_end(summary, ends[0]) if ends else summary


def _last_records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL_BYTES, 0))
        lines = file.read().split(b"\n")
    for line in lines[size > _TAIL_BYTES : -1]:
        try:
            yield decode_line(line.decode()).record
        except ValueError:
            continue  # torn by a kill
