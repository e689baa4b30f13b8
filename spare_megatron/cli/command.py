"""What all commands have in common: help as plain text with the terms that they print, errors that a user can fix, and
paths that are paths.
"""

import inspect
import re
import select
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from functools import wraps
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from spare_megatron.cli.printing import message, say
from spare_megatron.config.object_stores import refusal_of_address
from spare_megatron.formats.output import real_paths
from spare_megatron.machine import interrupts

TERMS: Mapping[str, str] = {
    "group": "a data-parallel replica of the model: TP x CP x PP ranks, or several lanes; lost and started as one",
    "shard": "a part of the global batch: m microbatches. There are as many as groups at the start",
    "microbatch": "the unit of compute, train.micro_batch_size sequences; it moves to another group when one is lost",
    "host": "of a shard: a group that can read its data and may compute it; each shard has spare.redundancy hosts",
    "stack": "the shards that a group hosts",
    "owner": "of a microbatch: the one host that computes it in this step",
    "load": "the microbatches that one group is dealt in a step; step lines have the largest, which a step waits for",
    "pace": "a group's time for a microbatch; slow groups get a smaller load",
    "lane": "one of the replicas that a wide group consists of (layout.data_parallel); they share work and state",
    "step": "numbered from 0: step 19 (20/60) is the step with which 20 of 60 are committed; after 20 steps: 20 are",
    "attempt": "one try to sum the gradients of a step over the groups and to commit it; counted from 0 over the run",
    "commit": "the decision that a step counts; only then do parameters change",
    "patch": "the microbatches that a lost group still owed in the step, computed by its survivors",
    "epoch": "of communicators: the number of the set of groups that take part; grows with each loss and return",
    "log": "the list of decisions in the control store that all groups follow",
    "fence": "the entry of the log that declares a group lost; nothing that it still does counts",
    "incarnation": "how often a group was started again: 0 for its first processes",
    "rejoin": "a group that was lost takes part again, with the state copied from another one",
    "drain": "a group leaves at the end of a step, as asked, and nothing is computed again",
    "re-form": "to make whole groups out of the machines of broken ones",
    "place": "the ranks that stand together on a machine; a machine may take another place",
    "quarantine": "a machine that computed wrongly, or slowly, gets no place before an examination passes",
    "audit": "a microbatch that two groups compute, whose bits are compared before the commit",
    "state partition": "a part of the optimizer's state that a few groups hold (optimizer.sharding=stacked)",
    "pause": "a shard has no host left, and the other groups wait for one",
    "wipe-out": "no group, or no host of a state partition, is left: only a checkpoint or snapshot helps",
    "goodput": "the share of the time that steps would have taken without incidents",
    "quiet step": "the median step with all groups and no fault",
    "scatter": "lost time without a known cause: what steps took beyond a quiet one",
}
"""A line for each, in the help of commands that use it and in docs/how_it_works.md."""


def explained(*terms: str) -> str:
    """The end of the help of a command that uses these terms."""
    lines = "\n".join(f"- {term}: {TERMS[term]}" for term in terms)
    return f"Terms; docs/how_it_works.md has all:\n\n{lines}" if terms else ""


@contextmanager
def explained_errors(command: str) -> Iterator[None]:
    """Turns errors a user can fix into one message on stderr and exit code 2, and Ctrl-C into exit code 130."""
    interrupts.name_command(command)
    try:
        yield
    except MemoryError as error:
        message(command, f"this machine has too little memory for it: {error}")
        raise typer.Exit(2) from error
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and not _has_reader(sys.stdout):
            raise  # click exits silently
        message(command, real_paths(str(error)))
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        message(command, "interrupted")
        raise typer.Exit(interrupts.INTERRUPTED) from None


