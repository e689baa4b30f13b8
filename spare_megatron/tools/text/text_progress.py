"""Progress of commands that read text: a bar on a terminal, otherwise a line for every tenth; on stderr."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from spare_megatron.cli.console import RunConsole
from spare_megatron.formats.quantities import format_bytes


class TextProgress:
    """How much of the files was read, tokens per second, and the time left. A context manager around the work."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._num_bytes = sum(path.stat().st_size for path in paths)
        self._num_read = self._num_tokens = 0
        self._began_s = time.monotonic()
        self._console = RunConsole(stderr=True)
        self._shown = ExitStack()

    def __enter__(self) -> Self:
        self._update = self._shown.enter_context(self._console.bar("reading", self._num_bytes))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.close()

    def advance(self, num_bytes: int, num_tokens: int = 0) -> None:
        tenths = self._tenths()
        self._num_read += num_bytes
        self._num_tokens += num_tokens
        self._update(self._num_read, self._rate())
        if self._tenths() > tenths and not self._console.is_terminal:
            left_s = (time.monotonic() - self._began_s) * (self._num_bytes / max(self._num_read, 1) - 1)
            read = f"read {format_bytes(self._num_read)} of {format_bytes(self._num_bytes)}"
            self._console.line(f"{read}, {self._rate()}, {max(left_s, 0.0):.0f} s left")

    def _tenths(self) -> int:
        return self._num_read * 10 // max(self._num_bytes, 1)

    def _rate(self) -> str:
        """In tokens if there are any yet: a tokenizer in training makes none."""
        spent_s = max(time.monotonic() - self._began_s, 1e-9)
        if self._num_tokens:
            return f"{self._num_tokens / spent_s:.3g} tokens/s"
        return f"{format_bytes(self._num_read / spent_s)}/s"
