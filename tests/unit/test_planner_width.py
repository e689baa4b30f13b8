"""Plans for wide groups, against the dealing of the core and plans for as many groups of one lane."""

import json
import random
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.order import initial_order
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.plans import share_of
from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts
from spare_megatron.tools.plan.overhead import StepTimes, least_makespans
from spare_megatron.tools.plan.plan import optimize
from spare_megatron.tools.plan.readmission import RejoinTimes
from spare_megatron.tools.plan.reforming_costs import ReformTimes
from spare_megatron.tools.plan.width import plans_by_width, widened

FACTS = ClusterFacts(
    num_groups=24,
    times=StepTimes(shard_s=60.0, reduce_s=6.0, loss_interval_s=3600.0),
    checkpoint=CheckpointTimes(save_s=10.0, restart_s=600.0),
    num_microbatches=8,
)


@pytest.mark.parametrize("num_lanes", [2, 3])
def test_a_wide_group_computes_as_many_passes_as_the_planner_has_microbatches(num_lanes: int) -> None:
    """Of the dealing of single microbatches, and of rows, which are dealt as the microbatches of one lane are."""
    chance, num_groups, m = random.Random(num_lanes), 7, 4
    placement = make_placement("golomb", num_groups, num_groups)
    for _ in range(20):
        num_lost = chance.randrange(num_groups - 1)
        alive = frozenset(map(GroupId, chance.sample(range(num_groups), num_groups - num_lost)))
        expected = least_makespans(num_groups, m)[num_lost] * m
        for row_size in (1, num_lanes):
            units = m * num_lanes // row_size
            work = initial_order(placement, units, "microbatch").for_groups(alive).work
            shares = [
                share_of(work.of(group), lane=lane, num_lanes=num_lanes, row_size=row_size, units_per_shard=units)
                for group in alive
                for lane in range(num_lanes)
            ]
            assert max(map(len, shares)) == expected


def test_a_width_is_planned_as_that_many_groups_with_less_between_them() -> None:
    (found,) = plans_by_width(FACTS, "microbatch", [4], over_groups_s=4.0)
    times = replace(FACTS.times, reduce_s=3.0)
    expected = optimize(replace(FACTS, num_groups=6, times=times), "microbatch")
    assert found.plan.redundancy == expected.redundancy
    assert found.plan.time_to_train_ratio == pytest.approx(expected.time_to_train_ratio * 63 / 66)
    assert (found.num_groups, found.lost_share, found.rank_share) == (6, 1 / 6, 1 / 4)


def test_what_a_group_has_of_machines_spares_and_domains_follows_its_width() -> None:
    reform = ReformTimes(machines_per_group=3, least_machines=2, reform_s=60.0, run_s=1e6, num_spares=5)
    wide = widened(replace(FACTS, reform=reform, rejoin=RejoinTimes(repair_s=600.0, num_spares=5)), 4)
    assert wide.reform is not None
    assert wide.rejoin is not None
    assert (wide.reform.machines_per_group, wide.reform.num_spares, wide.rejoin.num_spares) == (12, 5, 1)
    assert wide.reform.least_machines == 8
    domains = replace(FACTS, groups_per_domain=4, domain_interval_s=1e6)
    assert (widened(domains, 2).groups_per_domain, widened(domains, 2).num_domains) == (2, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--widths", "1,7"], "7 lanes do not divide the 24 groups"),
        (["--widths", "two"], "--widths two has to be numbers of lanes"),
        (["--widths", "0"], "0 lanes do not divide the 24 groups"),
        (["--over-groups", "1s"], "--over-groups 1s needs --widths"),
        (["--widths", "2", "--over-groups", "9s", "--reduce", "6s"], "--over-groups 9s exceeds the rest of a step"),
        (
            ["--widths", "8", "--groups-per-domain", "4", "--domain-mtbf", "9d"],
            "8 lanes do not divide a domain of 4 groups",
        ),
    ],
)
def test_widths_that_cannot_be_are_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", *CLUSTER, *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


CLUSTER = ["--groups", "24", "--mtbf", "1h", "--restart", "10m", "--save", "10s", "--microbatches", "8"]


def test_plan_compares_widths() -> None:
    result = CliRunner().invoke(app, ["plan", *CLUSTER, "--widths", "1,2,4"])
    assert result.exit_code == 0, result.output
    assert "wide groups" in result.output
    figures = json.loads(CliRunner().invoke(app, ["plan", *CLUSTER, "--widths", "1,4", "--json"]).stdout)
    one, four = figures["widths"]
    assert one["plan"]["time_to_train_ratio"] == pytest.approx(figures["time_to_train_ratio"])
    assert (four["num_lanes"], four["num_groups"]) == (4, 6)
