"""One GPU, whoever made it, and what torch calls it."""

from collections.abc import Mapping
from dataclasses import dataclass

Shown = Mapping[str, str]
"""What shows a process its GPUs: those variables of the driver that are set, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its driver shows it to a process; `name` is its model, `free_bytes` its unused memory."""

    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int


def name_in_torch(device: str) -> str:
    """The only device that a rank sees, as torch names it, of `cluster.device`.

    >>> name_in_torch("gpu"), name_in_torch("cpu")
    ('cuda:0', 'cpu')
    """
    return "cuda:0" if device == "gpu" else "cpu"
