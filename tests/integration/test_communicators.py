"""Ranks that wait for each other, over gloo."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.stacking.layout import GroupId

pytestmark = pytest.mark.timeout(120)

PATIENCE_S = 30.0


class _Probe(SilentProbe):
    """Counts progress signals."""

    def __init__(self) -> None:
        self.num_signs = 0

    def progress(self) -> None:
        self.num_signs += 1


class _Rank:
    """One of two ranks, and how often it has asked whether the log has moved on."""

    def __init__(self, store: dist.Store, group: int, ask_interval_s: float, *, ends_at: int = 0) -> None:
        self.num_asked = 0
        self._ends_at = ends_at
        self.probe = _Probe()
        self.communicator = CrossGroupCommunicator(
            group=GroupId(group),
            position=0,
            device=torch.device("cpu"),
            store=SimpleNamespace(rendezvous=lambda name, *_: dist.PrefixStore(name, store)),  # type: ignore[arg-type]
            timeout_s=PATIENCE_S,
            ask_interval_s=ask_interval_s,
            probe=self.probe,
        )
        self.communicator.start_build(0, [GroupId(0), GroupId(1)])

    def is_decided(self) -> bool:
        self.num_asked += 1
        return self.num_asked == self._ends_at

    def reduce(self) -> bool:
        return self.communicator.reduce(torch.ones(4), self.is_decided)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def connected(pool: ThreadPoolExecutor, *ask_intervals_s: float, ends_at: int = 0) -> list[_Rank]:
    """Ranks that have a communicator and have asked nothing since."""
    store = dist.HashStore()
    ranks = [_Rank(store, group, interval_s, ends_at=ends_at) for group, interval_s in enumerate(ask_intervals_s)]
    building = [pool.submit(rank.communicator.connect, lambda: False) for rank in ranks]
    assert all(future.result(PATIENCE_S) for future in building)
    for rank in ranks:
        rank.num_asked = rank.probe.num_signs = 0
    return ranks


def test_a_member_whose_sum_arrives_in_time_does_not_query_the_store(pool: ThreadPoolExecutor) -> None:
    ranks = connected(pool, PATIENCE_S, PATIENCE_S)
    for _ in range(3):
        assert all(pool.map(_Rank.reduce, ranks, timeout=PATIENCE_S))
    assert [rank.num_asked for rank in ranks] == [0, 0]


def test_a_waiting_member_queries_the_store_at_its_interval_and_sleeps_in_between(pool: ThreadPoolExecutor) -> None:
    """It looked 2000 times a second, on processors that others needed to compute what it waited for."""
    interval_s, num_asks = 0.02, 5
    _, early = connected(pool, PATIENCE_S, interval_s, ends_at=num_asks)
    began_s = time.monotonic()
    assert not early.reduce()  # the other never posts
    assert time.monotonic() - began_s >= num_asks * interval_s
    assert early.num_asked == num_asks
    assert early.communicator.evidence == "the log has moved on"
    # A pause is as long as an interval, give or take what the clock is coarse.
    assert num_asks <= early.probe.num_signs <= 2 * num_asks


def test_a_sum_that_comes_wakes_up_who_sleeps(pool: ThreadPoolExecutor) -> None:
    late, early = connected(pool, PATIENCE_S, PATIENCE_S)

    def post_late() -> bool:
        while not early.probe.num_signs:  # it has slept once by then
            time.sleep(0.001)
        return late.reduce()

    sums = [pool.submit(early.reduce), pool.submit(post_late)]
    assert all(future.result(PATIENCE_S) for future in sums)


def test_a_connection_that_breaks_wakes_up_who_sleeps(pool: ThreadPoolExecutor) -> None:
    late, early = connected(pool, PATIENCE_S, PATIENCE_S)

    def leave() -> None:
        while not early.probe.num_signs:
            time.sleep(0.001)
        del late.communicator  # its sockets are closed

    pending = pool.submit(leave)
    assert not early.reduce()
    assert early.communicator.evidence.startswith("connection: ")
    pending.result(PATIENCE_S)


# ------------------------------------------------------------------------------------------- failures of one's own

NO_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def short_of_files(*_: object) -> dist.Store:
    raise NO_FILES


def test_a_build_that_fails_at_once_ends_the_wait_of_its_rank_with_the_error_and_the_next_build_may_succeed(
    pool: ThreadPoolExecutor,
) -> None:
    store = dist.HashStore()
    short, other = (_Rank(store, group, PATIENCE_S) for group in (0, 1))
    works = short.communicator.store
    short.communicator.store = SimpleNamespace(rendezvous=short_of_files)  # type: ignore[assignment]
    short.communicator.start_build(1, [GroupId(0), GroupId(1)])
    assert not short.communicator.connect(lambda: False)
    assert (short.communicator.error, short.communicator.evidence) == (NO_FILES, f"rebuild: {NO_FILES}")
    other.communicator.start_build(1, [GroupId(0), GroupId(1)])
    assert not other.communicator.connect(lambda: True), "it learns that from the log"
    assert other.communicator.find_error() is None
    short.communicator.store = works
    for rank in (short, other):
        rank.communicator.start_attempt()
        rank.communicator.start_build(2, [GroupId(0), GroupId(1)])
    assert all(pool.map(_Rank.reduce, (short, other), timeout=PATIENCE_S))
    assert (short.communicator.error, short.communicator.evidence) == (None, "")


def test_a_rank_that_gives_up_for_others_finds_that_its_own_build_has_failed_too() -> None:
    rank = _Rank(dist.HashStore(), 0, PATIENCE_S)
    rank.communicator.store = SimpleNamespace(rendezvous=short_of_files)  # type: ignore[assignment]
    rank.communicator.start_build(1, [GroupId(0), GroupId(1)])
    assert not rank.communicator.connect(lambda: True)
    assert rank.communicator.find_error() is NO_FILES
    assert rank.communicator.evidence == f"rebuild: {NO_FILES}"


def test_a_rank_without_room_for_a_thread_fails_to_build_and_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = _Rank(dist.HashStore(), 0, PATIENCE_S)

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    rank.communicator.start_build(1, [GroupId(0), GroupId(1)])
    assert not rank.communicator.connect(lambda: False)
    assert rank.communicator.evidence == "rebuild: can't start new thread"


def test_a_rank_without_memory_for_a_sum_gives_it_up_and_names_the_error(pool: ThreadPoolExecutor) -> None:
    short, _ = connected(pool, PATIENCE_S, PATIENCE_S)

    def post(*_: object) -> None:
        raise MemoryError

    short.communicator._begin = post  # type: ignore[assignment]
    assert not short.reduce()
    assert short.communicator.evidence == "connection: MemoryError"
    assert isinstance(short.communicator.error, MemoryError)
