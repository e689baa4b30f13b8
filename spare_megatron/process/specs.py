"""What the processes of a run are told. Loads without torch, as the driver must start at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from spare_megatron.config.own_code import code_digest
from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.trace import Fault
from spare_megatron.process.heartbeats import HeartbeatPage
from spare_megatron.process.snapshot_wire import SnapshotServerAddress
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.spec import StoreSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """All that a rank's process is told.

    Attributes:
        config: The resolved configuration.
        run_dir: The run's directory.
        group: The rank's group.
        incarnation: Which life of the group it is; 0 with the start of the run.
        rank: Its index inside the group.
        device: Its device.
        store: Where the control store is.
        faults: The faults to inject into this rank.
        page: Memory shared with the supervisor, for the rank's beacon. Its process has it, and is not told.
        seconds_left: Until the run ends with the step under way; None if all steps are to be trained.
        wiped_out_at_s: Monotonic time at which the supervisor knew of the wipe-out after which the rank starts again.
        keeper: Where the keeper of its node listens; None where no snapshots are taken.
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
    keeper: SnapshotServerAddress | None = None
    code: str = field(default_factory=code_digest)

    @property
    def name(self) -> str:
        return f"group-{self.group:04d}-rank-{self.rank}" + (f"-life-{self.incarnation}" if self.incarnation else "")

    @property
    def member(self) -> Member:
        return Member(self.group, self.incarnation)


RankMain = Callable[[RankSpec, Connection], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """All that a supervisor's process is told.

    Attributes:
        config: The resolved configuration.
        run_dir: The run's directory.
        node: The node it is to look after.
        store: Where the control store is.
        faults: The faults to inject into the node's ranks.
        rank_main: What a rank's process runs.
        hub_pid: The process that holds the bridge between the nodes' networks, where each has one of its own.
        life: 0 for the supervisor with which the run began; whoever takes its place later has a higher number.
        is_remote: The driver is on another machine, and may be lost without the node.
        code: Digest of the driver's code.
    """

    config: RunConfig
    run_dir: Path
    node: int
    store: StoreSpec
    faults: tuple[Fault, ...]
    rank_main: RankMain
    hub_pid: int | None = None
    life: int = 0
    is_remote: bool = False
    code: str = field(default_factory=code_digest)

    @property
    def name(self) -> str:
        return f"supervisor-{self.node}" + (f"-life-{self.life}" if self.life else "")
