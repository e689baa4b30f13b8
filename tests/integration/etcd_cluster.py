"""A real etcd cluster of three members on this machine, and where its binary comes from."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spare_megatron.store.etcd_gateway import EtcdGateway
from spare_megatron.store.spec import EtcdStoreSpec
from tests.integration.debian import fetch_packages

NUM_MEMBERS = 3
_START_S = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def find_etcd(cache: Path) -> Path:
    """The etcd binary of this machine, or Debian's in the cache, fetched there without any change to the system."""
    found = shutil.which("etcd")
    if found:
        return Path(found)
    binary = cache / "usr" / "bin" / "etcd"
    fetch_packages(cache, binary, "etcd-server")
    return binary


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """Files of the members' own certificate, and of the authority that clients' certificates must come from."""

    ca_file: Path
    cert_file: Path
    key_file: Path


@dataclass(slots=True)
class EtcdCluster:
    """Running members, by their number."""

    endpoints: tuple[str, ...]
    launch: Callable[[int], subprocess.Popen[bytes]]
    members: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def leader(self) -> int:
        """The number of the member that leads, once the members agree on it: they may be electing one."""
        end_s = time.monotonic() + _START_S
        while True:
            leaders, numbers = set(), {}
            for number in self.members:
                status = ask(self.endpoints[number], "/v3/maintenance/status", {})
                leaders.add(status.get("leader"))
                numbers[status["header"]["member_id"]] = number
            if len(leaders) == 1 and (leader := numbers.get(leaders.pop())) is not None:
                return leader
            assert time.monotonic() < end_s, "the members do not agree on who leads"
            time.sleep(0.05)

    def start(self, number: int) -> None:
        """Starts a member, for the first time or again with what it has on disk."""
        self.members[number] = self.launch(number)

    def kill(self, number: int) -> None:
        """SIGKILL, and reaps it."""
        process = self.members.pop(number)
        process.kill()
        assert process.wait(_START_S) == -signal.SIGKILL

    def stop(self, number: int) -> None:
        """SIGTERM, as an operator stops a member; reaps it when it has ended by itself."""
        process = self.members.pop(number)
        process.terminate()
        assert process.wait(_START_S) in (0, -signal.SIGTERM)

    def pause(self, number: int) -> None:
        """Stops the member without closing any of its connections."""
        self.members[number].send_signal(signal.SIGSTOP)

    def resume(self, number: int) -> None:
        """Ends a pause."""
        self.members[number].send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running_cluster(
    binary: Path, folder: Path, tls: ServerTls | None = None, options: Sequence[str] = ()
) -> Iterator[EtcdCluster]:
    """A cluster; without TLS it has a leader already. Its members are started with these further options."""
    scheme = "https" if tls else "http"
    with _kept_ports(2 * NUM_MEMBERS) as ports:
        endpoints = tuple(f"{scheme}://127.0.0.1:{port}" for port in ports[:NUM_MEMBERS])
        peers = [f"http://127.0.0.1:{port}" for port in ports[NUM_MEMBERS:]]
        cluster = EtcdCluster(
            endpoints=endpoints,
            launch=lambda number: _start(binary, folder, number, endpoints[number], peers, tls, options),
        )
        try:
            for number in range(NUM_MEMBERS):
                cluster.start(number)
            if tls is None:
                EtcdGateway(EtcdStoreSpec(endpoints=endpoints, prefix="", timeout_s=_START_S)).call(
                    "/v3/kv/range", {"key": "AA=="}
                )
            yield cluster
        finally:
            for number in list(cluster.members):
                cluster.kill(number)


def _start(
    binary: Path,
    folder: Path,
    number: int,
    endpoint: str,
    peers: Sequence[str],
    tls: ServerTls | None,
    options: Sequence[str],
) -> subprocess.Popen[bytes]:
    command = [
        str(binary),
        f"--name=member-{number}",
        f"--data-dir={folder / f'member-{number}'}",
        f"--listen-client-urls={endpoint}",
        f"--advertise-client-urls={endpoint}",
        f"--listen-peer-urls={peers[number]}",
        f"--initial-advertise-peer-urls={peers[number]}",
        f"--initial-cluster={','.join(f'member-{i}={peer}' for i, peer in enumerate(peers))}",
        "--logger=zap",
        *options,
    ]
    if tls is not None:
        command += [
            f"--cert-file={tls.cert_file}",
            f"--key-file={tls.key_file}",
            f"--trusted-ca-file={tls.ca_file}",
            "--client-cert-auth",
        ]
    with (folder / f"member-{number}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _kept_ports(number: int) -> Iterator[list[int]]:
    """Ports that the system gives to no other process: etcd's members must know each other's before they start, and
    find theirs again. A process that may reuse an address, as a server in Go does, can listen where a socket is bound.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for item in sockets:
            item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            item.bind(("127.0.0.1", 0))
        yield [int(item.getsockname()[1]) for item in sockets]


def ports_for_members() -> int:
    """The first of six ports in a row, which were free a moment ago, for the members of one etcd.

    They are no ports that the system gives out, and others than another process of tests would choose at this moment.
    """
    firsts = range(30000, 32760, 6)
    for number in range(len(firsts)):
        first = firsts[(os.getpid() + number) % len(firsts)]
        try:
            for port in range(first, first + 6):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no six ports are free")


def ask(endpoint: str, path: str, body: Mapping[str, Any], tls: ssl.SSLContext | None = None) -> dict[str, Any]:
    """A member's answer to one request that is sent once."""
    request = urllib.request.Request(endpoint + path, data=json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=_START_S, context=tls) as response:
        return dict(json.load(response))
