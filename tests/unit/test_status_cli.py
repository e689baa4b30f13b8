"""`spare status` of a run directory, once and with --watch."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from spare_megatron.cli import status
from spare_megatron.commands import app
from spare_megatron.journal.files import encode_line
from spare_megatron.journal.records import LossRecord
from spare_megatron.journal.state.follow import read_run_state
from tests.unit.test_run_state import STAMP, commit, simulated, write


def test_status_describes_a_run_directory_without_slurm(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", simulated(2, 2, 300.0))
    result = CliRunner().invoke(app, ["status", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert "step 59 (60/60)" in result.output
    answer = json.loads(CliRunner().invoke(app, ["status", str(run_dir), "--json"]).stdout)
    assert answer["outcome"] == "finished"
    assert answer["steps_committed"] == 60
    assert len(answer["groups"]) == 7
    assert answer["restarts"] > 0
    assert answer["wall_s"] == pytest.approx(answer["goodput"] * answer["wall_s"] + sum(answer["lost_s"].values()))


def test_watching_without_a_terminal_shows_what_is_new_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = simulated(5, 3, 300.0)
    run_dir = write(tmp_path / "run", lines[:200])
    is_whole = False

    def grow(seconds: float) -> None:
        nonlocal is_whole
        assert not is_whole, "a run that has ended is not waited for"
        is_whole = True
        with (run_dir / "journal" / "test.jsonl").open("a") as file:
            file.write("".join(encode_line(item) + "\n" for item in lines[200:]))

    # Of that module alone: threads of other tests sleep, too.
    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=grow, time=time.time, monotonic=time.monotonic))
    result = CliRunner().invoke(app, ["status", str(run_dir), "--watch"])
    assert result.exit_code == 0, result.output
    shown_lines = result.output.splitlines()
    assert is_whole
    assert re.fullmatch(STAMP + r"step 59 \(60/60\)  groups 7/7  load 3  \d.*", shown_lines[-2])
    assert re.fullmatch(STAMP + "the run ended: finished: all steps are committed", shown_lines[-1])
    assert all(re.match(STAMP, text) for text in shown_lines)
    num_losses = sum(isinstance(item.record, LossRecord) for item in lines)
    assert sum(" lost: rank" in text for text in shown_lines) == num_losses > 0


@pytest.mark.parametrize("arguments", [["--watch"], ["--watch", "--json"], []])
def test_what_is_neither_a_run_nor_a_job_is_named(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["status", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert (str(tmp_path) in result.output) != (len(arguments) == 2)


def test_a_journal_without_any_run_record_shows_nothing(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", [commit(101.0, 0, 0)])
    assert read_run_state(run_dir).groups() == []
    assert "no run yet" in CliRunner().invoke(app, ["status", str(run_dir)]).output
