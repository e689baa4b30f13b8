"""The rooms of the package: imports point down the table, files and rooms keep their sizes."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.house import (
    PACKAGE,
    House,
    Package,
    Room,
    circles,
    dangling,
    docstring_permille,
    imported_names,
    misplaced,
    read_house,
    read_package,
    saying_cuda,
    too_large,
    unprepared,
)

DOCS = PACKAGE.parent / "docs"
STACKED_STATE = re.compile(
    r"\b(Ownership|PartitionCopy|StatePartition|PartitionId|Stacked\w+|ParamsGather|GroupRepairs)\b"
)
"""Names of the types of stacked state."""

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


@pytest.fixture(scope="module")
def house() -> House:
    return read_house()


@pytest.fixture(scope="module")
def package() -> Package:
    return read_package()


def test_imports_point_down_the_table(house: House, package: Package) -> None:
    assert list(misplaced(house, package)) == []


def test_no_files_import_each_other_in_a_circle(package: Package) -> None:
    assert list(circles(package)) == []


def test_texts_that_name_a_module_name_one_that_exists(package: Package) -> None:
    assert list(dangling(package)) == []


def test_rooms_and_files_keep_their_sizes(house: House, package: Package) -> None:
    assert list(too_large(house, package)) == []


def test_docstrings_keep_their_share(house: House, package: Package) -> None:
    assert docstring_permille(package) <= house.limits["docstring_permille"]


def test_tests_keep_their_size(house: House) -> None:
    files = PACKAGE.parent.joinpath("tests").rglob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= house.limits["lines_of_tests"]


def test_stacked_state_is_known_to_few_files(house: House, package: Package) -> None:
    found = {file for file in package.trees if STACKED_STATE.search((PACKAGE / file).read_text())}
    assert found == house.knows_stacked_state, "names of other files, or files that no longer know it, go from the list"


def test_cuda_is_named_by_few_files(house: House, package: Package) -> None:
    assert list(saying_cuda(house, package)) == []


def test_every_room_exists(house: House) -> None:
    assert [path for path in house.rooms if not (PACKAGE / path).exists()] == []


# ------------------------------------------------------------------------------------------ the checks themselves

CLEAN = {
    "low/__init__.py": "",
    "low/one.py": '"""One."""\n\nimport json\n',
    "high/__init__.py": "",
    "high/two.py": '"""Two."""\n\nimport torch\n\nfrom house.low import one\n\nNAME = "house.low.one"\n',
}
HOUSE = House(
    rooms={
        "low": Room(path="low", floor=1, lines=3, files=2),
        "high": Room(path="high", floor=2, lines=9, files=2, torch=True),
    },
    limits={"lines_of_a_file": 9, "lines_of_training": 12, "lines_of_tools": 0, "files": 4},
)


def findings(folder: Path, house: House = HOUSE, **files: str) -> list[str]:
    """What is found in the clean package with these files: `low__one` is `low/one.py`."""
    named = {name.replace("__", "/") + ".py": text for name, text in files.items()}
    for name, text in (CLEAN | named).items():
        path = folder / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    package = read_package(folder / "house")
    return [*misplaced(house, package), *circles(package), *dangling(package), *too_large(house, package)]


def test_a_package_that_keeps_the_rules_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path) == []


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        (
            {"low__one": "from house.high import two\n"},
            "low/one.py:1 imports high/two.py: high on floor 2 is not below low on floor 1",
        ),
        ({"low__one": "def f():\n    from house.high.two import NAME\n"}, "low/one.py:2 imports high/two.py"),
        ({"low__one": "import torch.nn\n"}, "imports torch, which low may not"),
        ({"high__two": "from megatron.core import mpu\n"}, "imports megatron, which high may not"),
        ({"high__two": "from house.low import gone\n"}, None),
        ({"high__two": "from house.low.gone import name\n"}, "imports house.low.gone.name, which does not exist"),
        ({"high__two": "NAME = 'house.low.gone'\n"}, "names 'house.low.gone', which does not exist"),
        (
            {"high__two": "from house.high import three\n", "high__three": "import house.high.two\n"},
            "circle of imports",
        ),
        ({"other__two": ""}, "other/two.py is in no room"),
        ({"high__two": "\n" * 10}, "high/two.py has 10 lines, more than 9"),
        ({"low__one": "\n" * 4}, "low has 4 lines in 2 files, more than 3 in 2"),
        ({"low__three": ""}, "low has 3 lines in 3 files, more than 3 in 2"),
        ({"low__three": ""}, "files: 5, more than 4"),
    ],
)
def test_what_breaks_a_rule_is_found(files: dict[str, str], finding: str | None, tmp_path: Path) -> None:
    found = findings(tmp_path, **files)
    if finding is None:  # a name in the package itself: whether it exists is for mypy
        assert found == []
    else:
        assert any(re.search(finding, text) for text in found), found


def test_lines_of_tools_count_apart(tmp_path: Path) -> None:
    rooms = HOUSE.rooms | {"tools/x": Room(path="tools/x", floor=3, lines=9, files=1)}
    found = findings(tmp_path, replace(HOUSE, rooms=rooms, limits=HOUSE.limits | {"files": 5}), tools__x__y="\n")
    assert found == ["lines_of_tools: 1, more than 0"]


def test_megatron_is_imported_after_what_makes_it_importable(package: Package, tmp_path: Path) -> None:
    assert list(unprepared(package)) == []
    megatron, ours = "from megatron.core import mpu\n", "from house.mcore import a\n"
    for name, text in {"right": ours + megatron, "wrong": megatron + ours, "late": f"def f():\n    {megatron}"}.items():
        (tmp_path / "house").mkdir(exist_ok=True)
        (tmp_path / "house" / f"{name}.py").write_text(text)
    found = list(unprepared(read_package(tmp_path / "house")))
    assert found == ["wrong.py imports megatron before house.mcore, which makes it importable"]


def test_a_file_that_says_cuda_and_one_that_no_longer_does_are_found(tmp_path: Path) -> None:
    assert findings(tmp_path, low__one="\nevent = 'torch.cuda'\n") == []
    package = read_package(tmp_path / "house")
    assert list(saying_cuda(replace(HOUSE, says_cuda=frozenset({"low"})), package)) == []
    assert list(saying_cuda(replace(HOUSE, says_cuda=frozenset({"low/one.py"})), package)) == []
    assert list(saying_cuda(replace(HOUSE, says_cuda=frozenset({"high"})), package)) == [
        "low/one.py:2 says cuda, which only high may",
        "high says nothing of cuda and goes from the list",
    ]


def test_an_import_inside_a_function_is_seen() -> None:
    tree = ast.parse("import numpy as np\ndef f():\n    from torch import nn\n    import megatron.core\n")
    assert [name for _, name in imported_names(tree)] == ["numpy", "torch.nn", "megatron.core"]


# ----------------------------------------------------------------------------------------------- beside the table


def table_of_rooms(house: House, package: Package) -> str:
    """The table of the documentation: each room, its floor, and the first sentence of its docstring."""
    rows = ["| floor | room | holds |", "| --- | --- | --- |"]
    for room in house.rooms.values():
        file = room.path if room.path.endswith(".py") else f"{room.path}/__init__.py"
        first = re.match(r"(.*?)\.(?=\s|$)", ast.get_docstring(package.trees[file]) or "", re.DOTALL)
        assert first is not None, f"the first sentence of {file} says what the room holds"
        rows.append(f"| {room.floor} | `{room.path}` | {' '.join(first[1].split())} |")
    return "\n".join(rows)


def test_the_documentation_has_the_table_of_rooms(house: House, package: Package) -> None:
    assert table_of_rooms(house, package) in (DOCS / "how_it_works.md").read_text()


def test_rooms_without_torch_load_where_torch_and_megatron_are_missing(house: House, package: Package) -> None:
    rooms = [room for room in house.rooms.values() if not room.torch]
    names = [name for name, file in package.modules.items() if house.room_of(file) in rooms and file != "__main__.py"]
    done = subprocess.run(
        [sys.executable, "-c", LOADING_WITHOUT_TORCH, *names],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(names) > 100


def test_the_check_for_missing_torch_notices_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING_WITHOUT_TORCH, "torch"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr
