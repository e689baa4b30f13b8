"""Who audits whom, what follows from a mismatch, and undos of steps that are spoiled, by the rules alone."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from spare_megatron.core.audits.audits import (
    AuditPolicy,
    Boundary,
    Dispute,
    MicrobatchDigest,
    Outvoted,
    Statement,
    Undecided,
    combined_digest,
    default_every_steps,
    draw_audits,
    first_difference,
    judge,
    mismatches,
    with_statements,
)
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.log.actions import (
    Action,
    AttemptReduce,
    AttemptUndo,
    BuildCommunicator,
    ChangePaces,
    ComputeAudits,
    ComputeStep,
    LoadCheckpoint,
    RefuseCheckpoint,
    SaveCheckpoint,
    SaveDispute,
    TakeSnapshot,
)
from spare_megatron.core.log.entries import Commit, Entry, Fence, Halt, Retry, Undo, encode_entry
from spare_megatron.core.log.votes import Held, Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy, Snapshots
from spare_megatron.stacking.layout import GroupId, Layout, Member, ShardId
from spare_megatron.stacking.order import Dealing, initial_order
from spare_megatron.stacking.pace_evidence import PaceException
from spare_megatron.stacking.paces import LIKE, Paces, Rounds, slack_of
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import NO_OWNER, Audit, Microbatch, Work, share_of
from spare_megatron.stacking.state_partitions import PartitionSetup
from tests.unit.controllers import begun, begun_with, decided, fold, of_type, setup_with

MICROBATCH = Microbatch(ShardId(3), 1)
POLICY = AuditPolicy(every_steps=3, seed=5)


# ------------------------------------------------------------------------------------------------------ who audits whom


@pytest.mark.parametrize("num_groups", [2, 3, 5, 8])
@pytest.mark.parametrize("is_shared", [False, True])
def test_every_group_audits_one_other_and_pairs_vary(num_groups: int, is_shared: bool) -> None:
    placement = make_placement("golomb", num_groups, min(3, num_groups))
    groups = tuple(map(GroupId, range(num_groups)))
    work = Dealing(initial_order(placement, 4, "microbatch"), groups).work(groups)
    pairs: Counter[tuple[int, int]] = Counter()
    items: Counter[Microbatch] = Counter()
    for step in range(60):
        audits = draw_audits(POLICY, step, work, None if is_shared else placement.hosts, groups, {})
        assert sorted(audit.auditor for audit in audits) == list(groups)
        assert sorted(audit.owner for audit in audits) == list(groups), "each is audited once, too"
        for audit in audits:
            assert work.owners[audit.microbatch.shard, audit.microbatch.index] == audit.owner != audit.auditor
            assert is_shared or audit.auditor in placement.hosts[audit.microbatch.shard]
        pairs.update((audit.auditor, audit.owner) for audit in audits)
        items.update(audit.microbatch for audit in audits)
    assert num_groups == 2 or len(pairs) >= 2 * num_groups
    assert len(items) == 4 * num_groups, "every microbatch has its turn"


def test_after_losses_every_group_with_a_common_host_is_asked() -> None:
    """By brute force: each group that hosts work of another one audits, whatever is left."""
    placement = make_placement("golomb", 7, 3)
    everybody = tuple(map(GroupId, range(7)))
    for lost in product(range(7), repeat=2):
        left = tuple(group for group in everybody if group not in lost)
        work = Dealing(initial_order(placement, 2, "microbatch"), everybody).work(left)
        audits = draw_audits(POLICY, 1, work, placement.hosts, left, {})
        able = {
            group
            for group in left
            for shard in range(7)
            if group in placement.hosts[shard] and set(work.owners[shard].tolist()) - {group}
        }
        assert {audit.auditor for audit in audits} == able
        some = draw_audits(POLICY, 1, work, placement.hosts, left[:1], {})
        assert {audit.auditor for audit in some} <= {left[0]}


def makespan(work: Work, audits: Collection[Audit], paces: Mapping[int, int]) -> int:
    """By counting: the slowest group's time for its own work, what it audits, and a digest of each, as long as each."""
    loads = Counter(work.owners.ravel().tolist())
    for audit in audits:
        loads[audit.auditor] += 2
        loads[audit.owner] += 1
    return max(paces.get(group, LIKE) * load for group, load in loads.items() if group != NO_OWNER)