def _has_reader(stream: IO[str]) -> bool:
    poll = select.poll()
    poll.register(stream, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def do_each(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs all tasks even if some fail. ValueError: several failed; the text lists every reason. A single failure is
    raised as it is, and a BrokenPipeError only if nothing else failed.
    """
    failures: list[ValueError | OSError | MemoryError] = []
    for task in tasks:
        try:
            task()
        except (ValueError, OSError, MemoryError) as error:
            failures.append(error)
    failed = [error for error in failures if not isinstance(error, BrokenPipeError)] or failures[:1]
    if len(failed) > 1:
        raise ValueError("; ".join(str(error) for error in failed))
    if failed:
        raise failed[0]


T = TypeVar("T")


def option(
    text: str,
    *names: str,
    default: Any = None,
    shown: bool | str = True,
    metavar: str | None = None,
    least: int | None = None,
) -> Any:
    """A dataclass field that becomes a command option with this help. `shown`: the default as the help shows it;
    `least`: its minimum.
    """
    parameter = typer.Option(*names, help=text, show_default=shown, metavar=metavar, min=least)
    return field(default=default, metadata={"parameter": parameter})


def same_option(options: type[Any], name: str) -> Any:
    """The field of an option that another command's options have, too."""
    one = next(one for one in fields(options) if one.name == name)
    return field(default=one.default, metadata=one.metadata)


def with_options(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Decorates a function of one dataclass as a command. Each field is an `option` or has typer's annotation."""
    hints = get_type_hints(options, include_extras=True)
    listed: Any = fields(options)  # type: ignore[arg-type]
    parameters = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[hints[one.name], *one.metadata.values()] if one.metadata else hints[one.name],
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in listed
    ]

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            command(options(**given))

        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


class SpareCommand(TyperCommand):
    """A command that explains errors, and refuses addresses of object stores in the place of paths."""

    def invoke(self, ctx: Any) -> Any:
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            for path in value if isinstance(value, list | tuple) else [value]:
                if isinstance(path, str | Path) and (reason := refusal_of_address(str(path))):
                    address = re.sub(":/+", "://", str(path), count=1)
                    raise typer.BadParameter(f"{address}: {reason}", ctx=ctx, param_hint=parameter.opts[0])
        with explained_errors(_name_of(ctx)):
            return super().invoke(ctx)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (named by the library)
        _write(formatter, self.help or "")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        _write(formatter, self.epilog or "")


def _write(formatter: Any, help_text: str) -> None:
    """Writes paragraphs, and lists with a line for each item."""
    for paragraph in inspect.cleandoc(help_text).split("\n\n") if help_text else ():
        formatter.write_paragraph()
        for text in re.split(r"\n(?=- )", paragraph):
            hanging = " " * (4 if text.startswith("- ") else 2)
            text = " ".join(text.split())
            filled = textwrap.fill(text, formatter.width, initial_indent="  ", subsequent_indent=hanging)
            formatter.write(f"{filled}\n")


class SpareGroup(TyperGroup):
    """The commands under their headings."""

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Runs a command; unless `standalone_mode` is off, ends this process with its exit code."""
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except Exception as error:
            if not standalone_mode or not hasattr(error, "format_message"):
                raise
            code = _explain(error)
        if standalone_mode:
            sys.exit(code)
        return code

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            sections[command.rich_help_panel or "Commands"].append((name, command.get_short_help_str(formatter.width)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _name_of(ctx: Any) -> str:
    """The command, as in `checkpoint list`, however the program was started."""
    return str(ctx.command_path.removeprefix(ctx.find_root().command_path).strip())


def _explain(error: Any) -> int:
    """Prints what is wrong with the arguments, or the help if there are none; returns the exit code."""
    path = error.ctx.command_path if error.ctx is not None else "spare"
    if type(error).__name__ == "NoArgsIsHelpError":
        say(*error.format_message().split("\n"), err=True)
    else:
        message("" if error.ctx is None else _name_of(error.ctx), f"{error.format_message()} (see `{path} --help`)")
    return int(error.exit_code)
