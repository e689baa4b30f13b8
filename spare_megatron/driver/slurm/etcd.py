"""Runs an etcd on the job's nodes, for a run without one of its own. Three members tolerate the loss of one. Members
and clients authenticate by certificates of the job; all others are refused.
"""

import dataclasses
import datetime
import ipaddress
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spare_megatron.config.checks.validate import num_etcd_members
from spare_megatron.config.schema import ControlConfig
from spare_megatron.driver.slurm.allocation import address_of
from spare_megatron.driver.slurm.slurm_commands import require
from spare_megatron.driver.slurm.steps import step_command
from spare_megatron.machine.addresses import is_address
from spare_megatron.store.etcd_gateway import silence_of
from spare_megatron.store.open_store import etcd_spec

LOG = "etcd.log"
_START_S = 60.0
_END_S = 5.0
_POLL_S = 0.2
_QUOTA_BYTES = 8 << 30
"""Quota of the database, the most that etcd advises. Its default, 2 GiB, may end a run of months."""
_RETENTION = "10m"
"""How long old versions of keys are kept: votes and heartbeats write new ones all the time."""
_ALL_INTERFACES = "0.0.0.0"
"""Listen address of a member on a node known by name, because etcd only takes addresses. Certificates keep others out.
"""

_RUN_AND_CLEAN_UP = """
limit_s=$1
shift
data=$(mktemp -d) || exit
trap "" USR1
trap 'is_asked=1; kill "$pid" 2>/dev/null' USR2
trap '[ "$is_ending" ] || { is_ending=1; (sleep "$limit_s"; kill -USR2 $$) & }' TERM
while :; do
    etcd --data-dir "$data" "$@" &
    pid=$!
    [ -z "$is_asked" ] || kill "$pid"
    while kill -0 "$pid"; do wait "$pid"; done 2>/dev/null # is interrupted by a signal
    [ "$is_ending" ] && [ -z "$is_asked" ] || break
done
rm -rf "$data"
"""
"""Runs etcd and removes its data, which are of no use after the job. Ignores USR1, which ends training early. USR2 ends
it: from the driver, as srun passes it on. Slurm itself sends TERM to all processes when the job is cancelled or out of
time: the run still needs etcd to end in order, so one that has ended of that is started again, until the limit.
"""
_MARGIN_S = 2.0
"""How much longer than the run, which has `control.end_grace_s` from TERM on, its etcd lasts."""


