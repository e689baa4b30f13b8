"""Who holds the optimizer state of which slice, who sends its parameters, and which copies have to be made anew.

Every rank position's flat parameter space is cut into as many slices as there are groups. A slice lives on r_o groups,
its hosts, which update it alike with every commit; one of them, its owner, sends the parameters to all others. At first
the hosts are those that `stacking.placement` gives for N and r_o, so that any two slices share at most one host where
that
is possible, and no two hosts of a slice one domain. A lost group takes its copies along. What then is missing is copied
from a host to a group that has no copy: a repair. A host is only who holds the whole state of the present step.

A group that comes back holds nothing, and others more than their share. When no copy is missing, slices move to those
who hold the fewest: the copy is made as in a repair, and one commit after it has become a host's, when it has been
compared with the others, the host that it came from lets go. So a slice never has fewer than r_o hosts for it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from spare_megatron.stacking.layout import GroupId, Member, SliceId
from spare_megatron.stacking.placement import make_placement

Hosts = tuple[tuple[Member, ...], ...]
"""For each slice its hosts, ascending."""


class StateWipeOut(Exception):
    """Some slices have no surviving host: only a checkpoint has their state.

    Attributes:
        slices: Those slices, in ascending order.
    """

    def __init__(self, slices: tuple[SliceId, ...]) -> None:
        super().__init__(f"no surviving host for slices {', '.join(map(str, slices))}")
        self.slices = slices

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[SliceId, ...]]]:
        return type(self), (self.slices,)


class SliceCopy(NamedTuple):
    """A copy of a slice's state, and who holds it."""

    slice: SliceId
    member: Member


