"""The layers of the package: imports point down the table and never back."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "spare_megatron"
DOCS = PACKAGE.parent / "docs"

ROOMS: dict[str, set[str]] = {
    "stacking": set(),
    "core": {"stacking"},
    "config": {"stacking", "core"},
    "faults": {"stacking", "core", "config"},
    "journal": {"stacking"},
    "planner": {"stacking", "core"},
    "observe": {"journal"},
    "simulator": {"stacking", "core", "config", "journal", "planner"},
    "store": {"stacking", "config"},
    "process": {"stacking", "core", "config", "faults", "journal", "store"},
    "text": {"process"},
    "mcore": {"stacking", "core", "config"},
    "comm": {"stacking", "core", "store", "mcore"},
    "voting": {"stacking", "core", "config", "journal", "store", "process"},
    "state": {"stacking", "core", "config", "journal", "store", "process", "mcore", "voting"},
    "rank": {
        "stacking", "core", "config", "faults", "journal", "store", "process", "mcore", "comm", "voting", "state",
    },
    "supervisor": {"stacking", "core", "config", "faults", "journal", "store", "process", "voting", "state"},
    "driver": {
        "stacking", "core", "config", "faults", "journal", "observe", "store", "process", "mcore", "comm", "voting",
        "state", "rank", "supervisor",
    },
    "cli": {
        "config", "faults", "journal", "planner", "observe", "simulator", "store", "process", "text", "mcore", "comm",
        "state", "supervisor", "driver",
    },
}  # fmt: skip
"""For each room, from the top of the table down, the rooms that it may import beside itself."""

FREE_OF_TORCH = ("stacking", "core", "config", "faults", "journal", "planner", "observe", "simulator", "store", "text")
"""Rooms whose modules load where torch and megatron are missing."""

TORCH_ALLOWED = {"store", "process", "mcore", "comm", "voting", "state", "rank", "supervisor", "driver", "cli"}
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


def modules_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


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
    for room, allowed in ROOMS.items():
        for path in modules_of(room):
            for name in imports_of(path):
                top, *rest = name.split(".")
                target = rest[0] if rest else ""
                where = f"{path.relative_to(PACKAGE)} imports {name}"
                if top == "spare_megatron" and target not in allowed | {room, "version"}:
                    yield f"{where}; {room} may import {sorted(allowed)}"
                if top == "megatron" and room not in MEGATRON_ALLOWED:
                    yield f"{where}; only mcore imports megatron"
                if top == "torch" and room not in TORCH_ALLOWED:
                    yield f"{where}; {room} is free of torch"


def test_every_room_has_a_row_in_the_table() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms == set(ROOMS)


def test_the_table_has_no_cycle() -> None:
    names = list(ROOMS)
    assert [(room, name) for room in names for name in ROOMS[room] if names.index(name) > names.index(room)] == []


def test_imports_point_down_the_table() -> None:
    assert list(violations()) == []


def test_folders_are_at_most_two_levels_deep() -> None:
    depths = {len(path.relative_to(PACKAGE).parts) - 1 for path in PACKAGE.rglob("*.py")}
    assert max(depths) == 2


def table_of_rooms() -> str:
    """The table of the documentation: each room, the first sentence of its docstring, and what it may import."""
    rows = ["| room | holds | may import |", "| --- | --- | --- |"]
    for room, allowed in ROOMS.items():
        docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
        first = re.match(r"(.*?)\.(?=\s|$)", docstring, re.DOTALL)
        assert first is not None, f"{room}/__init__.py says what the room holds, in its first sentence"
        imports = ", ".join(name for name in ROOMS if name in allowed) or "nothing of ours"
        rows.append(f"| `{room}` | {' '.join(first[1].split())} | {imports} |")
    return "\n".join(rows)


def test_the_documentation_has_the_table_of_rooms() -> None:
    assert table_of_rooms() in (DOCS / "how_it_works.md").read_text()


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import numpy as np\ndef f():\n    from torch import nn\n    import megatron.core\n")
    assert list(imports_of(module)) == ["numpy", "torch.nn", "megatron.core"]


def test_rooms_load_where_torch_and_megatron_are_missing() -> None:
    names = [module_name(path) for room in FREE_OF_TORCH for path in modules_of(room)]
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
