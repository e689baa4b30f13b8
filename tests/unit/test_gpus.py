"""Which GPUs a run may count on, by what the driver's library says and by what CUDA_VISIBLE_DEVICES names."""

import ctypes
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.driver.run import look_at_machine
from spare_megatron.machine import gpus
from spare_megatron.machine.gpus import Gpu, XidWatch, nvidia, visible_gpus
from spare_megatron.process.processes import set_gpu_environment
from spare_megatron.stacking.layout import Layout

GIB = 2**30
NOT_SUPPORTED, NOT_FOUND, NO_PERMISSION, NOT_LOADED, TIMEOUT, LOST = 3, 6, 4, 9, 10, 15


@dataclass(frozen=True)
class Part:
    uuid: str
    name: str
    memory_bytes: int = 80 * GIB
    parts: Sequence["Part | None"] | None = None
    """Its MIG instances, with gaps; None: not in MIG mode."""
    is_allowed: bool = True
    is_lost: bool = False
    """It has fallen off the bus."""
    throttled: int | None = 0
    """The reasons of its clock, by bits; None: not supported."""
    fabric: tuple[bytes, int] | None = None
    """UUID of its NVLink domain, and how far it has joined; None: not supported."""


class Nvml:
    """NVML on a machine with these GPUs. Handles are positions in the list of all devices, from 1."""

    def __init__(self, cards: Sequence[Part], *, is_loaded: bool = True) -> None:
        self._cards = cards
        self._devices = [*cards, *(part for card in cards for part in card.parts or () if part)]
        self._is_loaded = is_loaded
        self.num_open = 0
        self.watched: set[int] = set()
        self.events: SimpleQueue[tuple[int, int, int]] = SimpleQueue()
        """What each wait for an event returns: its code and, if that is 0, the device's handle and the Xid."""

    def nvmlEventSetCreate(self, events: Any) -> int:  # noqa: N802
        events._obj.value = 1
        return 0

    def nvmlDeviceRegisterEvents(self, handle: Any, types: int, _events: Any) -> int:  # noqa: N802
        self.watched.add(handle.value)
        return 0 if types == 8 else NOT_SUPPORTED

    def nvmlEventSetWait_v2(self, _events: Any, event: Any, _timeout_ms: int) -> int:  # noqa: N802
        code, event._obj.device, event._obj.data = self.events.get()
        return code

    def nvmlEventSetFree(self, _events: Any) -> int:  # noqa: N802
        return 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.num_open += self._is_loaded
        return 0 if self._is_loaded else NOT_LOADED

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.num_open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802
        handle._obj.value = index + 1
        return 0 if self._cards[index].is_allowed else NO_PERMISSION

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, _length: int) -> int:  # noqa: N802
        text.value = self._device(handle).uuid.encode()
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, _length: int) -> int:  # noqa: N802
        text.value = self._device(handle).name.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        if self._device(handle).is_lost:
            return LOST
        memory._obj.total, memory._obj.free = self._device(handle).memory_bytes, self._device(handle).memory_bytes // 2
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, mode: Any, _pending: Any) -> int:  # noqa: N802
        mode._obj.value = int(self._device(handle).parts is not None)
        return 0 if "H100" in self._device(handle).name else NOT_SUPPORTED

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._device(handle).parts or ())
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, place: int, part: Any) -> int:  # noqa: N802
        found = (self._device(handle).parts or ())[place]
        if found is None:
            return NOT_FOUND
        part._obj.value = self._devices.index(found) + 1
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:  # noqa: N802
        reasons._obj.value = self._device(handle).throttled or 0
        return NOT_SUPPORTED if self._device(handle).throttled is None else 0

    def nvmlDeviceGetGpuFabricInfo(self, handle: Any, info: Any) -> int:  # noqa: N802
        """clusterUuid, status, cliqueId and state of nvmlGpuFabricInfo_t (nvml.h)."""
        if (fabric := self._device(handle).fabric) is None:
            return NOT_SUPPORTED
        layout = struct.Struct("=16sIIB")
        info[: layout.size] = layout.pack(fabric[0], 0, 0x7FFE, fabric[1])
        return 0

    def nvmlDeviceGetClockInfo(self, _handle: Any, kind: int, clock: Any) -> int:  # noqa: N802
        clock._obj.value = {1: 1005}[kind]
        return 0

    def nvmlDeviceGetMaxClockInfo(self, _handle: Any, kind: int, clock: Any) -> int:  # noqa: N802
        clock._obj.value = {1: 1980}[kind]
        return 0

    def _device(self, handle: Any) -> Part:
        return self._devices[handle.value - 1]


