"""Simulated runs of a few steps whose every second is worked out by hand."""

import dataclasses

import pytest

from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.world import Result, Stalled

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


def test_evaluations_take_their_time_and_what_a_lost_group_had_to_evaluate_is_dealt_again() -> None:
    evaluated = {"costs": dataclasses.replace(COSTS, evaluate_s=20.0), "evaluate_every": 2}
    result = check(scenario_of(**evaluated), 166.0, compute=120.0, reduce=6.0, evaluate=40.0)  # after 2 and 3 steps
    assert result.time_to_train_ratio == 1.0
    # Lost after 6 of 20 s of the first one: agreed by 109, 2 of its 4 microbatches to 119; a step and evaluation of 6.
    terms = {"compute": 120.0, "extra_compute": 20.0, "reduce": 6.0, "evaluate": 20.0 + 10.0 + 30.0, **RECOVERY}
    check(scenario_of((90, 1), **evaluated), 211.0, **terms)


RECOVERY = {"agree": 5.0}
"""One undisturbed recovery from a loss during compute: it is detected before the compute ends, and the communicator is
there before the patch."""


def test_a_loss_during_compute_costs_a_recovery_and_longer_steps_from_then_on() -> None:
    # compute to 40, agreed by 45, patch of 2 microbatches to 65, rebuilt at 47, reduced by 67; then 6 of 16 each.
    result = check(scenario_of((10, 1)), 191.0, compute=120.0, extra_compute=40.0, reduce=6.0, patch=20.0, **RECOVERY)
    assert (result.losses, result.max_down) == (1, 1)
    assert result.mean_down == pytest.approx(181 / 191)


def test_a_loss_during_the_reduction_stops_it_at_once_and_what_was_reduced_is_in_vain() -> None:
    terms = {"compute": 120.0, "extra_compute": 40.0, "reduce": 1.0 + 6.0, "patch": 20.0, "detect": 3.0, **RECOVERY}
    result = check(scenario_of((41, 1)), 195.0, **terms)
    assert result.excess()["reduce"] == pytest.approx(1 / 126)


def test_a_loss_between_detection_and_agreement_starts_them_over_and_one_patch_serves_both() -> None:
    # Agreeing 40-44, detected 44-47, agreed by 52; a patch of 8 microbatches over 2 groups to 92; then 8 of 16 each.
    terms = {"detect": 3.0, "agree": 9.0, "patch": 40.0, "reduce": 6.0}
    check(scenario_of((10, 1), (44, 2)), 258.0, compute=120.0, extra_compute=80.0, **terms)


def test_a_loss_during_a_patch_costs_another_recovery_for_all_that_group_had_computed() -> None:
    # Group 2 has half of the first patch, which ends at 65: agreed by 70, 6 microbatches over 2 groups to 100.
    terms = {"agree": 10.0, "patch": 50.0, "reduce": 6.0}
    check(scenario_of((10, 1), (55, 2)), 266.0, compute=120.0, extra_compute=80.0, **terms)


def test_a_loss_during_a_rebuild_makes_it_useless() -> None:
    # Fenced at 40, so rebuilt by 80 while the patch ends at 65: waits 5 of 15, detects 70-73. The next rebuild
    # takes 73-113, the patch 78-108.
    terms = {"detect": 3.0, "agree": 10.0, "patch": 50.0, "rebuild": 5.0 + 5.0, "reduce": 6.0}
    slow = dataclasses.replace(COSTS, rebuild_s=40.0)
    check(scenario_of((10, 1), (70, 2), costs=slow), 279.0, compute=120.0, extra_compute=80.0, **terms)


def test_reducing_again_may_take_longer_than_reducing() -> None:
    costs = dataclasses.replace(COSTS, retry_s=4.0)
    terms = {"compute": 120.0, "extra_compute": 40.0, "reduce": 6.0, "patch": 20.0, "rebuild": 4.0, **RECOVERY}
    check(scenario_of((10, 1), costs=costs), 195.0, **terms)


def test_a_pipeline_is_filled_in_every_step_and_every_patch() -> None:
    # A shard of 4 microbatches takes 4 + 1 times 8 s: the patch of 2 takes 3 times, the steps of 6 seven times.
    costs = dataclasses.replace(COSTS, pipeline_fill=1.0)
    terms = {"compute": 120.0, "extra_compute": 32.0, "reduce": 6.0, "patch": 24.0, **RECOVERY}
    check(scenario_of((10, 1), costs=costs), 187.0, **terms)


