"""The README's table of settings against the schema, so that it stays true."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import spare_megatron.config.schema as schema

README = Path(__file__).parents[2] / "README.md"


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
    """Setting -> default as the README's table has them."""
    table = README.read_text().split("## Settings")[1]
    return dict(re.findall(r"^\| `([a-z_]+(?:\.[a-z0-9_]+)?)` \| (.*?) \|", table, re.MULTILINE))


def as_text(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if default not in ("", ()) else "empty"


def test_the_readme_lists_every_setting_with_its_default() -> None:
    assert rows() == {key: as_text(default) for key, default in settings(schema.RunConfig).items()}


def test_every_setting_has_its_help_below_it() -> None:
    tree = ast.parse(Path(schema.__file__).read_text())
    for section in [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "RunConfig"]:
        for field, following in zip(section.body, section.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign):
                is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert is_text, f"{section.name}.{ast.unparse(field.target)}"
