"""The canary: which bounds it lifts, and which package it says broke a test."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LINES = ["torch>=2.13,<2.16", "numpy>=1.26,<3", "msgspec>=0.20,<0.23", "rich>=13.7"]
NEWEST = {"torch": "2.15.0", "numpy": "3.1.0", "msgspec": "0.24.0", "rich": "99"}


@pytest.fixture
def canary() -> ModuleType:
    spec = importlib.util.spec_from_file_location("canary", ROOT / "launch/canary.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_upper_bound_of_the_project_is_lifted_and_no_lower_one(canary: ModuleType) -> None:
    wanted = list(canary.requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]))
    assert len(wanted) > 30
    for line in wanted:
        lifted, bounded = Requirement(canary.UPPER_BOUND.sub("", line)), Requirement(line)
        assert lifted.specifier.contains("99999"), line
        assert (lifted.name, lifted.extras) == (bounded.name, bounded.extras)
        lower = {str(one) for one in bounded.specifier if one.operator == ">="}
        assert {str(one) for one in lifted.specifier} == lower


def test_the_ranges_that_the_package_checks_at_import_are_lifted(canary: ModuleType, tmp_path: Path) -> None:
    tried = canary.Canary(tmp_path)
    tried.copy_checkout()
    program = "import runpy, sys; print({one.before for one in runpy.run_path(sys.argv[1])['SUPPORTED'].values()})"
    command = [sys.executable, "-c", program, str((tried.copy / canary.RANGES).with_suffix(".py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "{'9999'}\n"


@pytest.mark.parametrize(("culprit", "text"), [("numpy", "numpy 3.1.0 breaks 1 of them"), ("", "nothing broke")])
def test_what_passes_with_a_package_put_back_was_broken_by_it(
    canary: ModuleType, capsys: pytest.CaptureFixture[str], culprit: str, text: str
) -> None:
    class Machine:
        """What pip and pytest would do where the newest release of `culprit` breaks a test."""

        def __init__(self) -> None:
            self.installed = dict(NEWEST)

        def install(self, *wanted: str) -> str:
            for line in wanted:
                name, newest = canary.name_of(line), NEWEST[canary.name_of(line)]
                self.installed[name] = newest if Requirement(line).specifier.contains(newest) else "0"
            return ""

        install_torch = install

        def versions(self) -> dict[str, str]:
            return dict(self.installed)

        def is_within(self, line: str, version: str) -> bool:
            return Requirement(line).specifier.contains(Version(version))

        def failures(self, _tests: list[str]) -> set[str]:
            return {"tests/a.py::test"} if culprit and self.installed[culprit] == NEWEST[culprit] else set()

    machine = Machine()
    assert canary.try_newest(machine, LINES, ["tests/a.py"]) == (1 if culprit else 0)
    printed = capsys.readouterr().out
    assert text in printed
    assert "numpy 3.1.0, beyond numpy>=1.26,<3\n" in printed
    assert "rich 99\n" in printed
    assert ("msgspec 0.24.0 breaks none of them by itself" in printed) == bool(culprit)
    assert machine.installed == NEWEST, "each is put back alone"
