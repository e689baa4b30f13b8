"""How commands tell a user what is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def explained_errors(command: str) -> Iterator[None]:
    """Turns what a user can fix into one message on stderr and exit code 2, without a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"spare {command}: {error}", err=True)
        raise typer.Exit(2) from error
