"""Progress of commands that read text: a bar on a terminal, otherwise a line for every tenth; on stderr."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import typer

from spare_megatron.journal.quantities import format_bytes


class TextProgress:
    """How much of the files was read, tokens per second, and the time left. A context manager around the work."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._num_bytes = sum(path.stat().st_size for path in paths)
        self._num_read = self._num_tokens = 0
        self._began_s = time.monotonic()
        self._stack = ExitStack()
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        if self._is_terminal:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = self._stack.enter_context(Progress(*columns, console=Console(stderr=True)))
            self._task = self._bar.add_task("reading", total=self._num_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def advance(self, num_bytes: int, num_tokens: int = 0) -> None:
        tenths = self._tenths()
        self._num_read += num_bytes
        self._num_tokens += num_tokens
        if self._is_terminal:
            self._bar.update(self._task, completed=self._num_read, description=self._rate())
        elif self._tenths() > tenths:
            left_s = (time.monotonic() - self._began_s) * (self._num_bytes / max(self._num_read, 1) - 1)
            read = f"read {format_bytes(self._num_read)} of {format_bytes(self._num_bytes)}"
            typer.echo(f"{read}, {self._rate()}, {max(left_s, 0.0):.0f} s left", err=True)

    def _tenths(self) -> int:
        return self._num_read * 10 // max(self._num_bytes, 1)

    def _rate(self) -> str:
        """In tokens if there are any yet: a tokenizer in training makes none."""
        spent_s = max(time.monotonic() - self._began_s, 1e-9)
        if self._num_tokens:
            return f"{self._num_tokens / spent_s:.3g} tokens/s"
        return f"{format_bytes(self._num_read / spent_s)}/s"
