"""What is found on the nodes that a run is to have, before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass

from spare_megatron.config.store_space import StoreSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as torch sees it.

    Attributes:
        name: Its model.
        memory_bytes: What it has.
        free_bytes: What nobody uses now.
    """

    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node says of itself.

    Attributes:
        host: The name of the machine.
        versions: Package -> version; empty where it is absent.
        torch_failure: Why torch cannot be loaded; empty if it can.
        gpus: Those that torch sees.
        gpu_driver: Version of NVIDIA's driver; empty without one.
        open_files: How many files a process may have open.
        open_files_most: What that may be raised to.
        locked_memory_bytes: How much memory a process may lock; None: all.
        has_infiniband: There are adapters that want memory locked.
        busy_ports: Those of the ports asked about that somebody listens on.
        store_failures: Endpoint of etcd -> why it does not answer here.
        store_refusal: What etcd answers instead of how large it is, or that it answers nothing; empty if it tells, or
            cannot be connected to.
        store_space: How large it is; None where it does not tell.
        corpus_bytes: Sizes of the corpus's two files; None for one that cannot be read.
        sees_folder: The file that the driver has put into the folder of the checkpoints is there.
        folder_free_bytes: Free space in that folder.
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
    corpus_bytes: tuple[int | None, int | None]
    sees_folder: bool
    folder_free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast bytes went; or why they did not."""

    bytes_per_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How far a node's clock is ahead of the driver's, give or take the error."""

    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node and what was measured between it and others.

    Attributes:
        name: What it is called: its name in Slurm, or `node I`.
        failure: Why nothing more is known of it; empty otherwise.
        facts: What it says of itself.
        clock: Its clock.
        write: Into the folder of the checkpoints, while the other nodes of a group write, too.
        link_to: The node that it sent bytes to; empty if it is alone.
        link: To that node, all nodes sending at once.
    """

    name: str
    failure: str = ""
    facts: NodeFacts | None = None
    clock: Clock | None = None
    write: Rate | None = None
    link_to: str = ""
    link: Rate | None = None
