"""The members of a job's own etcd: where they listen, and what they leave."""

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spare_megatron.slurm.certificates import issue
from spare_megatron.slurm.etcd import member_commands


def urls(command: tuple[str, ...], option: str) -> list[str]:
    return [word.partition("=")[2] for word in command if word.startswith(f"--{option}=")]


@pytest.mark.parametrize(("address", "bound"), [("n1", "0.0.0.0"), ("10.0.0.7", "10.0.0.7")])
def test_a_member_listens_at_an_address_and_is_known_by_what_slurm_knows_its_node_by(
    tmp_path: Path, address: str, bound: str
) -> None:
    """etcd takes no names for where it listens: "expected IP in URL for binding"."""
    (command,) = member_commands(["n1"], [address], 2379, "job-7", issue(tmp_path / "etcd", [address]))
    listening = [*urls(command, "listen-client-urls"), *urls(command, "listen-peer-urls")]
    hosts = [urlsplit(url).hostname or "" for url in listening]
    assert [str(ipaddress.ip_address(host)) for host in hosts] == [bound, bound]
    assert [urlsplit(url).port for url in listening] == [2379, 2380]
    assert urls(command, "advertise-client-urls") == [f"https://{address}:2379"]
    assert urls(command, "initial-advertise-peer-urls") == [f"https://{address}:2380"]
