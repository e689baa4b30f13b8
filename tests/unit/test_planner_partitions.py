"""State wipe-outs: closed forms against random losses of the partitions,
of plain hosts, and against simulated runs.
"""

import heapq
from dataclasses import replace

import numpy as np
import pytest

from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import PartitionCopy, PartitionSetup, StateWipeOut, first_ownership
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts
from spare_megatron.tools.plan.overhead import StepTimes
from spare_megatron.tools.plan.partition_redundancy import plan_partitions, state_time_to_wipe_out_s
from spare_megatron.tools.plan.plan import TOLERANCE, predict
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario

INTERVAL_S = 100.0  # of one group


def time_to_wipe_out_s(num_groups: int, redundancy: int, back_s: float, rng: np.random.Generator) -> float:
    """One history: groups come back at once and empty, a copy is there after the same time whichever group makes it."""
    partitioning = PartitionSetup(num_groups=num_groups, redundancy=redundancy)
    incarnations = dict.fromkeys(range(num_groups), 0)
    ownership = first_ownership(partitioning, [Member(GroupId(group)) for group in incarnations])
    whole_at_s: list[tuple[float, PartitionCopy]] = []
    asked: set[PartitionCopy] = set()
    now_s = 0.0
    while True:
        now_s += rng.exponential(INTERVAL_S / num_groups)
        while whole_at_s and whole_at_s[0][0] <= now_s:
            ownership = ownership.with_copies([heapq.heappop(whole_at_s)[1]])
        lost = GroupId(int(rng.integers(num_groups)))
        incarnations[lost] += 1
        try:
            ownership = ownership.for_members(member for member in ownership.members if member.group != lost)
        except StateWipeOut:
            return now_s
        ownership = ownership.for_members((*ownership.members, Member(lost, incarnations[lost])))
        for repair in ownership.repairs:
            copy = PartitionCopy(repair.partition, repair.receiver)
            if copy not in asked:
                asked.add(copy)
                heapq.heappush(whole_at_s, (now_s + back_s, copy))


@pytest.mark.parametrize(("num_groups", "redundancy", "back_s"), [(12, 2, 4.0), (12, 3, 15.0)])
def test_with_copies_as_random_losses_of_real_partitions(num_groups: int, redundancy: int, back_s: float) -> None:
    rng = np.random.default_rng([num_groups, redundancy])
    samples = [time_to_wipe_out_s(num_groups, redundancy, back_s, rng) for _ in range(150)]
    expected = state_time_to_wipe_out_s(num_groups, redundancy, INTERVAL_S, back_s)
    assert np.mean(samples) == pytest.approx(expected, rel=0.2)  # 8% is one standard error


@pytest.mark.parametrize(("num_groups", "redundancy"), [(20, 1), (20, 2), (60, 2), (60, 3)])
def test_without_copies_as_the_first_partition_whose_first_hosts_have_all_been_lost(
    num_groups: int, redundancy: int
) -> None:
    rng = np.random.default_rng([num_groups, redundancy])
    hosts = make_placement("golomb", num_groups, redundancy).host_array
    lost_at_s = rng.exponential(INTERVAL_S, size=(8000, num_groups))
    samples = lost_at_s[:, hosts].max(axis=2).min(axis=1)
    expected = state_time_to_wipe_out_s(num_groups, redundancy, INTERVAL_S, None)
    assert samples.mean() == pytest.approx(expected, rel=0.03)


def test_one_host_is_lost_with_the_next_group_and_each_further_one_lengthens_the_time() -> None:
    times_s = [state_time_to_wipe_out_s(100, redundancy, 100 * 300.0, 60.0) for redundancy in (1, 2, 3)]
    assert times_s[0] == pytest.approx(300.0)
    for redundancy, ratio in ((2, times_s[1] / times_s[0]), (3, times_s[2] / times_s[1])):
        # F^r / (N r R^(r - 1)) over the same for one host less
        assert ratio == pytest.approx(100 * 300.0 / 60.0 * (redundancy - 1) / redundancy, rel=0.05)


def facts(num_groups: int = 600) -> ClusterFacts:
    return ClusterFacts(
        num_groups=num_groups,
        times=StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=300.0),
        checkpoint=CheckpointTimes(save_s=60.0, restart_s=3600.0),
        num_microbatches=16,
    )


def test_the_plan_takes_the_least_hosts_that_cost_next_to_nothing() -> None:
    shards = predict(facts(), "microbatch", 5)
    found = plan_partitions(facts(), shards, copy_s=60.0)
    assert shards.time_to_train_ratio <= found.time_to_train_ratio
    assert found.time_to_train_ratio <= shards.time_to_train_ratio * (1 + TOLERANCE)
    fewer_s = state_time_to_wipe_out_s(600, found.redundancy - 1, 600 * 300.0, 60.0 + 70.0 * shards.stretch)
    assert fewer_s < found.time_to_wipe_out_s
    assert found.time_to_wipe_out_without_copies_s < shards.time_to_wipe_out_s
    slower = plan_partitions(facts(), shards, copy_s=7200.0)
    assert slower.redundancy > found.redundancy


def test_two_groups_have_at_most_two_hosts() -> None:
    found = plan_partitions(facts(num_groups=2), predict(facts(num_groups=2), "microbatch", 2), copy_s=60.0)
    assert found.redundancy <= 2


SCENARIO = Scenario(
    name="partitions",
    num_groups=10,
    redundancy=10,  # no shard is ever wiped out
    microbatches_per_shard=1,
    costs=CostModel(compute_s=20.0, reduce_s=1.0, save_s=1.0, restart_s=10.0),
    failures=FailureSpec(mean_s=150.0),
    repair_s=50.0,
    save_interval_s=200.0,
    num_steps=1500,
)


def test_a_simulated_run_loses_state_as_often_as_planned() -> None:
    scenario = replace(SCENARIO, partition_redundancy=2, partition_copy_s=40.0)
    result = simulate(scenario, 0)
    assert result.restarts == result.state_wipe_outs > 10
    lived_s = (result.end_s - result.terms["restart"]) / result.state_wipe_outs
    expected_s = state_time_to_wipe_out_s(10, 2, 10 * 150.0, 40.0 + 21.0)
    assert lived_s == pytest.approx(expected_s, rel=0.4)  # a quarter is one standard error


def test_with_one_host_every_loss_is_a_wipe_out_and_with_three_copies_in_time_avert_it() -> None:
    one = simulate(replace(SCENARIO, partition_redundancy=1, partition_copy_s=40.0, num_steps=200), 0)
    assert 40 < one.state_wipe_outs == one.restarts <= one.losses < 50  # two in one step are one wipe-out
    three = simulate(replace(SCENARIO, partition_redundancy=3, partition_copy_s=1.0, num_steps=200), 0)
    assert (three.state_wipe_outs, three.losses > 10) == (0, True)
    never = simulate(replace(SCENARIO, partition_redundancy=3, num_steps=200), 0)
    assert never.state_wipe_outs > 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"partition_redundancy": 11}, "partition_redundancy=11 has to be from 0 to num_groups=10"),
        ({"partition_copy_s": 3.0}, "partition_copy_s=3.0 is never used"),
        ({"partition_redundancy": 2, "partition_copy_s": -1.0}, "partition_copy_s=-1.0 has to be 0 or more"),
        ({"partition_redundancy": 2, "policy": "replication"}, "belongs to the policy spare"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(SCENARIO, **change)
