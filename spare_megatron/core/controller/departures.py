"""Which of the groups that are asked to leave may do so at the end of a step, and which must hand over state first."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from spare_megatron.stacking.layout import Member
from spare_megatron.stacking.placement import Placement
from spare_megatron.stacking.state_partitions import Ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """What a commit says of the members that ask to leave."""

    drain: tuple[Member, ...]
    """Those that leave with it."""
    leaving: tuple[Member, ...]
    """Those whose state partitions others are to host; empty if every group holds all state."""
    ready: tuple[Member, ...]
    """Those that could leave, but for checkpoints that they write or have written."""


def departures(
    asked: Iterable[Member],
    members: Collection[Member],
    placement: Placement,
    ownership: Ownership | None,
    *,
    writers: Collection[Member] = (),
    last_resort: bool = False,
) -> Departures:
    """Grants members their leave in ascending order, as long as every shard keeps a host and one group stays.

    The others wait. `writers` wait until their checkpoints are complete and compared. With `last_resort` every group
    can compute every shard.

    >>> from spare_megatron.stacking.placement import make_placement
    >>> ring, members = make_placement("golomb", 3, 2), [Member(group) for group in range(3)]
    >>> departures(members[:2], members, ring, None).drain  # without both shard 1 has no host
    (Member(group=0, incarnation=0),)
    """
    staying, granted = set(members), []
    for member in sorted(asked):
        left = frozenset(other.group for other in staying if other != member)
        if left and (last_resort or not placement.uncovered(left)):
            staying.discard(member)
            granted.append(member)
    ready = tuple(member for member in granted if ownership is None or ownership.has_handed_over(member))
    return Departures(
        drain=tuple(member for member in ready if member not in writers),
        leaving=() if ownership is None else tuple(granted),
        ready=ready,
    )
