"""How long ranks lacked a processor, and what their supervisor makes of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spare_megatron.core.liveness import Operation, Pulse
from spare_megatron.core.topology import GroupId
from spare_megatron.runtime import beacon
from spare_megatron.runtime.beacon import Starvation
from spare_megatron.runtime.rank_watch import RankWatch
from spare_megatron.runtime.reports import RankKey

pytestmark = pytest.mark.timeout(60)

INTERVAL_S = 1.0
LOOK_S = 0.25
GROUP = GroupId(0)


class FakeRanks:
    """Ranks of one group that show what a test says."""

    def __init__(self) -> None:
        self.pulses: dict[RankKey, Pulse] = {}

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
    watch = RankWatch(ranks, INTERVAL_S, 60.0)  # type: ignore[arg-type]
    watch.begin(GROUP)
    for number in range(40):
        now_s = number * LOOK_S
        if now_s >= ends_at_s:
            watch.end((GROUP, 1))
        ranks.pulses[GROUP, 0] = shown(number, progress=0)
        ranks.pulses[GROUP, 1] = shown(number, progress=number, starved_s=100.0 + starved * now_s)
        for group, rank, cause in watch.find_lost(now_s, ()):
            assert (group, rank) == (GROUP, 0)
            assert "no progress" in cause
            return now_s
    return None


def test_a_rank_whose_peer_has_no_processor_is_not_missed() -> None:
    assert found_at_s(starved=0.0) == 1.5
    assert found_at_s(starved=0.5) == 3.0
    assert found_at_s(starved=1.0) is None


def test_the_end_of_a_rank_that_starved_makes_no_other_late() -> None:
    assert found_at_s(starved=1.0, ends_at_s=5.0) == 6.25  # its share of the time up to its last look stays forgiven


def test_every_thread_that_lacks_a_processor_shows_and_none_takes_its_time_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacked_s = {"10": 1.0, "11": 2.0}
    monkeypatch.setattr(beacon, "_starved_s", lambda pid: dict(lacked_s))
    starvation = Starvation(10)
    assert starvation.seconds() == 3.0
    lacked_s |= {"11": 2.5, "12": 5.0}
    assert starvation.seconds() == 8.5
    del lacked_s["11"]
    assert starvation.seconds() == 8.5
    lacked_s["12"] = 5.5
    assert starvation.seconds() == 9.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel tells nothing of waiting threads")
def test_the_kernel_tells_of_threads_that_wait_for_a_processor() -> None:
    """One that shares its processor with another that never sleeps, for as long as that takes."""
    processor = min(os.sched_getaffinity(0))
    child = subprocess.Popen([sys.executable, "-c", _TWO_BUSY_THREADS.format(processor=processor)])
    try:
        starvation = Starvation(child.pid)
        while starvation.seconds() < 0.05:
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert starvation.seconds() >= 0.05, "it has ended, and what it lacked is not forgotten"


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
