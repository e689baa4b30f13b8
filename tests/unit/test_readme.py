"""What the documentation says against what is there, so that it stays true."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import spare_megatron.config.schema as schema
import spare_megatron.config.schema_sections as schema_sections
import spare_megatron.config.schema_sites as schema_sites
from spare_megatron.cli.command import TERMS
from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.loader import load_run_config
from spare_megatron.core.log.entries import Entry
from spare_megatron.faults import kinds
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import KINDS
from tests.matrix.cells import CELLS, MEMBERSHIP_CELLS, PAUSE_CELLS, REFORM_CELLS
from tests.protocol.test_histories import HISTORIES, NUM_SHORTAGE_HISTORIES
from tests.stages.cells import CELLS as STAGE_CELLS

ROOT = Path(__file__).parents[2]
SETTINGS, CAMPAIGNS, JOURNAL, RUNBOOK = (
    ROOT / f"docs/{page}.md" for page in ("settings", "campaigns", "journal", "runbook")
)
VALUES = r"\.\.\.|\[[^]]*\]|\(\.\.\.\)|\b[0-9.]+\b|SIG[A-Z]+|[a-z]+\.[a-z_]+=?"
"""What stands for a value in a message on a page."""
PAGES = [ROOT / "README.md", ROOT / "benchmarks/RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def settings(kind: type[Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> default of every setting below a section."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = f"{field.name.capitalize()}Config"
        section = getattr(schema, name, getattr(schema_sections, name, None))
        if section is not None and prefix == "":
            found |= settings(section, f"{field.name}.")
        elif field.name != "megatron":
            found[prefix + field.name] = field.default
    return found


def rows() -> dict[str, tuple[str, str]]:
    """Setting -> default and meaning as the table has them."""
    found = re.findall(r"^\| `([a-z_]+(?:\.[a-z0-9_]+)?)` \| (.*?) \| (.*) \|$", SETTINGS.read_text(), re.MULTILINE)
    return {key: (default, meaning) for key, default, meaning in found}


def as_text(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if default in ("", ()):
        return "empty"
    return str(list(default) if isinstance(default, tuple) else default)


def sections_in_source() -> dict[str, ast.ClassDef]:
    files = (Path(module.__file__) for module in (schema, schema_sections, schema_sites))
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def helps() -> dict[str, str]:
    """Setting -> the string below its field in the schema."""
    sections = sections_in_source()

    def of(name: str, prefix: str) -> Iterator[tuple[str, str]]:
        body = sections[name].body
        for field, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign):
                continue
            kind = ast.unparse(field.annotation)
            if kind in sections:
                yield from of(kind, f"{ast.unparse(field.target)}.")
            elif isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                yield f"{prefix}{ast.unparse(field.target)}", " ".join(str(following.value.value).split())

    return {key: text for key, text in of("RunConfig", "") if key != "megatron"}


def test_every_setting_is_listed_with_its_default_and_help() -> None:
    defaults, texts = settings(schema.RunConfig), helps()
    assert rows() == {key: (as_text(default), texts.get(key)) for key, default in defaults.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.is_file(), f"{page.name} -> {target}"
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if file.suffix == ".md" else []
        assert heading in {"", *(text.lower().replace(" ", "-") for text in headings)}, f"{page.name} #{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    text, package = page.read_text(), ROOT / "spare_megatron"
    named = re.findall(r"`((?:benchmarks|configs|tests|launch)/[a-z0-9_/.]+\.(?:py|toml|sh))", text)
    folders = "|".join(folder.name for folder in package.iterdir() if folder.is_dir())
    modules = re.findall(rf"`((?:{folders})/[a-z0-9_/]+\.py)", text)
    below = re.findall(r"`((?:unit|integration|gpu)/test_[a-z0-9_]+\.py)`", text)
    places = [*map(ROOT.joinpath, named), *map(package.joinpath, modules), *map((ROOT / "tests").joinpath, below)]
    assert [str(place) for place in places if not place.exists()] == []


def test_names_behind_a_file_are_in_it_and_planted_bugs_are_planted() -> None:
    text = "".join(page.read_text() for page in PAGES)
    folders = (ROOT / "spare_megatron", ROOT, ROOT / "tests")
    for file, names in re.findall(r"`([a-z_0-9/]+/[a-z_0-9]+\.py)`\s+\(((?:`[\w.]+`[,\s]*)+)", text):
        source = next(folder / file for folder in folders if (folder / file).exists()).read_text()
        for name in re.findall(r"\w+(?=`)", names):
            assert re.search(rf"\b{name}\b", source), f"{file}: {name}"
    planted = "".join(file.read_text() for file in (ROOT / "tests/protocol").glob("mutations*.py"))
    for bug in re.findall(r'"([^"]+)"', "".join(re.findall(r"Planted bugs?:((?:\s*\"[^\"]+\",?)+)", text))):
        assert f'"{" ".join(bug.split())}":' in planted, bug


def test_how_it_works_has_the_actions_of_a_step_in_their_order() -> None:
    source = (ROOT / "spare_megatron/rank/train_step.py").read_text()
    (step,) = re.findall(r"^def train_step\(.*?^def ", source, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`[A-Z].*?) \|", (ROOT / "docs/how_it_works.md").read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", "".join(rows)) == re.findall(r"actions\.(\w+)\(\)", step)


def test_figures_of_the_readme_say_how_they_were_made() -> None:
    made = r"^\| (?:measured|simulated)\b.*\| .*`.*\b[0-9a-f]{7,8}\b.*\b20\d\d-\d\d-\d\d.* \|$"
    assert len(re.findall(made, (ROOT / "README.md").read_text(), re.MULTILINE)) == 8


def test_the_preset_that_is_shown_can_run_where_there_are_gpus(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", SETTINGS.read_text(), re.DOTALL)
    (tmp_path / "mine.toml").write_text(text)
    config = load_run_config(tmp_path / "mine.toml").config
    assert problems(config, MachineResources(num_gpus=8, num_cores=8, has_corpus=True)) == []
    assert config.name == "mine"


def test_the_page_of_campaigns_has_every_kind_and_every_phase() -> None:
    """The schema sends readers who look for the kinds there, and half of them were on no page."""
    text = CAMPAIGNS.read_text().partition("## Faults")[2]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", text.partition("| `kind` |")[2], re.MULTILINE)) == set(kinds.KINDS)
    moments = "".join(re.findall(r"^\| (?:of a step|after a loss|between steps).*$", text, re.MULTILINE))
    assert set(re.findall(r"`([a-z_]+)`", moments)) - {"step"} == {str(phase) for phase in FaultPoint}


def test_the_page_of_the_journal_has_every_field_of_every_record_and_entry() -> None:
    tables = KINDS, {kind.__name__.lower(): kind for kind in get_args(Entry)}
    for text, found in zip(JOURNAL.read_text().split("## The decision log"), tables, strict=True):
        for name, kind in found.items():
            (row,) = re.findall(rf"^\| `{name}` \|.*$", text, re.MULTILINE)
            assert {field.name for field in dataclasses.fields(kind)} <= set(re.findall(r"`([a-z_0-9]+)`", row)), name


def test_messages_that_the_runbook_explains_are_those_of_the_program() -> None:
    """Values differ: pieces of three words and more between them have to be there."""
    constants = [
        node.value
        for file in (ROOT / "spare_megatron").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    written = "\n".join(constants)
    cells = re.findall(r"^\| (`[^|]*) \|", RUNBOOK.read_text().partition("## Reasons")[2], re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    pieces = [piece.strip(" ;:,") for message in messages for piece in re.split(VALUES, message)]
    phrases = [piece for piece in pieces if len(piece.split()) >= 3]
    assert len(phrases) > 20
    assert [piece for piece in phrases if piece not in written] == []


def features() -> dict[str, list[str]]:
    """Feature -> cells of its row beside other trainers: ours, three of others, and the tests."""
    text = (ROOT / "docs/compared.md").read_text().partition("## Features beside other trainers")[2]
    rows = re.findall(r"^\| ([^|*-][^|]*) \| (.*) \|$", text, re.MULTILINE)
    return {feature: [cell.strip() for cell in cells.split("|")] for feature, cells in rows}


def test_each_feature_that_we_have_names_a_test_that_is_there() -> None:
    assert len(features()) > 40
    for feature, (ours, *_, shown) in features().items():
        named = re.findall(r"`([^`]+)::(test_[a-z0-9_]+)`", shown)
        assert shown == ", ".join(f"`{file}::{test}`" for file, test in named), feature
        assert bool(named) == ours.startswith("Yes"), f"{feature}: {ours}, shown by {shown or 'nothing'}"
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{feature}: {file}::{test}"


def test_what_others_have_is_linked_or_was_not_found() -> None:
    text = (ROOT / "docs/compared.md").read_text()
    targets = dict(re.findall(r"^\[([a-z0-9-]+)\]: (https://\S+)$", text, re.MULTILINE))
    begins = {"m": "NVIDIA/Megatron-LM", "n": "NVIDIA-NeMo/Megatron-Bridge", "t": "pytorch/torchtitan"}
    for feature, (_, *others, _) in features().items():
        for begin, cell in zip(begins, others, strict=True):
            links = re.findall(r"\[[^]]+\]\[([a-z0-9-]+)\]", cell)
            assert cell == "not found" or re.fullmatch(r"(\[[^]]+\]\[[a-z0-9-]+\](, )?)+", cell), f"{feature}: {cell}"
            for name in links:
                assert re.fullmatch(rf"https://github.com/{begins[begin]}/blob/[0-9a-f]{{40}}/.+", targets[name]), name
    assert {name for name in targets if f"][{name}]" not in text} == set()


def test_the_page_of_terms_has_those_that_commands_explain() -> None:
    text = (ROOT / "docs/how_it_works.md").read_text().partition("## Terms")[2].partition("###")[0]
    assert dict(re.findall(r"^\| ([^|]+) \| (.*) \|$", text, re.MULTILINE)[2:]) == TERMS


def test_the_page_of_tests_counts_what_a_test_run_has() -> None:
    text = " ".join((ROOT / "docs/contributing.md").read_text().split())
    total = NUM_SHORTAGE_HISTORIES + sum(kind.num_histories for kind in HISTORIES.values())
    assert f"Every test run plays {total:,} histories" in text
    assert f"4 groups of 2 stages, {len(CELLS)} cells of" in text
    assert f"In {len(PAUSE_CELLS)} more cells both hosts" in text
    assert f"In {len(REFORM_CELLS)} more a machine of each host" in text
    assert f"In {len(MEMBERSHIP_CELLS)} more a group is killed in the step" in text
    assert f"Between steps there are {len(STAGE_CELLS)} more cells" in text
