"""Where a control store is and how it is reached: what a rank's process is told of it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpStoreSpec:
    """The embedded store of a run."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A user of etcd."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdStoreSpec:
    """One run's keys in etcd.

    Attributes:
        endpoints: URLs of the members, all of one scheme.
        prefix: All keys of the run stand below it; no other run has it.
        timeout_s: Longest time without an answer of any member.
        ca_file: Certificates that may vouch for the members; the system's when empty.
        cert_file: The client's certificate; none when empty.
        key_file: Its key.
        credentials: The user, where etcd has users.
    """

    endpoints: tuple[str, ...]
    prefix: str
    timeout_s: float
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    credentials: Credentials | None = None


StoreSpec = TcpStoreSpec | EtcdStoreSpec
