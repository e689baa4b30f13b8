"""The NVIDIA GPUs of this machine, by NVML, the library of the driver: without torch, and without using any."""

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
"""NVML's own limit for names and UUIDs."""
_SM_CLOCK = 1
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
"""Bits of nvmlClocksThrottleReasons (nvml.h) that mean less than a device could do; idle and settings are others."""


_XID_EVENT = 0x08
"""nvmlEventTypeXidCriticalError."""
_TIMEOUT, _GPU_IS_LOST = 10, 15
"""Of nvmlReturn_t."""
_OFF_THE_BUS = 79
_WAIT_MS = 1000
_RECENT_S = 60.0
"""The exception of a rank comes within seconds of the event; earlier ones have nothing to do with it."""
_KEPT_EVENTS = 256


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as CUDA shows it to a process; `name` is its model, `free_bytes` its unused memory."""

    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class _Device:
    uuid: str
    handle: ctypes.c_void_p = field(compare=False)
    is_instance: bool = False
    """A MIG instance, a part of a GPU."""


@dataclass(frozen=True, slots=True)
class _Card:
    """A GPU with its only device, or, in MIG mode, its instances."""

    uuid: str
    devices: Sequence[_Device]


def visible_gpus() -> tuple[Gpu, ...]:
    """The devices that CUDA shows to a process, in the order of CUDA_VISIBLE_DEVICES; all of them if it is unset. Of
    MIG instances CUDA shows only one, and here none beside a whole GPU. Empty where no driver is loaded.
    """
    with _library() as nvml:
        return tuple(_describe(nvml, device) for device in _visible_devices(nvml, os.environ.get(_VISIBLE)))


def reduced_clocks(names: str | None = None) -> tuple[str, ...]:
    """Of each device that CUDA shows under `names`, as in CUDA_VISIBLE_DEVICES, why its clock is reduced, and to what;
    empty for one that is not throttled.
    """
    with _library() as nvml:
        return tuple(_reduced_clock(nvml, device) for device in _visible_devices(nvml, names))


def list_file(run_dir: Path, node: int) -> Path:
    """The list of the GPUs of this node's machine, by UUID, in the order in which its ranks have them."""
    return run_dir / "gpus" / f"node-{node}"


def read_list(file: Path) -> tuple[str, ...]:
    with contextlib.suppress(FileNotFoundError):
        return tuple(file.read_text().split())
    return ()


def write_list(file: Path, uuids: Sequence[str]) -> None:
    """Writes it as a whole or not at all; OSError: the disk does not take it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text("".join(f"{uuid}\n" for uuid in uuids))
    unfinished.replace(file)


def gpus_of_machine(kept: Sequence[str], here: Sequence[str]) -> tuple[str, ...]:
    """The GPUs of a machine in the order of the list `kept`, of which some may be lost, where it has those of `here`
    now. With none of the list here, this is another machine, which begins a list of its own.
    """
    return tuple(kept if not here or set(kept).intersection(here) else here)


def show(uuids: Sequence[str]) -> None:
    """Has this process, and those that it starts, see these GPUs alone, in this order. CUDA is not in use yet."""
    os.environ[_VISIBLE] = ",".join(uuids)


@contextlib.contextmanager
def shown_to_children(uuid: str | None) -> Iterator[None]:
    """Processes that are spawned meanwhile see this GPU alone, from before their first import; with None, what this
    process sees. Not for two threads at a time.
    """
    own = os.environ.get(_VISIBLE)
    if uuid is not None:
        show([uuid])
    try:
        yield
    finally:
        restore_shown(own)


def restore_shown(names: str | None) -> None:
    if names is None:
        os.environ.pop(_VISIBLE, None)
    else:
        os.environ[_VISIBLE] = names


def hide_all() -> str | None:
    """Has this process see no GPU until `restore_shown` gets what this returns."""
    own = os.environ.get(_VISIBLE)
    show([])
    return own


class ClockReader:
    """Returns what its last call found by `reduced_clocks`, in a thread: with a broken GPU NVML may not return. Of the
    GPUs that this process sees now; what children are shown later does not matter to the thread.
    """

    def __init__(self) -> None:
        self._names = os.environ.get(_VISIBLE)
        self._found: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None

    def __call__(self) -> tuple[str, ...]:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read, name="gpu-clocks", daemon=True)
            self._thread.start()
        return self._found

    def _read(self) -> None:
        self._found = reduced_clocks(self._names)


class XidWatch:
    """Watches Xid events, which CUDA's exceptions do not name. A daemon thread waits for them, as NVML may hang with a
    broken GPU. A GPU off the bus counts as event 79, even if no event arrives.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self._found: deque[tuple[float, str, int]] = deque(maxlen=_KEPT_EVENTS)
        if uuids:
            threading.Thread(target=self._watch, name="gpu-events", daemon=True).start()

    def recent(self, uuids: Collection[str], since_s: float = 0.0) -> tuple[tuple[str, int], ...]:
        """The events of these GPUs in the last minute, and after this time (monotonic), each once, as UUID and Xid."""
        since_s = max(since_s, time.monotonic() - _RECENT_S)
        return tuple(
            dict.fromkeys((uuid, xid) for at_s, uuid, xid in list(self._found) if at_s > since_s and uuid in uuids)
        )

    def _watch(self) -> None:
        with _library() as nvml:
            devices = {} if nvml is None else _devices_with_events(nvml, self._uuids)
            events = ctypes.c_void_p()
            if not devices or nvml.nvmlEventSetCreate(ctypes.byref(events)) != 0:
                return
            for handle in devices:
                nvml.nvmlDeviceRegisterEvents(ctypes.c_void_p(handle), _XID_EVENT, events)
            while devices:
                self._await_event(nvml, events, devices)
            nvml.nvmlEventSetFree(events)

    def _await_event(self, nvml: Any, events: ctypes.c_void_p, devices: dict[int, str]) -> None:
        """Notes the next event, and what has fallen off the bus, which is watched no longer."""
        event = _Event()
        code = nvml.nvmlEventSetWait_v2(events, ctypes.byref(event), _WAIT_MS)
        if code == 0 and event.device in devices:
            self._found.append((time.monotonic(), devices[event.device], event.data))
        elif code not in (0, _TIMEOUT):
            for handle in [one for one in devices if _is_lost(nvml, one)]:
                self._found.append((time.monotonic(), devices.pop(handle), _OFF_THE_BUS))
            time.sleep(_WAIT_MS / 1000)  # NVML may return this error at once, every time


