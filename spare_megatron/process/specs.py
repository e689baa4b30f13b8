"""Specs of ranks and supervisors. Loads without torch, as the driver must start at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.points import Fault
from spare_megatron.process.heartbeats import HeartbeatPage
from spare_megatron.process.snapshot_wire import SnapshotServerAddress
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.spec import StoreSpec
from spare_megatron.version import code_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """All that a rank's process needs to know at its start.

    Attributes:
        incarnation: Incarnation of the group; 0 with the start of the run.
        rank: Index inside the group.
        page: Heartbeat page, shared with the supervisor. The process inherits it; a spec that is sent has none.
        seconds_left: Time until the run ends with the current step; None if all steps are to be trained.
        wiped_out_at_s: Monotonic time at which the supervisor learned of the wipe-out that caused this start, if any.
        code: Digest of the driver's code.
    """

    config: RunConfig
    run_dir: Path
    group: GroupId
    incarnation: int
    rank: int
    device: str
    store: StoreSpec
    faults: tuple[Fault, ...]
    page: HeartbeatPage | None = None
    seconds_left: float | None = None
    wiped_out_at_s: float | None = None
    snapshot_server: SnapshotServerAddress | None = None
    code: str = field(default_factory=code_digest)

    @property
    def name(self) -> str:
        return f"group-{self.group:04d}-rank-{self.rank}" + (f"-life-{self.incarnation}" if self.incarnation else "")

    @property
    def member(self) -> Member:
        return Member(self.group, self.incarnation)

    @property
    def number(self) -> int:
        """Of the rank among those of all groups."""
        return self.group * self.config.parallel.ranks_per_group + self.rank


def devices_on(config: RunConfig, node: int) -> list[str]:
    """The device of each rank of a node, in order. With the local launcher all nodes share the GPUs of one machine."""
    cluster, layout = config.cluster, config.parallel
    first = node * layout.ranks_per_node if cluster.launcher == "local" else 0
    indices = [(first + position) // cluster.ranks_per_gpu for position in range(layout.ranks_per_node)]
    return [f"cuda:{index}" if cluster.device == "gpu" else "cpu" for index in indices]


def device_of(config: RunConfig, group: GroupId, rank: int) -> str:
    """The device of a rank of a group, on the machine that holds its place."""
    node = config.parallel.node_of(group, rank)
    return devices_on(config, node)[config.parallel.ranks_on(node).index((group, rank))]


RankMain = Callable[[RankSpec, Connection], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """All that a supervisor's process needs to know at its start.

    Attributes:
        hub_pid: Process that holds the bridge between the nodes' networks, if each has one of its own.
        incarnation: Incarnation of the node's supervisor; 0 for the first, higher for each that replaces it.
        is_remote: The driver is on another machine, and may be lost without the node.
        ends_at_s: When training is to end, on the monotonic clock of the machine; None if it is not limited.
        code: Digest of the driver's code.
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

    @property
    def name(self) -> str:
        return f"supervisor-{self.node}" + (f"-life-{self.incarnation}" if self.incarnation else "")
