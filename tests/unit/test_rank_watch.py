"""How long ranks lacked a processor, and what their supervisor makes of it."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.core.machines.failure_detector import Operation, Pulse
from spare_megatron.machine.machine_signs import Starvation
from spare_megatron.process.reports import RankKey
from spare_megatron.stacking.layout import GroupId
from spare_megatron.supervisor.rank_watch import RankWatch, read_state

pytestmark = pytest.mark.timeout(60)

INTERVAL_S = 1.0
LOOK_S = 0.25
GROUP = GroupId(0)


class FakeRanks:
    """Ranks of one group that show what a test says."""

    def __init__(self) -> None:
        self.pulses: dict[RankKey, Pulse] = {}
        self.pids: dict[RankKey, int] = {}

    def of(self, group: GroupId) -> list[RankKey]:
        return [key for key in self.pulses if key[0] == group]

    def pulse(self, key: RankKey) -> Pulse:
        return self.pulses[key]


def shown(number: int, *, progress: int, starved_s: float = 0.0) -> Pulse:
    return Pulse(
        beats=number,
        progress=progress,
        operation=Operation.UPDATE,
        step=3,
        progress_at_s=0.0,
        slowest_s=0.01,
        starved_s=starved_s,
    )


def found_at_s(starved: float, *, ends_at_s: float = 100.0) -> float | None:
    """When rank 0 is found, whose progress stands still from 0 on while rank 1, which ends at some time, starves."""
    ranks = FakeRanks()
    ranks.pulses = {(GROUP, rank): shown(0, progress=0) for rank in (0, 1)}
    watch = RankWatch(ranks, INTERVAL_S, 60.0, 600.0)  # type: ignore[arg-type]
    watch.start_watching(GROUP)
    for number in range(40):
        now_s = number * LOOK_S
        if now_s >= ends_at_s:
            watch.stop_watching((GROUP, 1))
        ranks.pulses[GROUP, 0] = shown(number, progress=0)
        ranks.pulses[GROUP, 1] = shown(number, progress=number, starved_s=100.0 + starved * now_s)
        for group, rank, cause in watch.find_lost(now_s, ()):
            assert (group, rank) == (GROUP, 0)
            assert "no progress" in cause
            return now_s
    return None


def test_a_rank_whose_peer_has_no_processor_is_missed_later() -> None:
    assert found_at_s(starved=0.0) == 1.5
    assert found_at_s(starved=0.5) == 3.0
    assert found_at_s(starved=1.0) == found_at_s(starved=7.0) == 7.5


def test_the_end_of_a_rank_that_starved_makes_no_other_late() -> None:
    assert found_at_s(starved=1.0, ends_at_s=5.0) == 6.25  # its share of the time up to its last look stays forgiven


def at_storage(
    until_s: float, *, goes_on_s: float, held_up_by: Operation = Operation.STORAGE
) -> tuple[float, int] | None:
    """When which rank is found, if rank 0 is at storage up to some time, and rank 1 waits for it and some time more."""
    ranks = FakeRanks()
    ranks.pulses = {(GROUP, rank): shown(0, progress=0) for rank in (0, 1)}
    watch = RankWatch(ranks, INTERVAL_S, 60.0, 600.0)  # type: ignore[arg-type]
    watch.start_watching(GROUP)
    for number in range(400):
        now_s = number * LOOK_S
        is_there = now_s < until_s
        operation = held_up_by if is_there else Operation.COMPUTE
        leader = shown(number, progress=0 if is_there else number)
        ranks.pulses[GROUP, 0] = replace(leader, operation=operation, progress_at_s=0.0 if is_there else now_s)
        peer = shown(number, progress=0 if now_s < goes_on_s else number)
        ranks.pulses[GROUP, 1] = replace(peer, operation=Operation.COMPUTE)
        for _, rank, cause in watch.find_lost(now_s, ()):
            assert "no progress" in cause
            return now_s, rank
    return None


def test_a_rank_that_waits_for_a_peer_at_storage_or_resumes_soon_after_it_is_not_found() -> None:
    assert at_storage(30.0, goes_on_s=31.0) is None
    assert at_storage(30.0, goes_on_s=31.0, held_up_by=Operation.PROFILE) is None


def test_a_rank_that_hangs_after_its_peer_has_left_storage_is_found() -> None:
    assert at_storage(30.0, goes_on_s=1e6) == (31.25, 1)  # 1.5 s after the last look that saw its peer there


def test_a_rank_that_hangs_at_storage_is_found_though_its_peers_wait_for_it() -> None:
    assert at_storage(1e6, goes_on_s=1e6) == (60.0, 0)


class FakeKernel:
    """What a kernel would report of a process's threads."""

    def __init__(self) -> None:
        self.times: dict[str, tuple[int, int]] = {}
        self.ready: set[str] = set()

    def watched(self) -> Starvation:
        return Starvation(10, lambda pid: dict(self.times), lambda pid, thread: thread in self.ready)

    def report(self, **lacked_s: float) -> None:
        """For how long each thread waited before it last ran."""
        self.times = {thread: (0, int(value * 1e9)) for thread, value in lacked_s.items()}