def test_slack_is_used_first_and_costs_no_time() -> None:
    """By counting, over random losses, paces and granularities."""
    random, free_steps, num_free = Random(3), 0, 0
    for case in range(400):
        num_groups = random.randint(3, 9)
        redundancy = random.randint(2, num_groups)
        placement = make_placement("golomb", num_groups, redundancy)
        hosts = random.choice((placement.hosts, None))
        everybody = tuple(map(GroupId, range(num_groups)))
        left = tuple(sorted(random.sample(everybody, random.randint(2, num_groups))))
        if placement.uncovered(frozenset(left)):
            continue
        granularity = random.choice(("stack", "microbatch"))
        work = Dealing(initial_order(placement, 4, granularity), everybody).work(left)
        permille = {group: random.choice((500, 1700)) for group in left if random.random() < 0.2}
        slack = slack_of(work, Paces(permille=permille))
        calm = makespan(work, (), permille)
        for group, some in slack.items():
            busy = int((work.owners == group).sum())
            assert permille.get(group, LIKE) * (busy + some) <= calm < permille.get(group, LIKE) * (busy + some + 1)
        free = draw_audits(POLICY, case, work, hosts, (), slack)
        assert makespan(work, free, permille) == calm
        num_free += len(free)
        due = draw_audits(POLICY, case, work, hosts, left, slack)
        for audits in (free, due):
            assert len({audit.auditor for audit in audits}) == len(audits)
            for audit in audits:
                assert work.owners[audit.microbatch.shard, audit.microbatch.index] == audit.owner != audit.auditor
                assert hosts is None or audit.auditor in hosts[audit.microbatch.shard]
        reached = {group for audit in due for group in (audit.auditor, audit.owner)}
        alone = {group for audit in draw_audits(POLICY, case, work, hosts, left, {}) for group in audit[:2]}
        assert reached >= alone, "no group goes without an audit for the sake of slack"
        free_steps += len(due) < len(left) and reached == set(slack)
    assert num_free > 100
    assert free_steps > 20


@pytest.mark.parametrize(("num_groups", "num_lanes", "m"), [(13, 8, 16), (13, 4, 8), (60, 8, 16)])
def test_more_lanes_than_parts_of_a_shard_are_audited_by_several_groups(
    num_groups: int, num_lanes: int, m: int
) -> None:
    """An auditor shares a shard with an owner, of which that has computed m / 4 microbatches, fewer than its lanes."""
    placement, groups = make_placement("golomb", num_groups, 4), tuple(map(GroupId, range(num_groups)))
    work = Dealing(initial_order(placement, m, "microbatch"), groups).work(groups)
    policy = AuditPolicy(every_steps=1, seed=5, rounds=Rounds(lanes=num_lanes))
    num_missed = 0
    for step in range(20):
        audits = draw_audits(policy, step, work, placement.hosts, groups, {})
        per_auditor = Counter(audit.auditor for audit in audits)
        assert per_auditor == dict.fromkeys(groups, num_lanes)
        assert len({(audit.auditor, audit.microbatch) for audit in audits}) == len(audits)
        lanes = {(audit.owner, work.of(audit.owner).index(audit.microbatch) % num_lanes) for audit in audits}
        num_missed += num_groups * num_lanes - len(lanes)
    assert num_missed < 0.04 * 20 * num_groups * num_lanes


@pytest.mark.parametrize("num_lanes", [2, 3])
def test_every_lane_audits_and_is_audited(num_lanes: int) -> None:
    placement = make_placement("golomb", 7, 3)
    m = 9  # each host of a shard has as many as there are lanes, or more
    groups = tuple(map(GroupId, range(7)))
    policy = AuditPolicy(every_steps=1, seed=5, rounds=Rounds(lanes=num_lanes))
    for lost in range(8):
        left = tuple(group for group in groups if group != lost)
        work = Dealing(initial_order(placement, m, "microbatch"), groups).work(left)
        for step in range(5):
            audits = draw_audits(policy, step, work, placement.hosts, left, {})
            for group in left:
                mine = work.of(group)
                lanes = {mine.index(audit.microbatch) % num_lanes for audit in audits if audit.owner == group}
                assert lanes == set(range(num_lanes)) or left != groups
                here = [audit.microbatch for audit in audits if audit.auditor == group]
                assert len(set(here)) == len(here) == num_lanes
                shares = [
                    share_of([*mine, *here], lane=lane, num_lanes=num_lanes, row_size=1, units_per_shard=m)
                    for lane in range(num_lanes)
                ]
                assert all(sum(one.unit in here for one in share) == 1 for share in shares), "in one round"


