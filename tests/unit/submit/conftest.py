"""Commands of Slurm that only write down how they were called, and a job to submit to them."""

import os
from pathlib import Path

import pytest

from tests.unit.submit.job_configs import CONFIGS
from tests.unit.tiny_corpus import write_tiny_corpus


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that write down how they were called; what they answer stands in files beside them."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("sbatch", "scontrol", "scancel", "squeue"):
        command = folder / name
        command.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n'
            f"cat {folder}/{name}.err >&2 2>/dev/null && exit 1\ncat {folder}/{name}.out 2>/dev/null\nexit 0\n"
        )
        command.chmod(0o755)
    (folder / "sbatch.out").write_text("17;cluster\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    write_tiny_corpus(tmp_path / "corpus")
    preset = CONFIGS / "run/gpt_7b_h100.toml"
    return ["--config", str(preset), "--set", f"data.corpus={tmp_path / 'corpus'}", "--run-dir", str(tmp_path / "job")]
