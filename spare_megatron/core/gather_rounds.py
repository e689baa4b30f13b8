"""In which order the owners of slices send their parameters, so that all of them get all."""

from collections.abc import Sequence
from typing import NamedTuple

from spare_megatron.core.topology import GroupId, SliceId


class Share(NamedTuple):
    """What one member sends in one round: elements of a slice that it owns, from one place to another."""

    slice: SliceId
    start: int
    stop: int


Round = tuple[Share | None, ...]
"""What each member sends, in the order of the members; None for those who have nothing left."""


def gather_rounds(
    owners: Sequence[GroupId], members: Sequence[GroupId], lengths: Sequence[int], most: int
) -> list[Round]:
    """The rounds of an all-gather in which every member sends what it owns, in as few rounds as that takes.

    Args:
        owners: For each slice, who sends it.
        members: Everybody, owner or not.
        lengths: For each slice, its elements.
        most: Elements that a member sends in a round, at least 1.

    >>> for sent in gather_rounds([4, 7, 7], [4, 5, 7], [3, 2, 1], most=2):
    ...     print(*("-" if share is None else tuple(share) for share in sent))
    (0, 0, 2) - (1, 0, 2)
    (0, 2, 3) - (2, 0, 1)
    """
    queues: dict[GroupId, list[Share]] = {member: [] for member in members}
    for index, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
        queues[owner] += [Share(SliceId(index), start, min(start + most, length)) for start in range(0, length, most)]
    num_rounds = max(map(len, queues.values()))
    columns = [queue + [None] * (num_rounds - len(queue)) for queue in queues.values()]
    return list(zip(*columns, strict=True))
