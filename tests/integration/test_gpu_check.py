"""`launch/gpu-check --dry-run`: all of its parts, in short form on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check.parts import PARTS

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]


def test_a_dry_run_passes_without_a_gpu_and_names_what_makes_no_sense_there(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--json", file, "--folder", tmp_path / "logs"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    parts = json.loads(file.read_text())["parts"]
    assert [part["name"] for part in parts] == list(PARTS)
    for part in parts:
        why = PARTS[part["name"]].not_on_cpu
        assert (part["verdict"], part["reason"]) == (("not run", why) if why else ("passed", ""))
        assert part["name"] == "versions" or why or part["rows"], part
    of_gpus = {"step-1p3b", "step-1p3b-reproducible", "transformer-engine", "buckets", "tests-bitwise", "tests-runs"}
    assert {part["name"] for part in parts if part["verdict"] == "not run"} == of_gpus