def test_one_audit_in_so_many_steps_costs_at_most_a_percent() -> None:
    for m in range(1, 200):
        every = default_every_steps(m)
        assert 1 / (m * every) <= 0.01 < 1 / (m * max(every - 1, 0.5))


# ------------------------------------------------------------------------------------------------------------- verdicts


def dispute(*reported: tuple[int, int], num_rounds: int = 1) -> Dispute:
    statements = tuple(Statement(GroupId(group), digest) for group, digest in reported)
    return Dispute(microbatch=MICROBATCH, statements=statements, asked=(), num_rounds=num_rounds)


def verdict(*reported: tuple[int, int], members: tuple[int, ...], able: tuple[int, ...]) -> object:
    found = judge(dispute(*reported), set(map(GroupId, members)), list(map(GroupId, able)))
    if isinstance(found, Outvoted):
        return found.group
    return found.asked if isinstance(found, Dispute) else type(found)


def test_one_digest_against_one_asks_a_third_group() -> None:
    assert verdict((1, 7), (2, 8), members=(0, 1, 2, 5), able=(5, 0, 1, 2)) == (5,)
    assert verdict((1, 7), (2, 8), (5, 7), members=(0, 1, 2, 5), able=(5, 0, 1, 2)) == 2
    assert verdict((1, 7), (2, 8), (5, 9), members=(0, 1, 2, 5), able=(5, 0, 1, 2)) == (0,)


def test_two_hosts_compute_once_more_and_who_contradicts_itself_is_out() -> None:
    assert verdict((1, 7), (2, 8), members=(1, 2), able=(1, 2)) == (1, 2)
    assert verdict((1, 7), (2, 8), (1, 7), (2, 7), members=(1, 2), able=(1, 2)) == 2
    assert verdict((1, 7), (2, 8), (1, 7), (2, 8), members=(1, 2), able=(1, 2)) is Undecided


def test_digests_of_lost_groups_count_and_no_lost_group_is_fenced_again() -> None:
    assert verdict((1, 7), (2, 8), (5, 7), members=(1, 5), able=(1, 5)) is type(None)
    assert verdict((1, 7), (2, 8), (5, 7), members=(2, 5), able=(2, 5)) == 2
    assert verdict((1, 7), (2, 8), members=(2, 5), able=(2,)) is type(None)


def test_no_set_of_right_digests_has_a_right_group_fenced() -> None:
    """Whatever few wrong groups say: two that are right and able outvote them, and no right one is named."""
    random = Random(2)
    for _ in range(3000):
        groups = list(range(random.randint(3, 6)))
        wrong = set(random.sample(groups, random.randint(1, len(groups) - 2)))
        members, asked, num_rounds = set(groups), tuple(random.sample(groups, 2)), 0
        reported: list[tuple[int, int]] = []
        while num_rounds < 20:
            num_rounds += 1
            for group in asked:
                error = random.choice((100 + group, 1000 * (group + 1) + random.randrange(100)))
                reported.append((group, error if group in wrong else 7))
            found = judge(dispute(*reported), members, sorted(members))
            while isinstance(found, Outvoted):
                assert found.group in wrong
                members.discard(found.group)
                found = judge(dispute(*reported), members, sorted(members))
            if not isinstance(found, Dispute):
                break
            asked = found.asked
        assert found is None, "two right groups are always left"
        assert len({digest for group, digest in reported if group in members}) == 1


