"""Help texts of `spare` at 80 columns."""

from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from spare_megatron.cli.command import TERMS, SpareCommand
from spare_megatron.commands import app

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
