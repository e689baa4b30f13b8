"""Assigns partitions of the optimizer state to groups: hosts, owners, repairs and moves.

Each rank position's flat parameter space has as many partitions as groups. A partition's r_o hosts hold its whole
state; one of them, its owner, sends the parameters to all groups. A repair replaces a lost copy. A move evens out the
load: the receiver becomes a host, the next commit's votes compare it, and only then the donor releases its copy.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.placement import make_placement

Hosts = tuple[tuple[Member, ...], ...]
"""For each state partition, its hosts, ascending."""


def hosted_by(hosts: Hosts, member: Member) -> tuple[PartitionId, ...]:
    return tuple(PartitionId(number) for number, row in enumerate(hosts) if member in row)


class StateWipeOut(Exception):
    """Some state partitions, in ascending order, have no surviving host: only a checkpoint or a snapshot helps."""

    def __init__(self, partitions: tuple[PartitionId, ...]) -> None:
        super().__init__(partitions)
        self.partitions = partitions

    def __str__(self) -> str:
        return f"no surviving host for partitions {', '.join(map(str, self.partitions))}"


class PartitionCopy(NamedTuple):
    """A member's copy of a state partition."""

    partition: PartitionId
    member: Member


class Repair(NamedTuple):
    """A copy to make: the donor is a host, the receiver becomes one once its copy is complete."""

    partition: PartitionId
    donor: Member
    receiver: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSetup:
    """N partitions of the optimizer state, each on r_o = `redundancy` groups; a domain may be lost as one."""

    num_groups: int
    redundancy: int
    groups_per_domain: int = 1

    def domains_of(self, members: Iterable[Member]) -> set[int]:
        return {member.group // self.groups_per_domain for member in members}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Hosts, owners and pending copies of all state partitions at one point of the log, the same on every rank."""

    setup: PartitionSetup
    placed: tuple[tuple[GroupId, ...], ...]
    members: tuple[Member, ...]
    hosts: Hosts
    """For each partition, the members that hold its whole state of the present step."""
    owners: tuple[Member, ...]
    """For each partition, the host that sends its parameters, as even as hosts allow."""
    repairs: tuple[Repair, ...] = ()
    """The copies to make, up to r_o hosts or all members, partitions with the fewest hosts first."""
    moves: tuple[Repair, ...] = ()
    """The copies whose donors release theirs afterwards; until then both are hosts."""
    leaving: tuple[Member, ...] = ()
    """Members that are to leave: others are to host what they do, and they get no further copies."""

    def for_members(self, members: Iterable[Member]) -> "Ownership":
        """The ownership for other members; new ones hold none. Raises StateWipeOut if a partition has no host left."""
        present = tuple(sorted(members))
        left = set(present)
        hosts = tuple(tuple(host for host in row if host in left) for row in self.hosts)
        if lost := tuple(PartitionId(number) for number, row in enumerate(hosts) if not row):
            raise StateWipeOut(lost)
        leaving = tuple(member for member in self.leaving if member in left)
        return replace(self, members=present, hosts=hosts, leaving=leaving)._settled()

    def with_copies(
        self,
        copies: Collection[PartitionCopy],
        released: Collection[PartitionCopy] = (),
        leaving: Collection[Member] = (),
    ) -> "Ownership":
        """The ownership after copies are completed or released by hosts. Copies that were not asked for are ignored.

        `leaving` are the members that are to leave from here on.
        """
        leaving = tuple(member for member in self.members if member in leaving)
        if not copies and not released and leaving == self.leaving:
            return self
        asked = {PartitionCopy(copy.partition, copy.receiver) for copy in (*self.repairs, *self.moves)}
        hosts = [set(row) for row in self.hosts]
        for copy in copies:
            if copy in asked:
                hosts[copy.partition].add(copy.member)
        for copy in released:
            hosts[copy.partition].discard(copy.member)
        return replace(self, hosts=tuple(tuple(sorted(row)) for row in hosts), leaving=leaving)._settled()

    @property
    def superseded(self) -> tuple[PartitionCopy, ...]:
        """The copies that the next commit releases: others have replaced them."""
        return tuple(PartitionCopy(move.partition, move.donor) for move in self.moves if self._is_made(move))

    @property
    def num_wanted(self) -> int:
        return min(self.setup.redundancy, len(self.members) - len(self.leaving))

    def has_handed_over(self, member: Member) -> bool:
        """Whether a member that is to leave is needed as a host no more."""
        hosted = set(hosted_by(self.hosts, member))
        return member in self.leaving and not any(repair.partition in hosted for repair in self.repairs)

    def staying(self, row: tuple[Member, ...]) -> tuple[Member, ...]:
        """The hosts of a partition without those that are to leave."""
        return tuple(host for host in row if host not in self.leaving) if self.leaving else row

    def _is_made(self, move: Repair) -> bool:
        row = self.hosts[move.partition]
        return move.donor in row and move.receiver in row and len(self.staying(row)) > self.num_wanted

    def _settled(self) -> "Ownership":
        owners = _assign_owners(self.hosts, self.owners)
        repairs, made = _plan_repairs(self), [move for move in self.moves if self._is_made(move)]
        under_way = [move for move in self.moves if move.receiver not in self.hosts[move.partition]]
        if not repairs and not self.leaving:
            made += _releases_of_surplus(self, {move.partition for move in made})
        moves = made if repairs or self.leaving else _Evening(self, made).moves_with(under_way)
        return replace(self, owners=owners, repairs=repairs, moves=tuple(moves))


def first_ownership(setup: PartitionSetup, members: Iterable[Member]) -> Ownership:
    """The ownership when every group can take any partition: at the start of a run and after loading a checkpoint.

    The hosts are those of the placement; other members replace those that do not take part.

    >>> ring = first_ownership(PartitionSetup(num_groups=3, redundancy=2), [Member(g) for g in range(3)])
    >>> [[host.group for host in row] for row in ring.hosts], [owner.group for owner in ring.owners]
    ([[0, 2], [0, 1], [1, 2]], [0, 1, 2])
    """
    placement = make_placement("golomb", setup.num_groups, setup.redundancy, setup.groups_per_domain)
    present = tuple(sorted(members))
    by_group = {member.group: member for member in present}
    placed = tuple(tuple(sorted(by_group[g] for g in row if g in by_group)) for row in placement.hosts)
    receivers = _assign_receivers(setup, present, placed, {})
    hosts = tuple(tuple(sorted((*row, *receivers.get(index, ())))) for index, row in enumerate(placed))
    homes = tuple(by_group.get(row[0], present[0]) for row in placement.hosts)
    owned = Ownership(setup=setup, placed=placement.hosts, members=present, hosts=hosts, owners=homes)
    return owned._settled()


def _assign_owners(hosts: Hosts, earlier: Sequence[Member]) -> tuple[Member, ...]:
    """Owners as even as the hosts allow: the earlier ones if possible, else the host that owns the fewest.

    If a member then owns more than necessary, a maximum matching (Hopcroft-Karp) with the least feasible L slots per
    host.
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
    """An owner for every partition, at most `most` per member, or None."""
    place = {member: index * most for index, member in enumerate(able)}
    columns = [place[host] + number for row in hosts for host in row for number in range(most)]
    ends = np.cumsum([0, *(len(row) * most for row in hosts)])
    graph = csr_array((np.ones(len(columns), dtype=np.int8), columns, ends), shape=(len(hosts), len(able) * most))
    found = maximum_bipartite_matching(graph, perm_type="column")
    return None if (found < 0).any() else tuple(able[int(column) // most] for column in found)


def _plan_repairs(ownership: Ownership) -> tuple[Repair, ...]:
    """The repairs: those under way continue while needed, from another host if the donor is lost.

    A move of a partition that lost a host becomes a repair, unless its receiver shares a domain with other hosts.
    """
    hosts, left = ownership.hosts, set(ownership.members)
    staying = left.difference(ownership.leaving)
    running: dict[int, list[Member]] = {}
    donors: dict[PartitionCopy, Member] = {}
    domains_of = ownership.setup.domains_of
    moves = [move for move in ownership.moves if not domains_of([move.receiver]) & domains_of(hosts[move.partition])]
    for repair in (*ownership.repairs, *moves):
        if repair.receiver in staying and repair.receiver not in hosts[repair.partition]:
            running.setdefault(repair.partition, []).append(repair.receiver)
            if repair.donor in left:
                donors[PartitionCopy(repair.partition, repair.receiver)] = repair.donor
    receivers = _assign_receivers(ownership.setup, sorted(staying), [*map(ownership.staying, hosts)], running)
    wanted = [PartitionCopy(PartitionId(index), receiver) for index, row in receivers.items() for receiver in row]
    given = Counter(donors[copy] for copy in wanted if copy in donors)
    repairs = []
    for copy in sorted(wanted, key=lambda copy: (len(hosts[copy.partition]), copy)):
        donor = donors.get(copy)
        if donor is None:
            donor = min(hosts[copy.partition], key=lambda host: (given[host], host))
            given[donor] += 1
        repairs.append(Repair(copy.partition, donor, copy.member))
    return tuple(repairs)


def _assign_receivers(
    setup: PartitionSetup,
    members: Collection[Member],
    hosts: Sequence[tuple[Member, ...]],
    running: Mapping[int, Sequence[Member]],
) -> dict[int, list[Member]]:
    """Partition -> receivers of the copies that it lacks: those under way, then further members.

    Order: outside the other hosts' domains, fewest copies to make, fewest partitions held, lowest id.
    """
    wanted = min(setup.redundancy, len(members))
    num_held = Counter(host for row in hosts for host in row)
    receivers = {
        index: list(running.get(index, ()))[: wanted - len(row)] for index, row in enumerate(hosts) if len(row) < wanted
    }
    num_asked = Counter(member for row in receivers.values() for member in row)
    for index, row in sorted(receivers.items(), key=lambda item: (len(hosts[item[0]]), item[0])):
        for _ in range(wanted - len(hosts[index]) - len(row)):
            taken = {*hosts[index], *row}
            domains = setup.domains_of(taken)
            chosen = min(
                (member for member in members if member not in taken),
                key=lambda m: (setup.domains_of([m]) <= domains, num_asked[m], num_held[m], m),
            )
            row.append(chosen)
            num_asked[chosen] += 1
    return receivers


def _releases_of_surplus(ownership: Ownership, moved: Collection[PartitionId]) -> list[Repair]:
    """Complete moves for partitions with more hosts than wanted: others copied them from a member that was to leave,
    and stays. The host with most partitions releases its copy, of those without which the hosts span the most domains.
    """
    domains_of, releases = ownership.setup.domains_of, []
    num_held = Counter(host for row in ownership.hosts for host in row)
    for index, row in enumerate(ownership.hosts):
        if len(row) <= ownership.num_wanted or PartitionId(index) in moved:
            continue
        others = {host: tuple(other for other in row if other != host) for host in row}
        giver = min(row, key=lambda host: (-len(domains_of(others[host])), -num_held[host], host))
        num_held[giver] -= 1
        releases.append(Repair(PartitionId(index), giver, others[giver][0]))
    return releases


class _Evening:
    """Moves that even out how many partitions the members hold, as far as failure domains allow.

    A partition moves from the member with the most to one with at least two fewer, or one fewer if its hosts then span
    more domains; never fewer domains. One move per partition, and no member both gives and takes, so no move undoes
    another. `made` are complete moves whose donors have yet to release their copies.
    """

    def __init__(self, ownership: Ownership, made: Iterable[Repair]) -> None:
        self._ownership = ownership
        self._moves: list[Repair] = []
        self._held = Counter(dict.fromkeys(ownership.members, 0))
        self._partitions: dict[Member, list[PartitionId]] = {member: [] for member in ownership.members}
        self._crowded: set[PartitionId] = set()  # partitions whose hosts share a domain
        for index, row in enumerate(ownership.hosts):
            if len(ownership.setup.domains_of(row)) < len(row):
                self._crowded.add(PartitionId(index))
            self._held.update(row)
            for host in row:
                self._partitions[host].append(PartitionId(index))
        for move in made:
            self._held[move.receiver] -= 1  # counted among the hosts already
            self._plan(move)

    def moves_with(self, under_way: Iterable[Repair]) -> list[Repair]:
        """All moves; those under way that are still useful continue."""
        for move in under_way:
            if move.receiver in self._partitions and any(self._allowed([move.partition], move.donor, move.receiver)):
                self._plan(move)
        while (found := self._next()) is not None:
            self._plan(found)
        return self._moves

    def _plan(self, move: Repair) -> None:
        self._moves.append(move)
        self._held[move.donor] -= 1
        self._held[move.receiver] += 1

    def _next(self) -> Repair | None:
        """The next move, from the member with the most partitions to the one with the fewest; lowest ids."""
        givers, takers = {move.donor for move in self._moves}, {move.receiver for move in self._moves}
        moved = {move.partition for move in self._moves}
        able_to_take = sorted((count, member) for member, count in self._held.items() if member not in givers)
        for most, giver in sorted((-count, member) for member, count in self._held.items() if member not in takers):
            free = [number for number in self._partitions[giver] if number not in moved]
            crowded = [number for number in free if number in self._crowded]
            for fewest, taker in able_to_take:
                numbers = free if -most - fewest > 1 else crowded
                if not numbers or -most - fewest < 1:
                    break  # the following members hold no fewer
                chosen = min(self._allowed(numbers, giver, taker), default=None)
                if chosen is not None:
                    return Repair(chosen[-1], giver, taker)
        return None

    def _allowed(
        self, numbers: Iterable[PartitionId], giver: Member, taker: Member
    ) -> Iterator[tuple[int, int, PartitionId]]:
        """Partitions that may move, with keys: first if hosts gain a domain, then if it restores the placement."""
        ownership, surplus = self._ownership, self._held[giver] - self._held[taker]
        domains_of = ownership.setup.domains_of
        for number in numbers:
            row, placed = ownership.hosts[number], ownership.placed[number]
            num_more = len(domains_of([taker, *(host for host in row if host != giver)])) - len(domains_of(row))
            if taker not in row and num_more >= 0 and surplus >= (1 if num_more else 2):
                yield -num_more, (giver.group in placed) - (taker.group in placed), number


def recipients(ownership: Ownership) -> tuple[tuple[GroupId, ...], ...]:
    """For each partition, the groups that get its gradient sums: its owner, then the others, ascending."""
    asked = [set(row) for row in ownership.hosts]
    for copy in (*ownership.repairs, *ownership.moves):
        asked[copy.partition].add(copy.receiver)
    return tuple(
        (owner.group, *sorted(member.group for member in row if member != owner))
        for owner, row in zip(ownership.owners, asked, strict=True)
    )


class GatherShare(NamedTuple):
    """A range of elements of an owned partition that one member sends in one round."""

    partition: PartitionId
    start: int
    stop: int


Round = tuple[GatherShare | None, ...]
"""What each member sends, in the order of the members; None for those with nothing left."""


def gather_rounds(
    owners: Sequence[GroupId], members: Sequence[GroupId], lengths: Sequence[int], most: int
) -> list[Round]:
    """The fewest rounds of an all-gather in which every member sends what it owns, at most `most` elements a round.

    `owners` and `lengths` (in elements) are by partition.

    >>> for sent in gather_rounds([4, 7, 7], [4, 5, 7], [3, 2, 1], most=2):
    ...     print(*("-" if share is None else tuple(share) for share in sent))
    (0, 0, 2) - (1, 0, 2)
    (0, 2, 3) - (2, 0, 1)
    """
    queues: dict[GroupId, list[GatherShare]] = {member: [] for member in members}
    for index, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
        queues[owner] += [
            GatherShare(PartitionId(index), start, min(start + most, length)) for start in range(0, length, most)
        ]
    num_rounds = max(map(len, queues.values()))
    columns = [queue + [None] * (num_rounds - len(queue)) for queue in queues.values()]
    return list(zip(*columns, strict=True))
