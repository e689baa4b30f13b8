"""How runs end is one list, which the command's help, the pages and the launchers repeat."""

import re
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.records import EXIT_CODES, MEANINGS, Outcome, exit_code
from spare_megatron.machine.interrupts import INTERRUPTED

ROOT = Path(__file__).parents[2]


def test_every_outcome_has_an_exit_code_and_every_code_a_meaning() -> None:
    assert set(EXIT_CODES) == set(get_args(Outcome))
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert set(MEANINGS) == {*EXIT_CODES.values(), 2}
    assert EXIT_CODES["interrupted"] == INTERRUPTED


def test_the_runbook_has_every_outcome_with_its_code() -> None:
    table = (ROOT / "docs/runbook.md").read_text().partition("## Ending a run")[0]
    rows = {(name, int(code)) for name, code in re.findall(r"^\| `(\w+)`, (\d+) \|", table, re.MULTILINE)}
    assert rows == {*EXIT_CODES.items(), ("finished", 1), ("stopped", 1)}
    assert set(map(int, re.findall(r"^\| [^|]*, (\d+) \|", table, re.MULTILINE))) == set(MEANINGS)


def test_the_help_has_every_code_with_its_meaning() -> None:
    text = CliRunner().invoke(app, ["train", "--help"], terminal_width=1000, env={"COLUMNS": "1000"}).output
    shown = dict(re.findall(r"[•-] (\d+): (.*?)\s*\n", text))
    assert shown == {str(code): meaning for code, meaning in MEANINGS.items()}


def test_jobs_go_back_into_the_queue_after_what_a_new_run_goes_on_from() -> None:
    script = (ROOT / "spare_megatron/driver/slurm/job.sh.j2").read_text()
    (codes,) = re.findall(r"\$status == \[(\d+)\]", script)
    assert set(map(int, codes)) == {EXIT_CODES["wipe_out"], EXIT_CODES["stopped"]}


@pytest.mark.parametrize(
    ("outcome", "verdict", "code"),
    [
        ("finished", "valid", 0),
        ("finished", "not run", 0),
        ("finished", "unknown", 1),
        ("finished", "invalid", 1),
        ("stopped", "valid", 5),
        ("stopped", "unknown", 5),
        ("stopped", "invalid", 1),
        ("wipe_out", "valid", 3),
        ("wipe_out", "invalid", 3),
        ("unknown", "unknown", 1),
    ],
)
def test_a_proof_counts_where_it_says_that_what_was_reached_is_wrong(outcome: str, verdict: str, code: int) -> None:
    assert exit_code(outcome, verdict) == code
