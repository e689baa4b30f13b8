"""Specs of a control store: where it is and how to connect to it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpStoreSpec:
    """The embedded store of a run."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdStoreSpec:
    """One run's keys in etcd, below a unique `prefix`. `timeout_s`: longest time without an answer from any member.
    `ca_file`: for the members, the system's when empty. `cert_file`: the client's, with its key in `key_file`.
    """

    endpoints: tuple[str, ...]
    prefix: str
    timeout_s: float
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    credentials: Credentials | None = None


StoreSpec = TcpStoreSpec | EtcdStoreSpec
