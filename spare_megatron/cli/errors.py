"""How commands report errors to a user."""

import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import typer

from spare_megatron.cli.printing import message
from spare_megatron.formats.output import real_paths
from spare_megatron.machine import interrupts


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


def _has_reader(stream: IO[str]) -> bool:
    poll = select.poll()
    poll.register(stream, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))
