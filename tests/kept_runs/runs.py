"""Run directories that earlier versions wrote, and what readers of journals answered of them then.

`python -m tests.kept_runs.runs RUN_DIR NAME` keeps a further one, with what this version answers.
"""

import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.training.run_terms import terms_in
from spare_megatron.journal.journal_index import JournalIndex
from spare_megatron.journal.state.summary import sum_up

FOLDER = Path(__file__).parent
EXPECTED = FOLDER / "expected.json"
CHECKPOINTS = "checkpoints"
"""The archive of two checkpoints, with settings and corpus."""
CHECKPOINTS_OF_VERSIONS = "checkpoints_of_versions"
"""That of checkpoints of several versions of megatron-core; all others are of runs."""
READ = ("config.toml", "origin.json", "summary.json", "metrics.jsonl", "journal/*.jsonl")
"""Files of a run directory that `spare check`, `status`, `audit` and `report` read."""
_OF_NOW = ("next_save_s", "driverless")
_OF_NOW_WITHOUT_END = ("goodput", "wall_s", "lost_s")
"""What `spare status` answers that depends on the present time; the latter while a run goes on."""


def expected_answers() -> dict[str, dict[str, Any]]:
    """Kept run -> what was answered when it was kept."""
    found: dict[str, dict[str, Any]] = json.loads(EXPECTED.read_text())
    return found


def unpack(name: str, folder: Path) -> Path:
    """The directory of a kept run, or of kept checkpoints, below a folder."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def answers_of(run_dir: Path) -> dict[str, Any]:
    """What this version answers of a run, as JSON has it, without the path of the directory and rounding errors."""
    status = json.loads(_output("status", run_dir, "--json"))
    of_now = _OF_NOW + (_OF_NOW_WITHOUT_END if status["outcome"] == "going on" else ())
    del status["overview"]  # later than the kept answers, as the kinds of events are
    for event in status["events"]:
        del event["kind"]
    summary = sum_up(JournalIndex(run_dir, settings=terms_in(run_dir)))
    answers: Mapping[str, Any] = {
        "check": json.loads(_output("check", run_dir, "--json")),
        "summary": asdict(summary),
        "status": {key: value for key, value in status.items() if key not in of_now},
        "audit": _output("audit", run_dir).splitlines(),
    }
    text = json.dumps(answers).replace(str(run_dir), "RUN_DIR")
    found: dict[str, Any] = json.loads(text, parse_float=lambda number: round(float(number), 6))
    return found


def _output(command: str, run_dir: Path, *options: str) -> str:
    result = CliRunner().invoke(app, [command, str(run_dir), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def keep(run_dir: Path, name: str) -> None:
    """Adds a run. ValueError if there is one of this name: what is kept is never written again."""
    target = FOLDER / f"{name}.tar.xz"
    if target.exists():
        raise ValueError(f"{target} is kept already: choose another name")
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for file in sorted(file for pattern in READ for file in run_dir.glob(pattern)):
            member = tarfile.TarInfo(f"{name}/{file.relative_to(run_dir)}")
            member.size = file.stat().st_size
            archive.addfile(member, io.BytesIO(file.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        answers = {**expected_answers(), name: answers_of(unpack(name, Path(folder)))}
    EXPECTED.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m tests.kept_runs.runs RUN_DIR NAME")
    keep(Path(sys.argv[1]), sys.argv[2])
