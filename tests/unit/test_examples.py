"""Commands and settings on pages: the command line takes them, their configurations can run, and results are these."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config import schema
from spare_megatron.config.loader import load_run_config, shipped_presets
from spare_megatron.driver.planned_faults import resolve_trace
from tests.unit.test_readme import PAGES, ROOT, settings

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[A-Z]|i|GROUP")
"""What stands for a number in a command on a page."""
PLACEHOLDERS = {"CONFIG", "PRESET", "RUN_DIR/config.toml", "IMPORTED/config.toml"}


def words_of(line: str) -> list[str]:
    """Arguments of a command as a page writes it: `[--json]` may be left out, and `...` stands for more."""
    words = [word if "=" in word else word.strip("[]") for word in shlex.split(line, comments=True)]
    return ["1" if NUMBER.fullmatch(word) else word for word in words if word != "..."]


def commands(page: Path) -> Iterator[list[str]]:
    """Those in blocks; of `spare check | audit RUN_DIR` both."""
    blocks = [block for language, block in BLOCK.findall(page.read_text()) if language != "toml"]
    for line in re.sub(r"\\\n\s*", " ", "".join(blocks)).splitlines():
        if found := re.search(r"(?:^|&& )spare ((?:[\w-]+ \| )*)([\w-].*)", line):
            name, *rest = words_of(found[2])
            yield from ([other, *rest] for other in [*re.findall(r"[\w-]+", found[1]), name])


def mentions(page: Path) -> Iterator[list[str]]:
    """Those in the text, which may be incomplete."""
    yield from map(words_of, re.findall(r"`spare ([a-z][^`]*)`", BLOCK.sub("", page.read_text())))


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command with these words, and its arguments."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def parsed(words: list[str]) -> dict[str, Any]:
    """Parameters of the command; its error if it does not take them."""
    command, arguments = command_of(words)
    with suppress(typer.Exit):  # --help and --version
        return dict(command.make_context("spare", list(arguments)).params)
    return {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_are_taken_and_their_configurations_can_run(page: Path) -> None:
    for words in commands(page):
        parameters = parsed(words)
        preset = str(parameters.get("preset") or parameters.get("config") or "")
        if not preset or words[0] == "simulate":
            continue
        assert preset in {*PLACEHOLDERS, *shipped_presets()} or (ROOT / preset).is_file(), words
        file = "demo_cpu" if preset in PLACEHOLDERS else preset if preset in shipped_presets() else str(ROOT / preset)
        options = [word for text in parameters.get("overrides") or () for word in ("--set", text)]
        result = CliRunner().invoke(app, ["config", "show", file, *options])
        assert result.exit_code == 0, f"{words}: {result.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_of_a_page_are_there_with_their_options(page: Path) -> None:
    for words in mentions(page):
        command, arguments = command_of(words)
        takes = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in arguments if word.startswith("--")} <= takes | {"--help"}, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_the_text_of_a_page_are_there(page: Path) -> None:
    keys = {*settings(schema.RunConfig), "metrics.jsonl", "spare.redundency"}  # a file, and an example of a mistake
    sections = "|".join({key.partition(".")[0] for key in keys if "." in key})
    code = " ".join(re.findall(r"`([^`]+)`", BLOCK.sub("", page.read_text())))
    named = re.findall(rf"(?<![\w/.])(?:{sections})\.[a-z_0-9]+(?![\w./(])", code)
    assert [key for key in named if key not in keys] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "RESULTS.md"], ids=lambda page: page.name)
def test_benchmarks_on_a_page_have_these_options(page: Path) -> None:
    """Not those of RESULTS.md, which were run at the commits that it names."""
    for file, options in re.findall(r"`(benchmarks/[a-z_/]+\.py) ([^`]+)`", page.read_text()):
        source = (ROOT / file).read_text()
        for option in re.findall(r"(?<!\S)--([a-z-]+)", options):
            name = option.replace("-", "_")
            assert re.search(rf'"--{option}"|^    {name}: ', source, re.MULTILINE), f"{file} --{option}"


def test_the_widths_that_are_shown_are_those_that_the_command_prints() -> None:
    page = ROOT / "docs/large_models.md"
    (words,) = [words for words in commands(page) if words[0] == "plan"]
    (shown,) = [block for _, block in BLOCK.findall(page.read_text()) if block.startswith("lanes ")]
    assert shown in CliRunner().invoke(app, words).output


def test_the_picture_of_the_demo_has_its_faults_and_each_step_has_all_microbatches() -> None:
    config = load_run_config(shipped_presets()["demo_cpu"]).config
    picture = re.findall(r"^(?:step|group \d) +(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    rows = [line.replace("...", "").split() for line in picture]
    total = config.layout.num_groups * config.spare.microbatches_per_shard
    for step, *cells in zip(*rows, strict=True):
        struck = [fault.group for fault in resolve_trace(config) if fault.step == int(step)]
        assert [group for group, cell in enumerate(cells) if cell == "KILL"] == struck
        assert sum(int(part) for cell in cells if cell != "KILL" for part in cell.split("+")) == total
