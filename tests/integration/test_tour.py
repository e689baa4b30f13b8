"""`launch/tour`: from JSON lines to a model that transformers loads, with few steps."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
LIMIT_S = 840.0
STEPS = 8


_spec = importlib.util.spec_from_file_location("tour", ROOT / "launch/tour.py")
assert _spec is not None
tour = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tour)  # type: ignore[union-attr]

GOOD = {"eval_loss": 6.0, "transformers_loss": 6.00009, "groups_lost": 2, "verdict": "valid"}


def launched(tmp_path: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """The launcher as it is, in the environment of the tests."""
    launch = tmp_path / "launch"
    launch.mkdir()
    for name in ("tour", "tour.py"):
        shutil.copy(ROOT / "launch" / name, launch)
    environment = f'root="$(realpath "$(dirname "${{BASH_SOURCE[0]}}")/..")"; venv={sys.prefix}; cd "$root"\n'
    (launch / "environment.sh").write_text(environment)
    command = [str(word) for word in ("launch/tour", *options)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.mark.parametrize("preset", tour.PRESETS)
def test_text_becomes_a_model_that_transformers_loads_though_two_groups_are_lost(tmp_path: Path, preset: str) -> None:
    options = ("--json", "figures.json", "--folder", "made", "--steps", STEPS, "--preset", preset)
    done = launched(tmp_path, *options)
    assert done.returncode == 0, done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures.keys() == {"eval_loss", "transformers_loss", "groups_lost", "verdict", "wall_s"}
    assert figures["eval_loss"] == pytest.approx(figures["transformers_loss"], abs=1e-4, rel=0)
    assert 3 < figures["eval_loss"] < 8.5, "below that of a model that knows nothing, ln 8192 = 9.01"
    assert figures["groups_lost"] >= 2
    assert figures["verdict"] == "valid"
    assert json.loads((tmp_path / "made/longer/summary.json").read_text())["steps_committed"] == STEPS // 2
    commands = [line.partition("$ ")[2] for line in done.stdout.splitlines() if line.startswith("[tour] $ spare ")]
    assert [command.split()[1] for command in commands] == [
        *("tokenizer", "preprocess", "preprocess", "train", "train", "check", "check", "checkpoint"),
    ]
    # As typed: what a shell makes of a printed command is what ran.
    assert (tmp_path / "made/weights/tokenizer.json").exists()
    shutil.rmtree(tmp_path / "made/tokenizer")
    again = subprocess.run(
        ["bash", "-c", f'spare() {{ {shlex.join(tour.spare_command())} "$@"; }}; {commands[0]}'],
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
    assert again.returncode == 0
    assert (tmp_path / "made/tokenizer/tokenizer.json").exists()
    shutil.rmtree(tmp_path / "made")  # some hundred MB


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--steps", 5), "--steps 5 is below 8"),
        (("--folder", "full"), "--folder full is not empty; choose another"),
        (("--folder", "full/file"), "full/file cannot be written: File exists"),
        (("--json", "nowhere/figures.json"), "nowhere/figures.json cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(tmp_path: Path, options: tuple[object, ...], reason: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    refused = launched(tmp_path, *options)
    assert refused.returncode == 2
    assert reason in refused.stdout


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"transformers_loss": 6.00011}, "the losses differ by 0.00011, more than 0.0001"),
        ({"eval_loss": float("nan")}, "the losses differ by nan"),
        ({"groups_lost": 1}, "two groups were to be lost, with valid journals"),
        ({"verdict": "unknown"}, "two groups were to be lost, with valid journals"),
    ],
)
def test_figures_that_are_not_what_they_have_to_be_fail(wrong: dict[str, Any], reason: str) -> None:
    tour.judge(GOOD)
    with pytest.raises(tour.Failed, match=reason):
        tour.judge(GOOD | wrong)


@pytest.mark.parametrize(("code", "message"), [(7, "error: this command ended with 7: spare"), (130, "interrupted")])
def test_a_command_that_fails_ends_the_tour_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, message: str
) -> None:
    stub = tmp_path / "spare"
    stub.write_text(f"#!/bin/sh\nexit {code}\n")
    stub.chmod(0o755)
    monkeypatch.setattr(tour, "spare_command", lambda: [str(stub)])
    monkeypatch.setattr(sys, "argv", ["tour", "--folder", str(tmp_path / "made"), "--json", str(tmp_path / "json")])
    assert tour.main() == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"[tour] {message}")
    assert (tmp_path / "json").read_text() == ""
    assert (tmp_path / "made/prose.jsonl").exists()
