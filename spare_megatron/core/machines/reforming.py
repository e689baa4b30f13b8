"""Decides which machines fill the places of broken groups, so that as many groups as possible are whole again.

A *place* is a node index of the layout: the ranks that stand together. A *machine* holds one place, or none while it is
idle. A group that comes in takes its state from the others, so any machine may take any place. k = places of a group.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, cast

from spare_megatron.stacking.layout import GroupId, Layout, MachineId, PlaceId

MachineState = Literal["placed", "idle"]


class Machine(NamedTuple):
    """A healthy machine. An idle one has a domain, None if unknown; one that holds a place counts as in that of it."""

    state: MachineState
    place: PlaceId | None = None
    domain: int | None = None


class Move(NamedTuple):
    """A machine takes a place, and leaves another of a broken group, or None if it was idle."""

    machine: MachineId
    place: PlaceId
    from_place: PlaceId | None


Source = tuple[MachineId, PlaceId | None]
"""A machine that may be moved, and the place that it holds."""


def places_per_group(layout: Layout) -> int:
    """k; ValueError, with the reason, for groups that do not fill whole machines: those cannot be re-formed.

    >>> places_per_group(Layout(num_groups=2, pipeline_parallel=4, num_nodes=4))
    2
    """
    on_machine, in_group = layout.ranks_per_node, layout.ranks_per_group
    if in_group % on_machine:
        raise ValueError(
            f"groups of {in_group} ranks on machines of {on_machine} do not fill whole machines: a machine that holds "
            "ranks of several groups can take no place of one of them; set cluster.num_nodes so that "
            "the ranks of a group are a multiple of those of a machine"
        )
    return in_group // on_machine


def can_reform(layout: Layout) -> bool:
    """Whether groups stand on several machines and fill them: only then have others use for one of a broken group."""
    try:
        return places_per_group(layout) > 1
    except ValueError:
        return False


def reform(
    layout: Layout,
    machines: Mapping[MachineId, Machine],
    broken: Collection[GroupId],
    *,
    groups_per_domain: int = 1,
    unhosted: Collection[Collection[GroupId]] = (),
) -> tuple[Move, ...]:
    """The moves that make broken groups whole: most whole groups, then fewest shards without a host, then fewest moves,
    then fewest across domains, but for groups that shards need. `unhosted`: the hosts of each shard that has none now.

    Idle machines and those placed in broken groups are moved, those of other groups never; `machines` has none that are
    lost, are to leave or have given their place up. Ties: the lowest groups are completed; low places take low
    machines, of their own domain first. Moves are in the order of their places.
    Cost: O(M + P log P) for M machines and the P places of broken groups. ValueError as for `places_per_group`.
    """
    size = places_per_group(layout)
    holders: dict[PlaceId, MachineId] = {}
    idle: defaultdict[int | None, list[Source]] = defaultdict(list)
    groups = set(broken)
    for machine, (state, place, domain) in machines.items():
        if state == "idle":
            idle[domain].append((machine, None))
        elif state == "placed" and place is not None and place // size in groups:
            assert place not in holders, f"place {place} is held by machines {holders[place]} and {machine}"
            holders[place] = machine
    short = [_Broken.of(group, size, holders) for group in sorted(groups)]
    num_whole = (len(holders) + sum(map(len, idle.values()))) // size
    num_whole = min(len(short), num_whole)
    needed = _needed(short, num_whole, unhosted) if unhosted else frozenset()
    chosen = _chosen(short, num_whole, idle, groups_per_domain, needed)
    wanted: defaultdict[int, list[PlaceId]] = defaultdict(list)
    for group in short:
        domain = group.group // groups_per_domain
        if group.group in chosen:
            wanted[domain] += group.missing
        else:
            idle[domain] += [(holders[place], place) for place in group.places if place in holders]
    return _assigned(wanted, idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    """A broken group: its places, the number of those that hold a machine, and those that hold none, ascending."""

    group: GroupId
    places: Sequence[PlaceId]
    num_held: int
    missing: list[PlaceId]

    @classmethod
    def of(cls, group: GroupId, size: int, holders: Mapping[PlaceId, MachineId]) -> "_Broken":
        places = cast("Sequence[PlaceId]", range(group * size, (group + 1) * size))
        missing = [place for place in places if place not in holders]
        return cls(group=group, places=places, num_held=size - len(missing), missing=missing)


_MOST_TRIED = 2000
"""Sets of groups that are tried at most for shards without a host."""


def _needed(broken: Sequence[_Broken], num_whole: int, unhosted: Collection[Collection[GroupId]]) -> frozenset[GroupId]:
    """The groups to complete for these shards: with those that lack fewest machines beside them, fewest shards stay
    without a host, and this takes the fewest moves. Branch and bound over the host that each shard gets, exact up to
    `_MOST_TRIED` sets.
    """
    order = sorted(broken, key=lambda group: len(group.missing))
    ranks = {group.group: rank for rank, group in enumerate(order)}
    shards = sorted((sorted(ranks[host] for host in hosts if host in ranks) for hosts in unhosted), key=len)
    num_moves = [0, *accumulate(len(group.missing) for group in order)]  # of the groups below a rank

    def end_of_others(forced: frozenset[int]) -> int:
        """The others are completed below this rank."""
        end = num_whole
        while (shorter := num_whole - sum(rank >= end for rank in forced)) < end:
            end = shorter
        return end

    def score(forced: frozenset[int]) -> tuple[int, int]:
        """Shards that stay without a host, and moves."""
        end = end_of_others(forced)
        num_left = sum(all(rank >= end and rank not in forced for rank in hosts) for hosts in shards)
        return num_left, num_moves[end] + sum(len(order[rank].missing) for rank in forced if rank >= end)

    best: frozenset[int] = frozenset()
    open_sets = [(0, best)]  # shards looked at, and groups forced for them
    for _ in range(_MOST_TRIED):
        if not open_sets:
            break
        number, forced = open_sets.pop()
        found = score(forced)
        best = forced if found < score(best) else best
        num_left = sum(forced.isdisjoint(hosts) for hosts in shards[:number])
        if number == len(shards) or (num_left, found[1]) >= score(best):
            continue
        open_sets.append((number + 1, forced))
        if len(forced) < num_whole and forced.isdisjoint(shards[number]):
            open_sets += [(number + 1, forced | {rank}) for rank in reversed(shards[number])]
    end = end_of_others(best)
    of_shards = {rank for hosts in shards for rank in hosts}
    return frozenset(order[rank].group for rank in of_shards if rank < end or rank in best)


def _chosen(
    broken: Sequence[_Broken],
    num_whole: int,
    idle: Mapping[int | None, list[Source]],
    groups_per_domain: int,
    needed: Collection[GroupId],
) -> set[GroupId]:
    """The groups to complete, those that are `needed` and others. Those that lack fewest machines need the fewest
    moves: each missing machine is one move.

    Among those that lack equally many, t, domains decide. With n of them completed, a domain takes min(demand, supply)
    machines from itself: demand grows by t for each, supply falls by the k - t that it no longer gives. That is concave
    in n, so taking the greatest gain each time is optimal.
    """
    by_missing = sorted(broken, key=lambda group: (group.group not in needed, len(group.missing)))
    if num_whole in (len(broken), len(needed), 0):
        return {group.group for group in by_missing[:num_whole]}
    lacking = len(by_missing[num_whole - 1].missing)
    chosen = {group.group for group in broken if len(group.missing) < lacking} | {*needed}
    demand, supply = Counter[int](), Counter({domain: len(own) for domain, own in idle.items() if domain is not None})
    tied: defaultdict[int, list[_Broken]] = defaultdict(list)
    for group in broken:
        domain = group.group // groups_per_domain
        if group.group in chosen:
            demand[domain] += len(group.missing)
        else:
            supply[domain] += group.num_held
        if len(group.missing) == lacking and group.group not in needed:
            tied[domain].append(group)

    def offer(domain: int) -> tuple[int, GroupId, int]:
        group, before = tied[domain][0], min(demand[domain], supply[domain])
        gain = min(demand[domain] + lacking, supply[domain] - group.num_held) - before
        return -gain, group.group, domain

    offers = [offer(domain) for domain in tied]
    heapq.heapify(offers)
    while len(chosen) < num_whole:
        _, _, domain = heapq.heappop(offers)
        group = tied[domain].pop(0)
        chosen.add(group.group)
        demand[domain] += lacking
        supply[domain] -= group.num_held
        if tied[domain]:
            heapq.heappush(offers, offer(domain))
    return chosen


def _assigned(wanted: Mapping[int, list[PlaceId]], sources: Mapping[int | None, list[Source]]) -> tuple[Move, ...]:
    """A machine for each wanted place: first those of its domain, then of those that are left."""
    pairs: list[tuple[PlaceId, Source]] = []
    open_places: list[PlaceId] = []
    left: list[Source] = []
    for domain in {*wanted, *sources}:
        own, places = sorted(sources.get(domain, ())), [] if domain is None else wanted.get(domain, [])
        pairs += zip(places, own, strict=False)
        open_places += places[len(own) :]
        left += own[len(places) :]
    pairs += zip(sorted(open_places), sorted(left), strict=False)
    return tuple(Move(machine, place, old) for place, (machine, old) in sorted(pairs))