def test_a_dispute_counts_only_the_groups_that_it_has_asked() -> None:
    opened = Dispute(
        microbatch=MICROBATCH, statements=dispute((1, 7), (2, 8)).statements, asked=(GroupId(5),), num_rounds=1
    )
    boundaries = (Boundary("forward", 0, 0, 1),)
    digests = {
        GroupId(1): (MicrobatchDigest(*MICROBATCH, 7, boundaries),),
        GroupId(5): (MicrobatchDigest(*MICROBATCH, 8), MicrobatchDigest(ShardId(0), 0, 9)),
    }
    statements = with_statements(opened, digests).statements
    assert [(s.group, s.digest) for s in statements] == [(1, 7), (2, 8), (5, 8)]
    assert statements[0].boundaries == boundaries
    assert [one.microbatch for one in mismatches(digests)] == [MICROBATCH]


def test_the_first_difference_follows_the_stages() -> None:
    right = [
        Boundary(kind, stage, 2 * stage + rank, 1)
        for kind in ("forward", "backward", "gradients")
        for stage in range(3)
        for rank in range(2)
    ]

    def spoiled(*places: tuple[str, int]) -> list[Boundary]:
        return [one._replace(digest=2) if (one.kind, one.stage) in places else one for one in right]

    later = [("forward", 2), ("backward", 1), ("backward", 0), ("gradients", 0), ("gradients", 1), ("gradients", 2)]
    assert str(first_difference(spoiled(("forward", 1), *later), right)) == "stage 1, forward pass, ranks 2, 3"
    backward = spoiled(("backward", 0), ("gradients", 0), ("gradients", 1))
    assert str(first_difference(backward, right)) == "stage 1, backward pass, ranks 2, 3"
    one_rank = [one._replace(digest=2) if (one.kind, one.position) == ("gradients", 5) else one for one in right]
    assert str(first_difference(one_rank, right)) == "stage 2, gradients, rank 5"
    assert first_difference(right, right) is None
    elsewhere = [one._replace(offset=6) for one in right]
    assert first_difference(elsewhere, right) is None
    assert combined_digest(elsewhere) == combined_digest(right)
    wrong = [one._replace(offset=6) for one in spoiled(("forward", 1), *later)]
    assert str(first_difference(wrong, right)) == "stage 1, forward pass, ranks 8, 9", "those that have computed it"
    assert combined_digest(right) == combined_digest(reversed(right)) != combined_digest(one_rank)


# ------------------------------------------------------------------------------------------------------- the controller


def started(num_groups: int = 4, every_steps: int | None = 1, save_every_steps: int | None = None) -> Controller:
    """With all shards on all groups."""
    audits = None if every_steps is None else AuditPolicy(every_steps=every_steps, seed=1)
    saves = SavePolicy(interval_steps=save_every_steps)
    return begun(num_groups=num_groups, redundancy=num_groups, m=2, steps=9, audits=audits, saves=saves)


def votes_of(
    controller: Controller, audits: tuple[Audit, ...], wrong: dict[tuple[int, Microbatch], int]
) -> dict[GroupId, Vote]:
    votes = {}
    for group in controller.members:
        mine = sorted({one.microbatch for one in audits if group in (one.auditor, one.owner)})
        digests = tuple(MicrobatchDigest(*one, wrong.get((group, one), 7)) for one in mine)
        digest = controller._plans[-1].digest
        votes[group] = Vote(is_complete=True, plan_digest=digest, num_complete=(1,), audits=digests)
    return votes


def logged(controller: Controller, votes: dict[GroupId, Vote]) -> Entry:
    entry = decided(controller, votes)
    assert "forward" not in encode_entry(entry), "the log holds no boundaries"
    return entry


