"""Journals of other formats: an earlier one is read, a later one is refused, and neither counts as damaged."""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import FORMAT, JournalWriter, read_journal
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.proofs.proof import check
from spare_megatron.journal.records import CadenceRecord, EndRecord, ParamsRecord, VoteRecord
from spare_megatron.journal.run_record import FirstTerms, RunRecord, digest_of_terms
from tests.unit.journal_in_memory import run_record

RUN = run_record(2, format=FORMAT, name="kept", num_steps=0)
CADENCE = {
    "group": 0,
    "step": 3,
    "interval_s": 60.0,
    "save_s": 1.0,
    "group_interval_s": 1e6,
    "absence_s": None,
    "time_to_wipe_out_s": 1e6,
    "num_losses": 0,
    "exposure_s": 9.0,
    "num_members": 2,
}
OF_CADENCE = {"record": "cadence", "source": "group-0000-rank-0", "at_s": 2.0, **CADENCE}


def journal_at(run_dir: Path, journal_format: int | None, *lines: dict[str, Any], **of_run: Any) -> Path:
    """A run that had nothing to commit; its records as a version that writes this format would have them."""
    last = (ParamsRecord(group=group, step=0, sha256="f" * 64) for group in range(RUN.num_groups))
    for record in (RUN, *last, EndRecord(outcome="finished", reason="")):
        writer = JournalWriter(run_dir, "driver", now_s=lambda: 1.0)
        writer.write(record)
        writer.close()
    file = run_dir / "journal" / "driver.jsonl"
    first, *others = [json.loads(text) for text in file.read_text().splitlines()]
    del first["format"]
    first |= of_run if journal_format is None else {"format": journal_format, **of_run}
    file.write_text("".join(json.dumps(line) + "\n" for line in (first, *others)))
    (run_dir / "journal" / "group-0000-rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_what_this_version_writes_says_its_format(tmp_path: Path) -> None:
    journal = read_journal(journal_at(tmp_path, FORMAT))
    assert [run.format for run in journal.of(RunRecord)] == [FORMAT]
    assert check(JournalIndex(tmp_path)).verdict == "valid"


def test_a_cadence_as_the_first_format_had_it_is_read(tmp_path: Path) -> None:
    """It had the mean time of a restart, too; `spare check` took that for damage."""
    run_dir = journal_at(tmp_path, None, {**OF_CADENCE, "restart_s": 30.0})
    verdict = check(JournalIndex(run_dir))
    assert (verdict.verdict, verdict.reasons) == ("valid", ())
    journal = read_journal(run_dir)
    assert [run.format for run in journal.of(RunRecord)] == [1]
    assert journal.of(CadenceRecord) == [CadenceRecord(**CADENCE)]  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [{"record": "omen"}, {**OF_CADENCE, "moon": "full"}], ids=["kind", "field"])
@pytest.mark.parametrize(
    ("journal_format", "verdict", "reason"),
    [
        (
            None,
            "unknown",
            f"unknown: a line is not as format {FORMAT} has it, and the journal is of format 1: group-0000",
        ),
        (FORMAT, "invalid", "invalid: damaged line: group-0000"),
    ],
    ids=["first", "this"],
)
def test_a_line_that_fits_no_record_is_damage_in_a_journal_of_this_format_alone(
    tmp_path: Path, line: dict[str, Any], journal_format: int | None, verdict: str, reason: str
) -> None:
    found = check(JournalIndex(journal_at(tmp_path, journal_format, line)))
    assert found.verdict == verdict
    assert found.reasons[0].startswith(reason)


@pytest.mark.parametrize("command", ["check", "status", "report"])
@pytest.mark.parametrize("has_origin", [True, False])
def test_a_journal_of_a_later_format_is_refused_with_the_version_that_wrote_it(
    tmp_path: Path, command: str, *, has_origin: bool
) -> None:
    run_dir = journal_at(tmp_path, FORMAT + 1, {"record": "omen"}, moon="full")
    if has_origin:
        (run_dir / "origin.json").write_text('{"version": "9.1", "commit": "abc123"}')
    result = CliRunner().invoke(app, [command, str(run_dir)])
    assert result.exit_code == 2
    assert f"is of format {FORMAT + 1}" in result.stderr
    assert f"formats 1 to {FORMAT}" in result.stderr
    assert ("written by spare_megatron 9.1, commit abc123" in result.stderr) == has_origin
    assert "damaged" not in result.output


def test_a_journal_whose_run_has_not_begun_is_read(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "group-0000-rank-0")
    writer.write(VoteRecord(group=0, step=0, attempt=0, is_complete=True, work_digest=""))
    writer.close()
    (tmp_path / "journal" / "driver.jsonl").write_text("")
    assert check(JournalIndex(tmp_path)).reasons == ("unknown: 0 run records, expected 1",)


def test_earlier_journals_keep_the_digest_of_their_terms() -> None:
    """They have no order of samples, which was the first one, no weights and no evaluations."""
    terms = {name: place for place, name in enumerate(one.name for one in fields(FirstTerms))}
    earlier = hashlib.sha256(json.dumps([*range(len(terms))], separators=(",", ":")).encode()).hexdigest()
    later = {
        "order": 1,
        "weights": "",
        "validation": "",
        "masks": "",
        "program": "",
        "offset": 0,
        "audit_every_steps": 0,
        "eval_every_steps": 0,
        "eval_microbatches_per_shard": 0,
        "ramp": [],
        "max_groups": 0,
        "lanes": 1,
        "row_size": 1,
        "deal_by_pace": False,
        "skip": "",
        "phases": "",
        "least_stages": 0,
        "num_layers": 0,
    }
    assert digest_of_terms({**terms, **later}) == earlier
    assert digest_of_terms({**terms, **later, "order": 2}) != earlier
    assert digest_of_terms({**terms, **later, "eval_every_steps": 5}) != earlier
    assert digest_of_terms({**terms, **later, "ramp": [1, 1, 2]}) != earlier
    assert digest_of_terms({**terms, **later, "max_groups": 6}) != earlier
    assert digest_of_terms({**terms, **later, "lanes": 2}) != earlier
    assert digest_of_terms({**terms, **later, "phases": "64:8"}) != earlier
