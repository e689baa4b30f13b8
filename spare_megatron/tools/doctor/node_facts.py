"""Facts collected on the nodes of a run before it starts; see `diagnosis` for their judgement."""

from collections.abc import Mapping
from dataclasses import dataclass

from spare_megatron.formats.store_space import StoreSpace
from spare_megatron.machine.gpus import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    host: str
    versions: Mapping[str, str]
    """Package -> version; empty if absent."""
    torch_failure: str
    """Why torch cannot be loaded, or use the GPUs; empty if it can."""
    gpus: tuple[Gpu, ...]
    gpu_driver: str
    open_files: int
    """Limit on open files of a process."""
    open_files_most: int
    """Value to which that limit can be raised."""
    locked_memory_bytes: int | None
    """Limit on locked memory of a process; None if unlimited."""
    has_infiniband: bool
    """InfiniBand adapters, which need locked memory, are present."""
    busy_ports: tuple[int, ...]
    store_failures: Mapping[str, str]
    """etcd endpoint -> why it does not answer here."""
    store_refusal: str
    """Why etcd does not report its size; empty if it does, or is unreachable."""
    store_space: StoreSpace | None
    """Size of etcd's database; None if not reported."""
    corpus_bytes: tuple[int | None, ...]
    """Sizes of `input_files`; None for one that cannot be read."""
    sees_folder: bool
    """The file that the driver wrote to the checkpoint folder is visible."""
    folder_free_bytes: int
    address_space_bytes: int | None = None
    """Limit on the address space of a process; None if unlimited."""
    nccl_cumem: str = ""
    """NCCL_CUMEM_ENABLE in the environment; empty if it is not set."""
    temp_folder: str = ""
    """Folder of temporary files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A measured transfer rate, or why the measurement failed."""

    bytes_per_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Offset of a node's clock from the driver's, with its uncertainty."""

    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasurements:
    """Facts of one node and measurements between it and others."""

    name: str
    failure: str = ""
    facts: NodeFacts | None = None
    clock: ClockOffset | None = None
    write: Rate | None = None
    """Rate into the checkpoint folder while the other nodes of a group write too."""
    link_to: str = ""
    """The node to which `link` was measured; empty for a single node."""
    link: Rate | None = None
    """Rate to that node while all nodes send."""