def test_a_mismatch_is_settled_before_the_commit() -> None:
    controller = started()
    audits = controller._plans[0].audits
    assert isinstance(logged(controller, votes_of(controller, audits, {})), Commit)
    one = audits[0]
    wrong = {(int(one.owner), one.microbatch): 8}
    asked = logged(controller, votes_of(controller, audits, wrong))
    assert isinstance(asked, Retry)
    [open_one] = asked.disputes
    [third] = open_one.asked
    assert third not in (one.auditor, one.owner)
    assert (open_one.microbatch, asked.kept, asked.recompute) == (one.microbatch, (1,), False)
    actions = fold(controller, asked)
    [save] = of_type(actions, SaveDispute)
    assert (save.step, save.attempt) == (0, 1)
    assert save.member.group not in (one.auditor, one.owner), "their parameters may be what is wrong"
    [compute] = of_type(actions, ComputeAudits)
    assert compute.asked_of(third) == (one.microbatch,)
    [attempt] = of_type(actions, AttemptReduce)
    assert attempt.disputed == (one.microbatch,)
    another = started()
    fold(another, asked)
    with pytest.raises(ValueError, match="discarded"):
        fold(another, Commit(step=0, attempt=1))
    further = (*audits, Audit(third, one.owner, one.microbatch))
    fence = logged(controller, votes_of(controller, further, wrong))
    assert isinstance(fence, Fence)
    assert (fence.group, fence.discard, fence.is_outvoted) == (one.owner, True, True)
    assert not of_type(fold(controller, fence), SaveDispute), "once in a step"
    again = logged(controller, {g: v for g, v in votes_of(controller, further, wrong).items() if g != one.owner})
    assert isinstance(again, Retry)
    assert (again.recompute, again.kept, again.disputes) == (True, (), ())
    steps = of_type(fold(controller, again), ComputeStep)
    assert one.owner not in {audit.owner for audit in steps[0].plan.audits}
    assert len(steps[0].plan.audits) == 3, "those that are left are audited again"


def test_a_group_that_is_outvoted_at_once_has_the_parameters_saved_too() -> None:
    """Two auditors may draw the same microbatch, so that a third host has voted before any is asked."""
    controller = started()
    audits = controller._plans[0].audits
    one = audits[0]
    third = next(group for group in controller.members if group not in (one.auditor, one.owner))
    further = (*audits, Audit(third, one.owner, one.microbatch))
    fence = logged(controller, votes_of(controller, further, {(int(one.owner), one.microbatch): 8}))
    assert isinstance(fence, Fence)
    [save] = of_type(fold(controller, fence), SaveDispute)
    assert (save.step, save.attempt, save.member.group in controller.members) == (0, 0, True)


def test_a_checkpoint_says_how_many_of_the_first_steps_are_audited() -> None:
    """What a group has computed between its last audit and the one that found it wrong is in all later states."""
    controller = started(every_steps=2, save_every_steps=1)

    def committed() -> int | None:
        commit = Commit(step=controller.step, attempt=controller.attempt, save=True)
        [save] = of_type(fold(controller, commit), SaveCheckpoint)
        return save.audited_steps

    assert [committed() for _ in range(4)] == [0, 2, 2, 4]
    assert committed() == 4
    fold(controller, Fence(group=GroupId(2), reason="SIGKILL"))
    fold(controller, Retry(step=5, attempt=5))
    assert [committed() for _ in range(2)] == [6, 6]
    fold(controller, Fence(group=GroupId(1), discard=True, is_outvoted=True))
    fold(controller, Retry(step=7, attempt=8, recompute=True))
    assert [committed() for _ in range(2)] == [6, 6]
    calm = started(every_steps=None, save_every_steps=1)
    [save] = of_type(fold(calm, Commit(step=0, attempt=0, save=True)), SaveCheckpoint)
    assert save.audited_steps is None


@pytest.mark.parametrize("who", ["owner", "auditor", "both"])
def test_a_mismatch_with_a_group_that_was_lost_after_its_vote_has_the_step_computed_again(who: str) -> None:
    """Its gradient is in the sum, and no member is left that differs."""
    controller = started()
    audits = controller._plans[0].audits
    one = audits[0]
    votes = votes_of(controller, audits, {(int(one.owner), one.microbatch): 8})
    lost = {"owner": {one.owner}, "auditor": {one.auditor}, "both": {one.owner, one.auditor}}[who]
    for group in sorted(lost):
        fold(controller, Fence(group=group, reason="SIGKILL"))
    retry = logged(controller, votes)
    assert isinstance(retry, Retry)
    assert [one.asked for one in retry.disputes] == [()]
    fold(controller, retry)
    again = logged(controller, {g: v for g, v in votes_of(controller, audits, {}).items() if g not in lost})
    assert isinstance(again, Retry)
    assert again.recompute


