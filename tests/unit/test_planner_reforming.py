"""Closed forms for re-formed groups and for partitions beside random losses, event by event."""

import heapq
from dataclasses import replace
from math import ceil, inf
from typing import Any

import numpy as np
import pytest

from spare_megatron.core.saves.endurance import FloatArray
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import PartitionCopy, PartitionSetup, StateWipeOut, first_ownership
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts
from spare_megatron.tools.plan.overhead import StepTimes
from spare_megatron.tools.plan.partition_redundancy import plan_partitions, state_time_to_wipe_out_s
from spare_megatron.tools.plan.plan import TOLERANCE, predict
from spare_megatron.tools.plan.reforming_costs import (
    MissingGroups,
    ReformTimes,
    missing_groups,
    survival,
    time_without_machines_s,
)
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, MachineDomain
from spare_megatron.tools.simulate.scenario import CostModel, Scenario

N = 60


def reform_times(**changes: Any) -> ReformTimes:
    return ReformTimes(**{"machines_per_group": 10, "reform_s": 1.0, "run_s": 150.0, **changes})


class Events:
    """One run with a loss of a machine a second while all groups are up, counted, without ids of machines."""

    def __init__(self, rng: np.random.Generator, reform: ReformTimes) -> None:
        self.rng, self.reform = rng, reform
        self.start()

    def start(self) -> None:
        self.up = set(range(N))
        self.num_healthy = N * self.reform.machines_per_group + self.reform.num_spares
        self.missing: list[int] = []
        self.coming: list[tuple[float, int]] = []  # when, and the group
        self.repaired: list[float] = []

    def complete(self, at_s: float) -> None:
        """Missing groups for which there are machines now are back after a while."""
        while self.missing and len(self.up) + len(self.coming) < self.num_healthy // self.reform.machines_per_group:
            heapq.heappush(self.coming, (at_s + self.reform.absence_s, self.missing.pop()))

    def until(self, at_s: float) -> None:
        while (due_s := min([*self.coming[:1], *((t, -1) for t in self.repaired[:1])], default=(inf, 0))[0]) <= at_s:
            if self.coming and self.coming[0][0] == due_s:
                self.up.add(heapq.heappop(self.coming)[1])
            else:
                heapq.heappop(self.repaired)
                self.num_healthy += 1
                self.complete(due_s)

    def lose(self, at_s: float) -> int | None:
        """A loss strikes a random group; None if that is not up."""
        self.until(at_s)
        group = int(self.rng.integers(N))
        if group not in self.up:
            return None
        self.up.remove(group)
        self.num_healthy -= 1
        if self.reform.repair_s is not None:
            heapq.heappush(self.repaired, at_s + self.reform.repair_s)
        self.missing.append(group)
        self.complete(at_s)
        return group


def seconds_per_wipe_out(redundancy: int, reform: ReformTimes, num_runs: int) -> float:
    """Each run starts over at a wipe-out, with all machines, and ends after run_s without one."""
    placement = make_placement("golomb", N, redundancy)
    hosts = [[set(placement.hosts[shard]) for shard in placement.stack(GroupId(group))] for group in range(N)]
    events = Events(np.random.default_rng(0), reform)
    passed_s, num_wipe_outs = 0.0, 0
    for _ in range(num_runs):
        events.start()
        at_s = 0.0
        while (at_s := at_s + events.rng.exponential()) < reform.run_s:
            group = events.lose(at_s)
            if group is not None and any(not shard & events.up for shard in hosts[group]):
                num_wipe_outs += 1
                break
        passed_s += min(at_s, reform.run_s)
    assert num_wipe_outs > 100
    return passed_s / num_wipe_outs


@pytest.mark.parametrize(
    ("redundancy", "changes", "num_runs"),
    [
        (2, {}, 250),
        (3, {"run_s": 120.0}, 500),
        (3, {"repair_s": 25.0}, 250),
        (3, {"repair_s": 25.0, "num_spares": 20}, 600),
    ],
)
def test_time_to_a_wipe_out_is_that_of_random_losses(redundancy: int, changes: dict[str, Any], num_runs: int) -> None:
    reform = reform_times(**changes)
    counted_s = seconds_per_wipe_out(redundancy, reform, num_runs)
    expected_s = survival(N, redundancy, float(N), reform).lived_s
    print(f"\nr = {redundancy}, {changes}: {expected_s / counted_s - 1:+.1%}")
    assert 0.8 < expected_s / counted_s < 1.2


def mean_of(missing: MissingGroups) -> FloatArray:
    found: FloatArray = missing.shares @ np.arange(missing.shares.shape[1])
    return found


@pytest.mark.parametrize("changes", [{}, {"repair_s": 25.0}, {"repair_s": 25.0, "num_spares": 25}, {"run_s": 1000.0}])
def test_missing_groups_are_those_for_which_random_losses_leave_no_machines(changes: dict[str, Any]) -> None:
    reform = reform_times(reform_s=0.0, **changes)
    missing = missing_groups(N, float(N), reform)
    rng = np.random.default_rng(0)
    counted = []
    for _ in range(60):
        events = Events(rng, reform)
        at_s = 0.0
        while (at_s := at_s + rng.exponential()) < reform.run_s:
            events.lose(at_s)
        events.until(reform.run_s)
        counted.append(len(events.missing))
    assert missing.shares.sum(axis=1) == pytest.approx(1.0)
    assert mean_of(missing)[-1] == pytest.approx(np.mean(counted), abs=4 * np.std(counted) / 60**0.5 + 0.05)