def test_every_thread_that_lacks_a_processor_shows_and_none_takes_its_time_along() -> None:
    kernel = FakeKernel()
    watched = kernel.watched()
    kernel.report(a=1.0, b=2.0)
    assert watched.seconds(1, 0.0) == 3.0
    kernel.report(a=1.0, b=2.5, c=5.0)
    assert watched.seconds(2, 1.0) == 8.5
    kernel.report(a=1.0, c=5.0)
    assert watched.seconds(3, 2.0) == 8.5
    kernel.report(a=1.0, c=5.5)
    assert watched.seconds(4, 3.0) == 9.0


def test_a_wait_shows_while_it_lasts_and_counts_once() -> None:
    """The kernel reports it only when it is over, which may be too late for a rank that does not beat meanwhile."""
    kernel = FakeKernel()
    watched = kernel.watched()
    kernel.report(waits=1.0, sleeps=0.0)
    kernel.ready = {"waits"}
    assert watched.seconds(7, 0.0) == 1.0
    assert watched.seconds(7, 1.0) == 1.0, "it may have begun to wait just now"
    assert watched.seconds(7, 2.5) == 2.5
    assert watched.seconds(7, 3.0) == 3.0
    kernel.report(waits=3.25, sleeps=0.0)  # it ran, after 2.25 s
    assert watched.seconds(8, 3.5) == 3.25
    kernel.report(waits=3.5, sleeps=0.0)
    assert watched.seconds(9, 4.0) == 3.5


def test_nothing_is_looked_for_in_a_rank_that_beats() -> None:
    kernel = FakeKernel()
    watched = kernel.watched()
    kernel.report(waits=1.0)
    kernel.ready = {"waits"}
    assert [watched.seconds(number, number) for number in range(4)] == [1.0] * 4


def test_a_stopped_process_is_not_one_that_waits() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        watched = Starvation(child.pid)
        waited_s = watched.seconds(7, 0.0)
        assert [watched.seconds(7, now_s) for now_s in (1.0, 2.0, 3.0)] == [waited_s] * 3
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel reports no waiting threads")
def test_the_kernel_reports_threads_that_wait_for_a_processor() -> None:
    """One that shares its processor with another that never sleeps, for as long as that takes."""
    processor = min(os.sched_getaffinity(0))
    child = subprocess.Popen([sys.executable, "-c", _TWO_BUSY_THREADS.format(processor=processor)])
    try:
        watched, beats = Starvation(child.pid), 0
        while watched.seconds(beats, 0.0) < 0.05:
            beats += 1
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert watched.seconds(0, 0.0) >= 0.05, "it has ended, and what it lacked is not forgotten"


_TWO_BUSY_THREADS = """
import hashlib, os, threading
os.sched_setaffinity(0, {{{processor}}})
data = bytes(1 << 22)
def work():
    while True:
        hashlib.sha256(data).digest()  # without the interpreter's lock
threading.Thread(target=work).start()
work()
"""


