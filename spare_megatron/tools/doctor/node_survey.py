"""Collects facts about this node, and measures its disk and network speed within bounds of bytes and time."""

import hmac
import os
import platform
import re
import resource
import shutil
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from io import BufferedReader
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from spare_megatron.config.schema import ControlConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.corpus import input_files
from spare_megatron.formats.frames import Address, listen
from spare_megatron.formats.store_space import StoreSpace
from spare_megatron.machine.gpus import visible_gpus
from spare_megatron.process.shortages import process_limits
from spare_megatron.store.etcd_gateway import ANSWER_S, etcd_space, silence_of
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.open_store import etcd_spec
from spare_megatron.tools.doctor.diagnosis import NodeFacts, Rate
from spare_megatron.version import __version__, code_digest

_PIECE = bytes(1 << 20)
_MOST_SENT_PIECES = 64
_MOST_SENT_S = 1.0
_SILENT_S = 10.0
_COUNT = struct.Struct(">Q")


class Sink:
    """Server that drains what senders with its key send, and answers with the number of bytes received."""

    def __init__(self, host: str) -> None:
        self._socket, self.address = listen(host)
        threading.Thread(target=self._receive, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _receive(self) -> None:
        while True:
            try:
                sender, _ = self._socket.accept()
            except OSError:  # closed
                return
            with sender, sender.makefile("rb") as stream, suppress(OSError):
                sender.settimeout(_SILENT_S)
                key = bytes.fromhex(self.address.token)
                if hmac.compare_digest(stream.read(len(key)), key):
                    sender.sendall(_COUNT.pack(_drained(stream)))


def send_speed(to: Address) -> Rate:
    """Speed of sending up to 64 MiB to a sink, in little more than a second."""
    try:
        with socket.create_connection((to.host, to.port), timeout=_SILENT_S) as receiver:
            receiver.sendall(bytes.fromhex(to.token))
            num_bytes, began_s = 0, time.monotonic()
            while num_bytes < _MOST_SENT_PIECES * len(_PIECE) and time.monotonic() - began_s < _MOST_SENT_S:
                receiver.sendall(_PIECE)
                num_bytes += len(_PIECE)
            receiver.shutdown(socket.SHUT_WR)
            count = receiver.makefile("rb").read(_COUNT.size)
            took_s = time.monotonic() - began_s
    except OSError as error:
        return Rate(failure=f"{to.host}:{to.port}: {error.strerror or error}")
    if count != _COUNT.pack(num_bytes):
        return Rate(failure=f"{to.host}:{to.port}: the data did not arrive completely")
    return Rate(bytes_per_s=num_bytes / took_s)


def _drained(stream: BufferedReader) -> int:
    buffer, num_bytes = bytearray(1 << 20), 0
    while count := stream.readinto(buffer):
        num_bytes += count
    return num_bytes


_PACKAGES = ("megatron-core", "transformer-engine")
_VISIBLE_S = 5.0
"""A network file system shows a new file to other nodes within this time."""
_POLL_S = 0.2
_PIECE_BYTES = 16 << 20
_MOST_PIECES = 8
_MOST_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsWanted:
    data: DataConfig
    control: ControlConfig
    ports: tuple[int, ...]
    folder: Path
    token: str
    """A file that the driver has made in the folder."""


def examine_node(wanted: FactsWanted, visible_s: float = _VISIBLE_S) -> NodeFacts:
    """Collects the facts about this machine. The file of the driver is visible within `visible_s`."""
    control, folder = wanted.control, wanted.folder
    gpus = visible_gpus()
    versions, torch_failure = _torch_facts(has_gpus=bool(gpus))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infiniband = Path("/sys/class/infiniband")
    store_failures = _store_failures(control)
    store_space, store_refusal = None, ""
    if len(store_failures) < len(control.endpoints):
        store_space, store_refusal = _store_space(control)
    return NodeFacts(
        host=socket.gethostname(),
        versions={**versions, **{package: _version(package) for package in _PACKAGES}, **_own_versions()},
        torch_failure=torch_failure,
        gpus=gpus,
        gpu_driver=_gpu_driver(),
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        has_infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
        busy_ports=tuple(port for port in wanted.ports if _is_busy(port)),
        store_failures=store_failures,
        store_refusal=store_refusal,
        store_space=store_space,
        corpus_bytes=tuple(map(_size, input_files(wanted.data))),
        sees_folder=_appears(folder / wanted.token, visible_s),
        folder_free_bytes=shutil.disk_usage(folder).free if folder.is_dir() else 0,
        nccl_cumem=os.environ.get("NCCL_CUMEM_ENABLE", ""),
        **asdict(process_limits()),
    )


def write_speed(file: Path) -> Rate:
    """Speed of writing up to 128 MiB durably, in little more than a second."""
    piece = os.urandom(_PIECE_BYTES)  # some file systems compress
    num_bytes, began_s = 0, time.monotonic()
    try:
        with file.open("xb", buffering=0) as stream:
            while num_bytes < _MOST_PIECES * _PIECE_BYTES and time.monotonic() - began_s < _MOST_S:
                num_bytes += stream.write(piece)
                os.fsync(stream.fileno())  # each piece: a single sync at the end could take any time
        return Rate(bytes_per_s=num_bytes / (time.monotonic() - began_s))
    except OSError as error:
        return Rate(failure=error.strerror or str(error))
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _torch_facts(*, has_gpus: bool) -> tuple[dict[str, str], str]:
    """Versions of torch and what it was built with, and why it cannot be loaded or use the GPUs."""
    try:
        import torch

        from spare_megatron.devices import gpu

        versions = {"torch": torch.__version__, **dict([gpu.platform()])}
        if torch.distributed.is_nccl_available():
            versions |= dict([gpu.collective_library()])
            if has_gpus:
                gpu.init()
    except (ImportError, OSError, RuntimeError) as error:  # a library that is missing, a driver that is too old
        return {"torch": _version("torch")}, f"{type(error).__name__}: {error}".partition("\n")[0]
    return versions, ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _own_versions() -> dict[str, str]:
    return {"Python": platform.python_version(), "spare_megatron": f"{__version__} ({code_digest()[:12]})"}


def _gpu_driver() -> str:
    with suppress(OSError):
        found = re.search(r"Module\s+(?:for \S+\s+)?([0-9.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else ""
    return ""


def _is_busy(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a process that has just ended does not count
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _store_failures(control: ControlConfig) -> Mapping[str, str]:
    """Endpoint -> why it refuses connections from here."""
    failures = {}
    for endpoint in control.endpoints:
        url = urlsplit(endpoint)
        try:
            socket.create_connection((url.hostname, url.port), timeout=ANSWER_S).close()
        except OSError as error:
            failures[endpoint] = error.strerror or str(error)
    return failures


def _store_space(control: ControlConfig) -> tuple[StoreSpace | None, str]:
    """The size of etcd's database, or why etcd does not report it."""
    try:
        spec = replace(etcd_spec(control, "doctor", os.environ), timeout_s=ANSWER_S)
        if silence := silence_of(spec):
            return None, f"no member that has a quorum answers within {ANSWER_S:g} s: {silence}"
        return etcd_space(spec), ""
    except (StoreLost, ValueError) as error:
        return None, str(error)


def _size(file: Path) -> int | None:
    """Size of a file whose last byte can be read; else None."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 1))
            stream.read(1)
            return size
    except OSError:
        return None


def _appears(file: Path, within_s: float) -> bool:
    end_s = time.monotonic() + within_s
    while not file.exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True
