"""Whether a run can begin without the groups that are lost before training does.

A broken machine costs its groups, at the start as later. What two machines raise is no fault of either: each group in
turn would use up its lives, and come to the same. So the run ends at once, and names the exception.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from spare_megatron.core.placement import make_placement
from spare_megatron.core.setup import ControllerSetup
from spare_megatron.core.topology import GroupId, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyLoss:
    """A group that is lost before training has begun.

    Attributes:
        group: The group.
        rank: The rank that showed it; -1 if its whole node is lost.
        cause: Why, in a line.
        error: The exception behind it, where other groups may meet the same; else empty.
        concerns_all: It was raised for what holds for all groups.
    """

    group: GroupId
    rank: int
    cause: str
    error: str = ""
    concerns_all: bool = False


class Start:
    """What has been lost of a run that has yet to begin.

    Args:
        layout: Of the run.
        setup: What is fixed for it.

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
        """Why the run cannot begin; empty while it may, without the groups that are lost so far.

        Args:
            loss: One more. A group that is started again may be lost again.
        """
        self._losses.append(loss)
        if loss.concerns_all:
            return f"group {loss.group} was lost before training began: rank {loss.rank}: {loss.cause}"
        raised: dict[GroupId, EarlyLoss] = {}
        for other in self._losses:
            if other.error:
                raised.setdefault(other.group, other)
        first = next(iter(raised.values()), self._losses[0])
        if len({other.group for other in self._losses}) == self._layout.num_groups:
            return f"all groups were lost before training began; group {first.group}: rank {first.rank}: {first.cause}"
        alike = [other for other in self._losses if loss.error and other.error == loss.error]
        groups = sorted({int(other.group) for other in alike})
        nodes = {self._layout.node_of(other.group, other.rank) for other in alike}
        if len(groups) > 1 and len(nodes) >= min(2, self._layout.num_nodes):
            return (
                f"groups {groups} raised the same before training began, which no redundancy masks: rank {loss.rank}: "
                f"{loss.cause}"
            )
        if any(raised.keys() >= set(hosts) for hosts in self._hosts):
            return (
                f"groups {sorted(map(int, raised))} raised before training began, and no other has what they host; "
                f"group {first.group}: rank {first.rank}: {first.cause}"
            )
        return ""

    @cached_property
    def _hosts(self) -> Sequence[Collection[GroupId]]:
        """The groups of which one is needed: for each shard its hosts, and for each slice of the optimizer state."""
        setup, slices = self._setup, self._setup.slices
        hosts = () if setup.last_resort else setup.placement.hosts
        if slices is None:
            return hosts
        placed = make_placement("golomb", slices.num_groups, slices.redundancy, slices.groups_per_domain)
        return (*hosts, *placed.hosts)