def test_two_hosts_that_repeat_different_digests_halt_the_run_with_both_named() -> None:
    controller = started(num_groups=2)
    audits = controller._plans[0].audits
    wrong = {(int(audits[0].owner), audits[0].microbatch): 8}
    asked = logged(controller, votes_of(controller, audits, wrong))
    assert isinstance(asked, Retry)
    assert asked.disputes[0].asked == (0, 1)
    fold(controller, asked)
    halt = logged(controller, votes_of(controller, audits, wrong))
    assert isinstance(halt, Halt)
    assert "groups 0 and 1 compute different gradients" in halt.reason
    assert halt.discard


def test_groups_whose_pace_changes_are_audited_in_the_next_step() -> None:
    audits = AuditPolicy(every_steps=98, seed=1)
    controller = begun(redundancy=4, m=8, steps=99, audits=audits, rounds=Rounds())
    audited, paces = {}, {}
    for step in range(40):
        slow = (PaceException(GroupId(1), 3000),) if step < 20 else (PaceException(GroupId(1), 1000),)
        actions = fold(controller, Commit(step=step, attempt=step, paces=slow))
        if changes := of_type(actions, ChangePaces):
            paces[step + 1] = dict(changes[0].permille)
        audited[step + 1] = [group for audit in controller._plans[0].audits for group in audit[:2]]
    first, second = paces
    assert (paces[first], paces[second]) == ({1: 3000}, {})
    assert 1 in audited[first]
    assert 1 in audited[second]
    assert audited[first - 1] == audited[second + 1] == []


def test_groups_that_come_in_are_audited_in_their_first_step() -> None:
    controller = started(every_steps=99)
    assert controller._plans[0].audits == ()
    fold(controller, Fence(group=GroupId(2)))
    fold(controller, Commit(step=0, attempt=0, admit=(Member(GroupId(2), 1),)))
    assert [audit.auditor for audit in controller._plans[0].audits] == [2]
    fold(controller, Commit(step=1, attempt=1))
    assert controller._plans[0].audits == ()


AUDITS = AuditPolicy(every_steps=3, seed=1, rounds=Rounds())  # in steps 2, 5, 8
SNAPSHOTS = SnapshotPolicy(every_steps=2, redundancy=1, layout=Layout(num_groups=4, num_nodes=4))
SETUP = setup_with(redundancy=4, m=2, steps=12, audits=AUDITS, snapshots=SNAPSHOTS, saves=SavePolicy(interval_steps=2))
PARTITIONED = replace(SETUP, partitions=PartitionSetup(num_groups=4, redundancy=2))
OUTVOTED = Fence(group=GroupId(2), reason="it is wrong", discard=True, is_outvoted=True)


def found_in_step_5(setup: ControllerSetup) -> tuple[Controller, list[Action]]:
    """Group 2 is outvoted in step 5: what it has computed since step 2 may be wrong. Returns what follows."""
    controller = begun_with(setup)
    for step in range(5):
        fold(controller, Commit(step=step, attempt=step, save=step in (1, 3)))
    assert controller.audited_steps == 3
    fold(controller, OUTVOTED)
    is_shared = setup.partitions is not None
    return controller, fold(controller, Retry(step=5, attempt=5, recompute=True, gather=is_shared))


def voted(controller: Controller, held: Sequence[Held], group: int = 3) -> Entry:
    votes = {group: Vote(is_complete=False, plan_digest="same") for group in controller.members}
    votes[GroupId(group)] = replace(votes[GroupId(group)], held=tuple(held))
    return decided(controller, votes)


def test_where_nobody_is_left_that_copied_a_snapshot_all_members_are_asked_for_it() -> None:
    """Groups on a node vote with what any of them has copied there."""
    controller, _ = found_in_step_5(SETUP)
    fold(controller, Fence(group=GroupId(0)), Fence(group=GroupId(1)))
    load = next(
        one for one in fold(controller, voted(controller, [Held(1, 0, "a")])) if isinstance(one, LoadCheckpoint)
    )
    assert (load.snapshot, load.holders) == (1, (Member(GroupId(3)),))


