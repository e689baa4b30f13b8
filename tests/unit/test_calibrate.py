"""Costs from a journal: hand-made times have to come out again, and so do the costs of simulated runs."""

import dataclasses
from statistics import median

import numpy as np
import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import (
    ContributionRecord,
    EntryRecord,
    FaultRecord,
    LossRecord,
    Record,
    RecoveryRecord,
    UpdateRecord,
)
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.calibrate import calibrate, fit_rebuild
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.measured import WARM_UP_STEPS, in_order
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from tests.unit.journal_in_memory import run_record

STEP_S = 10.0
FIRST = WARM_UP_STEPS
RUN = run_record(2, name="hand-made", microbatches_per_shard=4, num_steps=30)


def part_of_step(group: int, step: int, compute_s: float, num_microbatches: int = 4) -> list[tuple[float, Record]]:
    """A group computes this long; every step is committed 7.5 s after it began, and applied after 8 s."""
    began_s = step * STEP_S
    contribution = ContributionRecord(
        group=group,
        step=step,
        attempt=step,
        epoch=0,
        members=[0, 1],
        microbatches={str(group): list(range(num_microbatches))},
    )
    commit = EntryRecord(group=group, index=step, entry={"entry": "commit", "step": step, "attempt": step})
    update = UpdateRecord(
        group=group,
        step=step,
        attempt=step,
        num_microbatches=8,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        makespan=4,
        step_s=8.0,
    )
    return [(began_s + compute_s, contribution), (began_s + 7.5, commit), (began_s + 8.0, update)]


def whole_step(step: int, *compute_s: float) -> list[tuple[float, Record]]:
    return [part for group, seconds in enumerate(compute_s) for part in part_of_step(group, step, seconds)]


def journal_of(*records: tuple[float, Record]) -> Journal:
    return in_order([Line(source="test", at_s=at_s, record=record) for at_s, record in records])


def loss_in(
    step: int, *, after_s: float, patch_s: float, num_patched: int, rebuild_s: float = 0.125
) -> list[tuple[float, Record]]:
    """Group 1 is lost so long after group 0 has computed for 5 s; it takes 0.5 s from then on to be noticed."""
    computed_s, index = step * STEP_S + 5.0, 1000 + step
    struck_s = computed_s + after_s
    recovery = RecoveryRecord(
        group=0,
        step=step,
        lost=[1],
        computed_at_s=computed_s,
        noticed_at_s=max(computed_s, struck_s) + 0.5,
        agree_s=0.25,
        patch_s=patch_s,
        rebuild_s=rebuild_s,
        reduce_s=2.0625,
        num_patched=num_patched,
    )
    return [
        (struck_s, FaultRecord(group=1, rank=0, step=step, phase="backward", kind="kill")),
        (struck_s + 0.75, LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=index)),
        (struck_s + 1.0, EntryRecord(group=0, index=index, entry={"entry": "retry", "step": step, "attempt": step})),
        (struck_s + 2.0, recovery),
    ]


def test_steps_without_a_loss_give_compute_reduction_and_update() -> None:
    parts = [part for step in range(FIRST, FIRST + 3) for part in whole_step(step, 5.0, 6.0)]
    found = calibrate(journal_of((0.0, RUN), *parts))
    assert (found.num_steps, found.num_recoveries) == (3, 0)
    assert found.compute_s == pytest.approx(6.0)  # the step waits for the last group
    assert (found.reduce_s, found.update_s) == (pytest.approx(1.5), pytest.approx(0.5))
    assert found.jitter == pytest.approx(0.0)
    assert set(found.costs) == {"compute_s", "reduce_s", "update_s", "jitter", "pipeline_fill", "full_speed_groups"}
    assert found.unmeasured == ("anything about recoveries, as it has none from a single loss",)


def test_the_spread_of_steps_is_the_jitter_and_single_slow_steps_do_not_count() -> None:
    compute_s = [5.0, 5.5, 6.0, 6.5, 7.4]
    parts = [part for step, seconds in enumerate(compute_s, FIRST) for part in whole_step(step, seconds, 1.0)]
    assert calibrate(journal_of((0.0, RUN), *parts)).jitter == pytest.approx(1.4826 * 0.5 / 6.0)


