"""One GPU of any maker, and its name in torch."""

from collections.abc import Mapping
from dataclasses import dataclass

Shown = Mapping[str, str]
"""What shows a process its GPUs: those variables of the driver that are set, by name."""
PLATFORMS = ("CUDA", "ROCm")
"""What torch is built with for GPUs of NVIDIA or AMD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its driver shows it to a process; `name` is its model, `free_bytes` its unused memory."""

    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int


def name_in_torch(device: str, number: int = 0) -> str:
    """What torch calls a device of this `cluster.device`, of those that a process sees: a rank sees one GPU."""
    return f"cuda:{number}" if device == "gpu" else "cpu"