FOUR = [Part(f"GPU-{letter}{letter}00-0000", f"H100 {letter}") for letter in "abcd"]
DIVIDED = Part(
    "GPU-ee00-0000",
    "H100 e",
    parts=[None, Part("MIG-1100-0000", "H100 1g", 10 * GIB), Part("MIG-2200-0000", "H100 2g", 20 * GIB)],
)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(nvml: Nvml, visible: str | None = None) -> Nvml:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libnvidia-ml.so.1": nvml}[name])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return nvml

    return use


def test_a_gpu_is_described_by_its_model_and_memory(install: Any) -> None:
    nvml = install(Nvml([Part("GPU-aa", "Tesla V100", 32 * GIB)]))
    assert visible_gpus() == (Gpu(uuid="GPU-aa", name="Tesla V100", memory_bytes=32 * GIB, free_bytes=16 * GIB),)
    assert nvml.num_open == 0


def test_a_throttled_device_is_named_with_its_clock_and_an_idle_one_is_not(install: Any) -> None:
    reasons = (0x00, 0x01 | 0x02, 0x40, 0x08 | 0x80, None)
    nvml = install(Nvml([Part(f"GPU-{at}", "H100", throttled=bits) for at, bits in enumerate(reasons)]))
    assert nvidia.reduced_clocks({}) == (
        "",
        "",
        "clock 1005 of 1980 MHz: thermal slowdown by the hardware",
        "clock 1005 of 1980 MHz: hardware slowdown, power brake",
        "",
    )
    assert nvml.num_open == 0
    install(Nvml([], is_loaded=False))
    assert nvidia.reduced_clocks({}) == ()


DOMAIN = bytes(range(16))


@pytest.mark.parametrize(
    ("fabric", "has_channels", "is_in_domain"),
    [
        (None, True, False),
        ((DOMAIN, 3), True, True),
        ((DOMAIN, 3), False, False),  # as H100 answer, whose memory no other machine can import
        ((DOMAIN, 2), True, False),  # it is joining
        ((bytes(16), 3), True, False),
        ((bytes(15) + b"\1", 3), True, True),
    ],
)
def test_a_gpu_that_has_joined_an_nvlink_domain_shares_memory_with_other_machines(
    install: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fabric: tuple[bytes, int] | None,
    has_channels: bool,
    is_in_domain: bool,
) -> None:
    """NCCL then treats its machines as one, and NVLink SHARP spans them."""
    monkeypatch.setattr(nvidia, "_CHANNELS", tmp_path if has_channels else tmp_path / "none")
    nvml = install(Nvml([Part("GPU-aa", "GB200"), Part("GPU-bb", "GB200", fabric=fabric)]))
    assert nvidia.is_in_domain() == is_in_domain
    assert nvml.num_open == 0
    layout = Layout(num_groups=2, tensor_parallel=4, num_nodes=2)
    for alone, expected in ((replace(layout, num_groups=1, num_nodes=1), "1"), (layout, "0" if is_in_domain else "1")):
        monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "1"})  # of the site
        set_gpu_environment(alone)
        assert os.environ["NCCL_NVLS_ENABLE"] == expected


def test_a_driver_that_knows_no_domains_and_none_at_all_are_in_none(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "_CHANNELS", tmp_path)
    install(Nvml([Part("GPU-aa", "GB200", fabric=(DOMAIN, 3))]))
    monkeypatch.delattr(Nvml, "nvmlDeviceGetGpuFabricInfo")
    assert not nvidia.is_in_domain()
    install(Nvml([], is_loaded=False))
    assert not nvidia.is_in_domain()


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_WAIT_MS", 1)


def await_end_of_watch(nvml: Nvml) -> None:
    """Once all GPUs are lost the watch ends, and closes the library."""
    for thread in [one for one in threading.enumerate() if one.name == "gpu-events"]:
        thread.join(10)
        assert not thread.is_alive()
    assert nvml.num_open == 0


@pytest.mark.usefixtures("_no_pauses")
def test_xid_events_are_those_of_a_gpu_and_one_off_the_bus_is_noted_without_an_event(install: Any) -> None:
    nvml = install(Nvml([Part("GPU-aa", "H100"), Part("GPU-bb", "H100", is_lost=True), Part("GPU-cc", "H100")]))
    watch = XidWatch(["GPU-gone", "GPU-bb", "GPU-aa"])  # the machine's list, without the third
    for answer in ((LOST, 0, 0), (0, 1, 31), (TIMEOUT, 0, 0), (0, 1, 95), (0, 2, 48), (0, 3, 48), (0, 1, 95)):
        nvml.events.put(answer)
    while not nvml.events.empty():
        time.sleep(0.001)
    nvml._devices[0] = replace(nvml._devices[0], is_lost=True)
    nvml.events.put((LOST, 0, 0))
    await_end_of_watch(nvml)
    assert nvml.watched == {1, 2}
    assert watch.recent(["GPU-aa"]) == (("GPU-aa", 31), ("GPU-aa", 95), ("GPU-aa", 79))
    assert watch.recent(["GPU-bb"]) == (("GPU-bb", 79),)
    assert watch.recent(["GPU-cc"]) == watch.recent([]) == ()


