"""Snapshots, copies of the state in node memory: when to take them, which groups hold them, which one to restart from.

Rank j of every group with the whole pipeline holds the same state, so a holder copies its own; groups with fewer stages
neither copy nor load any. A few groups on different nodes copy each rank position; as many hosts copy each state
partition, on all of their ranks. A node keeps the newest snapshot that all holders have and the one being copied; with
audits also the newest of audited steps, to which an undo can go back. A rank has made its copy before it votes on the
step before the next snapshot, so older ones can go then.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

from spare_megatron.core.log.actions import TakeSnapshot
from spare_megatron.core.log.events import HeldPartition
from spare_megatron.core.log.votes import Held
from spare_megatron.stacking.layout import GroupId, Layout, Member, PartitionId
from spare_megatron.stacking.state_partitions import Hosts, Ownership

_NUM_REMEMBERED = 3
"""Newest snapshots that a restart may use: nodes have two, or three if one reaches the third before another."""


class WholeSnapshot(NamedTuple):
    """A snapshot with every rank position and partition after `step` committed steps, the last by `attempt`."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """When snapshots are taken, and how often each is copied."""

    every_steps: int
    """Steps from one to the next, at least 2."""
    redundancy: int
    """Nodes that may be lost; each rank position has one holder more."""
    layout: Layout
    groups_per_domain: int = 1
    num_partitions: int = 0
    """Partitions of the optimizer state; 0 if every group has all of it."""


class Snapshots:
    """The snapshots of a run, as the log has them; none without a policy."""

    def __init__(self, policy: SnapshotPolicy | None) -> None:
        self._policy = policy
        self._taken: tuple[WholeSnapshot, ...] = ()  # the last ones that are neither undone nor wrong
        self._holders: dict[int, frozenset[GroupId]] = {}  # of each of these, by its attempt

    def after(
        self,
        step: int,
        attempt: int,
        groups: Sequence[GroupId],
        ownership: Ownership | None = None,
        audited_steps: int | None = None,
    ) -> tuple[()] | tuple[TakeSnapshot]:
        """The snapshot to take after the commit of this attempt, if one is due. `groups`: those with the whole
        pipeline, whose ranks alone have the state of rank positions.
        """
        policy = self._policy
        if policy is None or step % policy.every_steps or not groups:
            return ()
        clean = self.clean(audited_steps)[-1:]
        kept = tuple(sorted({one.attempt for one in (*clean, *self._taken[-1:])}))
        last = self._taken[1 - _NUM_REMEMBERED :]
        self._taken = (*(one for one in clean if one not in last), *last, WholeSnapshot(step, attempt))
        action = TakeSnapshot(
            step=step,
            attempt=attempt,
            kept=kept,
            settled_by=step + policy.every_steps - 1,
            holders=holders_of_snapshot(policy, groups),
            partition_holders=() if ownership is None else holders_of_partitions(policy, ownership.hosts),
        )
        self._holders = {one.attempt: self._holders.get(one.attempt, frozenset()) for one in self._taken}
        self._holders[attempt] = frozenset().union(*action.holders, *action.partition_holders)
        return (action,)

    def on_loss(self, group: GroupId, wrong_after: int | None) -> None:
        """Records a loss; if the state was wrong after `wrong_after` committed steps, so are its snapshots of them."""
        self._taken = tuple(
            one for one in self._taken if one.step != wrong_after or group not in self._holders[one.attempt]
        )

    def on_restart(self, step: int) -> None:
        self._taken = tuple(one for one in self._taken if one.step <= step)

    def clean(self, audited_steps: int | None) -> tuple[WholeSnapshot, ...]:
        """Those of audited steps, the newest last."""
        return () if audited_steps is None else tuple(one for one in self._taken if one.step <= audited_steps)

    def holders(self, attempt: int, members: Iterable[Member]) -> tuple[Member, ...]:
        """The members that were to copy some of the snapshot."""
        return tuple(member for member in members if member.group in self._holders.get(attempt, ()))

    def newest_whole(
        self,
        held: Iterable[Held],
        partitions: Iterable[HeldPartition] = (),
        among: Sequence[WholeSnapshot] | None = None,
    ) -> WholeSnapshot | None:
        """The newest with copies of every rank position and partition, all copies of one being equal; `among` these."""
        if self._policy is None:
            return None
        positions = set(range(self._policy.layout.ranks_per_group))
        numbers = set(range(self._policy.num_partitions))
        whole = _alike(held), _alike(partitions)
        for taken in reversed(self._taken if among is None else among):
            if positions <= whole[0].get(taken.attempt, set()) and numbers <= whole[1].get(taken.attempt, set()):
                return taken
        return None


def _alike(copies: Iterable[Held | HeldPartition]) -> dict[int, set[int]]:
    """Attempt -> positions or partitions of which all copies are equal."""
    digests: dict[tuple[int, int], set[str]] = {}
    for attempt, what, sha256 in copies:
        digests.setdefault((attempt, what), set()).add(sha256)
    alike: dict[int, set[int]] = {}
    for (attempt, what), found in digests.items():
        if len(found) == 1:
            alike.setdefault(attempt, set()).add(what)
    return alike


def held_by_group(of_ranks: Sequence[Sequence[HeldPartition]]) -> tuple[HeldPartition, ...]:
    """The copies of partitions that a group has on all of its ranks, given those of each rank.

    >>> both, one = HeldPartition(5, PartitionId(0), "a"), HeldPartition(5, PartitionId(1), "b")
    >>> [(held.attempt, held.partition) for held in held_by_group([[both, one], [both]])]
    [(5, 0)]
    """
    found: dict[tuple[int, PartitionId], list[str]] = {}
    for held in of_ranks:
        for attempt, number, sha256 in held:
            found.setdefault((attempt, number), []).append(sha256)
    return tuple(
        HeldPartition(*what, hashlib.sha256("".join(digests).encode()).hexdigest())
        for what, digests in sorted(found.items())
        if len(digests) == len(of_ranks)
    )


def holders_of_snapshot(policy: SnapshotPolicy, groups: Sequence[GroupId]) -> tuple[tuple[GroupId, ...], ...]:
    """For each rank position, its holders, ascending: redundancy + 1 groups, fewer if there are no more nodes.

    No two share a node, nor a domain if possible. Positions take the groups in turn, domain by domain.

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


