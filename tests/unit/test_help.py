"""Help texts of `spare` at 80 columns."""

from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from spare_megatron.cli.main import app

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
