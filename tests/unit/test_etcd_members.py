"""The members of a job's own etcd: where they listen, and what they leave."""

import ipaddress
import os
import signal
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spare_megatron.driver.slurm.etcd import issue, member_commands


def urls(command: tuple[str, ...], option: str) -> list[str]:
    return [word.partition("=")[2] for word in command if word.startswith(f"--{option}=")]


@pytest.mark.parametrize(("address", "bound"), [("n1", "0.0.0.0"), ("10.0.0.7", "10.0.0.7")])
def test_a_member_listens_at_an_address_and_is_known_by_what_slurm_knows_its_node_by(
    tmp_path: Path, address: str, bound: str
) -> None:
    """etcd takes no names for where it listens: "expected IP in URL for binding"."""
    certificates = issue(tmp_path / "etcd", [address])
    (command,) = member_commands(["n1"], [address], 2379, "job-7", certificates, end_grace_s=25.0)
    listening = [*urls(command, "listen-client-urls"), *urls(command, "listen-peer-urls")]
    hosts = [urlsplit(url).hostname or "" for url in listening]
    assert [str(ipaddress.ip_address(host)) for host in hosts] == [bound, bound]
    assert [urlsplit(url).port for url in listening] == [2379, 2380]
    assert urls(command, "advertise-client-urls") == [f"https://{address}:2379"]
    assert urls(command, "initial-advertise-peer-urls") == [f"https://{address}:2380"]


def test_a_member_may_grow_to_what_etcd_advises_at_most_and_forgets_old_versions(tmp_path: Path) -> None:
    """Of 2 GiB, etcd's default, or without compaction a run of months would find it full."""
    certificates = issue(tmp_path / "etcd", ["10.0.0.7"])
    (command,) = member_commands(["n1"], ["10.0.0.7"], 2379, "job-7", certificates, end_grace_s=25.0)
    assert {"--quota-backend-bytes=8589934592", "--auto-compaction-retention=10m"} <= set(command)


WAIT_S = 60.0


@pytest.mark.parametrize(("number", "grace_s"), [(signal.SIGUSR2, 25.0), (signal.SIGTERM, -1.9)])
def test_a_member_that_is_stopped_leaves_no_data(tmp_path: Path, number: signal.Signals, grace_s: float) -> None:
    """SIGTERM is what Slurm sends where a job is cancelled, or its time is over: the run has some time from then on."""
    etcd, arguments, folders = tmp_path / "bin/etcd", tmp_path / "arguments", tmp_path / "folders"
    etcd.parent.mkdir()
    folders.mkdir()
    etcd.write_text(
        f'#!/bin/sh\ntouch "$2/member"\necho "$@" > {arguments}.new\nmv {arguments}.new {arguments}\nexec sleep 600\n'
    )
    etcd.chmod(0o755)
    certificates = issue(tmp_path / "etcd", ["n1"])
    (command,) = member_commands(["n1"], ["10.0.0.7"], 2379, "job-7", certificates, end_grace_s=grace_s)
    script = command[command.index("sh") :]
    environment = {**os.environ, "PATH": f"{etcd.parent}:{os.environ['PATH']}", "TMPDIR": str(folders)}
    with subprocess.Popen(script, env=environment) as shell:
        end_s = time.monotonic() + WAIT_S
        while not arguments.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        assert arguments.read_text().startswith(f"--data-dir {folders}/")
        assert len(list(folders.iterdir())) == 1
        shell.send_signal(signal.SIGUSR1)
        shell.send_signal(number)
        assert shell.wait(WAIT_S) == 0
    assert list(folders.iterdir()) == []


def test_a_member_that_ends_of_a_signal_to_the_whole_job_is_started_again(tmp_path: Path) -> None:
    """etcd itself gets it, too; without it the run could not commit its last step."""
    etcd, starts, folders = tmp_path / "bin/etcd", tmp_path / "starts", tmp_path / "folders"
    etcd.parent.mkdir()
    folders.mkdir()
    etcd.write_text(f"#!/bin/sh\necho $$ $2 >> {starts}\nexec sleep 600\n")
    etcd.chmod(0o755)
    (command,) = member_commands(["n1"], ["n1"], 2379, "job-7", issue(tmp_path / "etcd", ["n1"]), end_grace_s=25.0)
    environment = {**os.environ, "PATH": f"{etcd.parent}:{os.environ['PATH']}", "TMPDIR": str(folders)}
    with subprocess.Popen(command[command.index("sh") :], env=environment, start_new_session=True) as shell:
        first = starts_in(starts, 1)[0]
        os.killpg(shell.pid, signal.SIGTERM)
        second = starts_in(starts, 2)[1]
        shell.send_signal(signal.SIGUSR2)
        assert shell.wait(WAIT_S) == 0
        os.killpg(shell.pid, signal.SIGKILL)  # what waits for the limit
    assert first.split()[0] != second.split()[0]
    assert first.split()[1] == second.split()[1], "with the same data"
    assert list(folders.iterdir()) == []


def starts_in(file: Path, number: int) -> list[str]:
    end_s = time.monotonic() + WAIT_S
    while not file.exists() or len(file.read_text().splitlines()) < number:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return file.read_text().splitlines()


def test_the_members_of_etcd_know_each_other_and_none_shares_a_port(tmp_path: Path) -> None:
    """All on one address, as where nodes are rehearsed on one machine."""
    certificates = issue(tmp_path / "etcd", ["127.0.0.1"])
    commands = member_commands(["n1", "n2", "n3"], ["127.0.0.1"] * 3, 2379, "job-7", certificates, end_grace_s=25.0)
    clusters = {word for command in commands for word in command if word.startswith("--initial-cluster=")}
    peers = ",".join(f"member-{i}=https://127.0.0.1:{2380 + 2 * i}" for i in range(3))
    assert clusters == {f"--initial-cluster={peers}"}
    clients = {word for command in commands for word in command if word.startswith("--listen-client-urls=")}
    assert clients == {f"--listen-client-urls=https://127.0.0.1:{port}" for port in (2379, 2381, 2383)}
