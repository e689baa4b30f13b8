"""How a run that has ended is summed up: proven from its whole journal, or told by the ends of its files."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from spare_megatron.journal.filed import FiledEvidence
from spare_megatron.journal.lines import decode_line
from spare_megatron.journal.output import NotWritten, whole_file
from spare_megatron.journal.quantities import format_bytes
from spare_megatron.journal.records import EndRecord, EntryRecord, Record, RunRecord
from spare_megatron.journal.summary import NOT_RUN, UNKNOWN, Summary, sum_up, told_by

PROOF_S = 60.0
"""For which a journal is looked at when the run ends. A job whose time is over has no more before it is to be queued
again."""

_MOST_TAILS = 8
_TAIL_BYTES = 1 << 20


def conclude(run_dir: Path, end: EndRecord | None = None) -> Summary:
    """Sums the run up and writes `summary.json`. Several nodes may do so at once.

    Args:
        run_dir: The run's directory. A full disk may lack the end of the journal, and not take the summary.
        end: How the run ended, where that is known without the journal.
    """
    try:
        summary = sum_up(FiledEvidence(run_dir, until_s=time.monotonic() + PROOF_S))
    except TimeoutError:
        summary = _told(run_dir)
    if summary.outcome == UNKNOWN and end is not None:
        summary = told_by(summary, end)
    try:
        with whole_file("--run-dir", run_dir / "summary.json") as file:
            file.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
    except NotWritten as error:
        reason = f"summary.json was not written: {error.reason}"
        summary = dataclasses.replace(summary, reasons=(*summary.reasons, reason))
    return summary


def _told(run_dir: Path) -> Summary:
    """What the first line of the journal and the last ones of some files tell; the rest is not counted."""
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
            f"{format_bytes(num_bytes)} of journal take more than {PROOF_S:.0f} s to prove: spare check {run_dir}",
        ),
        outcome=UNKNOWN,
        outcome_reason="the journal has no end",
        steps_committed=num_steps - run.first_step,
        steps_left=run.num_steps - num_steps,
    )
    return told_by(summary, ends[0]) if ends else summary


def _last_records(path: Path) -> Iterator[Record]:
    """What the last lines of a file hold, those that can be read."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL_BYTES, 0))
        lines = file.read().split(b"\n")
    for line in lines[size > _TAIL_BYTES : -1]:
        try:
            yield decode_line(line.decode()).record
        except ValueError:
            continue  # torn by a kill