def test_groups_that_share_processors_take_turns() -> None:
    # Two at full speed: four groups take 80 s for 4 microbatches each. With 6, 5 and 5 three take 75 s for 5 each, then
    # one 10 s for the rest. Two groups patch, so these slow no group down.
    costs = dataclasses.replace(COSTS, full_speed_groups=2.0, update_s=1.0)
    result = simulate(scenario_of((10, 1), costs=costs), seed=0)
    assert result.failure_free_s == pytest.approx(3 * (80 + 4 + 2))
    assert result.terms["compute"] == pytest.approx(240.0)
    assert result.terms["extra_compute"] == pytest.approx(2 * 5.0)
    assert result.terms["patch"] == pytest.approx(20.0)
    assert result.terms["reduce"] == pytest.approx(3 * (2 + 1) * 1.5)


def test_fewer_groups_on_shared_processors_fill_fewer_pipelines() -> None:
    # One at full speed: 4 x 5 times 8 s without losses; with 6, 5 and 5 microbatches 7 + 6 + 6 times.
    costs = dataclasses.replace(COSTS, full_speed_groups=1.0, pipeline_fill=1.0)
    result = simulate(scenario_of((10, 1), costs=costs), seed=0)
    assert result.failure_free_s == pytest.approx(3 * (160 + 8))
    assert result.terms["extra_compute"] == pytest.approx(2 * (152 - 160))


def test_groups_lost_in_the_same_compute_are_patched_together() -> None:
    terms = {"compute": 120.0, "extra_compute": 80.0, "reduce": 6.0, "patch": 40.0, **RECOVERY}
    check(scenario_of((10, 1), (39, 2)), 253.0, detect=2.0, **terms)


def test_whole_shards_are_patched_and_planned_whole() -> None:
    terms = {"compute": 120.0, "extra_compute": 80.0, "reduce": 6.0, "patch": 40.0, **RECOVERY}
    check(scenario_of((10, 1), granularity="stack"), 251.0, **terms)


def test_a_wipe_out_makes_rework_of_everything_since_the_start() -> None:
    # Step 1 is computed until 82, the loss agreed on by 87; then all three steps again.
    result = check(scenario_of((50, 1), redundancy=1), 1213.0, compute=120.0, reduce=6.0, rework=87.0, restart=1000.0)
    assert (result.restarts, result.max_down) == (1, 1)
    assert result.availability == pytest.approx(126 / 1213)


def test_a_wipe_out_goes_back_to_the_last_save() -> None:
    # Saved 42-53; step 1 fails at 93 + 5, again from 1098; saved at 1140 and, last, at 1193.
    scenario = scenario_of((60, 1), redundancy=1, save_interval_s=40.0)
    result = check(scenario, 1204.0, compute=120.0, reduce=6.0, save=33.0, rework=45.0, restart=1000.0)
    assert result.saves == 3


def test_checkpoint_only_restarts_at_any_loss() -> None:
    scenario = scenario_of((10, 1), policy="checkpoint_only")
    check(scenario, 1171.0, compute=120.0, reduce=6.0, rework=45.0, restart=1000.0)


def test_a_loss_during_a_save_is_found_in_the_next_step() -> None:
    # Saved 42-53, step 1 planned with the lost group: computed by 93, reduced by 120 and saved, step 2 by 193.
    terms = {"compute": 120.0, "extra_compute": 20.0, "reduce": 6.0, "patch": 20.0, "save": 33.0, **RECOVERY}
    check(scenario_of((50, 1), save_interval_s=40.0), 204.0, **terms)


def test_a_group_is_admitted_by_the_first_commit_after_it_has_the_state() -> None:
    # Ready at 10 + 30 + 17 = 57, admitted at 67.
    terms = {"compute": 120.0, "reduce": 6.0, "patch": 20.0, "join": 13.0, **RECOVERY}
    result = check(scenario_of((10, 1), repair_s=30.0), 164.0, **terms)
    assert result.mean_down == pytest.approx(57 / 164)
    # Ready at 127, after the commit at 67 and before that at 129.
    check(scenario_of((10, 1), repair_s=100.0), 184.0, extra_compute=20.0, **terms)


def test_a_spare_comes_as_soon_as_it_has_the_state_and_only_once() -> None:
    terms = {"compute": 120.0, "reduce": 6.0, "join": 13.0}
    check(scenario_of((10, 1), num_spares=1), 164.0, patch=20.0, **terms, **RECOVERY)
    twice = simulate(scenario_of((10, 1), (100, 1), num_spares=1), seed=0)
    assert (twice.losses, twice.terms["join"], twice.terms["extra_compute"]) == (2, 13.0, 20.0)
    repaired = simulate(scenario_of((10, 1), (100, 1), num_spares=1, repair_s=5.0), seed=0)
    assert (repaired.terms["join"], repaired.terms["extra_compute"]) == (26.0, 0.0)