def test_the_first_steps_measure_nothing() -> None:
    parts = [part for step in range(FIRST + 1) for part in whole_step(step, *((7.0, 7.0) if step < FIRST else (5.0,)))]
    assert calibrate(journal_of((0.0, RUN), *parts)).compute_s == pytest.approx(5.0)


def test_compute_is_counted_per_shard_whatever_the_load() -> None:
    parts = part_of_step(0, FIRST, 6.0, num_microbatches=8)
    assert calibrate(journal_of((0.0, RUN), *parts)).compute_s == pytest.approx(3.0)


def test_groups_that_share_processors_compute_faster_than_they_seem_to() -> None:
    shared = dataclasses.replace(RUN, num_processors=2, ranks_per_group=2)
    found = calibrate(journal_of((0.0, shared), *whole_step(FIRST, 6.0, 6.0)))
    assert found.full_speed_groups == 1.0
    assert found.compute_s == pytest.approx(3.0)
    assert (found.reduce_s, found.update_s) == (pytest.approx(0.75), pytest.approx(0.25))


def test_unequal_loads_show_how_much_of_the_pipeline_fill_is_not_hidden() -> None:
    # (4 + 0.5) microbatches in 4.5 s and (6 + 0.5) in 6.5 s; a pipeline of two stages costs 1 at most.
    run = dataclasses.replace(RUN, pipeline_fill=1.0)
    parts = [*part_of_step(0, FIRST, 4.5, 4), *part_of_step(1, FIRST, 6.5, 6)]
    found = calibrate(journal_of((0.0, run), *parts))
    assert (found.pipeline_fill, found.compute_s) == (pytest.approx(0.5), pytest.approx(4.5))


def test_recoveries_give_their_stages_and_their_steps_no_compute() -> None:
    clean, hit = whole_step(FIRST, 5.0, 5.0), part_of_step(0, FIRST + 1, 1.0)
    loss = loss_in(FIRST + 1, after_s=1.0, patch_s=2.5, num_patched=2)
    found = calibrate(journal_of((0.0, RUN), *clean, *hit, *loss))
    assert (found.num_steps, found.num_recoveries) == (1, 1)
    assert found.compute_s == pytest.approx(5.0)
    assert (found.detect_s, found.agree_s) == (pytest.approx(0.5), pytest.approx(0.25))
    # 0.125 + 2.0625 from the patch to the commit; without a loss it is 2.5 from the contribution, so nothing is left.
    assert (found.rebuild_s, found.retry_s) == (None, pytest.approx(0.0))
    assert found.unmeasured == ("how long a rebuild takes: patches of 2.5 s and more have hidden it",)
    [patch] = [state for state in found.fit.states if state.what == "patch"]
    assert (patch.loads, patch.median_s, patch.residual) == ((2,), 2.5, pytest.approx(0.0))


def test_a_loss_that_compute_hid_is_detected_as_its_fence_was_written() -> None:
    loss = loss_in(FIRST + 1, after_s=-3.0, patch_s=2.5, num_patched=2)
    found = calibrate(journal_of((0.0, RUN), *whole_step(FIRST, 5.0, 5.0), *loss))
    assert found.detect_s == pytest.approx(0.75)
    assert found.agree_s == pytest.approx(0.75)  # all from the end of the compute to the decision
    assert "every loss came while they computed" in found.unmeasured[0]


def test_rebuilds_that_short_patches_did_not_hide_are_found() -> None:
    # Built 8 s after the fence, 0.25 s of which are agreement: patches of 1, 2 and 3 s leave 6.75, 5.75 and 4.75 s.
    losses = [
        part
        for step, patch_s in ((FIRST + 1, 1.0), (FIRST + 2, 2.0), (FIRST + 3, 3.0))
        for part in [
            *loss_in(step, after_s=1.0, patch_s=patch_s, num_patched=1, rebuild_s=7.75 - patch_s),
            *part_of_step(1, step, 5.0)[2:],  # the group is back
        ]
    ]
    clean = [(at_s, r) for at_s, r in whole_step(FIRST, 5.0, 5.0) if not isinstance(r, EntryRecord)]
    commit = EntryRecord(group=0, index=1, entry={"entry": "commit", "step": FIRST, "attempt": FIRST})
    found = calibrate(journal_of((0.0, RUN), *clean, (FIRST * STEP_S + 7.0625, commit), *losses))
    assert found.reduce_s == pytest.approx(2.0625)
    assert (found.rebuild_s, found.retry_s) == (pytest.approx(8.0), pytest.approx(0.0))


