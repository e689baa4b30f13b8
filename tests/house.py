"""Reads the package against `tests/house.toml`, the table of its rooms: floors, libraries, sizes.

A room is a folder, or one file of the root; a file belongs to the deepest room that contains it. All imports count,
also those inside functions and under TYPE_CHECKING.
"""

import ast
import graphlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("house.toml")
PACKAGE = Path(__file__).parents[1] / "spare_megatron"


@dataclass(frozen=True, kw_only=True)
class Room:
    """A row of the table. `torch`, `megatron`: its files may import these."""

    path: str
    floor: int
    lines: int
    files: int
    torch: bool = False
    megatron: bool = False


@dataclass(frozen=True, kw_only=True)
class House:
    """The table. `knows_stacked_state`: the files that may name its types. `says_cuda`: those that may, and rooms."""

    rooms: Mapping[str, Room]
    limits: Mapping[str, int]
    knows_stacked_state: frozenset[str] = frozenset()
    says_cuda: frozenset[str] = frozenset()

    def room_of(self, file: str) -> Room | None:
        """The room of a file, which is given by its path below the package."""
        parents = (parent.as_posix() for parent in Path(file).parents)
        return next((self.rooms[path] for path in (file, *parents) if path in self.rooms), None)


@dataclass(frozen=True, kw_only=True)
class Package:
    root: Path
    trees: Mapping[str, ast.Module] = field(repr=False)
    """By path below the root."""

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """Dotted name of each module -> its file."""
        return {self._dotted(file): file for file in self.trees}

    @cached_property
    def imports(self) -> list[tuple[str, int, str]]:
        """File, line, and the file of the package or the name of the library that it imports."""
        found = []
        for file, tree in self.trees.items():
            for line, name in imported_names(tree):
                if name.split(".")[0] != self.root.name:
                    found.append((file, line, name.split(".")[0]))
                    continue
                module = name if name in self.modules else name.rpartition(".")[0]
                found.append((file, line, self.modules.get(module, f"{name}, which does not exist")))
        return found

    def num_lines(self, file: str) -> int:
        return len((self.root / file).read_text(encoding="utf-8").splitlines())

    def _dotted(self, file: str) -> str:
        parts = (self.root.name, *Path(file).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_house(path: Path = TABLE) -> House:
    values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return House(
        rooms={row["path"]: Room(**row) for row in values["rooms"]},
        limits=values["limits"],
        knows_stacked_state=frozenset(values["knows_stacked_state"]),
        says_cuda=frozenset(values["says_cuda"]),
    )


def read_package(root: Path = PACKAGE) -> Package:
    files = sorted(root.rglob("*.py"))
    trees = {file.relative_to(root).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    return Package(root=root, trees=trees)


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that is imported, as far down as it is named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the room they reach"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def misplaced(house: House, package: Package) -> Iterator[str]:
    """Files without a room, imports that do not point down, and libraries that a room may not import."""
    for file in package.trees:
        if house.room_of(file) is None and file not in ("core/__init__.py", "tools/__init__.py"):
            yield f"{file} is in no room"
        if file.count("/") > 2:
            yield f"{file} is more than two folders deep"
    for file, line, target in package.imports:
        room, other = house.room_of(file), house.room_of(target)
        if room is None:
            continue
        if other is not None and other is not room and other.floor >= room.floor:
            floors = f"{other.path} on floor {other.floor} is not below {room.path} on floor {room.floor}"
            yield f"{file}:{line} imports {target}: {floors}"
        if "which does not exist" in target:
            yield f"{file}:{line} imports {target}"
        if (target == "torch" and not room.torch) or (target == "megatron" and not room.megatron):
            yield f"{file}:{line} imports {target}, which {room.path} may not"


def unprepared(package: Package) -> Iterator[str]:
    """Files that import megatron, when they are loaded, before our `mcore`, which makes it possible without triton."""
    mcore = f"{package.root.name}.mcore"
    for file, tree in package.trees.items():
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [name for node in at_once for _, name in imported_names(node)]
        first = next((name for name in names if name.startswith(("megatron.", f"{mcore}.")) or name == mcore), "")
        if first.startswith("megatron.") and not file.startswith("mcore/"):
            yield f"{file} imports megatron before {mcore}, which makes it importable"


def saying_cuda(house: House, package: Package) -> Iterator[str]:
    """Files that name what is CUDA's beside those that may, and those that may and do not."""
    needless = set(house.says_cuda)
    for file in package.trees:
        lines = (package.root / file).read_text(encoding="utf-8").splitlines()
        number = next((number for number, line in enumerate(lines, 1) if "cuda" in line), 0)
        room = house.room_of(file)
        places = {file, "" if room is None else room.path} & house.says_cuda
        if number:
            needless -= places
        if number and not places:
            yield f"{file}:{number} says cuda, which only {', '.join(sorted(house.says_cuda))} may"
    yield from (f"{place} says nothing of cuda and goes from the list" for place in sorted(needless))


def circles(package: Package) -> Iterator[str]:
    """A circle of files that import each other, if there is one."""
    graph: dict[str, set[str]] = {file: set() for file in package.trees}
    for file, _, target in package.imports:
        if target in graph and target != file:
            graph[file].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield "circle of imports: " + " <- ".join(error.args[1])


def dangling(package: Package) -> Iterator[str]:
    """Texts that name a module of the package, as for `python -m`, which does not exist."""
    for file, tree in package.trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if re.fullmatch(rf"{package.root.name}(\.[a-z_0-9]+)+", node.value) and node.value not in package.modules:
                yield f"{file}:{node.lineno} names {node.value!r}, which does not exist"


def too_large(house: House, package: Package) -> Iterator[str]:
    """Rooms, files and wings above their budgets."""
    rooms: dict[str, list[int]] = {path: [] for path in house.rooms}
    for file in package.trees:
        num_lines, room = package.num_lines(file), house.room_of(file)
        if num_lines > house.limits["lines_of_a_file"]:
            yield f"{file} has {num_lines} lines, more than {house.limits['lines_of_a_file']}"
        if room is not None:
            rooms[room.path].append(num_lines)
    for path, lines in rooms.items():
        room = house.rooms[path]
        if sum(lines) > room.lines or len(lines) > room.files:
            yield f"{path} has {sum(lines)} lines in {len(lines)} files, more than {room.lines} in {room.files}"
    tools = sum(sum(lines) for path, lines in rooms.items() if path.startswith("tools"))
    training = sum(map(sum, rooms.values())) - tools
    num_files = len(package.trees)
    for what, found in (("lines_of_training", training), ("lines_of_tools", tools), ("files", num_files)):
        if found > house.limits[what]:
            yield f"{what}: {found}, more than {house.limits[what]}"


def docstring_permille(package: Package) -> float:
    """Lines of the docstrings of modules, classes and functions, of 1,000 lines."""
    total = sum(map(package.num_lines, package.trees))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for tree in package.trees.values() for node in ast.walk(tree) if isinstance(node, kinds))
    lines = 0
    for node in nodes:
        if ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            assert text.end_lineno is not None
            lines += text.end_lineno - text.lineno + 1
    return 1000 * lines / total