@pytest.mark.usefixtures("_no_pauses")
def test_events_of_long_ago_say_nothing_of_a_loss(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(Nvml([Part("GPU-aa", "H100", is_lost=True)]))
    nvml.events.put((LOST, 0, 0))
    watch = XidWatch(["GPU-aa"])
    await_end_of_watch(nvml)
    assert watch.recent(["GPU-aa"]) == (("GPU-aa", 79),)
    assert watch.recent(["GPU-aa"], time.monotonic()) == (), "of the group's former processes"
    monkeypatch.setattr(gpus, "_RECENT_S", 0.0)
    assert watch.recent(["GPU-aa"]) == ()


@pytest.mark.parametrize("uuids", [[], ["GPU-aa"]])
def test_without_gpus_or_a_driver_there_are_no_events(install: Any, uuids: list[str]) -> None:
    nvml = install(Nvml([], is_loaded=False))
    watch = XidWatch(uuids)
    await_end_of_watch(nvml)
    assert watch.recent(["GPU-aa"]) == ()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "abcd"),
        ("", ""),
        ("NoDevFiles", ""),
        ("-1", ""),
        ("2,0", "ca"),
        (" 1 , 3", "bd"),
        ("0,1,4,2", "ab"),  # there is no fifth
        ("0,-1,1", "a"),
        ("0,1,0", ""),
        ("GPU-bb00-0000,GPU-aa00-0000", "ba"),
        ("GPU-dd,0", "da"),
        ("GPU-cc,GPU-ff,GPU-aa", "c"),
        ("GPU-,1", ""),  # of several
        ("MIG-1100", ""),
    ],
)
def test_of_four_gpus_those_count_that_cuda_would_number(install: Any, visible: str | None, expected: str) -> None:
    install(Nvml(FOUR), visible)
    assert "".join(gpu.name[-1] for gpu in visible_gpus()) == expected


@pytest.mark.parametrize(
    ("cards", "visible", "expected"),
    [
        ([DIVIDED], None, ["H100 1g"]),
        ([DIVIDED], "0", ["H100 1g"]),
        ([DIVIDED], "MIG-2200-0000", ["H100 2g"]),
        ([DIVIDED], "MIG-2200-0000,MIG-1100-0000", ["H100 2g"]),
        ([DIVIDED], "MIG-3300-0000", []),
        ([DIVIDED], "GPU-ee00", ["H100 1g"]),
        ([DIVIDED, *FOUR[:2]], None, ["H100 a", "H100 b"]),
        ([DIVIDED, *FOUR[:2]], "MIG-1100-0000", ["H100 1g"]),
        ([Part("GPU-ff", "H100 f", parts=[None])], None, []),
        ([Part("GPU-ff", "H100 f", parts=[None])], "0", []),
    ],
)
def test_of_mig_instances_a_process_sees_one_alone(
    install: Any, cards: list[Part], visible: str | None, expected: list[str]
) -> None:
    install(Nvml(cards), visible)
    assert [gpu.name for gpu in visible_gpus()] == expected


def test_gpus_that_a_job_was_not_given_are_not_numbered(install: Any) -> None:
    """Slurm hides them by their device files, and its indices are those of the others."""
    hidden = Part("GPU-ff", "H100 f", is_allowed=False)
    install(Nvml([hidden, *FOUR[:2], hidden]), "0,1")
    assert [gpu.name for gpu in visible_gpus()] == ["H100 a", "H100 b"]


def test_without_a_driver_there_are_none(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(Nvml(FOUR, is_loaded=False))
    assert (visible_gpus(), nvml.num_open) == ((), 0)

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert visible_gpus() == ()


def test_a_run_counts_the_gpus_that_nvml_counts(install: Any, tmp_path: Path) -> None:
    """It read /proc/driver/nvidia/gpus, which knows neither UUIDs nor what a job was given."""
    install(Nvml(FOUR), "GPU-bb,GPU-unknown,GPU-dd")
    config = RunConfig(data=DataConfig(corpus=str(tmp_path / "none")))
    assert look_at_machine(config).num_gpus == 1
