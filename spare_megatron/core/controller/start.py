"""Whether a run can begin without the groups that are lost before training does.

An exception that groups on two machines raise is a fault of neither, so the run ends and names it, unless the devices
of both may be at fault. It also ends if all hosts of some shard or state partition raised or have missing nodes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from spare_megatron.core.controller.controller import ControllerSetup
from spare_megatron.machine.gpus.device_errors import is_ambiguous
from spare_megatron.stacking.layout import GroupId, Layout
from spare_megatron.stacking.placement import make_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyLoss:
    """A group lost before training has begun, by a failed rank, or with its whole node (rank -1)."""

    group: GroupId
    rank: int
    cause: str
    error: str = ""
    """The exception behind it if other groups may raise the same."""
    concerns_all: bool = False
    """Whether it holds for all groups."""


class Start:
    """The losses of a run that has yet to begin.

    >>> placement = make_placement("golomb", 3, 2, 1)
    >>> setup = ControllerSetup(placement=placement, microbatches_per_shard=1, num_steps=1)
    >>> start = Start(Layout(num_groups=3), setup)
    >>> [start.lose(EarlyLoss(group=GroupId(group), rank=0, cause="SIGSEGV")) for group in range(3)]
    ['', '', 'all groups were lost before training began; group 0: rank 0: SIGSEGV']
    """

    def __init__(self, layout: Layout, setup: ControllerSetup) -> None:
        self._layout = layout
        self._setup = setup
        self._losses: list[EarlyLoss] = []

    def lose(self, loss: EarlyLoss) -> str:
        """Adds a loss; returns why the run cannot begin, empty while it can without the lost groups."""
        self._losses.append(loss)
        if loss.concerns_all:
            return f"group {loss.group} was lost before training began: rank {loss.rank}: {loss.cause}"
        raised = self._first_of_each(lambda other: bool(other.error))
        first = next(iter(raised.values()), self._losses[0])
        home = {GroupId(group) for group in range(self._layout.num_home_groups)}
        if home <= {other.group for other in self._losses}:
            return f"all groups were lost before training began; group {first.group}: {_why(first)}"
        alike = [other for other in self._losses if loss.error and other.error == loss.error]
        groups = sorted({int(other.group) for other in alike})
        nodes = {self._layout.node_of(other.group, other.rank) for other in alike}
        if not is_ambiguous(loss.error) and len(groups) > 1 and len(nodes) >= min(2, self._layout.num_nodes):
            return (
                f"groups {groups} raised the same before training began, which no redundancy masks: rank {loss.rank}: "
                f"{loss.cause}"
            )
        # A group that was killed on a node that is present is started again.
        gone = self._first_of_each(lambda other: bool(other.error) or other.rank < 0)
        if any(gone.keys() >= set(hosts) for hosts in self._hosts):
            first = next(iter(gone.values()))
            return (
                f"groups {sorted(map(int, gone))} were lost before training began, and no other group hosts what "
                f"they host; group {first.group}: {_why(first)}"
            )
        return ""

    def _first_of_each(self, is_meant: Callable[[EarlyLoss], bool]) -> dict[GroupId, EarlyLoss]:
        found: dict[GroupId, EarlyLoss] = {}
        for loss in filter(is_meant, self._losses):
            found.setdefault(loss.group, loss)
        return found

    @cached_property
    def _hosts(self) -> Sequence[Collection[GroupId]]:
        setup, partitions = self._setup, self._setup.partitions
        hosts = () if setup.last_resort else setup.placement.hosts
        if partitions is None:
            return hosts
        placed = make_placement("golomb", partitions.num_groups, partitions.redundancy, partitions.groups_per_domain)
        return (*hosts, *placed.hosts)


def _why(loss: EarlyLoss) -> str:
    return f"rank {loss.rank}: {loss.cause}" if loss.rank >= 0 else loss.cause
