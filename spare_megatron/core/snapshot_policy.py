"""Snapshots: copies of the state in the memory of nodes. When they are taken, who keeps them, which one helps.

Where every group holds the whole state, rank j of each holds the same. So a copy on another node is one that the rank
there makes of its own state, and nothing crosses the network before a restart. Each rank position is copied on a few
groups alone, its holders, the positions on different ones: the least memory that outlives the loss of all holders but
one. Where the optimizer's state is cut into slices, a position's copy has none of them: each slice is copied by as many
of its hosts, on all of their ranks.

A node keeps two of each: the newest that all holders have, and the one that they are copying. Nobody needs to be
asked which is which: a rank has made its copy before it votes on the step before the next snapshot. So whoever comes to
the next one knows that all others have the one before, and gives up what is older.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

from spare_megatron.core.actions import TakeSnapshot
from spare_megatron.stacking.layout import GroupId, Layout, Member, SliceId
from spare_megatron.stacking.state_partitions import Hosts, Ownership

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


class HeldSlice(NamedTuple):
    """Whole copies of a slice's state, those of one rank or of all ranks of a group.

    Attributes:
        attempt: As of `Held`.
        slice: The slice.
        sha256: Of the copy; of several, over theirs in the order of the ranks.
    """

    attempt: int
    slice: SliceId
    sha256: str


class WholeSnapshot(NamedTuple):
    """One that has every rank position, and every slice.

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
        num_slices: That the optimizer's state is cut into; 0 where every group has all of it.
    """

    every_steps: int
    redundancy: int
    layout: Layout
    groups_per_domain: int = 1
    num_slices: int = 0


class Snapshots:
    """Those of a run, as the log has them.

    Args:
        policy: None takes none.
    """

    def __init__(self, policy: SnapshotPolicy | None) -> None:
        self._policy = policy
        self._taken: tuple[WholeSnapshot, ...] = ()  # the last ones that are neither undone nor wrong
        self._holders: dict[int, frozenset[GroupId]] = {}  # of each of these, by its attempt

    def after(
        self, step: int, attempt: int, groups: Sequence[GroupId], ownership: Ownership | None = None
    ) -> tuple[()] | tuple[TakeSnapshot]:
        """What follows from a commit.

        Args:
            step: Committed steps.
            attempt: Of the commit.
            groups: Who takes part.
            ownership: Who hosts which slice, where there are any.
        """
        policy = self._policy
        if policy is None or step % policy.every_steps:
            return ()
        previous = self._taken[-1].attempt if self._taken else -1
        self._taken = (*self._taken[1 - _NUM_REMEMBERED :], WholeSnapshot(step, attempt))
        action = TakeSnapshot(
            step=step,
            attempt=attempt,
            previous=previous,
            settled_by=step + policy.every_steps - 1,
            holders=holders_of_snapshot(policy, groups),
            slice_holders=() if ownership is None else holders_of_slices(policy, ownership.hosts),
        )
        self._holders = {one.attempt: self._holders.get(one.attempt, frozenset()) for one in self._taken}
        self._holders[attempt] = frozenset().union(*action.holders, *action.slice_holders)
        return (action,)

    def lost(self, group: GroupId, wrong_after: int | None) -> None:
        """The group is lost.

        Args:
            group: The group.
            wrong_after: Committed steps after which its state was found to be wrong; None if it was not. What it
                keeps of a snapshot of just these steps is wrong, too.
        """
        self._taken = tuple(
            one for one in self._taken if one.step != wrong_after or group not in self._holders[one.attempt]
        )

    def restarted(self, step: int) -> None:
        """What was committed after so many steps is undone."""
        self._taken = tuple(one for one in self._taken if one.step <= step)

    def newest_whole(self, held: Iterable[Held], slices: Iterable[HeldSlice] = ()) -> WholeSnapshot | None:
        """The newest of which there is a copy of every rank position and slice, and all copies of one are alike.

        Args:
            held: Copies of rank positions.
            slices: Copies of slices on all ranks of some group.
        """
        if self._policy is None:
            return None
        positions = set(range(self._policy.layout.ranks_per_group))
        numbers = set(range(self._policy.num_slices))
        whole = _alike(held), _alike(slices)
        for taken in reversed(self._taken):
            if positions <= whole[0].get(taken.attempt, set()) and numbers <= whole[1].get(taken.attempt, set()):
                return taken
        return None


def _alike(copies: Iterable[Held | HeldSlice]) -> dict[int, set[int]]:
    """Attempt -> positions or slices of which there are copies, and all of them alike."""
    digests: dict[tuple[int, int], set[str]] = {}
    for attempt, what, sha256 in copies:
        digests.setdefault((attempt, what), set()).add(sha256)
    alike: dict[int, set[int]] = {}
    for (attempt, what), found in digests.items():
        if len(found) == 1:
            alike.setdefault(attempt, set()).add(what)
    return alike


def held_by_group(of_ranks: Sequence[Sequence[HeldSlice]]) -> tuple[HeldSlice, ...]:
    """The copies of slices that a group has on all of its ranks.

    A group's word of each is as short as a rank's, however many ranks it has: after a wipe-out all groups read what all
    groups have.

    Args:
        of_ranks: What each of its ranks has.

    >>> both, one = HeldSlice(5, SliceId(0), "a"), HeldSlice(5, SliceId(1), "b")
    >>> [(held.attempt, held.slice) for held in held_by_group([[both, one], [both]])]
    [(5, 0)]
    """
    found: dict[tuple[int, SliceId], list[str]] = {}
    for held in of_ranks:
        for attempt, number, sha256 in held:
            found.setdefault((attempt, number), []).append(sha256)
    return tuple(
        HeldSlice(*what, hashlib.sha256("".join(digests).encode()).hexdigest())
        for what, digests in sorted(found.items())
        if len(digests) == len(of_ranks)
    )


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
        chosen = _choose(policy, [position], list(islice(cycle(in_turn), start, start + len(in_turn))))
        holders.append(chosen)
        start = (start + len(chosen)) % len(in_turn)
    return tuple(holders)


def holders_of_slices(policy: SnapshotPolicy, hosts: Hosts) -> tuple[tuple[GroupId, ...], ...]:
    """For each slice those of its hosts that keep it: as many as of a rank position, and as far from each other.

    They begin with another host for each slice, so that no group keeps many more than another.

    Args:
        policy: How many, and who stands where.
        hosts: Who has the whole state of each slice.

    >>> from spare_megatron.stacking.layout import Member
    >>> layout = Layout(num_groups=3, num_nodes=3)
    >>> policy = SnapshotPolicy(every_steps=2, redundancy=0, layout=layout, num_slices=3)
    >>> holders_of_slices(policy, [[Member(GroupId(group)) for group in row] for row in ((0, 1), (1, 2), (0, 2))])
    ((0,), (2,), (0,))
    """
    # Groups that follow each other may share the nodes at their ends, and no others.
    ends = [0, policy.layout.ranks_per_group - 1]
    holders: list[tuple[GroupId, ...]] = []
    for number, row in enumerate(hosts):
        first = number % len(row)
        holders.append(_choose(policy, ends, [host.group for host in (*row[first:], *row[:first])]))
    return tuple(holders)


def in_order_to_ask(holders: Iterable[Member], present: Collection[Member], asker: GroupId) -> list[Member]:
    """Those who have a copy, as a group that wants it is to ask them.

    First who takes part: the nodes of the others may be lost since they said that they have it. After a wipe-out many
    groups ask at once, so that each begins with another holder.

    Args:
        holders: Who has a copy.
        present: Who takes part.
        asker: The group.

    >>> holders = [Member(GroupId(group)) for group in (1, 4, 6)]
    >>> [[holder.group for holder in in_order_to_ask(holders, holders[1:], GroupId(asker))] for asker in (0, 3)]
    [[4, 6, 1], [6, 4, 1]]
    """
    in_order: list[Member] = []
    ordered = sorted(holders)
    for row in ([one for one in ordered if one in present], [one for one in ordered if one not in present]):
        first = asker % len(row) if row else 0
        in_order += [*row[first:], *row[:first]]
    return in_order


def _in_turn(groups: Sequence[GroupId], unit: int) -> list[GroupId]:
    """The groups so that those of a unit, so many consecutive ids, are far from each other."""
    seen: Counter[int] = Counter()
    turns: list[tuple[int, GroupId]] = []
    for group in groups:
        turns.append((seen[group // unit], group))
        seen[group // unit] += 1
    return [group for _, group in sorted(turns)]


def _choose(policy: SnapshotPolicy, positions: Sequence[int], candidates: Sequence[GroupId]) -> tuple[GroupId, ...]:
    """The first of the candidates that stand apart with these of their ranks, ascending."""
    chosen: list[GroupId] = []
    for apart_by_domain in (True, False):
        for group in candidates:
            nodes = {policy.layout.node_of(one, position) for one in chosen for position in positions}
            domains = {one // policy.groups_per_domain for one in chosen}
            is_apart = nodes.isdisjoint(policy.layout.node_of(group, position) for position in positions)
            if is_apart and not (apart_by_domain and group // policy.groups_per_domain in domains):
                chosen.append(group)
            if len(chosen) > policy.redundancy:
                return tuple(sorted(chosen))
    return tuple(sorted(chosen))
