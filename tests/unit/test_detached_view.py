"""What a run shows is never in its way."""

import errno
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import pytest
import typer

from spare_megatron.cli import progress as progress_module
from spare_megatron.cli.command import explained_errors
from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.cli.progress import DetachedView, RunProgress
from spare_megatron.commands import app
from spare_megatron.config.schema import RunConfig
from spare_megatron.machine.standard_streams import outlast
from spare_megatron.process.reports import Message


class ListView:
    """Keeps what it receives; waits first for as long as it is held."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.goes_on = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.taken.append("end")

    def on_event(self, event: object) -> None:
        self.goes_on.wait(60.0)
        self.taken.append(event)

    def refresh(self) -> None:
        pass


LONG = " ".join(["a sentence of many words"] * 20)


def shown(*, is_terminal: bool) -> list[str]:
    """The lines of a long text and of a table of two long cells."""
    file = io.StringIO()
    console = RunConsole(file=file, force_terminal=is_terminal)
    console.line(LONG)
    console.tables(Table(columns=("name", "value"), rows=[(LONG, LONG)]))
    return file.getvalue().splitlines()


def test_what_goes_to_a_file_is_neither_wrapped_nor_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, to 80 columns, in the logs of Slurm."""
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = shown(is_terminal=False)
    assert lines[0] == LONG
    assert len(lines) == 1 + 3, "a table of a head and a row"
    assert lines[3].count(LONG) == 2
    assert max(map(len, lines)) < 3 * len(LONG), "nothing is padded to the width of the console"
    assert len(shown(is_terminal=True)) > len(lines), "a terminal has an edge"


def test_a_width_that_is_asked_for_holds_without_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, shown(is_terminal=False))) <= 60


def test_everything_is_shown_in_its_order_by_the_end() -> None:
    view = ListView()
    view.goes_on.set()
    with DetachedView(view) as detached:
        for event in range(100):
            detached.on_event(event)
    assert view.taken == [*range(100), "end"]


def test_an_output_that_stalls_blocks_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "CLOSE_TIMEOUT_S", 0.01)
    view = ListView()
    with DetachedView(view) as detached:
        for event in range(10_000):
            detached.on_event(event)
    assert view.taken == []
    view.goes_on.set()


@pytest.mark.parametrize("is_terminal", [False, True], ids=["plain lines", "a live view"])
def test_a_full_disk_ends_the_lines_and_nothing_else(tmp_path: Path, *, is_terminal: bool) -> None:
    with open("/dev/full", "w") as full:
        console = RunConsole(file=outlast(full), force_terminal=is_terminal)
        with DetachedView(RunProgress(RunConfig(), console, tmp_path)) as progress:
            for number in range(3):
                progress.on_event(Message(text=f"starting: part {number}"))
        console.line("the end")


def test_a_full_disk_under_one_stream_leaves_the_other(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Progress goes to stderr where the summary goes to stdout as JSON."""
    with open("/dev/full", "w") as full:
        console = RunConsole(file=outlast(full))
        with DetachedView(RunProgress(RunConfig(), console, tmp_path)) as progress:
            progress.on_event(Message(text="starting: a test"))
    print("{}", flush=True)
    assert capfd.readouterr().out == "{}\n"


@contextmanager
def unread_pipe() -> Iterator[IO[str]]:
    """The writing end of a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        yield pipe


def test_a_reader_that_has_left_ends_the_lines_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Also where progress goes to stderr and the summary to stdout, which rich itself would have taken for closed."""
    with unread_pipe() as pipe:
        console = RunConsole(file=outlast(pipe), force_terminal=False)
        with DetachedView(RunProgress(RunConfig(), console, tmp_path)) as progress:
            progress.on_event(Message(text="starting: a test"))
        console.line("the end")
    print("{}", flush=True)
    print("others may", file=sys.stderr)
    assert capfd.readouterr() == ("{}\n", "others may\n")


def test_a_command_whose_reader_has_left_ends_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `spare status --watch RUN_DIR | head -1`, whatever the run goes on to do."""
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "driver.jsonl").touch()
    with suppress(BrokenPipeError), unread_pipe() as pipe, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", pipe)
        patched.setattr(sys, "stderr", sys.stderr)  # click replaces both
        with pytest.raises(SystemExit) as ended:
            app(["status", str(tmp_path)])
    assert ended.value.code == 1
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_breaks_is_reported(capfd: pytest.CaptureFixture) -> None:
    """It is the same error as that of a reader who has left."""
    with pytest.raises(typer.Exit) as ended, explained_errors("train"):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert ended.value.exit_code == 2
    assert "spare train" in capfd.readouterr().err
