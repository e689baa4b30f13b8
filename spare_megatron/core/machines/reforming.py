"""Decides which machines fill the places of broken groups, so that these train again: as many whole ones as possible,
or, where pipelines may be shorter, with every machine.

A *place* is a node index of the layout: the ranks that stand together. A *machine* holds one place, or none while it is
idle. A group that comes in takes its state from the others, so any machine may take any place. k = places of a group;
one with a shorter pipeline needs the first of them alone.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from spare_megatron.stacking.layout import GroupId, Layout, MachineId, PlaceId
from spare_megatron.stacking.paces import PipelineTimes

MachineState = Literal["placed", "idle"]


class Machine(NamedTuple):
    """A healthy machine. An idle one has a domain, None if unknown; one that holds a place counts as in that of it."""

    state: MachineState
    place: PlaceId | None = None
    domain: int | None = None


class Move(NamedTuple):
    """A machine takes a place; it was idle, or leaves another place of a broken group."""

    machine: MachineId
    place: PlaceId


class Reformed(NamedTuple):
    """What becomes of broken groups."""

    moves: tuple[Move, ...]
    stages: dict[GroupId, int]
    """Of the groups that have the machines for these; those that need no move are among them."""


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
    times: PipelineTimes | None = None,
    others: Sequence[int] = (),
) -> Reformed:
    """The moves that make groups of `lengths_to_make`: with fewest shards without a host, then fewest moves, then
    fewest across domains, but for groups that shards need. `unhosted`: the hosts of each shard that has none now. Where
    pipelines may be shorter: `times` of steps, and the stages of the groups that are not broken (`others`).

    Idle machines and those placed in broken groups are moved, those of other groups never; `machines` has none that are
    lost, are to leave or have given their place up. Ties: the lowest groups are completed; low places take low
    machines, of their own domain first. Moves are in the order of their places.
    Cost: O(M + P log P) for M machines and the P places of broken groups. ValueError as for `places_per_group`.
    """
    size = places_per_group(layout)
    holders: dict[PlaceId, MachineId] = {}
    sources: defaultdict[int | None, list[MachineId]] = defaultdict(list)
    groups = set(broken)
    for machine, (state, place, domain) in machines.items():
        if state == "idle":
            sources[domain].append(machine)
        elif state == "placed" and place is not None and place // size in groups:
            assert place not in holders, f"place {place} is held by machines {holders[place]} and {machine}"
            holders[place] = machine
    num_idle = {domain: len(own) for domain, own in sources.items()}
    options: list[dict[GroupId, int]] = []
    for lengths in lengths_to_make(layout, len(groups), len(holders) + sum(num_idle.values())):
        sizes = [places_for(layout, length) for length in lengths]
        short = [_Broken.of(group, size, sizes or [size], holders) for group in sorted(groups)]
        needed = _needed(short, sizes, unhosted) if unhosted else frozenset()
        chosen = _chosen(short, sizes, num_idle, groups_per_domain, needed)
        made = sorted((one for one in short if one.group in chosen), key=lambda one: one.num_further)
        options.append({one.group: length for one, length in zip(made, lengths, strict=True)})
    stages = options[0] if len(options) == 1 else _fastest(options, unhosted, times, others)
    wanted: defaultdict[int, list[PlaceId]] = defaultdict(list)
    for group in sorted(groups):
        domain, number = group // groups_per_domain, places_for(layout, stages.get(group, 0))
        places = list(map(PlaceId, range(group * size, (group + 1) * size)))
        wanted[domain] += [place for place in places[:number] if place not in holders]
        sources[domain] += [holders[place] for place in places[number:] if place in holders]
    return Reformed(_assigned(wanted, sources), stages)


def lengths_to_make(layout: Layout, num_broken: int, num_machines: int) -> list[list[int]]:
    """The stages of the groups to make: whole ones alone or, if shorter pipelines make more groups, as many as possible
    and as even as possible of the machines that they have use for. Longer ones are first.

    >>> layout = Layout(num_groups=4, pipeline_parallel=4, least_pipeline_parallel=3, num_nodes=16)
    >>> [lengths_to_make(layout, 2, number) for number in (7, 6, 5)]
    [[[4], [4, 3]], [[4], [3, 3]], [[4]]]
    """
    whole, *shorter = layout.lengths
    options = [[whole] * min(num_broken, num_machines // places_for(layout, whole))]
    number = min(num_broken, num_machines // places_for(layout, shorter[-1])) if shorter else 0
    if number > len(options[0]):
        unit = whole - shorter[0]  # Of it all lengths are multiples, for these fill whole machines.
        num_units = min(num_machines // places_for(layout, unit), number * whole // unit)
        options.append([(num_units + index) // number * unit for index in reversed(range(number))])
    return options


def places_for(layout: Layout, stages: int) -> int:
    """The places of a group that so many stages fill."""
    return stages * layout.ranks_per_stage // layout.ranks_per_node


def _fastest(
    options: Sequence[dict[GroupId, int]],
    unhosted: Collection[Collection[GroupId]],
    times: PipelineTimes | None,
    others: Sequence[int],
) -> dict[GroupId, int]:
    """Of options to make groups with these stages the one that leaves fewest shards without a host, then the one with
    the shortest steps, then the first.
    """
    assert times is not None, "pipelines may have several lengths, and nothing says how long their steps take"

    def cost(made: dict[GroupId, int]) -> tuple[int, float]:
        num_left = sum(made.keys().isdisjoint(hosts) for hosts in unhosted)
        return num_left, times.step_time([*others, *made.values()])

    return min(options, key=cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    """A broken group where groups of some sizes are to be made."""

    group: GroupId
    num_held: int
    num_missing: int
    """Of its first places, as many as the smallest size has, those that hold no machine: each takes a move."""
    num_further: int
    """Likewise, of those that the largest size has beside them."""

    @classmethod
    def of(cls, group: GroupId, size: int, sizes: Sequence[int], holders: Collection[int]) -> "_Broken":
        is_held = [place in holders for place in range(group * size, (group + 1) * size)]
        first, further = is_held[: sizes[-1]], is_held[sizes[-1] : sizes[0]]
        missing, beside = first.count(False), further.count(False)
        return cls(group=group, num_held=sum(is_held), num_missing=missing, num_further=beside)

    @property
    def lacking(self) -> tuple[int, int]:
        return self.num_missing, self.num_further


_MOST_TRIED = 2000
"""Sets of groups that are tried at most for shards without a host."""


def _needed(
    broken: Sequence[_Broken], sizes: Sequence[int], unhosted: Collection[Collection[GroupId]]
) -> frozenset[GroupId]:
    """The groups to complete for these shards: with those that lack fewest machines beside them, fewest shards stay
    without a host, and this takes the fewest moves. Branch and bound over the host that each shard gets, exact up to
    `_MOST_TRIED` sets.
    """
    num_made, num_larger = len(sizes), sum(size > sizes[-1] for size in sizes)
    order = sorted(broken, key=lambda group: group.lacking)
    ranks = {group.group: rank for rank, group in enumerate(order)}
    shards = sorted((sorted(ranks[host] for host in hosts if host in ranks) for hosts in unhosted), key=len)
    num_moves = [0, *accumulate(group.num_missing for group in order)]  # of the groups below a rank

    def end_of_others(forced: frozenset[int]) -> int:
        """The others are completed below this rank."""
        end = num_made
        while (shorter := num_made - sum(rank >= end for rank in forced)) < end:
            end = shorter
        return end

    def score(forced: frozenset[int]) -> tuple[int, int]:
        """Shards that stay without a host, and moves."""
        end = end_of_others(forced)
        num_left = sum(all(rank >= end and rank not in forced for rank in hosts) for hosts in shards)
        beyond = [order[rank] for rank in forced if rank >= end]
        further = sorted(group.num_further for group in (*order[:end], *beyond)) if num_larger else []
        return num_left, num_moves[end] + sum(group.num_missing for group in beyond) + sum(further[:num_larger])

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
        if len(forced) < num_made and forced.isdisjoint(shards[number]):
            open_sets += [(number + 1, forced | {rank}) for rank in reversed(shards[number])]
    end = end_of_others(best)
    of_shards = {rank for hosts in shards for rank in hosts}
    return frozenset(order[rank].group for rank in of_shards if rank < end or rank in best)


def _chosen(
    broken: Sequence[_Broken],
    sizes: Sequence[int],
    num_idle: Mapping[int | None, int],
    groups_per_domain: int,
    needed: Collection[GroupId],
) -> set[GroupId]:
    """The groups to complete, those that are `needed` and others. Those that lack fewest machines need the fewest
    moves: each missing machine is one move.

    Among those that lack equally many, t, domains decide. With n of them completed, a domain takes min(demand, supply)
    machines from itself: demand grows by t for each, supply falls by the size less t that it no longer gives. That is
    concave in n, so taking the greatest gain each time is optimal.
    """
    num_made = len(sizes)
    by_missing = sorted(broken, key=lambda group: (group.group not in needed, group.lacking))
    if num_made in (len(broken), len(needed), 0):
        return {group.group for group in by_missing[:num_made]}
    lacking = by_missing[num_made - 1].lacking
    chosen = {group.group for group in broken if group.lacking < lacking} | {*needed}
    demand, supply = Counter[int](), Counter(num_idle)
    tied: defaultdict[int, list[_Broken]] = defaultdict(list)
    for group in broken:
        domain = group.group // groups_per_domain
        supply[domain] += group.num_held
        if group.group in chosen:
            demand[domain] += group.num_missing
            supply[domain] -= sizes[-1] - group.num_missing
        if group.lacking == lacking and group.group not in needed:
            tied[domain].append(group)

    def offer(domain: int) -> tuple[int, GroupId, int]:
        group, before = tied[domain][0], min(demand[domain], supply[domain])
        gain = min(demand[domain] + lacking[0], supply[domain] - sizes[-1] + lacking[0]) - before
        return -gain, group.group, domain

    offers = [offer(domain) for domain in tied]
    heapq.heapify(offers)
    while len(chosen) < num_made:
        _, _, domain = heapq.heappop(offers)
        group = tied[domain].pop(0)
        chosen.add(group.group)
        demand[domain] += lacking[0]
        supply[domain] -= sizes[-1] - lacking[0]
        if tied[domain]:
            heapq.heappush(offers, offer(domain))
    return chosen


def _assigned(wanted: Mapping[int, list[PlaceId]], sources: Mapping[int | None, list[MachineId]]) -> tuple[Move, ...]:
    """A machine for each wanted place: first those of its domain, then of those that are left."""
    pairs: list[tuple[PlaceId, MachineId]] = []
    open_places: list[PlaceId] = []
    left: list[MachineId] = []
    for domain in {*wanted, *sources}:
        own, places = sorted(sources.get(domain, ())), [] if domain is None else wanted.get(domain, [])
        pairs += zip(places, own, strict=False)
        open_places += places[len(own) :]
        left += own[len(places) :]
    pairs += zip(sorted(open_places), sorted(left), strict=False)
    return tuple(Move(machine, place) for place, machine in sorted(pairs))