_LIFE = datetime.timedelta(days=3650)
"""Longer than any job. They are of no use after it, because their etcd is gone."""
_SKEW = datetime.timedelta(days=1)
"""Tolerance for nodes whose clocks are behind."""
_SIGNS_ONLY = x509.KeyUsage(
    key_cert_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files with certificates and keys, readable by their owner only, on all nodes. The key of `authority` is not
    stored. `member` is valid for clients, too: a member's gateway presents it to the member.
    """

    authority: Path
    member: Path
    member_key: Path
    client: Path
    client_key: Path


def issue(folder: Path, addresses: Iterable[str]) -> Certificates:
    """Issues certificates for members at these addresses or names. ValueError: the folder exists or is not writable."""
    files = Certificates(
        authority=folder / "ca.pem",
        member=folder / "member.pem",
        member_key=folder / "member.key",
        client=folder / "client.pem",
        client_key=folder / "client.key",
    )
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _sign("authority", authority_key, "authority", authority_key, is_authority=True)
    try:
        folder.mkdir(mode=0o700, parents=True)
        _write(files.authority, authority)
        for name, file, key_file, hosts in (
            ("member", files.member, files.member_key, tuple(dict.fromkeys(addresses))),
            ("client", files.client, files.client_key, ()),
        ):
            key = ec.generate_private_key(ec.SECP256R1())
            _write(file, _sign(name, key, "authority", authority_key, hosts=hosts))
            _write(key_file, key)
    except OSError as error:
        raise ValueError(f"cannot write the certificates of the job's etcd to {folder}: {error.strerror}") from error
    return files


def _sign(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    hosts: Iterable[str] = (),
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = builder.add_extension(issuer_id, critical=False)
    if is_authority:
        own_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(own_id, critical=False).add_extension(_SIGNS_ONLY, critical=True)
    else:
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses if hosts else uses[1:]), critical=False)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"spare etcd {name}")])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, what: x509.Certificate | ec.EllipticCurvePrivateKey) -> None:
    """Writes PEM that only the owner can read, from the moment the file exists."""
    pem = serialization.Encoding.PEM
    if isinstance(what, x509.Certificate):
        blob = what.public_bytes(pem)
    else:
        blob = what.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(blob)


def member_commands(
    names: Sequence[str],
    addresses: Sequence[str],
    first_port: int,
    token: str,
    certificates: Certificates,
    *,
    end_grace_s: float,
) -> list[tuple[str, ...]]:
    """The srun command of each member. Member i serves clients on port `first_port` + 2 i, and other members on the
    next one. `token` distinguishes this cluster from an earlier one on the same nodes.
    """
    limit_s = f"{end_grace_s + _MARGIN_S:g}"
    peers = [f"https://{address}:{first_port + 2 * i + 1}" for i, address in enumerate(addresses)]
    cluster = ",".join(f"member-{i}={peer}" for i, peer in enumerate(peers))
    commands = []
    for i, (name, client, peer) in enumerate(zip(names, endpoints_of(addresses, first_port), peers, strict=True)):
        bound = addresses[i] if is_address(addresses[i]) else _ALL_INTERFACES
        options = (
            f"--name=member-{i}",
            f"--listen-client-urls=https://{bound}:{first_port + 2 * i}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls=https://{bound}:{first_port + 2 * i + 1}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={cluster}",
            f"--initial-cluster-token={token}",
            *_tls_options(certificates),
            f"--quota-backend-bytes={_QUOTA_BYTES}",
            f"--auto-compaction-retention={_RETENTION}",
            "--logger=zap",
            "--log-level=warn",
        )
        commands.append(step_command(f"etcd-{i}", name, ("sh", "-c", _RUN_AND_CLEAN_UP, "etcd", limit_s, *options)))
    return commands


def _tls_options(certificates: Certificates) -> Iterator[str]:
    for prefix in ("", "peer-"):  # between clients and members, between members
        yield f"--{prefix}client-cert-auth"
        yield f"--{prefix}trusted-ca-file={certificates.authority}"
        yield f"--{prefix}cert-file={certificates.member}"
        yield f"--{prefix}key-file={certificates.member_key}"


def endpoints_of(addresses: Sequence[str], first_port: int) -> tuple[str, ...]:
    return tuple(f"https://{address}:{first_port + 2 * i}" for i, address in enumerate(addresses))


@contextmanager
def etcd_of_the_job(
    nodes: Sequence[str], control: ControlConfig, first_port: int, token: str, folder: Path
) -> Iterator[ControlConfig]:
    """Runs an etcd on the first of these nodes within the block: three members, or one on fewer nodes. Yields
    `control`, which has no endpoints, with the settings that reach it. `first_port` and `token` are as for
    `member_commands`; `folder` takes certificates and output, must not exist, and all nodes share it. ValueError: it
    did not come up.
    """
    require("etcd", "install it on the nodes, add its folder in slurm.setup, or name an etcd in control.endpoints")
    names = nodes[: num_etcd_members(len(nodes))]
    addresses = [address_of(name) for name in names]
    certificates = issue(folder, addresses)
    control = dataclasses.replace(
        control,
        endpoints=endpoints_of(addresses, first_port),
        ca_file=str(certificates.authority),
        cert_file=str(certificates.client),
        key_file=str(certificates.client_key),
    )
    log = folder / LOG
    commands = member_commands(names, addresses, first_port, token, certificates, end_grace_s=control.end_grace_s)
    with log.open("ab") as file:
        steps = [subprocess.Popen(command, start_new_session=True, stdout=file, stderr=file) for command in commands]
    try:
        _wait_until_healthy(control, log)
        yield control
    finally:
        for number in (signal.SIGUSR2, signal.SIGKILL):
            for step in steps:
                step.send_signal(number)  # no effect on one that has ended
            for step in steps:
                with suppress(subprocess.TimeoutExpired):
                    step.wait(_END_S)


def _wait_until_healthy(control: ControlConfig, log: Path) -> None:
    """Waits until each member answers and has a quorum."""
    alone = [dataclasses.replace(control, endpoints=(endpoint,), credentials_file="") for endpoint in control.endpoints]
    end_s = time.monotonic() + _START_S
    while any(silence_of(etcd_spec(member, "health", {}), refusal_counts=True) for member in alone):
        if time.monotonic() > end_s:
            raise ValueError(
                f"etcd on {', '.join(control.endpoints)} has not come up within {_START_S:g} s: see {log}, and whether "
                f"slurm.etcd_port and the 5 ports after it are free on these nodes"
            )
        time.sleep(_POLL_S)
