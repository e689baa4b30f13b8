"""A node whose network is cut off, with its real connections to the embedded store: they go on when it is back."""

import contextlib
import os
import socket
import subprocess
import threading
import time
from multiprocessing.connection import Connection, wait

import pytest

from spare_megatron.machine.network import (
    FULL_RATE_BITS_PER_S,
    HUB_ADDRESS,
    NodeNetwork,
    network_of,
    why_no_slow_link,
)
from spare_megatron.process.processes import end_child, fork_server, start_child, start_embedded_store, start_hub
from spare_megatron.store.open_store import open_store
from spare_megatron.store.spec import StoreSpec

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of their own need root"),
]

AWAY_S = 16.5
"""TCP's default sends again 12.6 s and then 25.4 s after the cut. One that sends every second, and gives up after as
many times as by default, does so after 15 s.
"""
SLACK_S = 4.0
_TCP_RTO_MAX_MS = 44


def sends_often() -> bool:
    with socket.socket() as connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)
        return True
    return False


def _stay(node: int, hub_pid: int, test: Connection) -> None:
    """Main function of another node: a bridge without ports that forward is itself down."""
    NodeNetwork(node, hub_pid)
    test.send("up")
    test.recv()


def _shown(command: str) -> list[str]:
    return subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout.split()


def _keep_addresses(hub_pid: int) -> None:
    """As across a router, whose address stays known: looking one up anew may send what waits for it."""
    mac, address = _shown("ip -br link show eth0")[2], _shown("ip -br -4 addr show eth0")[2].partition("/")[0]
    _shown(f"nsenter --net=/proc/{hub_pid}/ns/net ip neigh replace {address} lladdr {mac} dev hub nud permanent")
    hub_mac = _shown(f"nsenter --net=/proc/{hub_pid}/ns/net ip -br link show hub")[2]
    _shown(f"ip neigh replace {HUB_ADDRESS} lladdr {hub_mac} dev eth0 nud permanent")


def _leave(node: int, hub_pid: int, spec: StoreSpec, test: Connection) -> None:
    """Main function of the node that is cut off. Sends when its requests were answered, and its link's state."""
    network = NodeNetwork(node, hub_pid)
    _keep_addresses(hub_pid)
    asking, waiting = open_store(spec), open_store(spec)
    found: dict[str, float | str] = {}

    def wait_for_key() -> None:
        waiting.wait("written meanwhile", 100.0)
        found["waited_s"] = time.monotonic() - cut_at_s

    def mend() -> None:
        found["link"] = _shown("ip -br link show eth0")[1]
        network.mend()
        found["mended_s"] = time.monotonic() - cut_at_s

    cut_at_s = time.monotonic()
    waiter = threading.Thread(target=wait_for_key)
    waiter.start()
    asking.put("before", "the cut")
    assert asking.exists("before")
    network.cut()
    cut_at_s = time.monotonic()
    test.send("cut")
    threading.Timer(AWAY_S, mend).start()
    asking.put("in", "the outage")
    assert asking.exists("in")
    found["asked_s"] = time.monotonic() - cut_at_s
    waiter.join()
    test.send(found)


NUM_BYTES = 1_000_000
FACTOR = 200.0  # 5 Mbit/s


def _time_transfers(node: int, hub_pid: int, port: int, test: Connection) -> None:
    """Main function of a node: sends and receives without a limit, with one, and without it again."""
    network = NodeNetwork(node, hub_pid)
    taken_s = []
    for change in (lambda: None, lambda: network.slow(FACTOR), network.restore):
        change()
        with socket.create_connection((HUB_ADDRESS, port), timeout=60.0) as connection:
            began_s = time.monotonic()
            connection.sendall(bytes(NUM_BYTES))
            connection.recv(1)
            sent_s = time.monotonic() - began_s
            num_left = NUM_BYTES
            while num_left:
                num_left -= len(connection.recv(65536))
            taken_s.append((sent_s, time.monotonic() - began_s - sent_s))
    test.send(taken_s)


def _serve_transfers(server: socket.socket) -> None:
    for _ in range(3):
        connection, _ = server.accept()
        with connection:
            num_left = NUM_BYTES
            while num_left:
                num_left -= len(connection.recv(65536))
            connection.sendall(bytes(1 + NUM_BYTES))


@pytest.mark.skipif(bool(why_no_slow_link()), reason=why_no_slow_link())
def test_a_slow_link_carries_its_rate_either_way_and_as_much_as_before_when_it_is_restored() -> None:
    hub = start_hub(fork_server(), wait)
    with network_of(hub.pid):
        server = socket.create_server((HUB_ADDRESS, 0))
    thread = threading.Thread(target=_serve_transfers, args=(server,), daemon=True)
    thread.start()
    node = start_child(fork_server(), "node", _time_transfers, 1, hub.pid, server.getsockname()[1])
    try:
        before, slow, after = node.reports.recv()
    finally:
        for child in (node, hub):
            end_child(child)
        server.close()
    at_least_s = 0.8 * NUM_BYTES * 8 / (FULL_RATE_BITS_PER_S / FACTOR)
    assert min(slow) > at_least_s
    assert max(*before, *after) < at_least_s / 2


def test_an_outage_costs_the_connections_to_the_store_little_more_than_itself() -> None:
    """It cost as much again, by TCP's doubled intervals. A link that was taken down instead stayed so for more than
    20 s after it was up again, on a busy machine.
    """
    if not sends_often():
        pytest.skip("before Linux 6.15 nothing bounds the intervals of retransmissions")
    hub = start_hub(fork_server(), wait)
    server, spec = start_embedded_store(fork_server(), "", hub)
    with network_of(hub.pid):
        here = open_store(spec)
    staying = start_child(fork_server(), "staying", _stay, 2, hub.pid)
    leaving = start_child(fork_server(), "leaving", _leave, 1, hub.pid, spec)
    try:
        assert staying.reports.recv() == "up"
        assert leaving.reports.recv() == "cut"
        here.put("written meanwhile", "and not noticed")
        assert not here.exists("in")
        found = leaving.reports.recv()
    finally:
        for child in (leaving, staying, server, hub):
            end_child(child)
    assert found["link"] == "UP", "the cut is not to be seen from the node"
    for answered in ("asked_s", "waited_s"):
        assert AWAY_S < found[answered] < found["mended_s"] + SLACK_S, answered
