"""What the documentation says against what is there, so that it stays true."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import spare_megatron.config.schema as schema

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "docs/settings.md"
PAGES = [ROOT / "README.md", ROOT / "benchmarks/RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def settings(kind: type[Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> default of every setting below a section."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        section = getattr(schema, f"{field.name.capitalize()}Config", None)
        if section is not None and prefix == "":
            found |= settings(section, f"{field.name}.")
        elif field.name != "megatron":
            found[prefix + field.name] = field.default
    return found


def rows() -> dict[str, str]:
    """Setting -> default as the table has them."""
    table = SETTINGS.read_text()
    return dict(re.findall(r"^\| `([a-z_]+(?:\.[a-z0-9_]+)?)` \| (.*?) \|", table, re.MULTILINE))


def as_text(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if default not in ("", ()) else "empty"


def test_every_setting_is_listed_with_its_default() -> None:
    assert rows() == {key: as_text(default) for key, default in settings(schema.RunConfig).items()}


def test_every_setting_has_its_help_below_it() -> None:
    tree = ast.parse(Path(schema.__file__).read_text())
    for section in [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "RunConfig"]:
        for field, following in zip(section.body, section.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign):
                is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert is_text, f"{section.name}.{ast.unparse(field.target)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.is_file(), f"{page.name} -> {target}"
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
        assert not heading or heading in {text.lower().replace(" ", "-") for text in headings}, (
            f"{page.name} #{heading}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`((?:benchmarks|configs|tests|launch)/[a-z0-9_/.]+\.(?:py|toml|sh))", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
