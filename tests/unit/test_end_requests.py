"""What each signal means to a run, against rules written down a second time, and that requests stay pending."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe

import pytest

from spare_megatron.machine import end_signal, interrupts
from spare_megatron.machine.end_signal import WITHOUT_LIMIT
from spare_megatron.machine.interrupts import deferred, raising
from spare_megatron.process.heartbeats import HeartbeatWriter, new_page
from spare_megatron.process.processes import end_child, start_child
from spare_megatron.process.reports import EndAsked
from spare_megatron.process.span_ring import PassTimes
from spare_megatron.supervisor import node_requests
from spare_megatron.supervisor.node_requests import EndRequests

NUM_DRAWN = 1500
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
ECHO_S = 0.25
GRACE_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(interrupts, "time", clock)
    return clock


# ------------------------------------------------------------------------------------------------------- the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A signal, `after_s` seconds after the one before; None is the beginning of training, which takes requests."""

    after_s: float
    number: signal.Signals | None


def draw(rng: random.Random) -> list[Moment]:
    moments = [
        Moment(after_s=rng.choice((0.0, 0.1, 0.2, 0.3, 5.0)), number=rng.choice((*ENDING, *ENDING, signal.SIGINT)))
        for _ in range(rng.randint(0, 5))
    ]
    moments.insert(rng.randint(0, len(moments)), Moment(after_s=1.0, number=None))
    return moments


def expected(moments: Sequence[Moment], ignored: set[signal.Signals]) -> tuple[str, signal.Signals | None]:
    """How the driver ends its run, and by which request: `at once` is 130."""
    now_s, has_begun = 0.0, False
    request: tuple[float, signal.Signals] | None = None
    for moment in moments:
        now_s += moment.after_s
        if moment.number is None:
            has_begun = True
        elif moment.number in ignored:
            continue
        elif moment.number == signal.SIGINT or not has_begun:
            return "at once", request and request[1]
        elif request is None:
            request = now_s, moment.number
        elif now_s - request[0] >= ECHO_S:
            return "at once", request[1]
    return ("in order", request[1]) if request else ("finished", None)


def drive(moments: Sequence[Moment], clock: Clock) -> tuple[str, signal.Signals | None]:
    """The same by real signals to this process, as the driver's loop takes them."""
    request: signal.Signals | None = None
    with contextlib.suppress(KeyboardInterrupt):
        with raising(), deferred() as found:
            for moment in moments:
                clock.now_s += moment.after_s
                if moment.number is None:
                    found.take_requests()
                else:
                    signal.raise_signal(moment.number)
                try:
                    found.wait([], 0.0)
                finally:
                    request = found.request
        return ("in order", request) if request else ("finished", None)
    return "at once", request


@pytest.mark.usefixtures("_handlers")
def test_a_driver_ends_by_any_sequence_of_signals_as_the_rules_say(clock: Clock) -> None:
    rng = random.Random(0)
    seen = set()
    for number in range(NUM_DRAWN):
        moments = draw(rng)
        ignored = set(rng.sample(ENDING[1:], rng.randint(0, 1)))  # as nohup ignores SIGHUP
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        wanted = expected(moments, ignored)
        assert drive(moments, clock) == wanted, (number, moments, ignored)
        seen.add((wanted[0], wanted[1] is None))
    assert seen == {("at once", True), ("at once", False), ("in order", False), ("finished", True)}


# --------------------------------------------------------------------------------------------------- a supervisor


class FakeTimers:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, object]] = []

    def after(self, seconds: float, action: object) -> None:
        self._due.append((self.now_s + seconds, action))

    def advance(self, to_s: float) -> None:
        for due_s, action in sorted(self._due, key=lambda item: item[0]):
            if due_s <= to_s:
                self._due.remove((due_s, action))
                self.now_s = due_s
                action()  # type: ignore[operator]
        self.now_s = to_s


