"""The layers of the package: imports point down the table and never back."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "spare_megatron"

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "journal": {"core"},
    "config": {"core"},
    "planner": {"core"},
    "report": {"core", "journal"},
    "metrics": {"journal"},
    "faults": {"core", "config"},
    "simulator": {"core", "journal", "config", "faults", "planner"},
    "slurm": {"config", "control"},
    "control": {"config"},
    "mcore": {"core", "config"},
    "runtime": {"core", "journal", "config", "metrics", "faults", "control", "mcore"},
    "bench": {"core", "journal", "config", "control", "mcore", "runtime"},
    "cli": {
        "bench",
        "core",
        "journal",
        "config",
        "planner",
        "report",
        "metrics",
        "faults",
        "simulator",
        "slurm",
        "control",
        "mcore",
        "runtime",
    },
}
"""For each package those of our packages that it may import beside itself, as the design's table has them."""

RUNTIME = (
    "wire",
    "process",
    "checkpoint",
    "vote",
    "state",
    "snapshot",
    "reduce",
    "rank",
    "supervisor",
    "driver",
    "doctor",
)
"""The packages within `runtime`: each may import those before it."""

FREE_OF_TORCH = ("core", "journal", "config", "planner", "report", "metrics", "faults", "simulator", "slurm", "control")
"""Packages above mcore: their modules load where torch and megatron are missing."""

TORCH_ALLOWED = {"control", "mcore", "runtime", "bench", "cli"}
MEGATRON_ALLOWED = {"mcore"}

LOADING_WITHOUT_TORCH = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.argv) - 1)
"""


def modules_of(package: str) -> list[Path]:
    return sorted((PACKAGE / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the layer they reach"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations() -> Iterator[str]:
    for package, allowed in MAY_IMPORT.items():
        for path in modules_of(package):
            for name in imports_of(path):
                top, *rest = name.split(".")
                target = rest[0] if rest else ""
                where = f"{path.relative_to(PACKAGE)} imports {name}"
                if top == "spare_megatron" and target not in allowed | {package, "__version__"}:
                    yield f"{where}; {package} may import {sorted(allowed)}"
                if top == "megatron" and package not in MEGATRON_ALLOWED:
                    yield f"{where}; only mcore imports megatron"
                if top == "torch" and package not in TORCH_ALLOWED:
                    yield f"{where}; {package} is free of torch"


def test_every_package_has_a_row_in_the_table() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert packages <= set(MAY_IMPORT)
    assert {"core", "config", "faults", "cli"} <= packages


def test_imports_point_down_the_table() -> None:
    assert list(violations()) == []


def test_imports_within_the_runtime_point_down_its_own_table() -> None:
    assert {path.name for path in (PACKAGE / "runtime").iterdir() if any(path.glob("*.py"))} == set(RUNTIME)
    assert [path.name for path in (PACKAGE / "runtime").glob("*.py")] == ["__init__.py"]
    up = [
        f"{package}/{path.name} imports {name}"
        for level, package in enumerate(RUNTIME)
        for path in (PACKAGE / "runtime" / package).glob("*.py")
        for name in imports_of(path)
        if name.startswith("spare_megatron.runtime.") and RUNTIME.index(name.split(".")[2]) > level
    ]
    assert up == []


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import numpy as np\ndef f():\n    from torch import nn\n    import megatron.core\n")
    assert list(imports_of(module)) == ["numpy", "torch.nn", "megatron.core"]


@pytest.mark.parametrize("package", [package for package in FREE_OF_TORCH if modules_of(package)])
def test_package_loads_where_torch_and_megatron_are_missing(package: str) -> None:
    names = [module_name(path) for path in modules_of(package)]
    done = subprocess.run(
        [sys.executable, "-c", LOADING_WITHOUT_TORCH, *names],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(names) > 0


def test_the_check_for_missing_torch_notices_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING_WITHOUT_TORCH, "torch"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr
