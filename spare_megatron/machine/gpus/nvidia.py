"""NVIDIA's GPUs, by NVML, the library of the driver."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spare_megatron.machine.gpus.gpu import Gpu, Shown

VARIABLES = ("CUDA_VISIBLE_DEVICES",)
"""Of the environment, which show a process some of the GPUs; the first takes UUIDs."""
LIST_COMMAND = "nvidia-smi -L"
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
_STATE_BYTE, _COMPLETED = 24, 3
"""Of nvmlGpuFabricInfo_t, which begins with 16 bytes of UUID: where its state is, and that of a GPU in a domain."""
_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
_WAIT_MS = 1000


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


def is_there() -> bool:
    with _library() as nvml:
        return nvml is not None


def visible_gpus(shown: Shown) -> tuple[Gpu, ...]:
    """The devices that CUDA shows to a process, in the order of CUDA_VISIBLE_DEVICES; all of them if it is unset. Of
    MIG instances CUDA shows only one, and here none beside a whole GPU.
    """
    with _library() as nvml:
        return tuple(_describe(nvml, device) for device in _visible_devices(nvml, shown))


def reduced_clocks(shown: Shown) -> tuple[str, ...]:
    with _library() as nvml:
        return tuple(_reduced_clock(nvml, device) for device in _visible_devices(nvml, shown))


def is_in_domain() -> bool:
    """Whether NVLink connects GPUs of this machine with those of others, as NCCL asks (ncclMnnvlCheck in mnnvl.cc): one
    is of a domain with a UUID, and processes may exchange memory through a channel of IMEX.
    """
    with _library() as nvml:
        return _CHANNELS.is_dir() and any(_has_domain(nvml, device) for device in _visible_devices(nvml, {}))


def showing(uuids: Sequence[str]) -> Shown:
    """The variables with which a process sees these GPUs alone."""
    return {VARIABLES[0]: ",".join(uuids)}


def watch(uuids: Sequence[str], note: Callable[[str, int], None]) -> None:
    """Notes Xid events of these GPUs until all have fallen off the bus."""
    with _library() as nvml:
        devices = {} if nvml is None else _devices_with_events(nvml, uuids)
        events = ctypes.c_void_p()
        if not devices or nvml.nvmlEventSetCreate(ctypes.byref(events)) != 0:
            return
        for handle in devices:
            nvml.nvmlDeviceRegisterEvents(ctypes.c_void_p(handle), _XID_EVENT, events)
        while devices:
            _await_event(nvml, events, devices, note)
        nvml.nvmlEventSetFree(events)


def _await_event(nvml: Any, events: ctypes.c_void_p, devices: dict[int, str], note: Callable[[str, int], None]) -> None:
    """Notes the next event, and what has fallen off the bus, which is watched no longer."""
    event = _Event()
    code = nvml.nvmlEventSetWait_v2(events, ctypes.byref(event), _WAIT_MS)
    if code == 0 and event.device in devices:
        note(devices[event.device], event.data)
    elif code not in (0, _TIMEOUT):
        for handle in [one for one in devices if _is_lost(nvml, one)]:
            note(devices.pop(handle), _OFF_THE_BUS)
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


def _visible_devices(nvml: Any, shown: Shown) -> Sequence[_Device]:
    return () if nvml is None else _visible(_cards(nvml), shown.get(VARIABLES[0]))


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


def _has_domain(nvml: Any, device: _Device) -> bool:
    ask, info = getattr(nvml, "nvmlDeviceGetGpuFabricInfo", None), (ctypes.c_ubyte * 64)()  # older drivers lack it
    return ask is not None and ask(device.handle, info) == 0 and any(info[:16]) and info[_STATE_BYTE] == _COMPLETED


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
