"""Which nodes keep snapshots, and that there always is one to go back to."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from spare_megatron.core.controller.restart import RestartLimits, Restarts, Search, decide_restart
from spare_megatron.core.log.actions import AppendEntry, CheckpointCandidate, StopWipeOut, TakeSnapshot
from spare_megatron.core.log.events import HeldPartition, RestartState, WaitingRead
from spare_megatron.core.log.membership import LogTerms
from spare_megatron.core.log.votes import Held
from spare_megatron.core.saves.snapshot_policy import (
    SnapshotPolicy,
    Snapshots,
    WholeSnapshot,
    held_by_group,
    holders_of_partitions,
    holders_of_snapshot,
)
from spare_megatron.stacking.layout import GroupId, Layout, Member, PartitionId
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import PartitionSetup, first_ownership

LIMITS = RestartLimits(max_restarts=1, window_s=60.0, wait_s=5.0)


def policy_for(
    num_groups: int, ranks: int = 1, nodes: int | None = None, redundancy: int = 1, domain: int = 1, every: int = 2
) -> SnapshotPolicy:
    layout = Layout(num_groups=num_groups, pipeline_parallel=ranks, num_nodes=nodes or num_groups)
    return SnapshotPolicy(every_steps=every, redundancy=redundancy, layout=layout, groups_per_domain=domain)


def ids(*groups: int) -> list[GroupId]:
    return [GroupId(group) for group in groups]


# ---------------------------------------------------------------------------------------------------------- holders


@pytest.mark.parametrize("redundancy", [0, 1, 2])
@pytest.mark.parametrize(
    ("num_groups", "ranks", "nodes"), [(4, 1, 4), (4, 2, 4), (6, 2, 3), (4, 4, 8), (5, 3, 5), (4, 2, 1), (8, 1, 4)]
)
def test_any_nodes_may_be_lost_but_one_more_than_the_redundancy(
    num_groups: int, ranks: int, nodes: int, redundancy: int
) -> None:
    """Whichever nodes are lost, and whichever groups were gone before, each rank position has a copy left."""
    policy = policy_for(num_groups, ranks, nodes, redundancy)
    layout = policy.layout
    for num_left in range(1, num_groups + 1):
        for groups in itertools.combinations(ids(*range(num_groups)), num_left):
            holders = holders_of_snapshot(policy, groups)
            for position, kept_by in enumerate(holders):
                there = {layout.node_of(group, position) for group in groups}
                keeping = {layout.node_of(group, position) for group in kept_by}
                assert len(keeping) == len(kept_by) == min(redundancy + 1, len(there))
                assert set(kept_by) <= set(groups)
                for lost in itertools.combinations(sorted(there), min(redundancy, len(there) - 1)):
                    assert keeping - set(lost)


def test_copies_stand_in_different_domains_where_that_can_be() -> None:
    policy = policy_for(num_groups=6, ranks=2, redundancy=1, domain=2)
    for num_left in range(1, 7):
        for groups in itertools.combinations(ids(*range(6)), num_left):
            domains = {group // 2 for group in groups}
            for kept_by in holders_of_snapshot(policy, groups):
                assert len({group // 2 for group in kept_by}) == min(2, len(domains))
                assert len(kept_by) == min(2, num_left)


@pytest.mark.parametrize(("num_groups", "ranks", "redundancy", "domain"), [(8, 4, 1, 1), (16, 8, 2, 4), (64, 8, 1, 8)])
def test_no_node_keeps_much_more_than_another(num_groups: int, ranks: int, redundancy: int, domain: int) -> None:
    holders = holders_of_snapshot(
        policy_for(num_groups, ranks, redundancy=redundancy, domain=domain), ids(*range(num_groups))
    )
    kept = [sum(group in kept_by for kept_by in holders) for group in range(num_groups)]
    assert sum(kept) == ranks * (redundancy + 1)  # no copy too many
    assert max(kept) - min(kept) <= 1


@pytest.mark.parametrize("redundancy", [0, 1, 2])
@pytest.mark.parametrize(
    ("num_groups", "ranks", "nodes", "domain"), [(7, 1, 7, 1), (6, 2, 3, 1), (6, 4, 12, 2), (4, 3, 6, 1), (4, 2, 1, 1)]
)
def test_partitions_stay_when_nodes_are_lost_as_far_as_their_hosts_are_apart(
    num_groups: int, ranks: int, nodes: int, domain: int, redundancy: int
) -> None:
    """Held against all subsets of the hosts: no other choice has more of them apart."""
    policy = replace(policy_for(num_groups, ranks, nodes, redundancy, domain), num_partitions=num_groups)
    random = Random(num_groups)
    for _ in range(50):
        members = [Member(group) for group in random.sample(ids(*range(num_groups)), random.randint(1, num_groups))]
        hosts = first_ownership(PartitionSetup(num_groups=num_groups, redundancy=min(3, num_groups)), members).hosts
        for row, kept_by in zip(hosts, holders_of_partitions(policy, hosts), strict=True):
            able = [host.group for host in row]
            most = max(
                num
                for num in range(1, redundancy + 2)
                if any(apart(policy.layout, some) for some in itertools.combinations(able, num))
            )
            assert set(kept_by) <= set(able)
            assert apart(policy.layout, kept_by)
            assert len(kept_by) == most or ranks == 3, "greedy where groups share nodes at their ends"


def apart(layout: Layout, groups: Sequence[GroupId]) -> bool:
    """Whether no two have a node in common."""
    nodes = [{layout.node_of(group, rank) for rank in range(layout.ranks_per_group)} for group in groups]
    return all(one.isdisjoint(other) for one, other in itertools.combinations(nodes, 2))


def test_no_group_keeps_many_more_partitions_than_another() -> None:
    policy = replace(policy_for(num_groups=24, ranks=8, redundancy=1), num_partitions=24)
    members = [Member(group) for group in ids(*range(24))]
    holders = holders_of_partitions(policy, first_ownership(PartitionSetup(num_groups=24, redundancy=3), members).hosts)
    kept = [sum(group in kept_by for kept_by in holders) for group in range(24)]
    assert sum(kept) == 24 * 2
    assert max(kept) <= 3, "of the partitions that it hosts"


# ------------------------------------------------------------------------------------------- one is always whole


@dataclass(slots=True)
class Rank:
    """The only holder of its position, and its snapshot server."""

    steps: int = 0
    held: set[int] = field(default_factory=set)
    action: TakeSnapshot | None = None
    stage: str = "whole"  # taken, copying, copied, whole
    settled_by: int = 0


def run_ranks(num_ranks: int, num_steps: int, every: int, random: Random, *, settles: bool = True) -> None:
    """Ranks in any order that the commits allow; asserts after every event that some snapshot has all positions."""
    policy = policy_for(num_groups=num_ranks, ranks=num_ranks, nodes=num_ranks * num_ranks, redundancy=0, every=every)
    snapshots = Snapshots(policy)
    actions = {step: snapshots.after(step, step + 100, ids(*range(num_ranks))) for step in range(1, num_steps + 1)}
    ranks = [Rank() for _ in range(num_ranks)]
    has_been_whole = False
    while any(rank.steps < num_steps for rank in ranks):
        rank = random.choice(ranks)
        match rank.stage, rank.action:
            case "taken", TakeSnapshot(kept=kept) if random.random() < 0.5:
                rank.held, rank.stage = {*kept} & rank.held, "copying"
            case "copying", TakeSnapshot() if random.random() < 0.5:
                rank.stage = "copied"
            case "copied", TakeSnapshot(attempt=attempt) if random.random() < 0.2:
                rank.held, rank.stage = rank.held | {attempt}, "whole"
            case stage, _:
                # All groups have voted on the step, and so have done the update before it.
                may_update = min(other.steps for other in ranks) >= rank.steps and rank.steps < num_steps
                waits_until = {"taken": 0, "copying": 0, "copied": rank.settled_by if settles else num_steps + 1}
                if may_update and rank.steps + 1 < waits_until.get(stage, num_steps + 1):
                    rank.steps += 1
                    for taken in actions[rank.steps]:
                        rank.action, rank.stage, rank.settled_by = taken, "taken", taken.settled_by
        whole = set.intersection(*(rank.held for rank in ranks))
        assert whole or not has_been_whole, "nothing to go back to"
        has_been_whole |= bool(whole)
    assert has_been_whole


@pytest.mark.parametrize("every", [2, 3, 5])
def test_from_the_first_snapshot_on_one_is_whole_at_every_moment(every: int) -> None:
    for seed in range(60):
        run_ranks(3, 6 * every, every, Random(seed))


def test_without_the_wait_before_the_next_snapshot_none_would_be_whole_at_times() -> None:
    """That the model above can see it."""

    def run() -> None:
        for seed in range(200):
            run_ranks(3, 12, 2, Random(seed), settles=False)

    with pytest.raises(AssertionError, match="nothing to go back to"):
        run()


# -------------------------------------------------------------------------------------------------- the newest whole


def taken_after(steps: range, policy: SnapshotPolicy) -> Snapshots:
    """Attempts are 10 more than the steps."""
    snapshots = Snapshots(policy)
    for step in steps:
        snapshots.after(step, step + 10, ids(*range(policy.layout.num_groups)))
    return snapshots


def test_the_newest_whole_snapshot_has_equal_copies_of_all_positions() -> None:
    snapshots = taken_after(range(1, 9), policy_for(4, ranks=2))
    old = [Held(16, 0, "a"), Held(16, 1, "b"), Held(16, 1, "b")]
    assert snapshots.newest_whole([]) is None
    assert snapshots.newest_whole([*old, Held(18, 0, "c")]) == WholeSnapshot(step=6, attempt=16)
    assert snapshots.newest_whole([*old, Held(18, 0, "c"), Held(18, 1, "d")]) == WholeSnapshot(step=8, attempt=18)
    differing = [*old, Held(18, 0, "c"), Held(18, 0, "x"), Held(18, 1, "d")]
    assert snapshots.newest_whole(differing) == WholeSnapshot(step=6, attempt=16)


def test_a_snapshot_is_complete_with_equal_copies_of_all_positions_and_partitions() -> None:
    """Random copies, against what whole means, counted out."""
    policy = replace(policy_for(2, ranks=2), num_partitions=2)
    snapshots = taken_after(range(1, 7), policy)
    outcomes = set()
    for seed in range(300):
        random = Random(seed)
        copies = [(attempt, part) for attempt in (12, 14, 16) for part in ("r0", "r1", "s0", "s1") for _ in range(2)]
        there = [(*copy, random.choice("aaaab")) for copy in copies if random.random() < 0.85]
        held = [Held(attempt, int(part[1]), sha256) for attempt, part, sha256 in there if part[0] == "r"]
        partitions = [
            HeldPartition(attempt, PartitionId(int(part[1])), sha256)
            for attempt, part, sha256 in there
            if part[0] == "s"
        ]
        whole = [
            attempt
            for attempt in (12, 14, 16)
            if all(
                len({sha256 for *copy, sha256 in there if copy == [attempt, part]}) == 1
                for part in ("r0", "r1", "s0", "s1")
            )
        ]
        expected = WholeSnapshot(step=max(whole) - 10, attempt=max(whole)) if whole else None
        assert snapshots.newest_whole(held, partitions) == expected
        outcomes.add(expected and expected.step)
    assert outcomes == {None, 2, 4, 6}


def test_a_group_has_the_partitions_that_all_of_its_ranks_have() -> None:
    first, second = ([HeldPartition(12, PartitionId(number), f"{rank}{number}") for number in (0, 1)] for rank in "ab")
    whole = held_by_group([first, second])
    assert [(one.attempt, one.partition) for one in whole] == [(12, 0), (12, 1)]
    assert held_by_group([first, second[:1]]) == whole[:1]
    assert held_by_group([second, first])[0].sha256 != whole[0].sha256


def test_a_snapshot_that_a_group_with_wrong_state_keeps_is_none() -> None:
    """Its copies stand alone where the others' nodes are lost. Of a step that was compared before, they are right."""
    held = [Held(14, 0, "b"), Held(18, 0, "c")]
    snapshots = taken_after(range(1, 9), policy_for(4))
    assert snapshots.newest_whole(held) == WholeSnapshot(step=8, attempt=18)
    (action,) = taken_after(range(1, 8), policy_for(4)).after(8, 18, ids(0, 1, 2, 3))
    keeping = sorted(action.holders[0])
    (other, *_) = set(ids(0, 1, 2, 3)) - set(keeping)
    for group, wrong_after in ((keeping[0], None), (keeping[0], 7), (other, 8)):
        snapshots.on_loss(group, wrong_after)
        assert snapshots.newest_whole(held) == WholeSnapshot(step=8, attempt=18)
    snapshots.on_loss(keeping[0], 8)
    assert snapshots.newest_whole(held) == WholeSnapshot(step=4, attempt=14)


