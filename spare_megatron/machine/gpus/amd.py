"""AMD's GPUs, by what the kernel's driver shows of them in /sys. Never run on a GPU; see docs/gpu.md."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from spare_megatron.machine.gpus.gpu import Gpu, Shown

VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""ROCm's runtime reads the first; HIP reads one of the others, as indices into what that leaves."""
LIST_COMMAND = "amd-smi list"
_SYS = Path("/sys/class")


def is_there() -> bool:
    return bool(_gpus())


def visible_gpus(shown: Shown) -> tuple[Gpu, ...]:
    left = _chosen(_gpus(), shown.get(VARIABLES[0]))
    return tuple(_chosen(left, shown.get(VARIABLES[1]) or shown.get(VARIABLES[2]) or None))


def reduced_clocks(shown: Shown) -> tuple[str, ...]:
    """The driver shows no reasons."""
    return tuple("" for _ in visible_gpus(shown))


def is_in_domain() -> bool:
    return False


def showing(uuids: Sequence[str]) -> Shown:
    """The variables with which a process sees these GPUs alone; torch counts none only if HIP shows it none, too."""
    return {VARIABLES[0]: ",".join(uuids)} | ({} if uuids else {VARIABLES[1]: ""})


def watch(_uuids: Sequence[str], _note: Callable[[str, int], None]) -> None:
    """The driver has no events with the numbers of NVIDIA's."""


def _gpus() -> list[Gpu]:
    """In the order of ROCm's runtime, without those that a job was not given, whose files it cannot read."""
    found = []
    for node in sorted((_SYS / "kfd/kfd/topology/nodes").glob("*"), key=lambda node: int(node.name)):
        with contextlib.suppress(OSError):
            lines = (node / "properties").read_text().splitlines()
            numbers = {name: int(value) for name, value in map(str.split, lines)}
            if numbers["simd_count"]:  # else a processor
                found.append(_described(numbers))
    return found


def _described(numbers: dict[str, int]) -> Gpu:
    memory = _SYS / f"drm/renderD{numbers['drm_render_minor']}/device"
    total, used = (int((memory / f"mem_info_vram_{which}").read_text()) for which in ("total", "used"))
    major, rest = divmod(numbers["gfx_target_version"], 10_000)
    name = f"gfx{major}{rest // 100:x}{rest % 100:x}"
    return Gpu(uuid=f"GPU-{numbers['unique_id']:016x}", name=name, memory_bytes=total, free_bytes=total - used)


def _chosen(gpus: Sequence[Gpu], names: str | None) -> Sequence[Gpu]:
    """Those that indices or beginnings of UUIDs name, up to the first name of no GPU, of several or of one again."""
    found: list[Gpu] = []
    for name in () if names is None else names.lower().split(","):
        start = name.strip() if name.strip().startswith("gpu-") else "none"
        named = [gpu for at, gpu in enumerate(gpus) if name.strip() == str(at) or gpu.uuid.lower().startswith(start)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return gpus if names is None else found
