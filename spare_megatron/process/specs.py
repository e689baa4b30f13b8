"""Specs of ranks and supervisors. Loads without torch, as the driver must start at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.points import Fault
from spare_megatron.journal.files import source_of_rank
from spare_megatron.journal.records import FaultRecord
from spare_megatron.machine.gpus import name_in_torch
from spare_megatron.process.heartbeats import HeartbeatPage
from spare_megatron.process.snapshot_wire import SnapshotServerAddress
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.spec import StoreSpec
from spare_megatron.version import code_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank's process needs to know. `incarnation`: of the group; `rank`: index inside it. `page`: inherited by
    the process; a spec that is sent has none. `seconds_left`: until the run ends with the current step.
    `wiped_out_at_s`: monotonic time at which the supervisor learned of the wipe-out that caused this start. `code`: the
    driver's digest. `gpu`: UUID of the only GPU that the process sees; empty on CPUs, and where its machine lacks one.
    `stages`: of the group's pipeline, if fewer than usual.
    """

    config: RunConfig
    run_dir: Path
    group: GroupId
    incarnation: int
    rank: int
    gpu: str = ""
    store: StoreSpec
    faults: tuple[Fault, ...]
    page: HeartbeatPage | None = None
    seconds_left: float | None = None
    wiped_out_at_s: float | None = None
    snapshot_server: SnapshotServerAddress | None = None
    code: str = field(default_factory=code_digest)
    stages: int | None = None

    @property
    def own_config(self) -> RunConfig:
        """The configuration with the pipeline of this group."""
        return self.config if self.stages is None else self.config.with_stages(self.stages)

    @property
    def num_ranks(self) -> int:
        """Of the group, in this incarnation."""
        return self.own_config.parallel.ranks_per_group

    @property
    def name(self) -> str:
        return source_of_rank(self.group, self.rank, self.incarnation)

    @property
    def device(self) -> str:
        return name_in_torch(self.config.cluster.device)

    @property
    def member(self) -> Member:
        return Member(self.group, self.incarnation)

    @property
    def number(self) -> int:
        """Of the rank among those of all groups."""
        return self.group * self.config.parallel.ranks_per_group + self.rank


def gpus_on(config: RunConfig, node: int) -> list[int | None]:
    """Which of its machine's GPUs each rank of a node has, in order; None on CPUs. With the local launcher all nodes
    share the GPUs of one machine.
    """
    cluster, layout = config.cluster, config.parallel
    if cluster.device != "gpu":
        return [None] * layout.ranks_per_node
    first = node * layout.ranks_per_node if cluster.launcher == "local" else 0
    return [(first + position) // cluster.ranks_per_gpu for position in range(layout.ranks_per_node)]


def gpu_of(config: RunConfig, group: GroupId, rank: int) -> int | None:
    """The same of one rank of a group, on the machine that holds its place."""
    node = config.parallel.node_of(group, rank)
    return gpus_on(config, node)[config.parallel.ranks_on(node).index((group, rank))]


def fault_record(fault: Fault) -> FaultRecord:
    """The journal's record of the fault once it has struck."""
    return FaultRecord(group=fault.group, rank=fault.rank, step=fault.step, phase=str(fault.phase), kind=fault.kind)


RankMain = Callable[[RankSpec, Connection], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What a supervisor's process needs to know. `hub_pid`: holds the bridge between the nodes' networks.
    `incarnation`: of the supervisor. `is_remote`: the driver is on another machine, and may be lost without the node.
    `ends_at_s`: when training is to end, on the machine's monotonic clock. `code`: digest of the driver's code. `gpus`:
    UUIDs of the machine's GPUs, which its supervisor finds.
    """

    config: RunConfig
    run_dir: Path
    node: int
    store: StoreSpec
    faults: tuple[Fault, ...]
    rank_main: RankMain
    hub_pid: int | None = None
    incarnation: int = 0
    is_remote: bool = False
    ends_at_s: float | None = None
    code: str = field(default_factory=code_digest)
    gpus: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"supervisor-{self.node}" + (f"-life-{self.incarnation}" if self.incarnation else "")