def _devices_with_events(nvml: Any, uuids: Sequence[str]) -> dict[int, str]:
    """UUIDs by handle. MIG instances have no events of their own."""
    wanted = (one for card in _cards(nvml) for one in card.devices if one.uuid in uuids and not one.is_instance)
    return {one.handle.value: one.uuid for one in wanted if one.handle.value is not None}


def _is_lost(nvml: Any, handle: int) -> bool:
    memory = _Memory()
    return bool(nvml.nvmlDeviceGetMemoryInfo(ctypes.c_void_p(handle), ctypes.byref(memory)) == _GPU_IS_LOST)


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    """NVML; None where no driver is loaded."""
    nvml = None
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL(_LIBRARY)
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _visible_devices(nvml: Any, names: str | None) -> Sequence[_Device]:
    return () if nvml is None else _visible(_cards(nvml), names)


def _visible(cards: Sequence[_Card], names: str | None) -> Sequence[_Device]:
    """Like CUDA, ignores everything from the first name on that is no device, and all names if one is repeated."""
    found: list[_Device] = []
    if names is None:
        found = [device for card in cards for device in card.devices]
    else:
        for name in names.split(","):
            device = _find(cards, name.strip())
            if device is None:
                break
            if device in found:
                return ()
            found.append(device)
    return [device for device in found if not device.is_instance] or found[:1]


def _find(cards: Sequence[_Card], name: str) -> _Device | None:
    """The device of an index, in MIG mode its first instance, or of a UUID, of which the beginning suffices."""
    if name.isdecimal():
        named = cards[int(name) : int(name) + 1]
    elif name.startswith("GPU-"):
        named = [card for card in cards if card.uuid.startswith(name)]
    elif name.startswith("MIG-"):
        parts = [part for card in cards for part in card.devices if part.is_instance and part.uuid.startswith(name)]
        return parts[0] if len(parts) == 1 else None
    else:
        return None
    return named[0].devices[0] if len(named) == 1 and named[0].devices else None


def _cards(nvml: Any) -> list[_Card]:
    """The GPUs that this process may use, ordered by bus address. NVML counts those that a job was not given, too."""
    indices = range(_count(nvml.nvmlDeviceGetCount_v2))
    handles = (_handle(nvml.nvmlDeviceGetHandleByIndex_v2, index) for index in indices)
    return [_card(nvml, handle) for handle in handles if handle is not None]


def _card(nvml: Any, handle: ctypes.c_void_p) -> _Card:
    uuid = _text(nvml.nvmlDeviceGetUUID, handle)
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    if nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(mode), ctypes.byref(pending)) != 0 or not mode.value:
        return _Card(uuid, [_Device(uuid, handle)])
    places = range(_count(nvml.nvmlDeviceGetMaxMigDeviceCount, handle))
    parts = (_handle(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place) for place in places)
    return _Card(uuid, [_Device(_text(nvml.nvmlDeviceGetUUID, part), part, True) for part in parts if part is not None])


def _describe(nvml: Any, device: _Device) -> Gpu:
    memory = _Memory()
    nvml.nvmlDeviceGetMemoryInfo(device.handle, ctypes.byref(memory))
    name = _text(nvml.nvmlDeviceGetName, device.handle)
    return Gpu(uuid=device.uuid, name=name, memory_bytes=memory.total, free_bytes=memory.free)


def _reduced_clock(nvml: Any, device: _Device) -> str:
    reasons = ctypes.c_ulonglong()
    if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device.handle, ctypes.byref(reasons)) != 0:
        return ""
    found = [name for bit, name in _REASONS.items() if reasons.value & bit]
    if not found:
        return ""
    clock = _count(nvml.nvmlDeviceGetClockInfo, device.handle, _SM_CLOCK)
    most = _count(nvml.nvmlDeviceGetMaxClockInfo, device.handle, _SM_CLOCK)
    return f"clock {clock} of {most} MHz: {', '.join(found)}"


def _count(ask: Any, *arguments: Any) -> int:
    count = ctypes.c_uint()
    ask(*arguments, ctypes.byref(count))
    return count.value


def _handle(ask: Any, *arguments: Any) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    return handle if ask(*arguments, ctypes.byref(handle)) == 0 else None


def _text(ask: Any, handle: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    ask(handle, text, _TEXT_BYTES)
    return text.value.decode(errors="replace")
