"""Snapshots: copies of the state in the memory of nodes. When they are taken, who keeps them, which one helps.

Where every group holds the whole state, rank j of each holds the same. So a copy on another node is one that the rank
there makes of its own state, and nothing crosses the network before a restart. Each rank position is copied on a few
groups alone, its holders, the positions on different ones: the least memory that outlives the loss of all holders but
one.

A node keeps two of a position: the newest that all holders have, and the one that they are copying. Nobody needs to be
asked which is which: a rank has made its copy before it votes on the step before the next snapshot. So whoever comes to
the next one knows that all others have the one before, and gives up what is older.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

from spare_megatron.core.topology import GroupId, Layout

_NUM_REMEMBERED = 3
"""Snapshots that a restart may go back to: nodes have two, and a third where one has come to it before another."""


class Held(NamedTuple):
    """A whole copy in the memory of some node.

    Attributes:
        attempt: Of the commit whose state it is. It names the snapshot, for no two commits have the same, not even of a
            step that is done again after a restart.
        position: The rank inside its group.
        sha256: Of the copy.
    """

    attempt: int
    position: int
    sha256: str


class WholeSnapshot(NamedTuple):
    """One that has every rank position.

    Attributes:
        step: Committed steps that it holds.
        attempt: Of the last one's commit.
    """

    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """When snapshots are taken, and how often each is copied.

    Attributes:
        every_steps: Steps from one to the next, at least 2.
        redundancy: Nodes that may be lost with it: one more keep each rank position.
        layout: Which ranks stand on which nodes.
        groups_per_domain: Groups of consecutive ids that may be lost together.
    """

    every_steps: int
    redundancy: int
    layout: Layout
    groups_per_domain: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """An action: the holders copy the state after this many committed steps.

    Attributes:
        step: The steps.
        attempt: Of the last one's commit.
        previous: Of the snapshot before, the only one that is kept; -1 if there is none.
        settled_by: The copy is made before the update that makes so many committed steps.
        holders: For each rank position the groups that keep it.
    """

    step: int
    attempt: int
    previous: int
    settled_by: int
    holders: tuple[tuple[GroupId, ...], ...]


class Snapshots:
    """Those of a run, as the log has them.

    Args:
        policy: None takes none.
    """

    def __init__(self, policy: SnapshotPolicy | None) -> None:
        self._policy = policy
        self._taken: tuple[WholeSnapshot, ...] = ()  # the last ones that no restart undid

    def after(self, step: int, attempt: int, groups: Sequence[GroupId]) -> tuple[()] | tuple[TakeSnapshot]:
        """What follows from a commit.

        Args:
            step: Committed steps.
            attempt: Of the commit.
            groups: Who takes part.
        """
        policy = self._policy
        if policy is None or step % policy.every_steps:
            return ()
        previous = self._taken[-1].attempt if self._taken else -1
        self._taken = (*self._taken[1 - _NUM_REMEMBERED :], WholeSnapshot(step, attempt))
        return (
            TakeSnapshot(
                step=step,
                attempt=attempt,
                previous=previous,
                settled_by=step + policy.every_steps - 1,
                holders=holders_of_snapshot(policy, groups),
            ),
        )

    def restarted(self, step: int) -> None:
        """What was committed after so many steps is undone."""
        self._taken = tuple(one for one in self._taken if one.step <= step)

    def newest_whole(self, held: Iterable[Held]) -> WholeSnapshot | None:
        """The newest of which there is a copy of every rank position, and all copies of one are alike."""
        if self._policy is None:
            return None
        digests: dict[tuple[int, int], set[str]] = {}
        for one in held:
            digests.setdefault((one.attempt, one.position), set()).add(one.sha256)
        positions = range(self._policy.layout.ranks_per_group)
        for taken in reversed(self._taken):
            if all(len(digests.get((taken.attempt, position), ())) == 1 for position in positions):
                return taken
        return None


def holders_of_snapshot(policy: SnapshotPolicy, groups: Sequence[GroupId]) -> tuple[tuple[GroupId, ...], ...]:
    """For each rank position the groups that keep it, redundancy + 1, fewer where there are no more nodes.

    No two stand on one node, nor in one domain where that can be. The positions go round the groups, domain by domain,
    so that no node keeps many more than another.

    Args:
        policy: How many, and who stands where.
        groups: Who takes part, ascending.

    >>> layout = Layout(num_groups=4, pipeline_parallel=2, num_nodes=4)
    >>> policy = SnapshotPolicy(every_steps=2, redundancy=1, layout=layout)
    >>> holders_of_snapshot(policy, [GroupId(0), GroupId(1), GroupId(2), GroupId(3)])
    ((0, 1), (2, 3))
    """
    layout = policy.layout
    in_turn = _in_turn(groups, max(policy.groups_per_domain, layout.ranks_per_node // layout.ranks_per_group))
    holders: list[tuple[GroupId, ...]] = []
    start = 0
    for position in range(layout.ranks_per_group):
        chosen = _choose(policy, position, list(islice(cycle(in_turn), start, start + len(in_turn))))
        holders.append(chosen)
        start = (start + len(chosen)) % len(in_turn)
    return tuple(holders)


def _in_turn(groups: Sequence[GroupId], unit: int) -> list[GroupId]:
    """The groups so that those of a unit, so many consecutive ids, are far from each other."""
    seen: Counter[int] = Counter()
    turns: list[tuple[int, GroupId]] = []
    for group in groups:
        turns.append((seen[group // unit], group))
        seen[group // unit] += 1
    return [group for _, group in sorted(turns)]


def _choose(policy: SnapshotPolicy, position: int, candidates: Sequence[GroupId]) -> tuple[GroupId, ...]:
    """The first of the candidates that stand apart, ascending."""
    chosen: list[GroupId] = []
    for apart_by_domain in (True, False):
        for group in candidates:
            nodes = {policy.layout.node_of(one, position) for one in chosen}
            domains = {one // policy.groups_per_domain for one in chosen}
            is_apart = policy.layout.node_of(group, position) not in nodes
            if is_apart and not (apart_by_domain and group // policy.groups_per_domain in domains):
                chosen.append(group)
            if len(chosen) > policy.redundancy:
                return tuple(sorted(chosen))
    return tuple(sorted(chosen))
