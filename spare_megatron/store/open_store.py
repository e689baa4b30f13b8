"""The control store that a configuration or a spec describes."""

import secrets
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spare_megatron.config.schema import ControlConfig
from spare_megatron.store.etcd_gateway import StoreRefused, tls_context
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import ControlStore
from spare_megatron.store.spec import Credentials, EtcdStoreSpec, StoreSpec, TcpStoreSpec
from spare_megatron.store.tcp_store import TcpControlStore

USER_VARIABLE, PASSWORD_VARIABLE = "SPARE_ETCD_USER", "SPARE_ETCD_PASSWORD"


def open_store(spec: StoreSpec) -> ControlStore:
    """A connection to the store.

    Raises:
        StoreLost: The embedded store does not answer. etcd is asked with the first request.
    """
    if isinstance(spec, TcpStoreSpec):
        return TcpControlStore(spec.host, spec.port)
    return EtcdControlStore(spec)


def etcd_spec(control: ControlConfig, run_name: str, environment: Mapping[str, str]) -> EtcdStoreSpec:
    """A new run's keys in the etcd of the configuration, under a prefix that no other run has.

    Raises:
        ValueError: The credentials cannot be used.
    """
    return EtcdStoreSpec(
        endpoints=control.endpoints,
        prefix=f"/spare/{run_name}-{secrets.token_hex(8)}",
        timeout_s=control.store_timeout_s,
        ca_file=control.ca_file,
        cert_file=control.cert_file,
        key_file=control.key_file,
        credentials=_read_credentials(control.credentials_file, environment),
    )


def check_files_for_etcd(control: ControlConfig, environment: Mapping[str, str]) -> None:
    """Refuses certificates and credentials that cannot be used, before anything is started.

    Raises:
        ValueError: They cannot.
    """
    try:
        tls_context(etcd_spec(control, "unused", environment))
    except StoreRefused as error:
        raise ValueError(str(error)) from error


def without_credentials(spec: StoreSpec) -> StoreSpec:
    """The store as it may be told over an open network."""
    return spec if isinstance(spec, TcpStoreSpec) else replace(spec, credentials=None)


def with_credentials(spec: StoreSpec, control: ControlConfig, environment: Mapping[str, str]) -> StoreSpec:
    """The store with the credentials that this machine has for it.

    Raises:
        ValueError: They cannot be used.
    """
    if isinstance(spec, TcpStoreSpec):
        return spec
    return replace(spec, credentials=_read_credentials(control.credentials_file, environment))


def _read_credentials(file: str, environment: Mapping[str, str]) -> Credentials | None:
    """The user in the file, else the one in the environment, else none."""
    if not file:
        user, password = environment.get(USER_VARIABLE, ""), environment.get(PASSWORD_VARIABLE, "")
        if bool(user) != bool(password):
            raise ValueError(f"set both {USER_VARIABLE} and {PASSWORD_VARIABLE}, or neither")
        return Credentials(user=user, password=password) if user else None
    path = Path(file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"control.credentials_file={file} cannot be read: {type(error).__name__}") from None
    if mode & 0o077:
        raise ValueError(
            f"control.credentials_file={file} has mode {mode:04o} and is readable by others; run `chmod 600 {file}`"
        )
    user, separator, password = text.strip().partition(":")
    if not (user and separator and password):
        raise ValueError(f"control.credentials_file={file} must hold one line, user:password")
    return Credentials(user=user, password=password)
