"""What every control store does, with real servers, and what the embedded one's server does."""

import contextlib
import gc
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.config.loader import load_run_config
from spare_megatron.core.log.entries import Commit, Fence, encode_entry
from spare_megatron.process.processes import Child, end_child, fork_server, start_embedded_store
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreLost, StoreTimeout
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import EtcdStoreSpec, StoreSpec, TcpStoreSpec
from spare_megatron.voting.fencing import fence
from tests.integration.etcd_cluster import EtcdCluster

pytestmark = pytest.mark.timeout(120)

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def running_store(address: str = LOOPBACK) -> Iterator[tuple[Child, TcpStoreSpec]]:
    child, spec = start_embedded_store(fork_server(), address)
    try:
        yield child, spec
    finally:
        end_child(child)


@pytest.fixture(params=["embedded", "etcd"])
def spec(request: pytest.FixtureRequest) -> Iterator[StoreSpec]:
    if request.param == "embedded":
        with running_store() as (_, spec):
            yield spec
    else:
        cluster: EtcdCluster = request.getfixturevalue("etcd_cluster")
        yield EtcdStoreSpec(endpoints=cluster.endpoints, prefix=f"/test/{secrets.token_hex(8)}", timeout_s=30.0)


@pytest.fixture
def store(spec: StoreSpec) -> ControlStore:
    return open_store(spec)


def test_only_the_first_of_two_writers_of_an_entry_counts(store: ControlStore) -> None:
    log = DecisionLog(store)
    assert not log.has(0)
    assert log.append(0, "first") == "first"
    assert log.append(0, "second") == "first"
    assert log.wait(0, timeout_s=30.0) == "first"
    assert log.has(0)  # which may be late, but not after that


def test_all_writers_of_one_entry_read_the_same_text(spec: StoreSpec) -> None:
    read: list[str] = []
    start = threading.Barrier(8)

    def write(number: int) -> None:
        log = DecisionLog(open_store(spec))
        start.wait(60)
        read.extend(log.append(index, f"{index} by {number}") for index in range(20))

    at_once(write, 8)
    assert len(read) == 8 * 20
    assert len(set(read)) == 20


def test_an_entry_that_is_not_written_in_time_is_a_timeout(store: ControlStore) -> None:
    with pytest.raises(StoreTimeout, match=r"log/0*7 "):
        DecisionLog(store).wait(7, timeout_s=0.05)


def test_a_waiter_misses_no_entry_however_soon_it_is_written(spec: StoreSpec) -> None:
    """The writer answers every entry at once, so that some writes fall between the waiter's read and its watch."""

    def take_turns(player: int) -> None:
        log = DecisionLog(open_store(spec))
        for index in range(100):
            if index % 2 == player:
                log.append(index, f"turn {index}")
            assert log.wait(index, timeout_s=60.0) == f"turn {index}"

    at_once(take_turns, 2)


def test_a_polling_reader_sees_an_entry_that_another_writes(spec: StoreSpec) -> None:
    polling, writing = DecisionLog(open_store(spec)), DecisionLog(open_store(spec))
    for index in range(10):
        assert not polling.has(index)
        assert not polling.has(index)
        writing.append(index, "entry")
        while not polling.has(index):
            pass  # the test's own timeout ends it
        assert polling.has(index)


def test_entries_are_found_in_whatever_order_they_are_asked_for(spec: StoreSpec) -> None:
    asking, writing = DecisionLog(open_store(spec)), DecisionLog(open_store(spec))
    for index in range(12):
        writing.append(index, f"entry {index}")
    assert [index for index in (9, 20, 5, 11, 13, 12) if asking.has(index)] == [9, 5, 11]
    for index in range(12, 22):
        writing.append(index, f"entry {index}")
    order = (12, 11, 21, 0, 13, 20)
    assert [asking.wait(index, 20.0) for index in order] == [f"entry {index}" for index in order]
    assert asking.entries(range(8, 24)) == [*(f"entry {index}" for index in range(8, 22)), None, None]
    assert [asking.find_head(index) for index in (0, 9, 21, 22)] == [22] * 4