class Repair(NamedTuple):
    """A copy to be made: the donor is a host, the receiver becomes one when it has everything."""

    slice: SliceId
    donor: Member
    receiver: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """What is fixed for a run.

    Attributes:
        num_groups: N, and as many slices.
        redundancy: r_o, hosts of each slice, from 1 to N.
        groups_per_domain: Groups of consecutive ids that may be lost together.
    """

    num_groups: int
    redundancy: int
    groups_per_domain: int = 1

    def domains_of(self, members: Iterable[Member]) -> set[int]:
        """The domains that members stand in."""
        return {member.group // self.groups_per_domain for member in members}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """The slices at one moment of the log. Every rank folds the same.

    Attributes:
        slicing: What is fixed.
        placed: For each slice, the groups that the placement gives it to.
        members: Who takes part, ascending.
        hosts: For each slice, who holds the whole state of the present step.
        owners: For each slice, the host that sends its parameters. The most slices that one member owns are as few as
            the hosts allow.
        repairs: The copies to make, those of the slices with the fewest hosts first. Every slice gets as many as it
            lacks: r_o hosts, or all members where there are fewer.
        moves: The copies whose donors let go of theirs afterwards. Until that is folded, the receiver of one that is
            whole is a host beside its donor.
    """

    slicing: Slicing
    placed: tuple[tuple[GroupId, ...], ...]
    members: tuple[Member, ...]
    hosts: Hosts
    owners: tuple[Member, ...]
    repairs: tuple[Repair, ...] = ()
    moves: tuple[Repair, ...] = ()

    def for_members(self, members: Iterable[Member]) -> "Ownership":
        """The same with other members: copies of those who are gone are gone, whoever is new has none.

        Raises:
            StateWipeOut: Some slice has no host left.
        """
        present = tuple(sorted(members))
        left = set(present)
        hosts = tuple(tuple(host for host in row if host in left) for row in self.hosts)
        wiped_out = tuple(SliceId(index) for index, row in enumerate(hosts) if not row)
        if wiped_out:
            raise StateWipeOut(wiped_out)
        return replace(self, members=present, hosts=hosts)._settled()

    def with_copies(self, copies: Collection[SliceCopy], released: Collection[SliceCopy] = ()) -> "Ownership":
        """The same with these copies complete. Those that nothing asks for are none: whoever made them lets go.

        Args:
            copies: What has been copied.
            released: Copies that hosts let go of.
        """
        if not copies and not released:
            return self
        asked = {SliceCopy(copy.slice, copy.receiver) for copy in (*self.repairs, *self.moves)}
        hosts = [set(row) for row in self.hosts]
        for copy in copies:
            if copy in asked:
                hosts[copy.slice].add(copy.member)
        for copy in released:
            hosts[copy.slice].discard(copy.member)
        return replace(self, hosts=tuple(tuple(sorted(row)) for row in hosts))._settled()

    @property
    def superseded(self) -> tuple[SliceCopy, ...]:
        """The copies that the next commit lets go of: others have taken their place."""
        return tuple(SliceCopy(move.slice, move.donor) for move in self.moves if self._is_made(move))

    @property
    def num_wanted(self) -> int:
        """Hosts that a slice is to have."""
        return min(self.slicing.redundancy, len(self.members))

    def hosted_by(self, member: Member) -> tuple[SliceId, ...]:
        """The slices of which a member is a host, ascending."""
        return tuple(SliceId(index) for index, row in enumerate(self.hosts) if member in row)

    def _is_made(self, move: Repair) -> bool:
        row = self.hosts[move.slice]
        return move.donor in row and move.receiver in row and len(row) > self.num_wanted

    def _settled(self) -> "Ownership":
        owners = _assign_owners(self.hosts, self.owners)
        repairs, made = _plan_repairs(self), [move for move in self.moves if self._is_made(move)]
        under_way = [move for move in self.moves if move.receiver not in self.hosts[move.slice]]
        moves = made if repairs else _Evening(self, made).moves_with(under_way)
        return replace(self, owners=owners, repairs=repairs, moves=tuple(moves))


def first_ownership(slicing: Slicing, members: Iterable[Member]) -> Ownership:
    """Where everybody can have any slice: at the start of a run, and when a checkpoint has been loaded.

    The hosts are those of the placement, and other members for those of them that do not take part.

    Raises:
        ValueError: The redundancy does not fit.

    >>> ring = first_ownership(Slicing(num_groups=3, redundancy=2), [Member(g) for g in range(3)])
    >>> [[host.group for host in row] for row in ring.hosts], [owner.group for owner in ring.owners]
    ([[0, 2], [0, 1], [1, 2]], [0, 1, 2])
    """
    placement = make_placement("golomb", slicing.num_groups, slicing.redundancy, slicing.groups_per_domain)
    present = tuple(sorted(members))
    by_group = {member.group: member for member in present}
    placed = tuple(tuple(sorted(by_group[g] for g in row if g in by_group)) for row in placement.hosts)
    receivers = _assign_receivers(slicing, present, placed, {})
    hosts = tuple(tuple(sorted((*row, *receivers.get(index, ())))) for index, row in enumerate(placed))
    homes = tuple(by_group.get(row[0], present[0]) for row in placement.hosts)
    owned = Ownership(slicing=slicing, placed=placement.hosts, members=present, hosts=hosts, owners=homes)
    return owned._settled()


def _assign_owners(hosts: Hosts, earlier: Sequence[Member]) -> tuple[Member, ...]:
    """The earlier owners where that is as even as can be, a new matching of slices to hosts elsewhere.

    Slices that have lost their owner go to the host that owns the fewest. If some member then owns more than it has
    to, a maximum matching (Hopcroft-Karp) with L places for each host decides, with the least L that serves.
    """
    kept = [owner if owner in row else None for owner, row in zip(earlier, hosts, strict=True)]
    load = Counter(owner for owner in kept if owner is not None)
    owners: list[Member] = []
    for owner, row in zip(kept, hosts, strict=True):
        if owner is None:
            owner = min(row, key=lambda host: (load[host], host))
            load[owner] += 1
        owners.append(owner)
    able = sorted({host for row in hosts for host in row})
    most = -(-len(hosts) // len(able))
    while most < max(load.values()):
        matched = _match(hosts, able, most)
        if matched is not None:
            return matched
        most += 1
    return tuple(owners)


def _match(hosts: Hosts, able: Sequence[Member], most: int) -> tuple[Member, ...] | None:
    """An owner for every slice, none with more than `most` of them, or None."""
    place = {member: index * most for index, member in enumerate(able)}
    columns = [place[host] + number for row in hosts for host in row for number in range(most)]
    ends = np.cumsum([0, *(len(row) * most for row in hosts)])
    graph = csr_array((np.ones(len(columns), dtype=np.int8), columns, ends), shape=(len(hosts), len(able) * most))
    found = maximum_bipartite_matching(graph, perm_type="column")
    return None if (found < 0).any() else tuple(able[int(column) // most] for column in found)


def _plan_repairs(ownership: Ownership) -> tuple[Repair, ...]:
    """Repairs under way go on where they are still needed, from another host if the donor is gone.

    So does a move of a slice that has lost a host, unless its receiver shares a domain with those that are left.
    """
    hosts, left = ownership.hosts, set(ownership.members)
    running: dict[int, list[Member]] = {}
    donors: dict[SliceCopy, Member] = {}
    domains_of = ownership.slicing.domains_of
    moves = [move for move in ownership.moves if not domains_of([move.receiver]) & domains_of(hosts[move.slice])]
    for repair in (*ownership.repairs, *moves):
        if repair.receiver in left and repair.receiver not in hosts[repair.slice]:
            running.setdefault(repair.slice, []).append(repair.receiver)
            if repair.donor in left:
                donors[SliceCopy(repair.slice, repair.receiver)] = repair.donor
    receivers = _assign_receivers(ownership.slicing, ownership.members, hosts, running)
    wanted = [SliceCopy(SliceId(index), receiver) for index, row in receivers.items() for receiver in row]
    given = Counter(donors[copy] for copy in wanted if copy in donors)
    repairs = []
    for copy in sorted(wanted, key=lambda copy: (len(hosts[copy.slice]), copy)):
        donor = donors.get(copy)
        if donor is None:
            donor = min(hosts[copy.slice], key=lambda host: (given[host], host))
            given[donor] += 1
        repairs.append(Repair(copy.slice, donor, copy.member))
    return tuple(repairs)


def _assign_receivers(
    slicing: Slicing, members: Collection[Member], hosts: Hosts, running: Mapping[int, Sequence[Member]]
) -> dict[int, list[Member]]:
    """Slice -> who is to get the copies that it lacks: whoever already does, then whoever has the fewest to make.

    Members outside the domains of the other hosts come first. Copies that one member makes one after another take that
    much longer, so that only members with as many to make are compared by what they hold; ties go to the lowest id.
    """
    wanted = min(slicing.redundancy, len(members))
    num_held = Counter(host for row in hosts for host in row)
    receivers = {
        index: list(running.get(index, ()))[: wanted - len(row)] for index, row in enumerate(hosts) if len(row) < wanted
    }
    num_asked = Counter(member for row in receivers.values() for member in row)
    for index, row in sorted(receivers.items(), key=lambda item: (len(hosts[item[0]]), item[0])):
        for _ in range(wanted - len(hosts[index]) - len(row)):
            taken = {*hosts[index], *row}
            domains = slicing.domains_of(taken)
            chosen = min(
                (member for member in members if member not in taken),
                key=lambda m: (slicing.domains_of([m]) <= domains, num_asked[m], num_held[m], m),
            )
            row.append(chosen)
            num_asked[chosen] += 1
    return receivers


class _Evening:
    """Moves that even out how many slices the members hold, as far as the domains of the hosts allow.

    A slice goes from who holds the most to who holds the fewest and at least two less, or one less where its hosts come
    to stand in more domains; they never come to stand in fewer. A slice has one move at a time, and nobody both gives
    and takes. So with every copy made, in whatever order, the sum of the squares of what the members hold falls, or
    stays and fewer hosts share a domain: no move undoes another.

    Args:
        ownership: No copy is missing.
        made: The moves whose donors have yet to let go.
    """

    def __init__(self, ownership: Ownership, made: Iterable[Repair]) -> None:
        self._ownership = ownership
        self._moves: list[Repair] = []
        self._held = Counter(dict.fromkeys(ownership.members, 0))
        self._slices: dict[Member, list[SliceId]] = {member: [] for member in ownership.members}
        self._crowded: set[SliceId] = set()  # with hosts that share a domain
        for index, row in enumerate(ownership.hosts):
            if len(ownership.slicing.domains_of(row)) < len(row):
                self._crowded.add(SliceId(index))
            self._held.update(row)
            for host in row:
                self._slices[host].append(SliceId(index))
        for move in made:
            self._held[move.receiver] -= 1  # it has come already
            self._plan(move)

    def moves_with(self, under_way: Iterable[Repair]) -> list[Repair]:
        """All moves: those under way that are still of use go on."""
        for move in under_way:
            if move.receiver in self._slices and any(self._allowed([move.slice], move.donor, move.receiver)):
                self._plan(move)
        while (found := self._next()) is not None:
            self._plan(found)
        return self._moves

    def _plan(self, move: Repair) -> None:
        self._moves.append(move)
        self._held[move.donor] -= 1
        self._held[move.receiver] += 1

    def _next(self) -> Repair | None:
        """The move from the member with the most slices that can give one to the member with the fewest; lowest ids."""
        givers, takers = {move.donor for move in self._moves}, {move.receiver for move in self._moves}
        moved = {move.slice for move in self._moves}
        able_to_take = sorted((count, member) for member, count in self._held.items() if member not in givers)
        for most, giver in sorted((-count, member) for member, count in self._held.items() if member not in takers):
            free = [number for number in self._slices[giver] if number not in moved]
            crowded = [number for number in free if number in self._crowded]
            for fewest, taker in able_to_take:
                numbers = free if -most - fewest > 1 else crowded
                if not numbers or -most - fewest < 1:
                    break  # whoever is next holds no fewer
                chosen = min(self._allowed(numbers, giver, taker), default=None)
                if chosen is not None:
                    return Repair(chosen[-1], giver, taker)
        return None

    def _allowed(self, numbers: Iterable[SliceId], giver: Member, taker: Member) -> Iterator[tuple[int, int, SliceId]]:
        """The slices that may go from one to the other, first those whose hosts share a domain or are elsewhere."""
        ownership, surplus = self._ownership, self._held[giver] - self._held[taker]
        domains_of = ownership.slicing.domains_of
        for number in numbers:
            row, placed = ownership.hosts[number], ownership.placed[number]
            num_more = len(domains_of([taker, *(host for host in row if host != giver)])) - len(domains_of(row))
            if taker not in row and num_more >= 0 and surplus >= (1 if num_more else 2):
                yield -num_more, (giver.group in placed) - (taker.group in placed), number


def recipients(ownership: Ownership) -> tuple[tuple[GroupId, ...], ...]:
    """For each slice, who gets the sums of its gradients: its owner, then the others, ascending."""
    asked = [set(row) for row in ownership.hosts]
    for copy in (*ownership.repairs, *ownership.moves):
        asked[copy.slice].add(copy.receiver)
    return tuple(
        (owner.group, *sorted(member.group for member in row if member != owner))
        for owner, row in zip(ownership.owners, asked, strict=True)
    )


class GatherShare(NamedTuple):
    """What one member sends in one round: elements of a slice that it owns, from one place to another."""

    slice: SliceId
    start: int
    stop: int


Round = tuple[GatherShare | None, ...]
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
    queues: dict[GroupId, list[GatherShare]] = {member: [] for member in members}
    for index, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
        queues[owner] += [
            GatherShare(SliceId(index), start, min(start + most, length)) for start in range(0, length, most)
        ]
    num_rounds = max(map(len, queues.values()))
    columns = [queue + [None] * (num_rounds - len(queue)) for queue in queues.values()]
    return list(zip(*columns, strict=True))
