"""Opens the control store that a configuration or a spec describes."""

import secrets
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from spare_megatron.config.schema import ControlConfig, RunConfig
from spare_megatron.store.etcd_gateway import StoreRefused, tls_context
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import ControlStore
from spare_megatron.store.spec import Credentials, EtcdStoreSpec, StoreSpec, TcpStoreSpec
from spare_megatron.store.tcp_store import TcpControlStore

USER_VARIABLE, PASSWORD_VARIABLE = "SPARE_ETCD_USER", "SPARE_ETCD_PASSWORD"


def open_store(spec: StoreSpec) -> ControlStore:
    """A new connection. Raises StoreLost for the embedded store; etcd is only contacted by the first request."""
    if isinstance(spec, TcpStoreSpec):
        return TcpControlStore(spec.host, spec.port)
    return EtcdControlStore(spec)


def etcd_spec(control: ControlConfig, run_name: str, environment: Mapping[str, str]) -> EtcdStoreSpec:
    """A new run's keys in the configured etcd, under a unique prefix. Raises ValueError for unusable credentials."""
    return EtcdStoreSpec(
        endpoints=control.endpoints,
        prefix=f"/spare/{run_name}-{secrets.token_hex(8)}",
        timeout_s=control.store_timeout_s,
        ca_file=control.ca_file,
        cert_file=control.cert_file,
        key_file=control.key_file,
        credentials=_read_credentials(control.credentials_file, environment),
    )


def outer_spec(config: RunConfig, environment: Mapping[str, str]) -> StoreSpec:
    """The store of all sites: the embedded one, or keys in etcd under the name of their runs, which no run removes.
    Raises as `etcd_spec` does.
    """
    url = urlsplit(config.sites.endpoints[0])
    if url.scheme == "tcp":
        return TcpStoreSpec(host=url.hostname or "", port=url.port or 0)
    spec = etcd_spec(replace(config.control, endpoints=config.sites.endpoints), config.name, environment)
    return replace(spec, prefix=f"/spare/sites/{config.name}")


def check_files_for_etcd(spec: EtcdStoreSpec) -> None:
    """Raises ValueError for certificates that cannot be used, before anything is started."""
    try:
        tls_context(spec)
    except StoreRefused as error:
        raise ValueError(str(error)) from error


def without_credentials(spec: StoreSpec) -> StoreSpec:
    """The spec without credentials, to be sent over an open network."""
    return spec if isinstance(spec, TcpStoreSpec) else replace(spec, credentials=None)


def with_credentials(spec: StoreSpec, control: ControlConfig, environment: Mapping[str, str]) -> StoreSpec:
    """The spec with this machine's credentials for the store. Raises ValueError if they cannot be used."""
    if isinstance(spec, TcpStoreSpec):
        return spec
    return replace(spec, credentials=_read_credentials(control.credentials_file, environment))


def _read_credentials(file: str, environment: Mapping[str, str]) -> Credentials | None:
    """The user in the file, else the one in the environment, else None."""
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