def test_a_group_that_is_down_is_not_lost_again() -> None:
    assert simulate(scenario_of((10, 1), (20, 1), (90, 1)), seed=0).losses == 1


def test_the_loss_of_all_groups_leaves_none_to_decide_and_restarts() -> None:
    losses = [(10.0, group) for group in range(4)]
    check(scenario_of(*losses), 1171.0, compute=120.0, reduce=6.0, rework=45.0, restart=1000.0)


def test_a_loss_that_falls_into_a_restart_is_absorbed() -> None:
    assert simulate(scenario_of((50, 1), (500, 2), redundancy=1), seed=0).restarts == 1


def test_a_replicated_step_takes_all_shards_of_a_set_and_its_losses_cost_nothing_until_a_set_is_dead() -> None:
    terms = {"compute": 120.0, "extra_compute": 120.0, "reduce": 6.0}
    check(scenario_of((10, 0), (20, 1), policy="replication", redundancy=2), 246.0, **terms)
    dead = scenario_of((10, 0), (20, 2), policy="replication", redundancy=2)
    check(dead, 1331.0, rework=85.0, restart=1000.0, **terms)
    # Lost while reducing: from 81 on.
    dying = scenario_of((10, 0), (81, 2), policy="replication", redundancy=2)
    check(dying, 1335.0, rework=89.0, restart=1000.0, **terms)


def test_a_shard_without_a_host_keeps_the_run_going_and_its_data_are_awaited_only_by_idle_groups() -> None:
    # Step 0: a patch of 4 microbatches of shard 1 over 3 groups, which first await its data; then 6 of 16 each, shard 1
    # in the hands of the survivors, who compute their own shards meanwhile.
    costs = dataclasses.replace(COSTS, fetch_s=0.5)
    scenario = scenario_of((10, 1), redundancy=1, last_resort=True, costs=costs)
    terms = {"compute": 120.0, "extra_compute": 40.0, "reduce": 6.0, "patch": 20.0, "fetch": 0.5, **RECOVERY}
    assert check(scenario, 191.5, **terms).restarts == 0
    # 5 microbatches' time: a group that takes two of shard 1 ends after 7, of which 6 or less are computed.
    late = dataclasses.replace(COSTS, fetch_s=50.0)
    result = simulate(dataclasses.replace(scenario, costs=late), seed=0)
    step_s = (result.terms["compute"] + result.terms["extra_compute"] - 40 + result.terms["fetch"] - 50) / 2
    assert step_s == pytest.approx(70.0)


@pytest.mark.parametrize(
    ("fetch_s", "terms"),
    [
        (None, {"patch": 10.0}),  # it owed 3, 3 and 2 of its shards, each of which has two other hosts
        (0.0, {"patch": 5.0}),
        (1.0, {"patch": 5.0, "fetch": 1.0}),
        (10.0, {"patch": 10.0}),  # hosts are as soon done as the data are there
    ],
)
def test_a_patch_over_all_groups_takes_one_microbatch_and_the_time_to_get_its_data(
    fetch_s: float | None, terms: dict[str, float]
) -> None:
    # 8 microbatches of 5 s; 80 over 9 groups are 9 each from step 1 on.
    sizes = {"num_groups": 10, "redundancy": 3, "microbatches_per_shard": 8}
    costs = dataclasses.replace(COSTS, fetch_s=fetch_s or 0.0)
    scenario = scenario_of((10, 1), last_resort=fetch_s is not None, costs=costs, **sizes)
    terms = {"compute": 120.0, "extra_compute": 10.0, "reduce": 6.0, **RECOVERY, **terms}
    check(scenario, sum(terms.values()), **terms)


def test_an_evaluation_waits_for_data_as_long_as_it_computes_nothing_else() -> None:
    # The survivor hosts two shards: it computes them for 60 s in a step, and for 6 of these 10 s in an evaluation.
    costs = CostModel(compute_s=30.0, evaluate_s=3.0, fetch_s=10.0)
    sizes = {"redundancy": 2, "microbatches_per_shard": 10, "num_steps": 4, "evaluate_every": 1}
    losses = trace((1.0, 0), (1.0, 1), (1.0, 2))
    run = simulate(scenario_of(failures=losses, last_resort=True, costs=costs, **sizes), seed=0)
    assert run.terms["fetch"] == pytest.approx(4 * (10.0 - 6.0))


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