def test_a_snapshot_of_what_a_restart_has_undone_is_none() -> None:
    snapshots = taken_after(range(1, 9), policy_for(4))
    snapshots.on_restart(4)
    assert snapshots.newest_whole([Held(18, 0, "c")]) is None
    (taken,) = snapshots.after(6, 30, ids(0, 1, 2, 3))
    assert (taken.kept, taken.settled_by) == ((14,), 7)
    assert snapshots.newest_whole([Held(18, 0, "c"), Held(30, 0, "e")]) == WholeSnapshot(step=6, attempt=30)


def test_none_is_taken_where_none_is_wanted_or_due() -> None:
    assert Snapshots(None).after(2, 1, ids(0)) == ()
    assert Snapshots(None).newest_whole([Held(1, 0, "a")]) is None
    assert Snapshots(policy_for(4)).after(3, 2, ids(0)) == ()


# --------------------------------------------------------------------------------------------------------- restarts


def test_a_restart_takes_the_newer_of_snapshot_and_checkpoint_and_memory_where_both_are_alike() -> None:
    terms = LogTerms(placement=make_placement("golomb", 2, 1), num_steps=99)
    waiting = [
        RestartState(member=Member(GroupId(group), 1), candidates=(CheckpointCandidate(8), CheckpointCandidate(4)))
        for group in (0, 1)
    ]
    for step, attempt in ((6, None), (8, 18), (10, 20)):
        snapshot = WholeSnapshot(step=step, attempt=step + 10)
        entry = decide_restart(11, Search(terms, waiting, 0.0, LIMITS, snapshot), 0)
        without = decide_restart(11, Search(terms, waiting, 0.0, LIMITS), 0)
        assert entry == without if attempt is None else entry
        assert (entry.step, entry.snapshot) == (max(step, 8), attempt)  # type: ignore[union-attr]


