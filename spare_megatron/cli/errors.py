"""How commands tell a user what is wrong."""

import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import typer

from spare_megatron.process import interrupts


@contextmanager
def explained_errors(command: str) -> Iterator[None]:
    """Turns what a user can fix into one message on stderr and exit code 2, without a traceback; Ctrl-C into 130."""
    interrupts.name_command(command)
    try:
        yield
    except MemoryError as error:
        typer.echo(f"spare {command}: this machine has too little memory for it: {error}", err=True)
        raise typer.Exit(2) from error
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and not _has_reader(sys.stdout):
            raise  # click ends the program without a word
        typer.echo(f"spare {command}: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo(f"spare {command}: interrupted", err=True)
        raise typer.Exit(interrupts.INTERRUPTED) from None


def do_each(tasks: Sequence[Callable[[], None]]) -> None:
    """Does all of these, whatever becomes of the others: a full disk costs a file, and not the figures as well.

    Raises:
        ValueError: Several could not be done; the text has every reason.
        OSError: One could not be done, or nobody reads what is printed any more. Or whatever else that one raises.
    """
    failures: list[ValueError | OSError | MemoryError] = []
    for task in tasks:
        try:
            task()
        except (ValueError, OSError, MemoryError) as error:
            failures.append(error)
    told = [error for error in failures if not isinstance(error, BrokenPipeError)] or failures[:1]
    if len(told) > 1:
        raise ValueError("; ".join(str(error) for error in told))
    if told:
        raise told[0]


def _has_reader(stream: IO[str]) -> bool:
    """Whether what is written to the stream may still be read by somebody, where it is a pipe."""
    poll = select.poll()
    poll.register(stream, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))
