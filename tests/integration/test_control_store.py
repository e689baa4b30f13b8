"""The embedded control store as a real server process."""

import contextlib
import os
from collections.abc import Iterator

import psutil
import pytest

from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.control.store import StoreLost, StoreTimeout
from spare_megatron.control.tcp_store import TcpControlStore
from spare_megatron.core.messages import Commit, Fence, encode_entry
from spare_megatron.core.topology import GroupId
from spare_megatron.runtime.detect import fence
from spare_megatron.runtime.processes import Child, end_child, fork_server, start_store

pytestmark = pytest.mark.timeout(120)


@contextlib.contextmanager
def running_store() -> Iterator[tuple[Child, tuple[str, int]]]:
    child, address = start_store(fork_server())
    try:
        yield child, address
    finally:
        end_child(child)


@pytest.fixture
def store() -> Iterator[TcpControlStore]:
    with running_store() as (_, address):
        yield TcpControlStore(*address)


def test_only_the_first_of_two_writers_of_an_entry_is_heard(store: TcpControlStore) -> None:
    log = DecisionLog(store)
    assert not log.has(0)
    assert log.append(0, "first") == "first"
    assert log.append(0, "second") == "first"
    assert log.has(0)
    assert log.wait(0, timeout_s=1.0) == "first"


def test_an_entry_that_is_not_written_in_time_is_a_timeout(store: TcpControlStore) -> None:
    with pytest.raises(StoreTimeout, match="log/7"):
        DecisionLog(store).wait(7, timeout_s=0.05)


def test_votes_are_counted_and_read_without_waiting_for_those_not_cast(store: TcpControlStore) -> None:
    log = DecisionLog(store)
    assert [log.vote(4, group, f"vote of {group}") for group in (0, 2)] == [1, 2]
    assert log.votes(4, [0, 1, 2]) == {0: "vote of 0", 2: "vote of 2"}
    assert log.votes(4, [0, 2]) == {0: "vote of 0", 2: "vote of 2"}
    log.forget_vote(4, 0)
    assert log.votes(4, [0, 2]) == {2: "vote of 2"}


def test_a_fence_finds_the_head_and_is_written_once(store: TcpControlStore) -> None:
    log = DecisionLog(store)
    log.append(0, encode_entry(Commit(step=0, attempt=0)))
    assert fence(log, GroupId(2), "dead", from_index=0) == 1
    assert fence(log, GroupId(2), "dead, says another", from_index=0) == 1
    assert fence(log, GroupId(1), "dead", from_index=1) == 2
    assert log.wait(1, 1.0) == encode_entry(Fence(group=GroupId(2), reason="dead"))


def test_the_server_listens_on_the_loopback_address_only() -> None:
    with running_store() as (child, (_, port)):
        listening = [c for c in psutil.Process(child.process.pid).net_connections("tcp") if c.status == "LISTEN"]
        assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", port)]


def test_a_dead_server_is_a_lost_store() -> None:
    with running_store() as (child, address):
        client = TcpControlStore(*address)
        child.process.kill()
        child.process.join(10)
        with pytest.raises(StoreLost):
            client.exists("anything")


def test_the_server_ends_with_the_process_that_started_it() -> None:
    child, _ = start_store(fork_server())
    child.reports.close()
    child.process.join(10)
    assert child.process.exitcode == 0
    assert child.process.pid != os.getpid()