def test_a_rebuild_is_fitted_as_trying_every_candidate_does() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        covered, rest = rng.integers(0, 9, (2, rng.integers(1, 9))).astype(float).tolist()

        def misfit(rebuild_s: float, retry_s: float, covered: list[float] = covered, rest: list[float] = rest) -> float:
            return sum(abs(max(0.0, rebuild_s - c) + retry_s - r) for c, r in zip(covered, rest, strict=True))

        retries = (0.0, *np.quantile(rest, np.linspace(0.0, 1.0, 21)))
        tried = [(c + max(0.0, r - retry), retry) for retry in retries for c, r in zip(covered, rest, strict=True)]
        least, hidden = min(misfit(*candidate) for candidate in tried), misfit(0.0, median(rest))
        rebuild_s, retry_s = fit_rebuild(covered, rest)
        is_hidden = len(rest) < 3 or least >= 0.5 * hidden
        assert (rebuild_s is None) == is_hidden
        assert misfit(rebuild_s or 0.0, retry_s) == pytest.approx(hidden if is_hidden else least)


@pytest.mark.parametrize("seed", range(5))
def test_noise_in_recoveries_moves_the_rebuild_no_further_than_the_best_of_a_grid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    covered = rng.uniform(0.0, 20.0, 40)
    rest = np.maximum(0.0, np.maximum(0.0, 10.0 - covered) + 2.0 + rng.normal(0.0, 0.5, 40))
    rebuilds_s, retries_s = np.meshgrid(np.linspace(8.0, 12.0, 161), np.linspace(0.0, 4.0, 161))
    least = np.abs(np.maximum(0.0, rebuilds_s[..., None] - covered) + retries_s[..., None] - rest).sum(axis=-1).min()
    rebuild_s, retry_s = fit_rebuild(covered.tolist(), rest.tolist())
    assert rebuild_s is not None
    assert np.abs(np.maximum(0.0, rebuild_s - covered) + retry_s - rest).sum() < 1.01 * least


@pytest.mark.timeout(60)
def test_a_rebuild_is_fitted_to_as_many_recoveries_as_a_long_campaign_has() -> None:
    """Each candidate against each recovery took an hour."""
    covered = np.random.default_rng(0).random(50_000)
    rebuild_s, retry_s = fit_rebuild(covered.tolist(), (np.maximum(0.0, 0.75 - covered) + 0.125).tolist())
    assert (rebuild_s, retry_s) == (pytest.approx(0.75), pytest.approx(0.125))


def test_a_journal_with_nothing_to_measure_says_so() -> None:
    with pytest.raises(ValueError, match="no run record"):
        calibrate(journal_of())
    with pytest.raises(ValueError, match="no committed step before the first restart"):
        calibrate(journal_of((0.0, RUN)))
    with pytest.raises(ValueError, match="its global batch grew from 1 to 4 microbatches per shard"):
        calibrate(journal_of((0.0, dataclasses.replace(RUN, ramp=[1, 1, 9]))))
    with pytest.raises(ValueError, match="it evaluated every 5 steps"):
        calibrate(journal_of((0.0, dataclasses.replace(RUN, eval_every_steps=5))))
    with pytest.raises(ValueError, match="computed in no time"):
        calibrate(journal_of((0.0, RUN), *whole_step(FIRST, 0.0, 0.0)))