def test_votes_are_counted_and_read_without_waiting_for_those_not_cast(store: ControlStore) -> None:
    log = DecisionLog(store)
    assert [log.cast(4, Member(group), {Member(group): f"vote of {group}"}) for group in (0, 2)] == [1, 2]
    assert log.num_votes(4) == 2
    assert log.votes(4, [Member(0), Member(1), Member(2)]) == {0: "vote of 0", 2: "vote of 2"}
    assert log.votes(4, [Member(0), Member(2)]) == {0: "vote of 0", 2: "vote of 2"}
    assert log.votes(4, []) == {}


def test_votes_that_others_have_cast_are_found_and_counted(store: ControlStore) -> None:
    log = DecisionLog(store)
    voters = [Member(group) for group in range(5)]
    assert log.cast(0, Member(0), {Member(0): "yes", Member(1): "no", Member(2): "yes"}) == 3
    assert log.cast(0, Member(3), {Member(3): "yes"}) == 4
    assert log.votes(0, voters, [Member(0), Member(3)]) == {0: "yes", 1: "no", 2: "yes", 3: "yes"}
    assert log.cast(0, Member(4), dict.fromkeys([*map(Member, (4, 5, 7, 8)), Member(6, 1)], "no")) == 9
    assert log.cast(0, Member(1), {Member(1): "no"}) == 10  # again: never fewer than there are
    assert log.num_votes(0) == 10
    assert log.votes(0, voters, [Member(0), Member(4)]) == {0: "yes", 1: "no", 2: "yes", 3: "yes", 4: "no"}
    assert log.votes(0, [Member(6)], [Member(4)]) == {}


def test_votes_that_are_forgotten_are_gone_and_no_others(store: ControlStore) -> None:
    log = DecisionLog(store)
    voters = [Member(group) for group in range(20)]
    for attempt in range(3):
        for voter in voters:
            log.cast(attempt, voter, {voter: "ok"}, [attempt - 2, attempt - 3] if voter[0] else [])
    assert log.votes(0, voters) == {0: "ok"}
    assert len(log.votes(1, voters)) == len(log.votes(2, voters)) == 20
    assert log.cast(2, Member(20), {Member(20): "ok"}) == 21
    assert log.cast(0, Member(20), {Member(20): "ok"}) == 1


def test_as_many_votes_are_counted_as_groups_vote_at_once(spec: StoreSpec) -> None:
    counts: list[int] = []

    def vote(group: int) -> None:
        counts.append(DecisionLog(open_store(spec)).cast(0, Member(group), {Member(group): "ok"}))

    at_once(vote, 16)
    assert sorted(counts) == list(range(1, 17))


def test_a_fence_finds_the_head_and_is_written_once(store: ControlStore) -> None:
    log = DecisionLog(store)
    log.append(0, encode_entry(Commit(step=0, attempt=0)))
    assert fence(log, Member(GroupId(2)), "dead", from_index=0) == 1
    assert fence(log, Member(GroupId(2)), "dead, says another", from_index=0) == 1
    assert fence(log, Member(GroupId(1)), "dead", from_index=1) == 2
    assert log.wait(1, 30.0) == encode_entry(Fence(group=GroupId(2), reason="dead"))


def test_a_rendezvous_brings_all_ranks_into_one_store(spec: StoreSpec) -> None:
    found: list[bytes] = []
    all_have_found = threading.Barrier(3)

    def meet(rank: int) -> None:
        store = open_store(spec).rendezvous("communicator/3/0", rank, 20.0)
        store.set(f"from {rank}", str(rank))
        store.wait([f"from {other}" for other in range(3)])
        found.append(b"".join(store.get(f"from {other}") for other in range(3)))
        all_have_found.wait(30)  # rank 0 may serve the others

    at_once(meet, 3)
    assert found == [b"012"] * 3


class _Probe:
    def progress(self) -> None:
        pass


