"""Certificates that identify the members and clients of a job's etcd."""

import datetime
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

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
