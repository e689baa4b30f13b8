"""The addresses at which other machines reach this one, and network namespaces for the nodes of a run on one machine,
so that a fault can cut a node off or slow its link.

Each node has a veth pair to a bridge in the hub's namespace, which holds the control store. All of it disappears with
the processes. resolv.conf is empty there, or every lookup would wait for a name server. Needs root and iproute2.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

HUB_ADDRESS = "10.213.0.1"
_INTERFACE = "eth0"
_BRIDGE = "hub"
_BRIDGE_MAC = "02:00:00:00:00:01"
_DISABLED, _FORWARDING = 0, 3  # states of a bridge's port
FULL_RATE_BITS_PER_S = 1e9
"""A link that is slowed by a factor carries this rate divided by it; one that is not slowed has no limit."""
_BURST_S = 0.01
_LEAST_BURST_BYTES = 16_384
_QUEUE_MS = 400
"""Packets that would wait for longer are dropped, as by a switch whose buffers are full."""
_COMMAND_TIMEOUT_S = 60.0
"""The kernel has one lock for changes of all networks, and holds it for seconds where grace periods of RCU are slow."""
_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000


def serve_hub(driver: Connection) -> None:
    """Main function of the hub's process: sets up the bridge, reports that, and holds it until the driver is gone."""
    _unshare_network()
    _ip("link", "set", "lo", "up")
    # By default a bridge has the lowest MAC of its ports, which changes while peers have the former one cached.
    _ip("link", "add", _BRIDGE, "address", _BRIDGE_MAC, "type", "bridge")
    _ip("addr", "add", f"{HUB_ADDRESS}/16", "dev", _BRIDGE)
    _ip("link", "set", _BRIDGE, "up")
    driver.send("up")
    with contextlib.suppress(EOFError):
        driver.recv()


def run_in_network_of(pid: int, target: Callable[..., None], *args: Any) -> None:
    """Runs the target in the network and mount namespaces of a process; for the start of a process."""
    for kind in ("net", "mnt"):
        _enter(f"/proc/{pid}/ns/{kind}")
    target(*args)


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """Sockets that this thread opens inside the block are opened in the network namespace of the process."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # resolv.conf is still this process's own
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    _enter(f"/proc/{pid}/ns/net")
    try:
        yield
    finally:
        _check(_libc().setns(home, _CLONE_NEWNET))
        os.close(home)


class NodeNetwork:
    """A node's namespace and its link to the hub. Created in the node's first process, before it has threads."""

    def __init__(self, node: int, hub_pid: int) -> None:
        self._plug = f"node{node}"  # the link's end at the bridge
        self._in_hub = ("nsenter", f"--net=/proc/{hub_pid}/ns/net")
        _unshare_network()
        _ip("link", "set", "lo", "up")
        _run(
            *self._in_hub, "ip", "link", "add", self._plug, "type", "veth", "peer", "name", _INTERFACE,
            "netns", str(os.getpid()),
        )  # fmt: skip
        _run(*self._in_hub, "ip", "link", "set", self._plug, "master", _BRIDGE, "up")
        _ip("addr", "add", f"10.213.{1 + node // 250}.{1 + node % 250}/16", "dev", _INTERFACE)
        _ip("link", "set", _INTERFACE, "up")
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE

    def cut(self) -> None:
        """Disables the node's port of the bridge: packets are lost silently, both ways.

        The link stays up: after it was down, the kernel drops what its other end sends, for 20 s on a busy machine.
        """
        self._set_port(_DISABLED)

    def mend(self) -> None:
        self._set_port(_FORWARDING)

    def slow(self, factor: float) -> None:
        """Limits what the link carries, either way, by a token bucket (tc-tbf(8))."""
        _run("tc", "qdisc", "replace", "dev", _INTERFACE, "root", *_bucket(factor))
        _run(*self._in_hub, "tc", "qdisc", "replace", "dev", self._plug, "root", *_bucket(factor))

    def restore(self) -> None:
        _run("tc", "qdisc", "del", "dev", _INTERFACE, "root")
        _run(*self._in_hub, "tc", "qdisc", "del", "dev", self._plug, "root")

    def _set_port(self, state: int) -> None:
        # Not `ip link set ... type bridge_slave state`: it also reports a change of the link, which enables the port.
        _run(*self._in_hub, "bridge", "link", "set", "dev", self._plug, "state", str(state))


def why_no_slow_link() -> str:
    """Why the kernel or a missing program would refuse `NodeNetwork.slow`; empty if neither would."""
    try:
        _run("unshare", "--net", "tc", "qdisc", "replace", "dev", "lo", "root", *_bucket(1.0))
    except OSError as error:
        return str(error)
    return ""


def _bucket(factor: float) -> tuple[str, ...]:
    rate = FULL_RATE_BITS_PER_S / factor
    burst_bytes = max(_LEAST_BURST_BYTES, round(_BURST_S * rate / 8))
    return ("tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst_bytes}b", "latency", f"{_QUEUE_MS}ms")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _unshare_network() -> None:
    _check(_libc().unshare(_CLONE_NEWNET | _CLONE_NEWNS))
    _run("mount", "--make-rprivate", "/")
    _run("mount", "--bind", "/dev/null", "/etc/resolv.conf")


def _enter(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    _check(_libc().setns(fd, 0))  # 0: a namespace of any kind
    os.close(fd)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def address_towards(hosts: Iterable[str]) -> str:
    """This machine's address on the route to the first host that is not itself; a loopback address if all of them are.

    A host name that resolves to a loopback address is skipped. Raises ValueError if there is no route to any host.
    """
    own, failures = "", []
    for host in hosts:
        try:
            address = address_on_the_way_to(host)
        except OSError as error:
            failures.append(f"{host} cannot be reached from here: {error.strerror}")
            continue
        if not is_loopback(address):
            return address
        own = own or address
    if not own:
        raise ValueError(f"{'; '.join(failures)}; correct the name, or have it resolved")
    return own


def refuse_loopback(address: str, hosts: Iterable[str]) -> None:
    """Raises ValueError if this address is loopback, which others cannot reach, and some host is given by name."""
    names = [host for host in hosts if _is_name(host)]
    if names and is_loopback(address):
        raise ValueError(
            f"{names[0]} stands for {address} on this machine, by which no other reaches it: take the name out of that "
            f"line of /etc/hosts, or name addresses (control.endpoints, or NodeAddr in slurm.conf)"
        )


def hosts_of(endpoints: Iterable[str]) -> list[str]:
    return [urlsplit(endpoint).hostname or "" for endpoint in endpoints]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_name(host: str) -> bool:
    return host != "localhost" and not is_address(host)


def address_on_the_way_to(host: str) -> str:
    """This machine's address on the route to a host. OSError: there is none, or no such host."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)  # sends nothing: a datagram socket
        return str(route.getsockname()[0])
