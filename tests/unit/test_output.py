"""Files that are written whole or not at all, and streams that are closed, full, slow or of another encoding."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pytest
import typer
from typer.testing import CliRunner

from spare_megatron.cli import progress as progress_module
from spare_megatron.cli.command import explained_errors
from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.cli.progress import DetachedView, RunProgress
from spare_megatron.commands import app
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig, DataConfig
from spare_megatron.driver import run
from spare_megatron.driver.run import start_run
from spare_megatron.formats import output
from spare_megatron.formats.output import NotWritten, named_errors, whole_file
from spare_megatron.machine.standard_streams import outlast
from spare_megatron.process.reports import Message
from spare_megatron.state.checkpoint.saver import with_folder
from tests.search_path import with_checkout
from tests.unit.tiny_corpus import write_tiny_corpus

FULL = "[Errno 28] No space left on device"


class FullDisk:
    """`Path.write_text` writes half of a text, and then the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write_text = Path.write_text

        def write_half(path: Path, text: str, *args: Any, **kwargs: Any) -> int:
            write_text(path, text[: len(text) // 2], *args, **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_text", write_half)


def test_a_file_takes_the_place_of_the_one_before_with_its_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(target)
    for text in ("first", "second"):
        with whole_file("--out", link) as file:
            file.write_text(text)
        assert target.read_text() == text
        target.chmod(0o640)
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html"]


@pytest.mark.parametrize("before", [None, "what was there"])
def test_what_fails_in_the_middle_leaves_what_was_there(
    tmp_path: Path, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    if before is not None:
        target.write_text(before)
    FullDisk(monkeypatch)
    with pytest.raises(NotWritten) as raised, whole_file("--out", target) as file:
        file.write_text("a new page")
    assert str(raised.value) == f"{FULL}: --out {target}: make room there, or choose another"
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if before is None else [before])


def test_what_is_no_plain_file_is_written_in_place(tmp_path: Path) -> None:
    """A rename would have put a file where the device was."""
    link = tmp_path / "page.html"
    link.symlink_to(os.devnull)
    with whole_file("--out", link) as file:
        file.write_text("page")
    assert Path(os.devnull).is_char_device()
    assert link.is_symlink()


def test_an_error_about_something_else_keeps_its_own_text(tmp_path: Path) -> None:
    other = tmp_path.parent / "other" / "document.txt"
    with pytest.raises(OSError, match="document") as raised, named_errors("--out", tmp_path / "page.html"):
        raise PermissionError(errno.EACCES, "Permission denied", str(other))
    assert not isinstance(raised.value, NotWritten)
    with (
        pytest.raises(NotWritten, match=r"Errno 13.*--out .*page.html: choose one that you may write"),
        named_errors("--out", tmp_path / "page.html"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))


def simulated(tmp_path: Path) -> Path:
    options = ("--preset", "paper_n200", "--set", "num_steps=3", "--seeds", "1", "--journal", str(tmp_path / "run"))
    result = CliRunner().invoke(app, ["simulate", *options])
    assert result.exit_code == 0, result.output
    return tmp_path / "run"


def test_a_report_that_the_disk_does_not_take_leaves_no_file_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty page was left, and the message had the error, and not its subject."""
    run_dir, page = simulated(tmp_path), tmp_path / "page.html"
    FullDisk(monkeypatch)
    result = CliRunner().invoke(app, ["report", str(run_dir), "--out", str(page)])
    assert result.exit_code == 2
    assert result.stderr == f"spare report: {FULL}: --out {page}: make room there, or choose another\n"
    assert not page.exists()


@pytest.mark.parametrize(
    ("fails", "settings", "named"),
    [
        ("write_with_exports", {}, "--run-dir {run}"),
        ("locked", {}, "--run-dir {run}"),
        ("second lock", {}, "--run-dir {run}/checkpoints"),
        ("second lock", {"folder": "{tmp}/kept"}, "checkpoint.folder {tmp}/kept"),
    ],
)
def test_a_run_that_cannot_write_its_folders_names_them_and_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, settings: dict[str, str], named: str
) -> None:
    paths = {"run": tmp_path / "run", "tmp": tmp_path}
    write_tiny_corpus(tmp_path / "corpus")
    settings = {key: value.format(**paths) for key, value in settings.items()}
    config = RunConfig(
        data=DataConfig(corpus=str(tmp_path / "corpus")), checkpoint=CheckpointConfig(interval_steps=1, **settings)
    )
    num_locked, locked = [], run.locked

    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lock(folder: Path) -> Any:
        num_locked.append(folder)
        return full() if fails == "locked" or (len(num_locked) == 2 and fails == "second lock") else locked(folder)

    monkeypatch.setattr(run, "preflight", lambda config: {})
    monkeypatch.setattr(run, "locked", lock)
    if fails == "write_with_exports":
        monkeypatch.setattr(run, fails, full)
    with pytest.raises(NotWritten) as raised:
        start_run(config, tmp_path / "run", lambda event: None)
    assert str(raised.value).startswith(f"{FULL}: {named.format(**paths)}: make room there")


def test_the_note_beside_a_corpus_names_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, prefix = tmp_path / "text.txt", tmp_path / "corpus"
    text.write_text("text")
    FullDisk(monkeypatch)
    result = CliRunner().invoke(app, ["preprocess", "--input", str(text), "--output-prefix", str(prefix)])
    assert result.exit_code == 2, result.output
    assert f"{FULL}: --output-prefix {prefix}: make room there" in result.stderr
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        (f"OSError: {FULL}", f"OSError: {FULL}: checkpoint.folder /kept"),
        (f"OSError: {FULL}: '/kept/.step-00000004'", f"OSError: {FULL}: '/kept/.step-00000004'"),
        ("group 1 was lost", "group 1 was lost"),
    ],
)
def test_a_failed_save_names_its_folder(reason: str, named: str) -> None:
    assert with_folder(reason, Path("/kept")) == named


def test_remedies_are_for_the_error() -> None:
    path = Path("/there/file")
    assert str(NotWritten(OSError(errno.EIO, "Input/output error"), "--out", path)).endswith(": choose another")
    assert str(output.NotWritten(OSError("odd"), "--out", path)) == "odd: --out /there/file: choose another"


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


CLOSED = [some for number in range(1, 4) for some in combinations((0, 1, 2), number)]
REPORT = """
import json, os, sys
from spare_megatron.machine import standard_streams
standard_streams.open_closed()
opened = os.open("/dev/zero", os.O_RDONLY)
kinds = [os.path.samestat(os.fstat(number), os.stat(os.devnull)) for number in range(3)]
inherited = [os.get_inheritable(number) for number in range(3)]
with standard_streams.outlasting():
    print("to stdout")
    print("to stderr", file=sys.stderr)
json.dump([opened, kinds, inherited, sys.stdin.read(1)], open(sys.argv[1], "w"))
"""


def run_with(
    streams: Callable[[], None], code: str, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program whose standard streams are changed just before it begins."""
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": with_checkout(), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="latin-1",
        timeout=100,
        check=False,
        preexec_fn=streams,
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_closed_descriptors_are_opened_on_nothing_before_another_file_takes_their_numbers(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    done = run_with(close, REPORT, str(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    opened, kinds, inherited, read = json.loads((tmp_path / "report").read_text())
    assert opened > 2
    assert [number for number in closed if not kinds[number]] == []
    assert inherited == [True] * 3
    assert read == ""
    assert done.stdout == ("" if 1 in closed else "to stdout\n")
    assert done.stderr == ("" if 2 in closed else "to stderr\n")


BOTH = "print('to stdout'); print('to stderr', file=sys.stderr)"
OUTLASTING = f"""
import sys
from spare_megatron.machine import standard_streams
standard_streams._PATIENCE_S = 0.1
standard_streams.open_closed()
with standard_streams.outlasting():
    {BOTH}
    {BOTH}
sys.exit(7)
"""


def onto(file: str) -> Callable[[], None]:
    def change() -> None:
        opened = os.open(file, os.O_WRONLY)
        os.dup2(opened, 1)
        os.dup2(opened, 2)

    return change


def without_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


def full(writer: int) -> None:
    os.set_blocking(writer, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * size)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


def full_and_not_blocking() -> None:
    _, writer = os.pipe()
    full(writer)


def of_a_reader_that_has_stopped() -> None:
    reader, writer = os.pipe()
    os.dup2(reader, 0)  # keeps it open
    full(writer)
    os.set_blocking(writer, True)


def of_a_terminal_that_has_stopped() -> None:
    ours, theirs = os.openpty()
    os.dup2(ours, 0)
    full(theirs)
    os.set_blocking(theirs, True)


def of_a_terminal_that_is_gone() -> None:
    ours, theirs = os.openpty()
    os.close(ours)
    os.dup2(theirs, 1)
    os.dup2(theirs, 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "streams",
    [
        onto("/dev/full"),
        without_reader,
        full_and_not_blocking,
        of_a_reader_that_has_stopped,
        of_a_terminal_that_has_stopped,
        of_a_terminal_that_is_gone,
        onto("/dev/null"),
    ],
)
def test_output_that_nothing_takes_changes_no_exit_code(streams: Callable[[], None]) -> None:
    """The last one shows that the program ends so where everything is taken."""
    assert run_with(streams, OUTLASTING).returncode == 7


@pytest.mark.timeout(120)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_an_encoding_lacks_are_printed_as_escapes(encoding: str) -> None:
    text = "caf\u00e9 \u4e2d \udcff"
    code = f"""
import sys
from spare_megatron.machine import standard_streams
standard_streams.open_closed()
print({text!r})
with standard_streams.outlasting():
    print({text!r})
"""
    done = run_with(lambda: None, code, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.encode("latin-1").splitlines()
    assert lines == [text.encode(encoding, "backslashreplace")] * 2


@pytest.mark.timeout(120)
def test_streams_without_a_descriptor_stay_as_they_are() -> None:
    stream = io.StringIO()
    assert outlast(stream) is stream
