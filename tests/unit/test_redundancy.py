"""For how long partitions lacked hosts, as the journal of a run shows."""

import pytest

from spare_megatron.journal.files import Journal, Line, decode_line, encode_line
from spare_megatron.journal.records import RedundancyRecord, RepairRecord
from spare_megatron.journal.state.goodput import full_redundancy_s
from tests.unit.journal_in_memory import summarize


def missing(at_s: float, group: int, num_missing: int, incarnation: int = 0) -> Line:
    record = RedundancyRecord(group=group, step=int(at_s), num_missing=num_missing)
    return Line(source=f"group-{group:04d}-rank-0-life-{incarnation}", at_s=at_s, record=record)


def journal_of(*lines: Line) -> Journal:
    return Journal(lines=tuple(sorted(lines, key=lambda line: line.at_s)))


def test_a_span_lasts_from_the_first_loss_to_the_last_copy() -> None:
    """Group 1 reports the same, a little later, and misses the rest; its next incarnation sees only the end of it."""
    seen = [(10.0, 3), (12.0, 5), (14.0, 2), (15.5, 0), (40.0, 1), (40.25, 0), (50.0, 4)]
    lines = [missing(at_s, 0, num) for at_s, num in seen]
    lines += [missing(at_s + 0.3, 1, num) for at_s, num in seen[:3]]
    lines += [missing(at_s + 0.3, 1, num, incarnation=1) for at_s, num in seen[4:6]]
    assert full_redundancy_s(journal_of(*lines)) == pytest.approx((5.5, 0.25))


def test_a_run_without_partitions_has_none() -> None:
    assert full_redundancy_s(journal_of()) == ()


def test_the_summary_counts_the_copies() -> None:
    repair = RepairRecord(group=2, step=7, slice=3, donor=0, num_bytes=100, repair_s=0.5)
    lines = [missing(1.0, 0, 1), missing(2.0, 0, 0), Line(source="group-0002-rank-0", at_s=1.5, record=repair)]
    assert [decode_line(encode_line(line)) for line in lines] == lines
    summary = summarize(journal_of(*lines))
    assert summary.slices_repaired == 1
    assert summary.full_redundancy_s == (1.0,)
