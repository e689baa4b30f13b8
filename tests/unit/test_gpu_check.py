"""`launch/gpu-check` around its parts: time limits, verdicts, results on disk, and what travels to another machine."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.gpu_check import wheels
from benchmarks.gpu_check.check import Check, environment
from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.table import as_table

pytestmark = pytest.mark.timeout(120)

WRITES = "import json, pathlib, sys; file = pathlib.Path(sys.argv[1]) / 'result.json'; write = lambda **what: "
WRITES += "file.write_text(json.dumps({'figures': {}, 'rows': []} | what)); "
PASSES = (
    WRITES + "write(verdict='passed', reason='', figures={'machine': 'M', 'commit': 'C', 'versions': {'torch': '2'}})"
)
FAILS = WRITES + "write(verdict='failed', reason='ValueError: no GPU')"
DIES = WRITES + "write(figures={'half': 1}); sys.exit('out of memory')"
HANGS = WRITES + (
    "import subprocess, time; child = subprocess.Popen(['sleep', '1000']); write(figures={'child': child.pid}); "
    "time.sleep(1000)"
)


SHORT_S = 5.0
"""On a busy machine Python starts within this time."""


def parts_of(**codes: str) -> list[Part]:
    limits_s = {HANGS: SHORT_S}
    return [
        Part(name=name, limit_s=limits_s.get(code, 60.0), measures=f"all of {name}", code=code)
        for name, code in codes.items()
    ]


def run(folder: Path, **codes: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the results of a check whose parts are these programs."""
    file = folder / "out.json"

    def command(part: Part, folder: Path) -> list[str]:
        return [sys.executable, "-c", part.code, str(folder)]

    code = Check(folder, [file], is_dry=False, command=command).run(parts_of(**codes))
    return code, json.loads(file.read_text())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_part_that_takes_too_long_is_killed_with_all_it_started_and_the_next_one_runs(tmp_path: Path) -> None:
    code, found = run(tmp_path, first=PASSES, slow=HANGS, dying=DIES, last=PASSES)
    _, slow, dying, _ = found["parts"]
    assert code == 1
    assert [part["verdict"] for part in found["parts"]] == ["passed", "failed", "failed", "passed"]
    assert slow["reason"] == "took longer than its limit of 5 s"
    assert dying["reason"] == "its process ended with exit code 1: out of memory"
    assert dying["figures"] == {"half": 1}, "what it had measured stays"
    end_s = time.monotonic() + 30.0
    while is_running(slow["figures"]["child"]) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not is_running(slow["figures"]["child"])
    assert (found["machine"], found["commit"]) == ("M", "C")


def test_nothing_runs_on_an_unsupported_machine(tmp_path: Path) -> None:
    code, found = run(tmp_path, versions=FAILS, tests=HANGS)
    assert code == 1
    assert [(part["name"], part["verdict"], part["reason"]) for part in found["parts"]] == [
        ("versions", "failed", "ValueError: no GPU"),
        ("tests", "not run", "versions failed"),
    ]


def test_a_check_without_a_failure_ends_with_0_and_its_table_names_machine_commit_and_date(tmp_path: Path) -> None:
    code, found = run(tmp_path, first=PASSES)
    assert code == 0
    *_, origin, _, _, _, row = as_table(found).splitlines()
    assert origin == "M; torch 2."
    assert row.startswith("| all of first | passed, ")
    assert row.endswith(f"| `launch/gpu-check --only first` | C, {found['date']} |")


def test_the_first_parts_fit_into_15_minutes_and_each_into_two_and_a_half() -> None:
    """Of a borrowed device, in two commands of ten minutes at most."""
    names = list(PARTS)
    first = names[: names.index("examination") + 1]
    assert {"costs", "step-1p3b-reproducible", "audited-flip", "aborts", "illegal-access"} < {*first}
    assert sum(PARTS[name].limit_s for name in first) <= 15 * 60
    assert max(part.limit_s for part in PARTS.values()) <= 150


def test_a_python_path_is_extended() -> None:
    """Wheels of a machine without a network are found by it alone."""
    given = environment({"PYTHONPATH": "/wheels:/more"})["PYTHONPATH"].split(os.pathsep)
    assert given[1:] == ["/wheels", "/more"]
    assert environment({})["PYTHONPATH"] == given[0]


def test_wheels_are_what_a_machine_lacks_of_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"torch": ["numpy"], "ortools": ["pandas>=2", "immutabledict>=3"], "pandas": ["tzdata"], "psutil": []}
    resolved = {name: {"name": name, "version": "1", "requires_dist": of} for name, of in needs.items()}
    resolved |= {name: {"name": name, "version": "2"} for name in ("numpy", "immutabledict", "tzdata")}
    downloaded: list[str] = []

    def pip(command: str, python: str, *words: str) -> None:
        assert python == "3.12"
        if command == "download":
            downloaded.extend(words[words.index(str(tmp_path)) + 1 :])
            return
        report = Path(words[words.index("--report") + 1])
        report.write_text(json.dumps({"install": [{"metadata": item} for item in resolved.values()]}))

    monkeypatch.setattr(wheels, "_pip", pip)
    monkeypatch.setattr(wheels, "_imported", lambda: {"torch", "ortools", "psutil"})
    (tmp_path / "have").write_text("pandas==3.0\nNumPy==2.5.2\ntorch==2.11.0\n")
    options = SimpleNamespace(make_wheels=tmp_path, python="3.12", torch="2.11.0", have=tmp_path / "have")
    assert wheels.make_wheels(options) == 0
    assert downloaded == ["immutabledict==2", "ortools==1", "psutil==1"]
