"""Simulated runs of a few steps whose every second is worked out by hand."""

import dataclasses

import pytest

from spare_megatron.core.topology import GroupId
from spare_megatron.simulator.costs import CostModel
from spare_megatron.simulator.engine import simulate
from spare_megatron.simulator.failures import FailureSpec, Loss
from spare_megatron.simulator.scenario import Scenario
from spare_megatron.simulator.world import Result, Stalled

COSTS = CostModel(
    compute_s=40.0,
    reduce_s=2.0,
    detect_s=3.0,
    agree_s=5.0,
    rebuild_s=7.0,
    save_s=11.0,
    restart_s=1000.0,
    join_s=13.0,
    state_transfer_s=17.0,
)


def scenario_of(*losses: tuple[float, int], **changes: object) -> Scenario:
    """Three steps of four groups that all host all shards of four microbatches, with losses at (seconds, group)."""
    base = Scenario(
        name="small",
        num_groups=4,
        redundancy=4,
        microbatches_per_shard=4,
        num_steps=3,
        costs=COSTS,
        failures=trace(*losses) if losses else FailureSpec(),
        save_interval_s=float("inf"),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def trace(*losses: tuple[float, int]) -> FailureSpec:
    return FailureSpec(kind="trace", trace=tuple(Loss(at_s=at_s, groups=(GroupId(group),)) for at_s, group in losses))


def check(scenario: Scenario, end_s: float, **terms: float) -> Result:
    """Simulates; the end and all terms that are not 0 have to be these."""
    result = simulate(scenario, seed=0)
    spent = {cause: seconds for cause, seconds in result.terms.items() if seconds}
    assert result.end_s == pytest.approx(end_s, abs=1e-9)
    assert spent == pytest.approx(terms, abs=1e-9)
    assert sum(terms.values()) == pytest.approx(end_s, abs=1e-9)
    assert sum(result.excess().values()) == pytest.approx(result.time_to_train_ratio - 1, abs=1e-9)
    return result


def test_without_losses_a_run_takes_its_compute_and_its_reductions() -> None:
    result = check(scenario_of(), 126.0, compute=120.0, reduce=6.0)
    assert (result.time_to_train_ratio, result.availability, result.losses, result.restarts) == (1.0, 1.0, 0, 0)


RECOVERY = {"detect": 3.0, "agree": 5.0, "rebuild": 7.0}
"""One undisturbed recovery."""


def test_a_loss_during_compute_costs_a_recovery_and_longer_steps_from_then_on() -> None:
    # compute to 40, noticed by 48, patch of 2 microbatches to 68, rebuilt by 75, reduced by 77; then 6 of 16 each.
    result = check(scenario_of((10, 1)), 201.0, compute=120.0, extra_compute=40.0, reduce=6.0, patch=20.0, **RECOVERY)
    assert (result.losses, result.max_down) == (1, 1)
    assert result.mean_down == pytest.approx(191 / 201)


def test_a_loss_during_the_reduction_stops_it_at_once_and_what_was_reduced_is_in_vain() -> None:
    terms = {"compute": 120.0, "extra_compute": 40.0, "reduce": 1.0 + 6.0, "patch": 20.0, **RECOVERY}
    result = check(scenario_of((41, 1)), 202.0, **terms)
    assert result.excess()["reduce"] == pytest.approx(1 / 126)


def test_a_loss_between_detection_and_agreement_starts_them_over_and_one_patch_serves_both() -> None:
    # noticed 40-43, agreeing 43-44, again 44-52; a patch of 8 microbatches over 2 groups to 92; then 8 of 16 each.
    terms = {"detect": 6.0, "agree": 6.0, "patch": 40.0, "rebuild": 7.0, "reduce": 6.0}
    check(scenario_of((10, 1), (44, 2)), 265.0, compute=120.0, extra_compute=80.0, **terms)


def test_a_loss_during_a_patch_costs_another_recovery_for_all_that_group_had_computed() -> None:
    # Group 3 has half of the first patch, which ends at 68: noticed by 76, 6 microbatches over 2 groups to 106.
    terms = {"detect": 6.0, "agree": 10.0, "patch": 50.0, "rebuild": 7.0, "reduce": 6.0}
    check(scenario_of((10, 1), (55, 3)), 279.0, compute=120.0, extra_compute=80.0, **terms)


def test_a_loss_during_a_rebuild_makes_it_useless() -> None:
    terms = {"detect": 6.0, "agree": 10.0, "patch": 50.0, "rebuild": 2.0 + 7.0, "reduce": 6.0}
    check(scenario_of((10, 1), (70, 3)), 281.0, compute=120.0, extra_compute=80.0, **terms)


def test_groups_lost_in_the_same_compute_are_patched_together() -> None:
    terms = {"compute": 120.0, "extra_compute": 80.0, "reduce": 6.0, "patch": 40.0, **RECOVERY}
    check(scenario_of((10, 1), (39, 2)), 261.0, **terms)


def test_whole_shards_are_patched_and_planned_whole() -> None:
    terms = {"compute": 120.0, "extra_compute": 80.0, "reduce": 6.0, "patch": 40.0, **RECOVERY}
    check(scenario_of((10, 1), granularity="stack"), 261.0, **terms)


def test_a_wipe_out_makes_rework_of_everything_since_the_start() -> None:
    # Step 1 is computed until 82, the loss agreed on by 90; then all three steps again.
    result = check(scenario_of((50, 1), redundancy=1), 1216.0, compute=120.0, reduce=6.0, rework=90.0, restart=1000.0)
    assert (result.restarts, result.max_down) == (1, 1)
    assert result.availability == pytest.approx(126 / 1216)


def test_a_wipe_out_goes_back_to_the_last_save() -> None:
    # Saved 42-53; step 1 fails at 93 + 8, again from 1101; saved at 1143 and, last, at 1196.
    scenario = scenario_of((60, 1), redundancy=1, save_interval_s=40.0)
    result = check(scenario, 1207.0, compute=120.0, reduce=6.0, save=33.0, rework=48.0, restart=1000.0)
    assert result.saves == 3


def test_checkpoint_only_restarts_at_any_loss() -> None:
    scenario = scenario_of((10, 1), policy="checkpoint_only")
    check(scenario, 1174.0, compute=120.0, reduce=6.0, rework=48.0, restart=1000.0)


def test_a_loss_during_a_save_is_found_in_the_next_step() -> None:
    # Saved 42-53, step 1 planned with the lost group: computed by 93, reduced by 130 and saved, step 2 by 203.
    terms = {"compute": 120.0, "extra_compute": 20.0, "reduce": 6.0, "patch": 20.0, "save": 33.0, **RECOVERY}
    check(scenario_of((50, 1), save_interval_s=40.0), 214.0, **terms)


def test_a_group_is_taken_in_by_the_first_commit_after_it_has_the_state() -> None:
    # Ready at 10 + 30 + 17 = 57, taken in at 77.
    terms = {"compute": 120.0, "reduce": 6.0, "patch": 20.0, "join": 13.0, **RECOVERY}
    result = check(scenario_of((10, 1), repair_s=30.0), 174.0, **terms)
    assert result.mean_down == pytest.approx(67 / 174)
    # Ready at 127, after the commit at 77 and before that at 139.
    check(scenario_of((10, 1), repair_s=100.0), 194.0, extra_compute=20.0, **terms)


def test_a_spare_comes_as_soon_as_it_has_the_state_and_only_once() -> None:
    terms = {"compute": 120.0, "reduce": 6.0, "join": 13.0}
    check(scenario_of((10, 1), num_spares=1), 174.0, patch=20.0, **terms, **RECOVERY)
    twice = simulate(scenario_of((10, 1), (100, 1), num_spares=1), seed=0)
    assert (twice.losses, twice.terms["join"], twice.terms["extra_compute"]) == (2, 13.0, 20.0)
    repaired = simulate(scenario_of((10, 1), (100, 1), num_spares=1, repair_s=5.0), seed=0)
    assert (repaired.terms["join"], repaired.terms["extra_compute"]) == (26.0, 0.0)


def test_a_group_that_is_down_is_not_lost_again() -> None:
    assert simulate(scenario_of((10, 1), (20, 1), (90, 1)), seed=0).losses == 1


def test_the_loss_of_all_groups_leaves_nobody_to_decide_and_restarts() -> None:
    losses = [(10.0, group) for group in range(4)]
    check(scenario_of(*losses), 1174.0, compute=120.0, reduce=6.0, rework=48.0, restart=1000.0)


def test_a_loss_that_falls_into_a_restart_is_absorbed() -> None:
    assert simulate(scenario_of((50, 1), (500, 2), redundancy=1), seed=0).restarts == 1


def test_a_replicated_step_takes_all_shards_of_a_set_and_its_losses_cost_nothing_until_a_set_is_dead() -> None:
    terms = {"compute": 120.0, "extra_compute": 120.0, "reduce": 6.0}
    check(scenario_of((10, 0), (20, 1), policy="replication", redundancy=2), 246.0, **terms)
    dead = scenario_of((10, 0), (20, 2), policy="replication", redundancy=2)
    check(dead, 1334.0, rework=88.0, restart=1000.0, **terms)
    # Lost while reducing: from 81 on.
    dying = scenario_of((10, 0), (81, 2), policy="replication", redundancy=2)
    check(dying, 1335.0, rework=89.0, restart=1000.0, **terms)


def test_hosts_of_last_resort_keep_the_run_going_at_the_price_of_reading() -> None:
    # Step 0: a patch of 4 microbatches of shard 1 over 3 groups, each reading that shard; then 6 of 16 each, shard 1
    # in the hands of all three survivors, once per step.
    costs = dataclasses.replace(COSTS, fetch_s=0.5)
    scenario = scenario_of((10, 1), redundancy=1, last_resort=True, costs=costs)
    terms = {"compute": 120.0, "extra_compute": 40.0, "reduce": 6.0, "patch": 20.0, "fetch": 1.5, **RECOVERY}
    assert check(scenario, 202.5, **terms).restarts == 0


def test_a_run_that_cannot_get_on_is_given_up() -> None:
    scenario = scenario_of(redundancy=1, num_steps=100, failures=FailureSpec(mean_s=1.0))
    with pytest.raises(Stalled, match="of 100 steps are saved"):
        simulate(scenario, seed=0)


def test_the_controller_is_timed_by_the_clock_that_is_passed_in() -> None:
    ticks = iter(range(1000))
    result = simulate(scenario_of((10, 1)), seed=0, clock=lambda: float(next(ticks)))
    # RunStarted, the fence, the votes, the retry; then votes and commit of each of three steps.
    assert result.decision_s == 10.0
    assert simulate(scenario_of((10, 1)), seed=0).decision_s == 0.0
