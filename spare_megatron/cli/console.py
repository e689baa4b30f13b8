"""The console of the commands: lines, tables, a live view and progress bars. No text is read as markup, and without a
terminal each line is as long as its text, unless COLUMNS is a width.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rich import box, table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

from spare_megatron.cli.printing import shown

_UNBROKEN_WIDTH = 1 << 20
"""Characters; wider than any line."""
_LEAST_WIDTH = 40
"""Less would leave out cells of tables; COLUMNS may be anything, such as 0."""
_BAR_WIDTH = 50
_ASCII_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""As `SIMPLE_HEAD`, which rich would replace by a box with bars between the columns."""

Pieces = Sequence[tuple[str, str]]
"""A line of texts, each with a style such as "bold red" for terminals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under heads, if there are `columns`. `has_numbers`: all columns but the first are aligned at their
    right ends.
    """

    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    title: str = ""
    caption: str = ""
    has_numbers: bool = False
    bold_row: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """What a live view shows: lines, and above them how many of `total` are done, if there are any."""

    lines: Sequence[str | Pieces]
    done: int = 0
    total: int = 0


class RunConsole:
    """Prints to a file, by default stdout. Raises BrokenPipeError if the reader of a pipe has gone."""

    def __init__(
        self, *, file: IO[str] | None = None, stderr: bool = False, force_terminal: bool | None = None
    ) -> None:
        stream = file or (sys.stderr if stderr else sys.stdout)
        is_terminal = stream is not None and stream.isatty() if force_terminal is None else force_terminal
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() else 0
        if width or (columns and is_terminal):
            width = max(width, _LEAST_WIDTH)
        elif not is_terminal:
            width = _UNBROKEN_WIDTH
        self._console = _Console(
            file=file,
            stderr=stderr,
            force_terminal=is_terminal,
            width=width or None,
            markup=False,
            emoji=False,
            highlight=False,
        )

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    @property
    def file(self) -> IO[str]:
        return self._console.file

    def line(self, text: str, style: str = "") -> None:
        self._console.print(self._text(text, style))

    def tables(self, *tables: Table) -> None:
        """Prints tables, with an empty line between them."""
        for index, one in enumerate(tables):
            if index:
                self._console.print()
            self._console.print(_Trimmed(self._drawn(one)))

    @contextlib.contextmanager
    def live(self) -> Iterator[Callable[[LiveView], None]]:
        """On a terminal the function shows a view below all lines, in the place of the one before."""
        if not self.is_terminal:
            yield lambda _: None
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            yield lambda view: live.update(self._drawn_view(view), refresh=True)

    @contextlib.contextmanager
    def bar(self, what: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
        """On a terminal the function sets how many of `total` are done, and the text beside the bar."""
        if not self.is_terminal:
            yield lambda *_: None
            return
        left, right = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("fields[what]", "description"))
        columns = (left, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), right)
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=total, completed=done, what=what)
            yield lambda done, text: progress.update(task, completed=done, description=shown(text, self.file))

    def _text(self, text: str, style: str = "") -> Text:
        return Text(shown(text, self.file), style)

    def _drawn(self, one: Table) -> table.Table:
        drawn = table.Table(
            title=self._text(one.title) if one.title else None,
            caption=self._text(one.caption) if one.caption else None,
            title_justify="left",
            caption_justify="left",
            show_header=bool(one.columns),
            box=_ASCII_HEAD if self._console.options.ascii_only else box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for index in range(max(map(len, (one.columns, *one.rows)), default=0)):
            head = self._text(one.columns[index]) if one.columns else ""
            drawn.add_column(head, justify="right" if one.has_numbers and index else "left", overflow="fold")
        for index, row in enumerate(one.rows):
            drawn.add_row(*map(self._text, row), style="bold" if index == one.bold_row else None)
        return drawn

    def _drawn_view(self, view: LiveView) -> table.Table:
        drawn = table.Table.grid()
        if view.total:
            drawn.add_row(ProgressBar(total=view.total, completed=view.done, width=_BAR_WIDTH))
        for line in view.lines:
            pieces = [(line, "")] if isinstance(line, str) else line
            drawn.add_row(Text.assemble(*(self._text(*piece) for piece in pieces)))
        return drawn


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises; rich would exit."""
        raise BrokenPipeError(errno.EPIPE, "its reader has left")


class _Trimmed:
    """A table whose lines end where their text ends."""

    def __init__(self, drawn: table.Table) -> None:
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._drawn, options, pad=False):
            while line and not line[-1].text.rstrip(" "):
                line.pop()
            if line:
                text, style, _ = line.pop()
                line.append(Segment(text.rstrip(" "), style))
            yield from line
            yield Segment.line()