def holders_of_partitions(policy: SnapshotPolicy, hosts: Hosts) -> tuple[tuple[GroupId, ...], ...]:
    """For each state partition, those of its hosts that keep it, as for a rank position; starts vary by partition.

    >>> from spare_megatron.stacking.layout import Member
    >>> layout = Layout(num_groups=3, num_nodes=3)
    >>> policy = SnapshotPolicy(every_steps=2, redundancy=0, layout=layout, num_partitions=3)
    >>> holders_of_partitions(policy, [[Member(GroupId(group)) for group in row] for row in ((0, 1), (1, 2), (0, 2))])
    ((0,), (2,), (0,))
    """
    # Consecutive groups can share only the nodes at their ends.
    ends = [0, policy.layout.ranks_per_group - 1]
    holders: list[tuple[GroupId, ...]] = []
    for number, row in enumerate(hosts):
        first = number % len(row)
        holders.append(_choose(policy, ends, [host.group for host in (*row[first:], *row[:first])]))
    return tuple(holders)


def in_order_to_ask(holders: Iterable[Member], present: Collection[Member], asker: GroupId) -> list[Member]:
    """Holders in the order in which a group asks them: present ones first, starts varying by asker.

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
    """The groups ordered so that those of a unit (this many consecutive ids) are far apart."""
    seen: Counter[int] = Counter()
    turns: list[tuple[int, GroupId]] = []
    for group in groups:
        turns.append((seen[group // unit], group))
        seen[group // unit] += 1
    return [group for _, group in sorted(turns)]


def _choose(policy: SnapshotPolicy, positions: Sequence[int], candidates: Sequence[GroupId]) -> tuple[GroupId, ...]:
    """The first redundancy + 1 candidates that share no node at these positions, in different domains if possible."""
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
