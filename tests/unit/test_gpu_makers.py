"""GPUs of NVIDIA and AMD answer alike: each function of the two rooms, on what stands in for their drivers and builds
of torch. What torch itself makes of the environment is asked of torch.
"""

import ctypes
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm import nccl
from spare_megatron.config.supported_versions import version_problem
from spare_megatron.devices import gpu
from spare_megatron.machine import gpus
from spare_megatron.machine.gpus import XidWatch, amd, nvidia
from spare_megatron.machine.gpus.device_errors import ends_process, error_line, is_ambiguous, is_memory_error
from spare_megatron.supervisor.rank_exits import cause_of_end
from tests.cudart_stand_in import MEMORY_ALLOCATION, CudartStandIn
from tests.unit.test_gpus import FOUR, GIB, Nvml

MAKERS = {"NVIDIA": nvidia, "AMD": amd}
UNIQUE = (0x1A2B, 0x1A3C << 48, 0xC0FFEE << 40, 0xD << 60)
UUIDS = {
    "NVIDIA": [one.uuid for one in FOUR],
    "AMD": ["GPU-0000000000001a2b", "GPU-1a3c000000000000", "GPU-c0ffee0000000000", "GPU-d000000000000000"],
}


@pytest.fixture(params=["NVIDIA", "AMD"])
def maker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Nothing names GPUs before a test, and what it leaves is taken back."""
    own = {name: os.environ.pop(name) for name in amd.VARIABLES if name in os.environ}
    yield
    for name in amd.VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(own)


@pytest.fixture
def machine(maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with four GPUs."""
    make_machine(maker, tmp_path, monkeypatch)
    return maker


def make_machine(maker: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(FOUR, is_loaded=maker == "NVIDIA")
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: nvml)
    monkeypatch.setattr(amd, "_SYS", folder)
    if maker == "AMD":
        add_node(folder, 0, simd_count=0, unique_id=0, drm_render_minor=0, gfx_target_version=0)
        for number, unique in enumerate(UNIQUE, 9):  # 10 follows 9, and not 1
            minor = 120 + number
            add_node(
                folder, number, simd_count=1216, unique_id=unique, drm_render_minor=minor, gfx_target_version=90402
            )
            memory = folder / f"drm/renderD{minor}/device"
            memory.mkdir(parents=True)
            (memory / "mem_info_vram_total").write_text(f"{80 * GIB}\n")
            (memory / "mem_info_vram_used").write_text(f"{40 * GIB}\n")


def add_node(folder: Path, number: int, **numbers: int) -> None:
    """A node of the kernel's driver (node_show in kfd_topology.c)."""
    node = folder / "kfd/kfd/topology/nodes" / str(number)
    node.mkdir(parents=True)
    (node / "properties").write_text("".join(f"{name} {value}\n" for name, value in numbers.items()))


def seen() -> list[str]:
    return [one.uuid for one in gpus.visible_gpus()]


def test_both_makers_have_the_same_functions() -> None:
    def public(module: object) -> dict[str, object]:
        functions = inspect.getmembers(module, inspect.isfunction)
        own = {name: inspect.signature(one) for name, one in functions if one.__module__ == module.__name__}  # type: ignore[attr-defined]
        return {
            name: str(one).replace("_uuids", "uuids").replace("_note", "note")
            for name, one in own.items()
            if name[0] != "_"
        }

    assert public(nvidia) == public(amd)
    assert {"is_there", "is_in_domain", "visible_gpus", "reduced_clocks", "showing", "watch"} <= public(amd).keys()
    assert all(len(one.VARIABLES) and one.LIST_COMMAND for one in MAKERS.values())


def test_the_gpus_of_a_machine_have_their_order_and_memory(machine: str) -> None:
    assert gpus.maker() is MAKERS[machine]
    assert seen() == UUIDS[machine]
    first = gpus.visible_gpus()[0]
    assert (first.memory_bytes, first.free_bytes) == (80 * GIB, 40 * GIB)
    assert first.name == {"NVIDIA": "H100 a", "AMD": "gfx942"}[machine]
    assert gpus.maker().reduced_clocks({}) == ("", "", "", "")


