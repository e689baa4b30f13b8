"""Finds the address at which other machines reach this one."""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit


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
