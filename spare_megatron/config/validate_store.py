"""What is wrong, or doubtful, with the settings of the control store."""

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from spare_megatron.config.schema import ControlConfig


def store_problems(control: ControlConfig, *, brings_etcd: bool = False, can_listen: bool = True) -> Iterator[str]:
    """Every reason why no control store can be reached with these settings.

    Args:
        control: The settings.
        brings_etcd: The run starts an etcd of its own where no endpoint is named.
        can_listen: `control.listen_address` is an address of this machine.
    """
    try:
        if ipaddress.ip_address(control.listen_address).is_unspecified:
            yield (
                f"control.listen_address={control.listen_address} is no single address, and ranks could not connect "
                f"to it; name one address of this machine"
            )
    except ValueError:
        yield f"control.listen_address={control.listen_address} is no IP address; name one of this machine"
    if control.vote_fan_in < 1:
        yield f"control.vote_fan_in={control.vote_fan_in} must be at least 1, with which every group votes directly"
    if control.store == "embedded":
        if not can_listen:
            yield (
                f"control.listen_address={control.listen_address} is no address of this machine, or its network is "
                f"down; name one that `ip address` shows"
            )
        for key in ("endpoints", "ca_file", "cert_file", "key_file", "credentials_file"):
            if getattr(control, key):
                yield f"control.{key} has no effect on control.store=embedded; remove it or set control.store=etcd"
        return
    if control.endpoints or not brings_etcd:
        yield from _endpoint_problems(control.endpoints)
    if bool(control.cert_file) != bool(control.key_file):
        yield "control.cert_file and control.key_file go together; set both or neither"
    if not _is_encrypted(control):
        for key in ("ca_file", "cert_file"):
            if getattr(control, key):
                yield f"control.{key} has no effect on http endpoints; use https in control.endpoints"


def store_warnings(control: ControlConfig) -> Iterator[str]:
    """What leaves the control store open to others."""
    if control.store == "embedded":
        if not ipaddress.ip_address(control.listen_address).is_loopback:
            yield (
                f"control.listen_address={control.listen_address}: the embedded store has no authentication, and "
                f"whoever reaches this address can end or falsify the run; keep the network closed, or use "
                f"control.store=etcd with TLS"
            )
    elif (
        control.endpoints
        and not _is_encrypted(control)
        and not all(_is_loopback(endpoint) for endpoint in control.endpoints)
    ):
        yield "control.endpoints are http: passwords and decisions travel in the clear; use https"


def _endpoint_problems(endpoints: tuple[str, ...]) -> Iterator[str]:
    if not endpoints:
        yield 'control.store=etcd needs control.endpoints, such as ["https://etcd-0:2379"]'
    for endpoint in endpoints:
        if not _is_endpoint(endpoint):
            yield f"control.endpoints: {_without_user(endpoint)!r} is not of the form https://host:port; correct it"
    if len({urlsplit(endpoint).scheme for endpoint in endpoints if _is_endpoint(endpoint)}) > 1:
        yield "control.endpoints mix http and https; use https for all"


def _is_endpoint(endpoint: str) -> bool:
    try:
        url = urlsplit(endpoint)
        is_whole = bool(url.hostname and url.port)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and is_whole and "@" not in url.netloc and url.path in ("", "/")


def _without_user(endpoint: str) -> str:
    """A password that was put here by mistake is not shown."""
    return endpoint.rpartition("@")[2]


def _is_encrypted(control: ControlConfig) -> bool:
    return any(urlsplit(endpoint).scheme == "https" for endpoint in control.endpoints if _is_endpoint(endpoint))


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
