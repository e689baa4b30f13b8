"""Which machines fill the places of broken groups, against every possible assignment."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, count, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from spare_megatron.core.machines.reforming import Machine, Move, Reformed, places_per_group, reform
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, PlaceId
from spare_megatron.stacking.paces import PipelineTimes

Places = dict[PlaceId, MachineId | None]
Idle = dict[MachineId, int | None]
Unhosted = Sequence[frozenset[GroupId]]


def layout_of(num_groups: int, size: int) -> Layout:
    """Groups of `size` machines with two ranks each."""
    return Layout(num_groups=num_groups, pipeline_parallel=2 * size, num_nodes=num_groups * size)


def places_of(size: int, held: Mapping[int, str]) -> Places:
    """Group -> one letter per place: x where the machine is lost, else the place holds the machine of its own id."""
    return {
        PlaceId(group * size + number): None if letter == "x" else MachineId(group * size + number)
        for group, letters in held.items()
        for number, letter in enumerate(letters)
    }


def moves_of(
    layout: Layout, places: Places, idle: Idle, *, groups_per_domain: int = 1, unhosted: Unhosted = ()
) -> tuple[Move, ...]:
    """`reform` for broken groups with these places, beside a whole group that no move may touch."""
    size = places_per_group(layout)
    groups = {GroupId(place // size) for place in places}
    machines = {machine: Machine("placed", place) for place, machine in places.items() if machine is not None}
    machines |= {machine: Machine("idle", domain=domain) for machine, domain in idle.items()}
    training = next(group for group in range(layout.num_groups) if group not in groups)
    machines |= {MachineId(200 + i): Machine("placed", PlaceId(training * size + i)) for i in range(size)}
    return reform(layout, machines, groups, groups_per_domain=groups_per_domain, unhosted=unhosted).moves


def arrangements(places: list[PlaceId], machines: frozenset[MachineId]) -> Iterator[Places]:
    """Every way to put some of the machines into some of the places."""
    if not places:
        yield {}
        return
    for taken in (None, *machines):
        for rest in arrangements(places[1:], machines - {taken} if taken is not None else machines):
            yield {places[0]: taken, **rest}


Score = tuple[int, int, int, int]


def score_of(before: Places, idle: Idle, after: Places, size: int, per_domain: int, unhosted: Unhosted = ()) -> Score:
    """Groups that are not whole, shards without a host, moves, and moves across domains where all shards have one: less
    is better, in this order.
    """
    home = {machine: place for place, machine in before.items() if machine is not None}
    moved = [(machine, place) for place, machine in after.items() if machine is not None and home.get(machine) != place]
    groups = {place // size for place in after}
    whole = {group for group in groups if all(after[PlaceId(group * size + i)] is not None for i in range(size))}
    domains = {machine: place // size // per_domain for machine, place in home.items()}
    num_across = sum(idle.get(machine, domains.get(machine)) != place // size // per_domain for machine, place in moved)
    return -len(whole), sum(not hosts & whole for hosts in unhosted), len(moved), 0 if unhosted else num_across


def applied(places: Places, moves: tuple[Move, ...]) -> Places:
    moved = {move.machine for move in moves}
    assert len(moved) == len(moves), "a machine takes one place"
    after = {place: None if machine in moved else machine for place, machine in places.items()}
    for move in moves:
        assert after[move.place] is None, "the place is taken"
        after[move.place] = move.machine
    return after


@st.composite
def broken(draw: st.DrawFn) -> tuple[int, Places, Idle, int, Unhosted]:
    """Up to 6 places in groups of equal size, up to 6 machines, in domains of up to 3 groups, and shards that up to
    three groups could host.
    """
    size = draw(st.integers(1, 3))
    groups = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6 // size, unique=True))
    letters = st.text("ox", min_size=size, max_size=size)
    places = places_of(size, {group: draw(letters) for group in groups})
    ids = list(places)
    machines = draw(st.permutations(ids))  # machines that moved before
    places = {place: None if held is None else MachineId(machines[ids.index(place)]) for place, held in places.items()}
    room = 6 - sum(held is not None for held in places.values())
    idle = draw(st.lists(st.one_of(st.none(), st.integers(0, 2)), max_size=min(room, 3)))
    hosts = st.frozensets(st.sampled_from([*map(GroupId, groups), GroupId(7)]), min_size=1, max_size=3)
    unhosted = draw(st.lists(hosts, max_size=3))
    numbered = {MachineId(100 + i): domain for i, domain in enumerate(idle)}
    return size, places, numbered, draw(st.integers(1, 3)), unhosted


@given(broken())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_moves_are_the_best_of_all(case: tuple[int, Places, Idle, int, Unhosted]) -> None:
    size, places, idle, per_domain, unhosted = case
    moves = moves_of(layout_of(7, size), places, idle, groups_per_domain=per_domain, unhosted=unhosted)
    after = applied(places, moves)
    machines = frozenset({*places.values(), *idle} - {None})
    assert len({move.machine for move in moves}) == len(moves), "a machine takes two places"
    best = min(
        score_of(places, idle, every, size, per_domain, unhosted)
        for every in arrangements(list(places), machines)  # type: ignore[arg-type]
    )
    assert score_of(places, idle, after, size, per_domain, unhosted) == best
    assert [move.place for move in moves] == sorted(move.place for move in moves)
    shuffled = dict(reversed(places.items())), dict(reversed(idle.items()))
    again = moves_of(layout_of(7, size), *shuffled, groups_per_domain=per_domain, unhosted=unhosted[::-1])
    assert again == moves


def test_groups_that_shards_need_are_completed_first() -> None:
    """Group 2 lacks more than the others, and alone could host a shard that has no host."""
    places = places_of(3, {0: "oox", 1: "oox", 2: "oxx"})
    assert {move.place for move in moves_of(layout_of(5, 3), places, {})} == {2}
    needed = moves_of(layout_of(5, 3), places, {}, unhosted=[frozenset({GroupId(2), GroupId(4)})])
    assert {move.place for move in needed} == {7, 8}


def fewest_left(places: Places, num_machines: int, size: int, unhosted: Unhosted) -> tuple[int, int]:
    """Fewest shards without a host, and fewest moves for that, of all sets of groups that can be whole."""
    missing = Counter({place // size: 0 for place in places})
    missing.update(place // size for place, held in places.items() if held is None)
    return min(
        (sum(not hosts & {*chosen} for hosts in unhosted), sum(missing[group] for group in chosen))
        for chosen in combinations(sorted(missing), min(len(missing), num_machines // size))
    )


def test_fewest_shards_stay_without_a_host_in_larger_cases() -> None:
    rng, num_better = np.random.default_rng(1), 0
    for _ in range(300):
        size, num_groups = int(rng.integers(2, 5)), int(rng.integers(4, 10))
        letters = ("x" * num + "o" * (size - num) for num in rng.integers(1, size + 1, num_groups).tolist())
        places = places_of(size, dict(enumerate(letters)))
        sizes = rng.integers(1, 4, rng.integers(1, 6)).tolist()
        unhosted = [frozenset(map(GroupId, rng.integers(0, num_groups + 1, number).tolist())) for number in sizes]
        num_machines = sum(held is not None for held in places.values())
        moves = moves_of(layout_of(num_groups + 2, size), places, {}, unhosted=unhosted)
        _, num_left, num_moves, _ = score_of(places, {}, applied(places, moves), size, 1, unhosted)
        assert (num_left, num_moves) == fewest_left(places, num_machines, size, unhosted)
        plain = applied(places, moves_of(layout_of(num_groups + 2, size), places, {}))
        num_better += num_left < score_of(places, {}, plain, size, 1, unhosted)[1]
    assert num_better > 50


def test_the_choice_for_shards_is_quick_for_a_thousand_groups() -> None:
    """However many sets of hosts there are: not all are tried."""
    rng = np.random.default_rng(2)
    places = places_of(4, {group: "xoxo" if group % 2 else "xooo" for group in range(1000)})
    unhosted = [frozenset(map(GroupId, rng.integers(0, 1000, 8).tolist())) for _ in range(40)]
    began_s = time.process_time()
    moves = moves_of(layout_of(1001, 4), places, {}, unhosted=unhosted)
    assert time.process_time() - began_s < 2.0
    assert score_of(places, {}, applied(places, moves), 4, 1, unhosted)[1] == 0


def fewest_across(places: Places, idle: Idle, size: int, per_domain: int) -> tuple[int, int]:
    """Fewest moves that complete as many groups as there are machines for, and fewest across domains among these."""
    groups = sorted({place // size for place in places})
    domains = {machine: place // size // per_domain for place, machine in places.items() if machine is not None}
    num_whole = min(len(groups), (len(domains) + len(idle)) // size)
    found = []
    for chosen in combinations(groups, num_whole):
        open_places = [place for place, held in places.items() if held is None and place // size in chosen]
        sources = [domains[held] for place, held in places.items() if held is not None and place // size not in chosen]
        sources += [-1 if domain is None else domain for domain in idle.values()]
        across = np.array([[place // size // per_domain != source for source in sources] for place in open_places])
        num_across = int(across[linear_sum_assignment(across)].sum()) if open_places else 0
        found.append((len(open_places), num_across))
    return min(found)


def test_moves_across_domains_are_as_few_as_an_exact_assignment_has() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        size, num_groups, per_domain = (int(rng.integers(*span)) for span in ((1, 5), (2, 8), (1, 4)))
        letters = ("x" * num + "o" * (size - num) for num in rng.integers(0, min(size, 2) + 1, num_groups).tolist())
        places = places_of(size, dict(enumerate(letters)))
        drawn = rng.integers(-1, 3, rng.integers(0, 5)).tolist()
        idle = {MachineId(100 + i): None if domain < 0 else domain for i, domain in enumerate(drawn)}
        moves = moves_of(layout_of(8, size), places, idle, groups_per_domain=per_domain)
        *_, num_moves, num_across = score_of(places, idle, applied(places, moves), size, per_domain)
        assert (num_moves, num_across) == fewest_across(places, idle, size, per_domain)


def test_two_broken_groups_become_one_whole_group() -> None:
    moves = moves_of(layout_of(5, 2), places_of(2, {0: "xo", 1: "ox"}), {})
    assert moves == (Move(machine=MachineId(2), place=PlaceId(0)),)


def test_a_spare_and_a_machine_of_a_broken_group_are_the_same() -> None:
    places = places_of(2, {0: "xo", 1: "ox"})
    for spare, taken in ((MachineId(9), MachineId(2)), (MachineId(1), MachineId(1))):
        moves = moves_of(layout_of(5, 2), {**places, PlaceId(1): MachineId(7)}, {spare: None})
        assert moves == (Move(machine=taken, place=PlaceId(0)),), "the lowest id, whichever it is"


def test_nothing_moves_where_no_group_can_be_whole() -> None:
    assert moves_of(layout_of(5, 3), places_of(3, {0: "oxx", 2: "xxo"}), {}) == ()


def test_a_group_that_lacks_nothing_keeps_its_machines() -> None:
    places = places_of(2, {0: "xo", 1: "oo", 2: "xo"})
    assert {move.machine for move in moves_of(layout_of(5, 2), places, {})} == {5}


def test_a_machine_of_the_same_domain_is_taken_first() -> None:
    places = places_of(2, {0: "ox", 1: "ox", 2: "ox", 3: "xx"})
    moves = moves_of(layout_of(5, 2), places, {MachineId(9): 1, MachineId(8): None}, groups_per_domain=2)
    # Groups 0 and 2 and one more could be whole with 5 machines: two groups, the fewest crossings.
    assert [(move.machine, move.place) for move in moves] == [(2, 1), (9, 5)]


def test_two_machines_in_one_place_are_noticed() -> None:
    machines = {MachineId(machine): Machine("placed", PlaceId(1)) for machine in (0, 1)}
    with pytest.raises(AssertionError, match="place 1 is held by machines 0 and 1"):
        reform(layout_of(2, 2), machines, [GroupId(0)])


def test_low_places_take_low_machines() -> None:
    places = places_of(3, {0: "xox", 2: "oxo"})
    idle: Idle = {MachineId(14): 0, MachineId(13): 0, MachineId(12): 0, MachineId(11): None}
    moves = moves_of(layout_of(5, 3), places, idle)
    assert [(move.machine, move.place) for move in moves] == [(12, 0), (13, 2), (11, 7)]


def test_a_group_of_whole_machines_can_be_re_formed() -> None:
    assert places_per_group(Layout(num_groups=4, pipeline_parallel=3, num_nodes=4)) == 1


@pytest.mark.parametrize(("ranks", "num_nodes"), [(2, 1), (2, 2), (3, 6)])
def test_groups_that_do_not_fill_whole_machines_are_refused(ranks: int, num_nodes: int) -> None:
    with pytest.raises(ValueError, match=r"do not fill whole machines.*cluster.num_nodes"):
        reform(Layout(num_groups=4, pipeline_parallel=ranks, num_nodes=num_nodes), {}, ())


def test_lanes_and_stages_of_a_machine_move_together() -> None:
    """Groups 0 and 1 have each lost the machine of another stage: that of group 1 takes the place of group 0's."""
    layout = Layout(num_groups=3, tensor_parallel=2, data_parallel=2, pipeline_parallel=2, num_nodes=6)
    machines = {MachineId(place): Machine("placed", PlaceId(place)) for place in (1, 2, 4, 5)}
    (move,) = reform(layout, machines, [GroupId(0), GroupId(1)]).moves
    assert move == Move(MachineId(2), PlaceId(0))
    stands = {
        place: [(layout.lane_of(rank), rank // layout.ranks_per_stage) for _, rank in layout.ranks_on(place)]
        for place in (move.place, 1)
    }
    assert stands == {0: [(0, 0), (0, 0), (1, 0), (1, 0)], 1: [(0, 1), (0, 1), (1, 1), (1, 1)]}


def test_machines_of_single_lanes_fill_places_of_other_lanes() -> None:
    layout = Layout(num_groups=3, tensor_parallel=2, data_parallel=4, num_nodes=12)
    assert places_per_group(layout) == 4
    machines = {MachineId(place): Machine("placed", PlaceId(place)) for place in range(12) if place not in (1, 4, 7)}
    moves, stages = reform(layout, machines, [GroupId(0), GroupId(1)])
    assert (moves, stages) == ((Move(MachineId(5), PlaceId(1)),), {0: 1})
    assert [layout.lane_of(rank) for _, rank in layout.ranks_on(1)] == [1, 1]


# ------------------------------------------------------------------------------------------------- shorter pipelines


def shorter(num_groups: int, size: int, least: int, unit: int = 1) -> Layout:
    """Groups of `size` x `unit` machines, of which each stage has `unit`."""
    sizes = {"pipeline_parallel": size, "least_pipeline_parallel": least, "data_parallel": unit}
    return Layout(num_groups=num_groups, num_nodes=num_groups * size * unit, **sizes)


def slowest_search(times: PipelineTimes, stages: Sequence[int]) -> float:
    """`PipelineTimes.step_time`, tick by tick."""
    size = times.num_microbatches if times.moves_shards else 1
    num_units = times.num_shards * times.num_microbatches // size
    share = -(-num_units // len(stages)) if stages else 0

    def done(length: int, until: int) -> int:
        rounds = until // -(-times.num_layers // length) - (length - 1)
        return max(rounds, 0) * times.lanes // size

    for until in count() if stages else ():
        units = [done(length, until) for length in stages]
        if sum(units) >= num_units if times.is_dealt else min(units) >= share:
            return until
    return float("inf")


def test_a_step_takes_the_least_time_in_which_its_work_fits() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        layers, shards, microbatches, lanes = (int(rng.integers(*span)) for span in ((1, 20), (1, 6), (1, 9), (1, 4)))
        times = PipelineTimes(
            num_layers=layers,
            num_shards=shards,
            num_microbatches=microbatches,
            lanes=lanes,
            moves_shards=bool(rng.integers(2)),
            is_dealt=bool(rng.integers(2)),
        )
        stages = rng.integers(1, 6, rng.integers(0, 5)).tolist()
        assert times.step_time(stages) == slowest_search(times, stages)


def first_missing(places: Places, layout: Layout, sizes: Mapping[int, int]) -> list[PlaceId]:
    """The places that are empty of the first ones of each group."""
    k = places_per_group(layout)
    firsts = (group * k + number for group, size in sizes.items() for number in range(size))
    return [PlaceId(place) for place in firsts if places[PlaceId(place)] is None]


def best_sizes(
    layout: Layout, places: Places, num_machines: int, times: PipelineTimes, others: list[int], unhosted: Unhosted
) -> tuple[list[int], int, int]:
    """Of all sizes that groups could have: the greatest capacity, of most groups that are as even as possible, or whole
    groups alone, if that leaves no more shards without a host and is as fast. Also the fewest shards without a host,
    and the fewest moves for that.
    """
    groups = sorted({place // places_per_group(layout) for place in places})
    of_length = {length: len(layout.nodes_of(GroupId(0), length)) for length in layout.lengths}
    every = [
        dict(zip(groups, sizes, strict=True))
        for sizes in product([0, *of_length.values()], repeat=len(groups))
        if sum(sizes) <= num_machines
    ]

    def used(sizes: Mapping[int, int]) -> list[int]:
        return sorted(size for size in sizes.values() if size)

    most = max(
        map(used, every),
        key=lambda sizes: (sum(sizes), len(sizes), min(sizes, default=0) - max(sizes, default=0)),
    )
    whole = max((used(one) for one in every if {*one.values()} <= {0, max(of_length.values())}), key=len)
    found = []
    for option in (whole, most):
        stages = [length for size in option for length, places in of_length.items() if places == size]
        cost = min(
            (
                sum(not any(one.get(host) for host in hosts) for hosts in unhosted),
                len(first_missing(places, layout, one)),
            )
            for one in every
            if used(one) == option
        )
        found.append((cost[0], slowest_search(times, others + stages), option, cost[1]))
    num_left, _, option, num_moves = min(found, key=lambda one: one[:2])
    return option, num_left, num_moves


def test_shorter_pipelines_use_the_most_machines_with_the_fewest_moves() -> None:
    """Up to five groups of five machines, or of units of two, against all sizes; with shards without a host, too."""
    rng, seen = np.random.default_rng(6), Counter[str]()
    for _ in range(250):
        unit, num_others = int(rng.integers(1, 3)), int(rng.integers(0, 3))
        size = int(rng.integers(3, 6 if unit == 1 else 4))
        layout = shorter(5 if unit == 1 else 4, size, int(rng.integers(2, size)), unit)
        num_groups, k = layout.num_groups, places_per_group(layout)
        broken = sorted(rng.choice(num_groups, num_groups - num_others, replace=False).tolist())
        share = rng.random()
        places = places_of(k, {group: "".join("ox"[rng.random() < share] for _ in range(k)) for group in broken})
        idle = [MachineId(100 + number) for number in range(rng.integers(0, 3))]
        times = PipelineTimes(
            num_layers=size * int(rng.integers(1, 9)), num_shards=num_groups, num_microbatches=int(rng.integers(2, 20))
        )
        others = rng.integers(2, size + 1, num_others).tolist()
        unhosted = [frozenset(map(GroupId, rng.integers(0, num_groups, 2).tolist())) for _ in range(rng.integers(0, 3))]
        held = {machine: Machine("placed", place) for place, machine in places.items() if machine is not None}
        made = reform(
            layout,
            held | dict.fromkeys(idle, Machine("idle")),
            [GroupId(group) for group in broken],
            unhosted=unhosted,
            times=times,
            others=others,
        )
        after = applied(places, made.moves)
        sizes = {group: len(layout.nodes_of(group, stages)) for group, stages in made.stages.items()}
        assert first_missing(after, layout, sizes) == [], "a group lacks a machine"
        best, num_left, num_moves = best_sizes(layout, places, len(held) + len(idle), times, others, unhosted)
        assert sorted(sizes.values()) == best
        assert sum(not hosts & made.stages.keys() for hosts in unhosted) == num_left
        assert len(made.moves) == len(first_missing(places, layout, sizes)) >= num_moves
        assert len(made.moves) == num_moves or unit > 1, "further machines are counted one by one"
        seen["shorter"] += min(best, default=k) < k
        seen["whole alone"] += bool(best) and min(best) == k and sum(best) < len(held) + len(idle)
        seen["some shard"] += bool(unhosted) and min(best, default=k) < k
    assert len(seen) == 3
    assert min(seen.values()) > 20, seen


THIRTY_TWO = PipelineTimes(num_layers=32, num_shards=4, num_microbatches=16)


def made_of(letters: Mapping[int, str], others: Sequence[int] = (), unhosted: Unhosted = ()) -> Reformed:
    """Of four groups of four machines, which may have three stages."""
    held = places_of(4, letters)
    machines = {machine: Machine("placed", place) for place, machine in held.items() if machine is not None}
    groups = [GroupId(group) for group in letters]
    return reform(shorter(4, 4, 3), machines, groups, unhosted=unhosted, times=THIRTY_TWO, others=others)


def test_a_group_that_lacks_a_machine_goes_on_with_the_others_in_its_first_places() -> None:
    assert made_of({1: "ooox"}, [4, 4, 4]) == ((), {1: 3})
    assert made_of({1: "oxoo"}, [4, 4, 4]) == ((Move(MachineId(7), PlaceId(5)),), {1: 3})
    assert made_of({1: "ooxx"}, [4, 4, 4]) == ((), {})


def test_broken_groups_share_their_machines_as_evenly_as_possible() -> None:
    assert made_of({0: "ooox", 1: "xoxo", 2: "oxxo"}, [4]).stages == {0: 3, 1: 4}, "place 7 has a machine"
    assert made_of({0: "ooox", 2: "ooxo"}, [4, 3]) == ((Move(MachineId(11), PlaceId(10)),), {0: 3, 2: 3})


def test_whole_groups_alone_are_made_where_that_is_as_fast() -> None:
    """Stages of one layer: a group with three of them is half as fast as a whole one."""
    machines = {MachineId(place): Machine("placed", PlaceId(place)) for place in range(16) if place % 4}
    groups, layout = [GroupId(group) for group in range(4)], shorter(4, 4, 3)
    few = replace(THIRTY_TWO, num_layers=4)
    assert [THIRTY_TWO.step_time(stages) for stages in ([4] * 3, [3] * 4)] == [200, 198]
    assert [few.step_time(stages) for stages in ([4] * 3, [3] * 4)] == [25, 36]
    assert reform(layout, machines, groups, times=THIRTY_TWO).stages == {0: 3, 1: 3, 2: 3, 3: 3}
    assert reform(layout, machines, groups, times=few).stages == {0: 4, 1: 4, 2: 4}
    # A shard whose only host would have to wait decides before the time does.
    unhosted = [frozenset({group}) for group in groups]
    assert reform(layout, machines, groups, times=few, unhosted=unhosted).stages == {0: 3, 1: 3, 2: 3, 3: 3}


def test_shorter_pipelines_need_the_times_of_steps() -> None:
    machines = {MachineId(place): Machine("placed", PlaceId(place)) for place in range(3)}
    with pytest.raises(AssertionError, match="nothing says how long their steps take"):
        reform(shorter(4, 4, 3), machines, [GroupId(0)])
