"""What a rank's process is told. Loads without torch, as the supervisor must start at once."""

from dataclasses import dataclass
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.control.spec import StoreSpec
from spare_megatron.core.topology import GroupId
from spare_megatron.faults.trace import Fault

ALL_GROUPS_READY = "all_groups_ready"
"""Key of the control store that is written once every group has its model built. From then on losses are masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """All that a rank's process is told.

    Attributes:
        config: The resolved configuration.
        run_dir: The run's directory.
        group: The rank's group.
        rank: Its index inside the group.
        device: Its device.
        store: Where the control store is.
        faults: The faults to inject into this rank.
    """

    config: RunConfig
    run_dir: Path
    group: GroupId
    rank: int
    device: str
    store: StoreSpec
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        return f"group-{self.group:04d}-rank-{self.rank}"