def test_spoiled_steps_are_undone_by_the_snapshot_that_the_members_have_whole() -> None:
    controller, actions = found_in_step_5(SETUP)
    assert [type(action) for action in actions[:1]] == [AttemptUndo]
    assert not any(isinstance(action, ComputeStep | BuildCommunicator) for action in actions), "nothing is computed yet"
    entry = voted(controller, [Held(1, 0, "a"), Held(3, 0, "b")])
    assert entry == Undo(step=2, attempt=6, snapshot=1), "the newer one holds step 3, which is not audited"
    refused, load, compute, reduce, _ = fold(controller, entry)
    assert isinstance(refused, RefuseCheckpoint)
    assert refused.step == 4
    assert isinstance(load, LoadCheckpoint)
    assert (load.step, load.snapshot, load.rework_steps) == (2, 1, 3)
    assert load.holders == tuple(Member(GroupId(group)) for group in (0, 1)), "of those that copied it"
    assert isinstance(compute, ComputeStep)
    assert compute.plan.step == 2
    assert compute.plan.audits, "all are audited at once"
    assert isinstance(reduce, AttemptReduce)
    assert (controller.step, controller.attempt, controller.audited_steps) == (2, 7, 2)
    assert controller.members == (0, 1, 3)
    again = fold(controller, Commit(step=2, attempt=7))
    assert not any(isinstance(action, TakeSnapshot) for action in again)
    [taken] = [action for action in fold(controller, Commit(step=3, attempt=8)) if isinstance(action, TakeSnapshot)]
    assert taken.kept == (1,), "what is undone goes"


def test_without_a_whole_snapshot_the_step_is_computed_with_what_is_spoiled() -> None:
    controller, _ = found_in_step_5(SETUP)
    entry = voted(controller, [Held(3, 0, "b")])
    assert entry == Retry(step=5, attempt=6, recompute=True)
    actions = fold(controller, entry)
    assert [type(action) for action in actions[:2]] == [ComputeStep, AttemptReduce]
    again = fold(controller, Retry(step=5, attempt=7, recompute=True))
    assert not any(isinstance(action, AttemptUndo) for action in again), "it is asked once"


@pytest.mark.parametrize(
    "setup",
    [PARTITIONED, replace(SETUP, snapshots=None), replace(SETUP, snapshots=replace(SNAPSHOTS, every_steps=4))],
    ids=["partitioned state", "no snapshots", "none old enough"],
)
def test_what_cannot_be_undone_is_not_asked_about(setup: ControllerSetup) -> None:
    _, actions = found_in_step_5(setup)
    assert not any(isinstance(action, AttemptUndo) for action in actions)
    assert any(isinstance(action, ComputeStep) for action in actions)


def test_an_undo_of_another_attempt_or_to_a_later_step_is_refused() -> None:
    for entry in (Undo(step=2, attempt=5, snapshot=1), Undo(step=5, attempt=6, snapshot=1)):
        controller, _ = found_in_step_5(SETUP)
        with pytest.raises(ValueError, match="goes back to the state after"):
            fold(controller, entry)


@pytest.mark.parametrize("seed", range(40))
def test_the_newest_audited_snapshot_is_kept_beside_the_newest_ones_and_no_more_than_three(seed: int) -> None:
    """Whatever the intervals of audits and snapshots are; against all that were ever taken."""
    random = Random(seed)
    every, audited_every = random.randint(2, 6), random.randint(1, 20)
    snapshots = Snapshots(replace(SNAPSHOTS, every_steps=every))
    held: set[int] = set()
    taken: list[int] = []
    audited = most = 0
    for step in range(1, 120):
        if step % audited_every == 0:
            audited = step
        for action in snapshots.after(step, step, [GroupId(0), GroupId(1)], audited_steps=audited):
            held = {attempt for attempt in held if attempt in action.kept} | {action.attempt}
            taken.append(step)
        wanted = max((one for one in taken if one <= audited), default=None)
        assert wanted is None or wanted in held
        assert [one.attempt for one in snapshots.clean(audited)][-1:] == ([] if wanted is None else [wanted])
        most = max(most, len(held))
    assert most == (2 if audited_every <= every else 3) or most == 2
