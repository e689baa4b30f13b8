"""What tests make of PYTHONPATH: they add to it."""

import os
from pathlib import Path

import pytest

from tests.search_path import ROOT, put_checkout_first, with_checkout


def test_folders_that_are_there_stay_behind_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were lost, and with them the packages of a machine that has them nowhere else."""
    monkeypatch.setenv("PYTHONPATH", f"/wheels{os.pathsep}{os.pathsep}/more")
    assert with_checkout(Path("/first")).split(os.pathsep) == ["/first", str(ROOT), "/wheels", "/more"]
    for _ in range(2):
        put_checkout_first()
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/wheels", "/more"]
    monkeypatch.delenv("PYTHONPATH")
    assert with_checkout() == str(ROOT)


def test_no_test_replaces_the_search_path() -> None:
    launchers = {ROOT / "tests" / "unit" / name for name in ("test_gpu_check.py", "test_launch.py")}
    own = {Path(__file__), ROOT / "tests" / "search_path.py", *launchers}
    lines = [
        line
        for path in (ROOT / "tests").rglob("*.py")
        if path not in own
        for line in path.read_text().splitlines()
        if "PYTHONPATH" in line and "with_checkout(" not in line
    ]
    assert lines == []