def test_a_group_that_is_not_up_gets_on_while_a_rank_makes_progress_and_for_ten_intervals_more() -> None:
    """Its leader may have a log of months to read, which takes longer than a start may."""
    ranks = FakeRanks()
    ranks.pulses = {
        (GROUP, rank): replace(shown(0, progress=rank), progress_at_s=at_s) for rank, at_s in enumerate((5.0, 100.0))
    }
    watch = RankWatch(ranks, INTERVAL_S, 60.0, 600.0)  # type: ignore[arg-type]
    assert [watch.is_getting_on(GROUP, now_s) for now_s in (100.0, 109.5, 110.5, 1000.0)] == [True, True, False, False]
    watch.start_watching(GROUP)
    assert not watch.is_getting_on(GROUP, 100.0)


def wait_for_state(pid: int, state: str) -> None:
    """Waits until the kernel shows the state; the test's time limit ends that."""
    while f"State:\t{state}" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.001)


def test_a_process_that_a_signal_stops_is_named_and_its_peers_are_not() -> None:
    """Real processes; the clock is the test's."""
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        ranks = FakeRanks()
        ranks.pulses = {(GROUP, rank): shown(rank, progress=rank) for rank in (0, 1)}
        ranks.pids = {(GROUP, rank): child.pid for rank, child in enumerate(children)}
        watch = RankWatch(ranks, INTERVAL_S, 60.0, 600.0)  # type: ignore[arg-type]
        watch.start_watching(GROUP)
        assert list(watch.find_stopped(0.0, ())) == []
        children[1].send_signal(signal.SIGSTOP)
        wait_for_state(children[1].pid, "T")
        found = [list(watch.find_stopped(0.1 * number, ())) for number in range(1, 8)]
        assert found[:5] == [[]] * 5
        assert found[5] == [(GROUP, 1, "stopped for 0.5 s in update of step 3")]
        assert list(watch.find_stopped(0.8, {GROUP})) == [], "it is lost already"
        watch.forgive()
        assert list(watch.find_stopped(0.9, ())) == []
        children[1].send_signal(signal.SIGCONT)
        wait_for_state(children[1].pid, "S")
        assert [list(watch.find_stopped(1.0 + 0.1 * number, ())) for number in range(10)] == [[]] * 10
    finally:
        for child in children:
            child.kill()
            child.wait()


_STOPPED_BY_A_DEBUGGER = """
import ctypes, os, signal, sys
pid = int(sys.argv[1])
assert ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0  # PTRACE_ATTACH: stops it
os.waitpid(pid, 0x40000000)  # __WALL
print("stopped", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a process that is not a child is traced by root")
def test_a_process_that_a_debugger_has_stopped_is_not_counted_as_stopped() -> None:
    traced = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    debugger = subprocess.Popen(
        [sys.executable, "-c", _STOPPED_BY_A_DEBUGGER, str(traced.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert debugger.stdout is not None
        assert debugger.stdout.readline() == b"stopped\n"
        status = Path(f"/proc/{traced.pid}/status").read_text()
        assert "tracing stop" in status
        assert f"TracerPid:\t{debugger.pid}" in status
        assert not read_state(traced.pid).is_stopped
    finally:
        for child in (debugger, traced):
            child.kill()
            child.wait()
    assert not read_state(traced.pid).is_stopped, "it has ended"


@pytest.mark.parametrize(("code", "found"), [("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"), ("os._exit(3)", "")])
def test_a_killed_process_is_found_before_it_has_gone_and_one_that_exits_is_not(code: str, found: str) -> None:
    """Memory of a GPU takes a while to be freed. Until it is reaped, an ended process shows what one does that ends."""
    child = subprocess.Popen([sys.executable, "-c", f"import os, signal; {code}"])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        ranks = FakeRanks()
        ranks.pulses, ranks.pids = {(GROUP, 0): shown(0, progress=0)}, {(GROUP, 0): child.pid}
        watch = RankWatch(ranks, INTERVAL_S, 60.0, 600.0)  # type: ignore[arg-type]
        watch.start_watching(GROUP)
        assert list(watch.find_stopped(0.0, ())) == ([(GROUP, 0, found)] if found else [])
    finally:
        child.wait()