def test_what_communicators_leave_in_the_embedded_store_does_not_add_up() -> None:
    """Each left the addresses of all its members, N^2 of them, for as long as the run took."""
    num_keys: list[int] = []
    probe: Any = _Probe()
    with running_store() as (_, spec):
        inspecting: Any = open_store(spec)

        def rebuild_again_and_again(group: int) -> None:
            communicator = CrossGroupCommunicator(
                group=GroupId(group),
                position=0,
                device=torch.device("cpu"),
                store=open_store(spec),
                timeout_s=60.0,
                ask_interval_s=0.01,
                probe=probe,
            )
            for key in range(8):
                communicator.start_build(key, [GroupId(0), GroupId(1), GroupId(2)])
                buffer = torch.ones(1)
                assert communicator.reduce(buffer, lambda: False)
                assert buffer.item() == 3.0
                if group == 0:
                    num_keys.append(inspecting._client.num_keys())
                assert communicator.reduce(torch.ones(1), lambda: False)  # no member goes on before they are counted

        at_once(rebuild_again_and_again, 3)
    grown = [later - num_keys[0] for later in num_keys]
    assert grown == [0, 3, 3, 3, 3, 3, 3, 3]


def test_communicators_that_could_not_be_built_leave_no_descriptors(spec: StoreSpec) -> None:
    """Each left its connections, and with etcd a server of its own, to the next collection of cyclic garbage."""
    probe: Any = _Probe()
    communicator = CrossGroupCommunicator(
        group=GroupId(0),
        position=0,
        device=torch.device("cpu"),
        store=open_store(spec),
        timeout_s=0.2,
        ask_interval_s=0.01,
        probe=probe,
    )
    held: list[int] = []
    gc.disable()
    try:
        for key in range(6):
            communicator.start_build(key, [GroupId(0), GroupId(1)])  # the second one never comes
            assert communicator._build is not None
            communicator._build.thread.join(30.0)
            assert not communicator.connect(lambda: False)
            assert communicator.evidence.startswith("rebuild: ")
            communicator.start_attempt()
            held.append(psutil.Process().num_fds())
    finally:
        gc.enable()
    assert max(held) == held[0]  # what earlier tests hold may be closed meanwhile


def at_once(function: Callable[[int], None], number: int) -> None:
    """The function with each number, each in a thread of its own; raises what one of them raises."""
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(function, range(number), timeout=100))


# ------------------------------------------------------------------------------------------------ the embedded server


def other_address() -> str:
    """An address of this machine that is not the loopback address."""
    for addresses in psutil.net_if_addrs().values():
        for item in addresses:
            if item.family == socket.AF_INET and not item.address.startswith("127."):
                return str(item.address)
    pytest.skip("this machine has the loopback address alone")


def listening_at(child: Child) -> list[tuple[str, int]]:
    """Whether others would be let in is not tried: on another address another process may have the same port."""
    connections = psutil.Process(child.process.pid).net_connections("tcp")
    return [(item.laddr.ip, item.laddr.port) for item in connections if item.status == psutil.CONN_LISTEN]


def test_the_server_listens_on_the_loopback_address_only() -> None:
    assert load_run_config(None).config.control.listen_address == LOOPBACK
    with running_store() as (child, spec):
        assert listening_at(child) == [(LOOPBACK, spec.port)]


def test_a_server_on_another_address_serves_there_only() -> None:
    with running_store(other_address()) as (child, spec):
        assert open_store(spec).put_if_absent("key", "value") == "value"
        assert listening_at(child) == [(other_address(), spec.port)]


def test_a_dead_server_is_a_lost_store() -> None:
    with running_store() as (child, spec):
        client = open_store(spec)
        child.process.kill()
        child.process.join(60)
        with pytest.raises(StoreLost):
            client.exists("anything")


def test_the_server_ends_with_the_process_that_started_it() -> None:
    child, _ = start_embedded_store(fork_server(), LOOPBACK)
    child.reports.close()
    child.process.join(60)
    assert child.process.exitcode == 0
    assert child.process.pid != os.getpid()


DRIVER = """
from spare_megatron.process.processes import fork_server, start_embedded_store
store, _ = start_embedded_store(fork_server(), "127.0.0.1")
print(store.pid, flush=True)
store.process.join()
"""


def test_a_server_that_is_stopped_ends_with_the_process_that_started_it_if_that_is_killed() -> None:
    """It reads nothing then, the end of its pipe neither. A fault that stops it for good left it behind."""
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            store = psutil.Process(int(driver.stdout.readline()))
            end = os.pidfd_open(store.pid)
            store.suspend()
            driver.kill()
            driver.wait(60)
            assert select.select([end], [], [], 60)[0], "it is still there"
        finally:
            driver.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                store.kill()
            os.close(end)
