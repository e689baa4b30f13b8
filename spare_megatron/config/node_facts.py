"""Facts collected on the nodes of a run before it starts; see `diagnosis` for their judgement."""

from collections.abc import Mapping
from dataclasses import dataclass

from spare_megatron.config.store_space import StoreSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as CUDA shows it to a process; `name` is its model, `free_bytes` its unused memory."""

    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts that a node reports about itself.

    Attributes:
        versions: Package -> version; empty if absent.
        torch_failure: Why torch cannot be loaded, or use the GPUs; empty if it can.
        open_files: Limit on open files of a process; `open_files_most` is the value to which it can be raised.
        locked_memory_bytes: Limit on locked memory of a process; None if unlimited.
        has_infiniband: InfiniBand adapters, which need locked memory, are present.
        store_failures: etcd endpoint -> why it does not answer here.
        store_refusal: Why etcd does not report its size; empty if it does, or is unreachable.
        store_space: Size of etcd's database; None if not reported.
        sees_folder: The file that the driver wrote to the checkpoint folder is visible.
        corpus_bytes: Sizes of the two files of each corpus; None for one that cannot be read.
    """

    host: str
    versions: Mapping[str, str]
    torch_failure: str
    gpus: tuple[Gpu, ...]
    gpu_driver: str
    open_files: int
    open_files_most: int
    locked_memory_bytes: int | None
    has_infiniband: bool
    busy_ports: tuple[int, ...]
    store_failures: Mapping[str, str]
    store_refusal: str
    store_space: StoreSpace | None
    corpus_bytes: tuple[int | None, ...]
    sees_folder: bool
    folder_free_bytes: int


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
    """Facts of one node and measurements between it and others.

    Attributes:
        write: Rate into the checkpoint folder while the other nodes of a group write too.
        link_to: The node to which `link` was measured; empty for a single node.
        link: Rate to that node while all nodes send.
    """

    name: str
    failure: str = ""
    facts: NodeFacts | None = None
    clock: ClockOffset | None = None
    write: Rate | None = None
    link_to: str = ""
    link: Rate | None = None