def test_only_copies_of_groups_that_wait_in_a_new_incarnation_count() -> None:
    restarts = Restarts(LIMITS, LogTerms(placement=make_placement("golomb", 2, 2), num_steps=99), policy_for(2))
    restarts.snapshots.after(2, 12, ids(0, 1))
    restarts.on_wipe_out(StopWipeOut(step=3))
    waiting = tuple(RestartState(member=Member(GroupId(group), 1), candidates=()) for group in (0, 1))
    gone = replace(waiting[0], member=Member(GroupId(0), 0), held=(Held(12, 0, "a"),))
    over = {GroupId(0): 0, GroupId(1): 0}
    for others, expected in (((gone, waiting[1]), None), ((waiting[0], replace(waiting[1], held=gone.held)), 12)):
        event = WaitingRead(group=GroupId(1), waiting=others, waited_s=LIMITS.wait_s)
        (append,) = restarts.decide(event, range(100), over, 0.0, 7)
        assert isinstance(append, AppendEntry)
        assert append.entry.snapshot == expected  # type: ignore[union-attr]


def test_a_restart_from_memory_needs_every_partition() -> None:
    ring, policy = make_placement("golomb", 2, 2), replace(policy_for(2), num_partitions=2)
    held = (Held(12, 0, "a"),)
    for numbers, expected in (((0, 1), 12), ((0,), None)):
        restarts = Restarts(LIMITS, LogTerms(placement=ring, num_steps=99), policy)
        restarts.snapshots.after(2, 12, ids(0, 1))
        restarts.on_wipe_out(StopWipeOut(step=3))
        waiting = tuple(
            RestartState(
                member=Member(GroupId(group), 1),
                candidates=(),
                held=held,
                partitions=(HeldPartition(12, PartitionId(number), "s"),),
            )
            for group, number in itertools.zip_longest((0, 1), numbers, fillvalue=numbers[0])
        )
        (append,) = restarts.decide(
            WaitingRead(group=GroupId(0), waiting=waiting, waited_s=0.0), range(100), {}, 0.0, 7
        )
        assert isinstance(append, AppendEntry)
        assert append.entry.snapshot == expected  # type: ignore[union-attr]
