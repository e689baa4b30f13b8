"""By which address a machine is reached from others, where its own name stands for a loopback address on itself."""

import socket

import pytest

from spare_megatron.machine import network
from spare_megatron.machine.network import address_towards, hosts_of, refuse_loopback
from spare_megatron.store.etcd_gateway import EtcdGateway
from spare_megatron.store.spec import EtcdStoreSpec

LOOPBACK, ELSEWHERE = "127.0.0.1", "10.0.0.1"


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names and addresses of a cluster as its first node has them; those that were asked for."""
    asked: list[str] = []

    def way(host: str) -> str:
        asked.append(host)
        own = {"n1": LOOPBACK, "n2": ELSEWHERE, "127.0.1.1": LOOPBACK}.get(host)
        if own is None:
            raise OSError(1, "no way there")
        return own

    monkeypatch.setattr(network, "address_on_the_way_to", way)
    return asked


@pytest.mark.parametrize(
    ("hosts", "expected", "expected_asked"),
    [
        (["n2", "n1"], ELSEWHERE, ["n2"]),
        (["n1", "n2"], ELSEWHERE, ["n1", "n2"]),
        (["n1", "n9"], LOOPBACK, ["n1", "n9"]),
        (["n1"], LOOPBACK, ["n1"]),
    ],
)
def test_a_loopback_address_is_taken_only_if_there_is_no_other(
    ways: list[str], hosts: list[str], expected: str, expected_asked: list[str]
) -> None:
    assert address_towards(hosts) == expected
    assert ways == expected_asked


def test_a_name_that_does_not_resolve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards([LOOPBACK]) == LOOPBACK

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # a real search may take long
    with pytest.raises(ValueError, match="n1 cannot be reached from here: Name or service not known; correct the name"):
        address_towards(["n1"])


def test_a_run_of_several_machines_is_refused_if_none_reaches_this_one() -> None:
    with pytest.raises(ValueError, match=r"n1 stands for 127\.0\.1\.1 on this machine, by which no other reaches it"):
        refuse_loopback("127.0.1.1", ["n1"])
    refuse_loopback(ELSEWHERE, ["n1"])


@pytest.mark.parametrize("endpoints", [["http://127.0.0.1:1"], ["https://localhost:1"], ["http://[::1]:1"], []])
def test_nodes_that_are_rehearsed_on_one_machine_have_loopback_addresses_on_purpose(endpoints: list[str]) -> None:
    refuse_loopback(LOOPBACK, hosts_of(endpoints))
    with pytest.raises(ValueError, match="n1 stands for"):
        refuse_loopback(LOOPBACK, hosts_of([*endpoints, "http://n1:1"]))


def test_a_node_with_a_member_of_etcd_of_its_own_is_known_by_the_address_that_others_reach(
    ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = EtcdGateway(EtcdStoreSpec(endpoints=("http://n1:1", "http://n2:1"), prefix="/run", timeout_s=1.0))
    monkeypatch.setattr(gateway, "call", lambda path, body: {})
    monkeypatch.setattr(gateway, "_host", "127.0.1.1")  # of the connection to the member on this node, by its name
    assert gateway.local_host() == ELSEWHERE
    assert ways == ["127.0.1.1", "n1", "n2"]
