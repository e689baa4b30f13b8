"""What a signal does wherever it comes: while modules are imported, a process is started, a call waits, all is over."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.preflight import preflight
from spare_megatron.machine.interrupts import INTERRUPTED, deferred, raising
from spare_megatron.process import processes
from spare_megatron.process.processes import end_child, fork_server, start_child
from tests.search_path import ROOT, with_checkout

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("_handlers")]

NUM_MOMENTS = 200
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
RAISE_SIGINT = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
"""A module that is interrupted while it is imported."""
BY_SCRIPT = ("-c", "import sys; from spare_megatron.__main__ import main; sys.exit(main())")
BY_MODULE = ("-m", "spare_megatron")


def run_python(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": with_checkout(path)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


# ---------------------------------------------------------------------------------------------------- at once


@pytest.mark.parametrize("entry", [BY_SCRIPT, BY_MODULE], ids=["script", "module"])
@pytest.mark.parametrize(
    ("imported", "command", "name"),
    [
        ("typer", "--version", "spare"),
        ("numpy", "plan --groups 600 --mtbf 300s --restart 60m --save 60s", "spare plan"),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(
    entry: tuple[str, ...], imported: str, command: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / f"{imported}.py").write_text(RAISE_SIGINT)
    done = run_python(*entry, *command.split(), path=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", f"{name}: interrupted\n")


@pytest.mark.parametrize(
    "at_the_end",
    [
        "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT); ",
        "import os, sys; sys.last = type('', (), {'__del__': lambda _, end=os.kill, at=os.getpid(): end(at, 15)})(); ",
    ],
    ids=["exit", "finalization"],
)
def test_a_signal_after_a_command_leaves_its_exit_code_alone(at_the_end: str) -> None:
    done = run_python(BY_SCRIPT[0], at_the_end + BY_SCRIPT[1], "--version")
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------ raised once


@pytest.mark.parametrize("number", ENDING)
def test_a_second_signal_does_not_break_off_the_cleaning_up(number: signal.Signals) -> None:
    done = []

    def block() -> None:
        with raising():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["cleaned up"]


def test_handlers_are_as_before_if_no_signal_came() -> None:
    before = signal.getsignal(signal.SIGINT)
    with raising(), deferred() as interrupts, interrupts.allowed():
        pass
    assert signal.getsignal(signal.SIGINT) is before


# --------------------------------------------------------------------------------------------------- deferred


def test_a_deferred_signal_takes_effect_at_the_end_of_the_block() -> None:
    done = []

    def block() -> None:
        with raising(), deferred(lambda: done.append("acted")):
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["acted", "whole"]


def test_what_is_started_after_a_signal_is_acted_on_too() -> None:
    started, ended = [], []

    def block() -> None:
        with raising(), deferred(lambda: ended.extend(started)) as interrupts:
            signal.raise_signal(signal.SIGINT)
            started.append("fork server")
            interrupts.check()

    with pytest.raises(KeyboardInterrupt):
        block()
    assert ended == ["fork server"]


def test_a_deferred_signal_ends_a_wait_also_one_that_begins_later() -> None:
    ours, _theirs = multiprocessing.Pipe()

    def block() -> None:
        with raising(), deferred() as interrupts:
            assert interrupts.wait([ours], 0.0) == []
            signal.raise_signal(signal.SIGTERM)
            interrupts.wait([ours])
            pytest.fail("waited for what never comes")

    with pytest.raises(KeyboardInterrupt):
        block()


@pytest.mark.parametrize("is_before", [False, True])
def test_a_long_call_in_a_deferred_block_can_be_broken_off_and_what_follows_cannot(*, is_before: bool) -> None:
    done = []

    def block() -> None:
        with raising(), deferred() as interrupts:
            try:
                if is_before:
                    signal.raise_signal(signal.SIGINT)
                with interrupts.allowed():
                    signal.raise_signal(signal.SIGINT)
                    done.append("went on")
            finally:
                signal.raise_signal(signal.SIGINT)
                done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["cleaned up"]


def test_what_fails_after_a_signal_gives_way_to_it() -> None:

    def block() -> None:
        with raising(), deferred():
            signal.raise_signal(signal.SIGINT)
            raise BrokenPipeError

    with pytest.raises(KeyboardInterrupt):
        block()


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_that_is_ignored_stays_ignored_also_in_programs_that_are_started(number: signal.Signals) -> None:
    """As SIGHUP is under nohup, which the kernel sends to all processes of the terminal."""
    signal.signal(number, signal.SIG_IGN)
    command = [sys.executable, "-c", f"import signal; signal.raise_signal({int(number)})"]
    with deferred(lambda: pytest.fail("acted on")) as interrupts:
        signal.raise_signal(number)
        interrupts.check()
        assert subprocess.run(command, timeout=100, check=False).returncode == 0


def test_a_signal_during_the_cleaning_up_is_acted_on_there() -> None:
    done = []

    def block() -> None:
        with raising():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                with deferred(lambda: done.append("killed")) as interrupts:
                    signal.raise_signal(signal.SIGHUP)
                    interrupts.check()
                done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["killed", "cleaned up"]


def test_a_request_to_end_does_not_kill_a_command_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nsignal.raise_signal(signal.SIGUSR1)\nos._exit(7)\n")
    assert run_python(*BY_SCRIPT, "--version", path=tmp_path).returncode == 7


# ---------------------------------------------------------------------------------------------- real processes


def _serve(driver: Connection) -> None:
    driver.send("up")
    driver.recv()


class InterruptAtLine:
    """Traces this thread, and sends it SIGINT at its n-th line of Python from then on."""

    def __init__(self, line: float) -> None:
        self._line = line
        self.num_lines = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> "InterruptAtLine":
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._line:
                signal.raise_signal(signal.SIGINT)
        return self


def _start_and_end(tracer: InterruptAtLine) -> str:
    """A child of the fork server from its start to its end, interrupted; what is wrong with the outcome."""
    for number in ENDING:  # the interrupt before has left them ignored
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    context = multiprocessing.get_context("forkserver")
    sys.settrace(tracer)
    try:
        with raising(), deferred() as interrupts:
            child = start_child(context, "child", _serve)
            try:
                interrupts.wait([child.reports])
                child.reports.recv()
            finally:
                end_child(child)
    except KeyboardInterrupt:
        return ""
    except Exception as error:  # noqa: BLE001  (whatever it is, it is reported)
        return repr(error)
    finally:
        sys.settrace(None)
    return "went on"


def interrupt_starts() -> None:
    """Run in a process of its own: interrupts the start of a process at lines spread over it."""
    processes._IMPORTED = (__name__,)
    fork_server()
    _start_and_end(InterruptAtLine(float("inf")))  # imports what is imported late
    whole = InterruptAtLine(float("inf"))
    assert _start_and_end(whole) == "went on"
    lines = [1 + index * whole.num_lines // NUM_MOMENTS for index in range(NUM_MOMENTS)]
    problems = {line: problem for line in lines if (problem := _start_and_end(InterruptAtLine(line)))}
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    _, left = psutil.wait_procs(server.children(), timeout=10)
    print(f"{len(set(lines))} moments, problems: {problems}, left behind: {left}")


def interrupt_import() -> None:
    """The same while the fork server imports a module that interrupts its driver, and then takes for ever."""
    processes._IMPORTED = ("slow_import",)
    try:
        with raising():
            preflight(RunConfig())
    except KeyboardInterrupt:
        print("interrupted")


def _in_its_own_process(function: Callable[[], None], path: Path = ROOT) -> str:
    done = run_python("-c", f"from {__name__} import {function.__name__} as be; be()", path=path)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_wherever_the_start_of_a_process_is_interrupted_none_is_left_and_nothing_else_is_raised() -> None:
    expected = f"{NUM_MOMENTS} moments, problems: {{}}, left behind: []\n"
    assert _in_its_own_process(interrupt_starts) == expected


def test_an_interrupt_does_not_wait_for_what_the_fork_server_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(1000)\n"
    )
    assert _in_its_own_process(interrupt_import, tmp_path) == "interrupted\n"