def test_a_process_sees_the_gpus_that_it_is_shown_and_its_children_theirs(machine: str) -> None:
    variables, uuids = gpus.maker().VARIABLES, UUIDS[machine]
    os.environ[variables[-1]] = "3,1"  # of a launcher
    assert seen() == [uuids[3], uuids[1]]
    with gpus.shown_to_children(uuids[2]):
        assert seen() == [uuids[2]]
        assert {name for name in variables if name in os.environ} == {variables[0]}, "of others indices would be left"
    with gpus.shown_to_children(None):
        assert seen() == [uuids[3], uuids[1]]
    gpus.show([uuids[1], uuids[0]])
    assert seen() == [uuids[1], uuids[0]]
    assert gpus.maker().reduced_clocks({variables[0]: uuids[2]}) == ("",)
    own = gpus.shown_now()
    gpus.show([])
    assert seen() == []
    gpus.restore_shown(own)
    assert seen() == [uuids[1], uuids[0]]


def test_torch_sees_what_a_process_is_shown(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own reading of the environment, and of UUIDs: `is_available` must be False in the fork server."""
    monkeypatch.setattr(torch.version, "hip", "7.2.0" if machine == "AMD" else None)
    known = [uuid.removeprefix("GPU-") if machine == "AMD" else uuid for uuid in UUIDS[machine]]
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    with gpus.shown_to_children(UUIDS[machine][2]):
        found = torch.cuda._parse_visible_devices()
        assert found == ([0] if machine == "AMD" else [UUIDS[machine][2]])
        assert machine == "AMD" or torch.cuda._transform_uuid_to_ordinals(found, known) == [2]
    gpus.show([])
    assert torch.cuda._parse_visible_devices() == []


def test_without_a_driver_there_are_no_gpus_and_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine("none", tmp_path, monkeypatch)
    assert (seen(), gpus.maker().reduced_clocks({}), amd.is_there(), nvidia.is_there()) == ([], (), False, False)
    for module in MAKERS.values():
        assert module.watch(["GPU-aa"], lambda _uuid, _xid: None) is None  # type: ignore[func-returns-value]


def test_a_processor_of_amd_with_a_gpu_of_its_own_is_none_beside_those_of_nvidia(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_machine("AMD", tmp_path, monkeypatch)
    assert gpus.maker() is amd
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Nvml(FOUR))
    assert gpus.maker() is nvidia
    assert seen() == UUIDS["NVIDIA"]


def test_an_event_that_no_driver_reports_is_none_of_a_gpu(machine: str) -> None:
    assert XidWatch(["GPU-gone"]).recent(["GPU-gone"]) == XidWatch([]).recent(UUIDS[machine]) == ()


# --------------------------------------------------------------------------------------------------------- AMD alone


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "expected"),
    [
        ("2,0", None, None, "ca"),
        (" 1 , 3", None, None, "bd"),
        ("0,9,1", None, None, "a"),
        ("0,1,0,2", None, None, "ab"),  # of a name that comes again the earlier ones stay
        ("GPU-C0FFEE0000000000,0", None, None, "ca"),
        ("gpu-d0,GPU-1A3C,GPU-ff,0", None, None, "db"),
        ("GPU-,1", None, None, ""),
        ("", None, None, ""),
        ("1,2,3", "2,0", None, "db"),  # of what the first leaves
        ("1,2,3", "3", None, ""),
        ("1,2,3", None, "1", "c"),
        ("1,2,3", "0", "1", "b"),
        (None, "", "1", "b"),  # an empty one is passed over
        ("", "0", None, ""),
    ],
)
def test_of_amds_gpus_those_count_that_its_runtime_and_hip_would_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rocr: str | None,
    hip: str | None,
    cuda: str | None,
    expected: str,
) -> None:
    """As `RvdFilter` in amd_filter_device.cpp and `Device::init` in rocdevice.cpp read them."""
    make_machine("AMD", tmp_path, monkeypatch)
    os.environ.update(
        {name: value for name, value in zip(amd.VARIABLES, (rocr, hip, cuda), strict=True) if value is not None}
    )
    assert "".join("abcd"[UUIDS["AMD"].index(uuid)] for uuid in seen()) == expected


def test_gpus_that_a_job_was_not_given_are_not_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine("AMD", tmp_path, monkeypatch)
    hidden = tmp_path / "kfd/kfd/topology/nodes/9/properties"
    hidden.unlink()
    hidden.mkdir()  # cannot be read, whoever asks
    os.environ["ROCR_VISIBLE_DEVICES"] = "0"
    assert seen() == UUIDS["AMD"][1:2]


# ---------------------------------------------------------------------------------------------------- builds of torch

Build = Callable[[tuple[int, ...]], None]


@pytest.fixture
def build(maker: str, monkeypatch: pytest.MonkeyPatch) -> Build:
    """torch as it is built for the maker: `torch.cuda` answers, `torch.version` and the library behind NCCL differ."""

    def use(version: tuple[int, ...]) -> None:
        monkeypatch.setattr(torch.version, "cuda", None if maker == "AMD" else "12.8")
        monkeypatch.setattr(torch.version, "hip", "7.2.26015" if maker == "AMD" else None)
        backend = type("Backend", (), {"get_runtime_nccl_version": staticmethod(lambda: version)})
        monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)

    return use


@pytest.mark.parametrize(("version", "is_supported"), [((2, 27, 7), True), ((2, 25, 1), False), ((2, 28, 3), False)])
def test_the_library_of_sums_is_asked_for_under_its_own_name(
    maker: str, build: Build, version: tuple[int, ...], is_supported: bool
) -> None:
    build(version)
    name, found = {"AMD": "RCCL", "NVIDIA": "NCCL"}[maker], ".".join(map(str, version))
    assert gpu.platform() == {"AMD": ("ROCm", "7.2.26015"), "NVIDIA": ("CUDA", "12.8")}[maker]
    assert gpu.collective_library() == (name, found)
    if is_supported:
        nccl.check_nccl()
        return
    with pytest.raises(ImportError, match=f"{name} {found} is installed, .*it comes with torch"):
        nccl.check_nccl()
    assert version_problem(name, None).startswith(f"{name}>=2.26,<3")


def test_host_memory_is_registered_and_given_up(maker: str, build: Build) -> None:
    """HIP's build has `cudart` with the same names (shared/cudart.cpp)."""
    build((2, 27, 7))
    cudart, ranges = CudartStandIn(), [(4096, 4096), (8192, 100)]
    assert gpu.register(cudart, ranges) == ""
    assert cudart.registered == dict(ranges)
    gpu.unregister(cudart, ranges)
    assert cudart.registered == {}
    refusing = CudartStandIn(refuses_from=2)
    assert gpu.register(refusing, ranges).endswith(
        f"of 4196 bytes: {'hip' if maker == 'AMD' else 'cuda'}Error {MEMORY_ALLOCATION}"
    )
    assert refusing.registered == {}


@pytest.mark.parametrize(
    ("code", "texts", "kind", "is_sticky"),
    [
        (
            100,
            {"NVIDIA": "no CUDA-capable device is detected", "AMD": "no ROCm-capable device is detected"},
            "own",
            False,
        ),
        (214, "uncorrectable ECC error encountered", "own", True),
        (700, "an illegal memory access was encountered", "ambiguous", True),
        (702, "the launch timed out and was terminated", "ambiguous", True),
        (710, "device-side assert triggered", "program", True),
        (719, "unspecified launch failure", "ambiguous", True),
        (2, "out of memory", "program", False),
    ],
)
def test_errors_of_a_device_are_known_by_code_and_text(
    maker: str, code: int, texts: str | dict[str, str], kind: str, is_sticky: bool
) -> None:
    """As torch writes them (CUDAException.cpp, which its build for AMD rewrites), with the texts of hip_error.cpp."""
    prefix = {"NVIDIA": "CUDA", "AMD": "HIP"}[maker]
    line = f"torch.AcceleratorError: {prefix} error: {texts if isinstance(texts, str) else texts[maker]}"
    advice = f"{prefix} kernel errors might be asynchronously reported at some other API call"
    traceback = f"Traceback (most recent call last):\n{line}\nSearch for more.\n{advice}\n"
    assert error_line(traceback) == line
    assert is_ambiguous(line) == (kind == "ambiguous")
    assert ends_process(RuntimeError(line)) == is_sticky
    assert is_memory_error(RuntimeError(line)) == (code == 700)
    cause, error = cause_of_end(1, traceback, code)
    assert cause == f"{line} ({'hip' if maker == 'AMD' else 'cuda'}Error {code})"
    assert error == ("" if kind == "own" else line)