def test_a_supervisor_keeps_the_first_limit_and_reports_every_signal() -> None:
    rng = random.Random(1)
    for _ in range(NUM_DRAWN):
        timers, acts, reports = FakeTimers(), [], []
        requests = EndRequests(
            timers,  # type: ignore[arg-type]
            GRACE_S,
            ask_ranks=lambda acts=acts: acts.append("asked"),
            cut_off=lambda acts=acts, timers=timers: acts.append(("cut off", timers.now_s)),
            end_at_once=lambda acts=acts, timers=timers: acts.append(("ended", timers.now_s)),
            report=reports.append,
        )
        times = sorted(rng.uniform(0.0, 30.0) for _ in range(rng.randint(0, 4)))
        limits: list[tuple[float, float]] = []  # when a request set one
        num_signals = 0
        for at_s in times:
            timers.advance(at_s)
            kind = rng.choice(("signal", "without limit", "driver", "driver without limit"))
            if kind in ("signal", "without limit"):
                num_signals += 1
                requests.on_signal(rng.choice(ENDING) if kind == "signal" else WITHOUT_LIMIT)
                requests.poll()
            else:
                limit_s = 5.0 if kind == "driver" else None
                requests.on_asked(EndAsked(by="the driver", limit_s=limit_s))
            if kind in ("signal", "driver"):
                limits.append((at_s, GRACE_S if kind == "signal" else 5.0))
        timers.advance(1000.0)
        assert ("asked" in acts) == bool(times)
        assert len(reports) == num_signals
        done = [act for act in acts if act != "asked"]
        assert len(done) == 2 * bool(limits), "one limit, however many requests"
        if limits:
            (began_s, limit_s), share = limits[0], node_requests.SHARE_OF_STEP
            assert done == [("cut off", began_s + share * limit_s), ("ended", began_s + limit_s)]
        asked = requests.poll()
        assert (asked is None) == (not times)
        assert asked is None or (asked.limit_s is not None) == bool(limits)


def test_a_rank_is_called_back_once_its_step_has_taken_too_long() -> None:
    """Whatever its main thread waits for."""
    page, is_cut_off = new_page(get_context("spawn")), threading.Event()
    writer = HeartbeatWriter(page, PassTimes(lambda: 0.0, lambda _began, _ended: 0.0))
    page.end_asked = 1
    writer.start_beating(1.0, is_cut_off.set)
    assert not is_cut_off.is_set()
    page.end_asked = 2
    assert is_cut_off.wait(20.0)


def _is_pending_of_itself(reports: Connection) -> None:
    """Born with it blocked, whatever its parent does with it."""
    os.kill(os.getpid(), signal.SIGUSR1)
    reports.send(end_signal.is_pending())
    end_signal.listen(lambda number: reports.send("asked"))
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.timeout(120)
def test_what_is_asked_of_a_process_before_it_listens_is_obeyed_when_it_does() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = start_child(multiprocessing.get_context("spawn"), "listener", _is_pending_of_itself)
    try:
        assert [child.reports.recv() for _ in range(3)] == [True, "asked", "asked"]
    finally:
        end_child(child)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, "its parent is as before"


def _keeps_it_ignored_while_blocked(ours: Connection) -> None:
    """As the driver does: ignored, so that nothing happens once it is over, and still known of until then."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # commands tried in the parent may have it blocked
    with end_signal.blocked():
        signal.raise_signal(signal.SIGUSR1)
        ours.send(end_signal.is_pending())
    ours.send(end_signal.is_pending())


@pytest.mark.timeout(120)
def test_the_signal_ends_no_process_that_ignores_it_and_is_seen_while_blocked() -> None:
    ours, theirs = Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_keeps_it_ignored_while_blocked, args=(theirs,))
    process.start()
    process.join(60.0)
    assert (process.exitcode, ours.recv(), ours.recv()) == (0, True, False)


LOOK_AT_THREADS = """
import pathlib
import spare_megatron.cli.train as command

def look(*_):
    for status in pathlib.Path("/proc/self/task").glob("*/status"):
        print(next(line for line in status.read_text().splitlines() if line.startswith("SigBlk")).split()[1])
    raise SystemExit

command.load_runnable = look
command.train(pathlib.Path("preset.toml"))
"""


@pytest.mark.timeout(120)
def test_no_thread_of_a_driver_swallows_it() -> None:
    """numpy starts threads when it is imported, unless a setting forbids it."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", LOOK_AT_THREADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    masks = [int(mask, 16) for mask in done.stdout.split()]
    assert masks
    assert all(mask >> (signal.SIGUSR1 - 1) & 1 for mask in masks)
