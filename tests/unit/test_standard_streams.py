"""Streams that are closed, full, or of another encoding, and what a process makes of them."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from spare_megatron.machine.standard_streams import outlast
from tests.search_path import with_checkout

pytestmark = pytest.mark.timeout(120)

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


def test_streams_without_a_descriptor_stay_as_they_are() -> None:
    stream = io.StringIO()
    assert outlast(stream) is stream