def test_a_run_without_a_quiet_step_says_what_disturbed_each() -> None:
    parts = [part for step in range(FIRST + 2) for part in whole_step(step, 5.0, 5.0)]
    hit = loss_in(FIRST, after_s=1.0, patch_s=2.5, num_patched=2)
    slow = FaultRecord(group=0, rank=0, step=FIRST + 1, phase="forward", kind="slow")
    with pytest.raises(
        ValueError, match=r"of 5 committed steps 3 are the first 3 of the run, 1 had a loss .* 1 had a "
    ):
        calibrate(journal_of((0.0, RUN), *parts, *hit, ((FIRST + 1) * STEP_S, slow)))


def test_steps_after_a_return_count_once_they_are_warm_and_a_disturbed_return_measures_nothing() -> None:
    first, num_steps = FIRST + 2, 12
    parts = [part for step in range(num_steps) for part in whole_step(step, 5.0, 5.0)]
    back = EntryRecord(group=0, index=500, entry={"entry": "commit", "step": first, "attempt": 500, "admit": [[1, 1]]})
    slow = FaultRecord(group=0, rank=0, step=first + 1, phase="forward", kind="slow")
    at_s = first * STEP_S + 8.0
    found = calibrate(journal_of((0.0, RUN), *parts, (at_s, back), (at_s + 1.0, slow)))
    assert found.num_steps == num_steps - 2 * WARM_UP_STEPS
    assert (found.num_joins, found.join_s) == (0, None)
    assert "how long it takes to admit groups" in found.unmeasured[-1]


# --------------------------------------------------------------------------------- simulated runs give their costs back

COSTS = CostModel(
    compute_s=9.0, pipeline_fill=0.5, reduce_s=1.5, update_s=0.5, detect_s=0.75, agree_s=0.25, retry_s=0.125
)


def simulated(costs: CostModel, num_steps: int = 40) -> Journal:
    """Four groups, of which one is lost while it computes and another in a reduction."""
    first = Loss(at_s=computed_at_s(costs, (), num_steps, step=5) - 1.0, groups=(GroupId(2),))
    second = Loss(at_s=computed_at_s(costs, (first,), num_steps, step=20) + 1.0, groups=(GroupId(0),))
    return run_of(costs, (first, second), num_steps)


def computed_at_s(costs: CostModel, losses: tuple[Loss, ...], num_steps: int, step: int) -> float:
    lines = run_of(costs, losses, num_steps).lines
    return max(at.at_s for at in lines if isinstance(at.record, ContributionRecord) and at.record.step == step)


def run_of(costs: CostModel, losses: tuple[Loss, ...], num_steps: int) -> Journal:
    scenario = Scenario(
        name="simulated",
        num_groups=4,
        redundancy=3,
        microbatches_per_shard=4,
        num_steps=num_steps,
        costs=costs,
        failures=FailureSpec(kind="trace", trace=losses) if losses else FailureSpec(),
        save_interval_s=float("inf"),
    )
    lines: list[Line] = []
    simulate(scenario, 0, journal=lines.append)
    return in_order(lines)


@pytest.mark.parametrize("full_speed_groups", [float("inf"), 2.0, 1.0])
def test_a_simulated_run_gives_its_costs_back(full_speed_groups: float) -> None:
    costs = dataclasses.replace(COSTS, full_speed_groups=full_speed_groups)
    found = calibrate(simulated(costs))
    assert (found.num_steps, found.num_recoveries) == (40 - WARM_UP_STEPS - 2, 2)
    measured = {name: value for name, value in found.costs.items() if name != "jitter"}
    assert measured == pytest.approx({name: costs.terms()[name] for name in measured})
    assert {"detect_s", "agree_s", "retry_s"} < set(measured)
    assert found.jitter == pytest.approx(0.0, abs=1e-9)


def test_jitter_disturbs_the_costs_little_and_is_found() -> None:
    costs = dataclasses.replace(COSTS, jitter=0.05, full_speed_groups=1.0)
    found = calibrate(simulated(costs, num_steps=400))
    assert found.compute_s == pytest.approx(costs.compute_s, rel=0.02)
    assert found.jitter == pytest.approx(0.05, rel=0.15)
    assert np.isfinite([state.residual for state in found.fit.states]).all()
