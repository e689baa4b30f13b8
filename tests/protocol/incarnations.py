"""Groups in one of their incarnations, and the state in which they begin an attempt."""

from dataclasses import dataclass

Incarnation = tuple[int, int]
"""A group and its incarnation."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The state in which an attempt begins."""

    step: int
    members: frozenset[Incarnation]
    epoch: int


def incarnation_of(process: str) -> Incarnation:
    """The group and the incarnation of a process, which is named after them."""
    group, _, incarnation = process.partition(".")
    return int(group), int(incarnation)
