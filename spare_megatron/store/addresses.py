"""By which address this machine is reached from others."""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit


def address_towards(hosts: Iterable[str]) -> str:
    """The address of this machine by which it reaches the first host that is elsewhere; a loopback one if none is.

    The machine's own name often stands for a loopback address on itself, by which nobody else reaches it. The next host
    is asked for only after that.

    Raises:
        ValueError: It knows no way to any of them.
    """
    own, failures = "", []
    for host in hosts:
        try:
            address = _address_on_the_way_to(host)
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
    """For a run of several machines: they have to reach this one by the address.

    Nodes that are rehearsed on one machine have loopback addresses on purpose: then no host goes by a name.

    Args:
        address: Of this machine.
        hosts: Those that it was found by.

    Raises:
        ValueError: None of the others would.
    """
    names = [host for host in hosts if _is_name(host)]
    if names and is_loopback(address):
        raise ValueError(
            f"{names[0]} stands for {address} on this machine, by which no other reaches it: take the name out of that "
            f"line of /etc/hosts, or name addresses (control.endpoints, or NodeAddr in slurm.conf)"
        )


def hosts_of(endpoints: Iterable[str]) -> list[str]:
    """The names or addresses in URLs."""
    return [urlsplit(endpoint).hostname or "" for endpoint in endpoints]


def is_loopback(address: str) -> bool:
    """Whether an IP address is reached from its own machine alone."""
    return ipaddress.ip_address(address).is_loopback


def is_address(host: str) -> bool:
    """Whether the host is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_name(host: str) -> bool:
    return host != "localhost" and not is_address(host)


def _address_on_the_way_to(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)  # sends nothing
        return str(route.getsockname()[0])