@pytest.mark.parametrize(("redundancy", "repair_s"), [(2, 900.0), (2, None), (1, 900.0)])
def test_planned_pauses_are_those_of_simulated_runs(redundancy: int, repair_s: float | None) -> None:
    """Shards without a host wait for a group that is re-formed, or for a machine that is repaired; the run restarts
    only where all hosts are missing for good.
    """
    facts, scenario = planned_and_simulated(redundancy, {"repair_s": repair_s}, {}, num_steps=400)
    plan, run = predict(facts, "reform", redundancy), simulate(scenario, 0)
    trained_s = run.end_s - run.terms["pause"] - run.terms["restart"]
    assert run.pauses > 4
    assert 0.5 < run.pauses / trained_s * plan.pause_interval_s < 2
    if repair_s is None:
        assert plan.time_to_wipe_out_s < 1e6
    else:
        assert run.restarts == 0
        assert plan.time_to_wipe_out_s > 5 * run.end_s / run.pauses
        assert plan.availability == pytest.approx(run.availability, abs=0.03)


def test_losses_until_no_group_is_left_are_all_machines() -> None:
    """With one group that is lost once a second: the sum of the times of its machines."""
    assert time_without_machines_s(1, 1.0, reform_times(machines_per_group=7)) == 7.0
    assert time_without_machines_s(3, 3.0, reform_times(machines_per_group=1)) == pytest.approx(1 + 3 / 2 + 3)
    assert time_without_machines_s(3, 3.0, reform_times(repair_s=1.0)) == inf


def test_one_group_is_missing_while_fewer_machines_are_away_than_it_has() -> None:
    missing = missing_groups(600, 600 * 300.0, reform_times(machines_per_group=125, repair_s=600.0, run_s=7e5))
    mean = mean_of(missing)
    assert mean[-1] == pytest.approx(1 - np.exp(-2.0), rel=1e-3), "two machines are away on average, Poisson"
    assert ceil(mean.max()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"machines_per_group": 0},
        {"least_machines": 11},
        {"run_s": 0.0},
        {"num_spares": -1},
        {"reform_s": -1.0},
        {"repair_s": 0.0},
    ],
)
def test_times_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        reform_times(**changes)


def planned_and_simulated(
    redundancy: int, changes: dict[str, Any], others: dict[str, Any], num_steps: int
) -> tuple[ClusterFacts, Scenario]:
    step = StepTimes(shard_s=64.0, reduce_s=6.0, loss_interval_s=300.0)
    times: dict[str, Any] = {
        "reform_s": 60.0,
        "join_s": 1.0,
        "run_s": num_steps * step.step_s,
        "machines_per_group": 50,
    }
    reform = reform_times(**{**times, **changes})
    facts = ClusterFacts(
        num_groups=N,
        times=step,
        checkpoint=CheckpointTimes(save_s=1.5, restart_s=3600.0),
        num_microbatches=16,
        reform=reform,
        **others,
    )
    costs = CostModel(
        compute_s=64.0, reduce_s=6.0, save_s=1.5, restart_s=3600.0, join_s=1.0, state_transfer_s=reform.transfer_s
    )
    scenario = Scenario(
        name="planned",
        num_groups=N,
        redundancy=redundancy,
        num_steps=num_steps,
        costs=costs,
        failures=FailureSpec(mean_s=300.0),
        repair_s=reform.repair_s,
        num_spares=reform.num_spares,
        machines_per_group=reform.machines_per_group,
        reform_s=reform.reform_s,
        save_interval_s=1000.0,
        **others,
    )
    return facts, scenario


@pytest.mark.parametrize(
    ("redundancy", "changes", "others"),
    [
        (4, {}, {}),
        (8, {"repair_s": 900.0}, {}),
        (4, {"repair_s": 900.0, "num_spares": 6, "transfer_s": 20.0}, {}),
        (4, {}, {"last_resort": True}),
    ],
)
def test_the_planned_step_is_that_of_simulated_runs(
    redundancy: int, changes: dict[str, Any], others: dict[str, Any]
) -> None:
    facts, scenario = planned_and_simulated(redundancy, changes, others, num_steps=1000)
    run = simulate(scenario, 0)
    assert run.losses > 100
    simulated = run.availability * run.time_to_train_ratio
    planned = predict(facts, "reform", redundancy).stretch
    print(f"\nr = {redundancy}, {changes}, {others}: {planned / simulated - 1:+.1%}")
    assert 0.99 < planned / simulated < 1.06


@pytest.mark.parametrize("num_spares", [0, 100])
def test_the_planned_step_with_lost_domains_is_that_of_simulated_runs(num_spares: int) -> None:
    """6 of 60 groups lose all their machines at once, every 50 minutes."""
    changes = {"repair_s": 900.0, "num_spares": num_spares, "transfer_s": 20.0}
    facts, scenario = planned_and_simulated(4, changes, {"last_resort": True}, num_steps=600)
    num_domains = ceil(scenario.num_machines / 300)
    domain = MachineDomain(name="power", machines=300, mean_s=3000.0 * num_domains, repair_s=900.0)
    run = simulate(replace(scenario, failures=FailureSpec(mean_s=300.0, domains=(domain,))), 0)
    alone = predict(facts, "reform", 4).stretch
    planned = predict(replace(facts, groups_per_domain=6, domain_interval_s=3000.0), "reform", 4).stretch
    simulated = run.availability * run.time_to_train_ratio
    print(f"\n{num_spares} spares: {planned / simulated - 1:+.1%}, without domains {alone / simulated - 1:+.1%}")
    assert run.losses_by_cause["power"] > 50
    assert run.restarts == 0
    assert 0.97 < planned / simulated < 1.06
    assert alone < planned - 0.01


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
