"""Help texts of `spare` at 80 columns; addresses of object stores are refused in the place of paths."""

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from spare_megatron.cli.command import TERMS, SpareCommand
from spare_megatron.commands import app
from spare_megatron.config.checks.validate import problems
from spare_megatron.config.loader import ConfigError, load_run_config, settings
from spare_megatron.config.object_stores import refusal_of_address
from tests.unit.configured import CPU, configured

LONGEST_SUMMARY = 64
"""What `spare --help` shows beside the longest name of a command without wrapping."""


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*prefix, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))  # type: ignore[arg-type]


COMMANDS = dict(commands(typer.main.get_command(app)))  # type: ignore[arg-type]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_each_command_has_a_summary_of_one_line_and_help_for_every_option(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    summary = (command.help or "").split("\n\n")[0]
    assert summary.endswith(".")
    assert "\n" not in summary
    assert len(summary) <= LONGEST_SUMMARY
    assert all(getattr(parameter, "help", "") for parameter in command.params)


def test_text_in_brackets_is_not_taken_for_markup() -> None:
    """Rich markup dropped "[faults]" from the help of a command."""
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert "[default: runs/NAME-TIME]" in result.output


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_plain_text_of_80_columns(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "FORCE_COLOR": "1"}).output
    assert shown.isascii()
    assert "\x1b" not in shown
    assert [line for line in shown.splitlines() if len(line) > 80 or line != line.rstrip()] == []


@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if not hasattr(COMMANDS[words], "commands")], ids=" ".join
)
def test_each_command_is_one_that_refuses_addresses_of_object_stores(words: tuple[str, ...]) -> None:
    assert isinstance(COMMANDS[words], SpareCommand)


@pytest.mark.parametrize(
    ("words", "terms"),
    [("train", {"load", "scatter", "step"}), ("status", {"load", "scatter"}), ("check", {"epoch", "attempt"})],
)
def test_help_explains_terms_that_the_command_prints(words: str, terms: set[str]) -> None:
    shown = " ".join(CliRunner().invoke(app, [words, "--help"]).output.split())
    assert [term for term in terms if f"- {term}: {TERMS[term]}" not in shown] == []


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["train", "--nope"], "No such option: --nope"),
        (["train", "a", "b"], "unexpected extra argument"),
        (["trian"], "No such command 'trian'"),
        (["status"], "Missing argument"),
        (["plan", "--groups", "[bold]x"], "valid integer"),
        (["config", "show", "[/]", "--sett"], "No such option: --sett"),
    ],
)
def test_a_wrong_argument_is_one_line(words: list[str], wrong: str) -> None:
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert wrong in result.stderr
    assert result.stderr.startswith("spare")
    assert "--help`)" in result.stderr


HINT = "s3:// is not read or written: name a path of a mounted file system"
LEAVES = {words: command for words, command in COMMANDS.items() if not hasattr(command, "commands")}


def texts_of(command: Any) -> set[str]:
    """Names of the parameters that are paths or free text."""
    written = inspect.unwrap(command.callback, stop=lambda function: hasattr(function, "__signature__"))
    hints = typing.get_type_hints(written)
    return {name for name, hint in hints.items() if re.search(r"\b(Path|str)\b", str(hint))}


PARAMETERS = [
    (words, parameter)
    for words, command in LEAVES.items()
    for parameter in command.params
    if parameter.name in texts_of(command)
]


def test_almost_every_command_takes_a_path() -> None:
    assert len({words for words, _ in PARAMETERS}) > len(LEAVES) - 5


@pytest.mark.parametrize(
    ("words", "parameter"), PARAMETERS, ids=lambda value: getattr(value, "name", None) or " ".join(value)
)
def test_every_path_of_every_command_is_refused_in_one_line(words: tuple[str, ...], parameter: Any) -> None:
    given: list[str] = []
    for one in LEAVES[words].params:
        if one is parameter or one.required:
            value = "s3://bucket/a" if one is parameter else "hf" if "--format" in one.opts else "1"
            given += [one.opts[-1], value] if one.param_type_name == "option" else [value]
    result = CliRunner().invoke(app, [*words, *given])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert f"s3://bucket/a: {HINT}" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_every_setting_that_is_text_is_refused() -> None:
    """Those that take no text of this kind are refused for that."""
    found = {}
    for key, value in settings(configured()):
        if not isinstance(value, str):
            continue
        try:
            config = configured(f"{key}=s3://bucket/a")
        except ConfigError:
            continue
        found[key] = [text for text in problems(config, CPU) if HINT in text]
    assert {"data.corpus", "data.cache", "checkpoint.folder", "checkpoint.load", "program.file"} <= set(found)
    assert [key for key, texts in found.items() if len(texts) != 1] == []


@pytest.mark.parametrize(
    "setting",
    [
        'data.blend=[{corpus="s3://bucket/a", weight=1}]',
        'data.validation=[{name="v", corpus="s3://bucket/a"}]',
    ],
)
def test_corpora_of_blends_and_validation_sets_are_refused(setting: str) -> None:
    corpus = "data.corpus=" if "blend" in setting else "data.corpus=c"
    found = problems(load_run_config(None, [corpus, "eval.every_steps=5", setting]).config, CPU)
    assert [text for text in found if HINT in text]


def test_a_preset_and_what_it_includes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('include = ["s3://bucket/a.toml"]\n')
    for preset in (Path("s3://bucket/a.toml"), tmp_path / "mine.toml"):
        with pytest.raises(ConfigError, match="s3:// is not read or written"):
            load_run_config(preset)


@pytest.mark.parametrize(
    "path", ["S3://b/a", "s3:/b/a", "hf:gs://b/a", "hdfs://n/a", "az://c/a", "abfss://c@a/b", "https://h/a"]
)
def test_addresses_of_all_kinds_are_known_also_as_a_path_shortens_them(path: str) -> None:
    assert "is not read or written" in refusal_of_address(path)
    assert "is not read or written" in refusal_of_address(str(Path(path)))


def test_paths_that_only_look_like_addresses_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    assert [
        path for path in ("s3:/a", "runs/s3", "a/s3://b", "gs", "hf:/m", "x-s3://a") if refusal_of_address(path)
    ] == []
