"""Costs from a journal: hand-made times have to come out again."""

import pytest

from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import (
    ContributionRecord,
    FaultRecord,
    Line,
    Record,
    RecoveryRecord,
    RunRecord,
    UpdateRecord,
)
from spare_megatron.simulator.calibrate import calibrate
from spare_megatron.simulator.costs import CostModel

STEP_S = 10.0
RUN = RunRecord(
    name="hand-made",
    num_groups=2,
    ranks_per_group=1,
    redundancy=2,
    microbatches_per_shard=4,
    num_steps=3,
    placement="golomb",
    granularity="microbatch",
    reduce_mode="fast",
    faults=[],
)


def part_of_step(group: int, step: int, compute_s: float, num_microbatches: int = 4) -> list[tuple[float, Record]]:
    """A group computes this long, and every step is applied 8 s after it began."""
    began_s = step * STEP_S
    contribution = ContributionRecord(
        group=group,
        step=step,
        attempt=step,
        epoch=0,
        members=[0, 1],
        microbatches={str(group): list(range(num_microbatches))},
    )
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
    return [(began_s + compute_s, contribution), (began_s + 8.0, update)]


def journal_of(*records: tuple[float, Record]) -> Journal:
    lines = (Line(source="test", at_s=at_s, record=record) for at_s, record in records)
    return Journal(lines=tuple(sorted(lines, key=lambda line: line.at_s)))


def loss_in(step: int, patch_s: float, num_patched: int) -> list[tuple[float, Record]]:
    at_s = step * STEP_S + 6.0
    recovery = RecoveryRecord(
        group=0,
        step=step,
        lost=[1],
        computed_at_s=at_s - 1.0,
        noticed_at_s=at_s + 0.5,
        agree_s=0.25,
        patch_s=patch_s,
        rebuild_s=0.125,
        reduce_s=0.0625,
        num_patched=num_patched,
    )
    return [(at_s, FaultRecord(group=1, rank=0, step=step, phase="backward", kind="kill")), (at_s + 2.0, recovery)]


def test_steps_without_a_loss_give_compute_and_the_rest_of_a_step() -> None:
    parts = [part for step in range(3) for group in (0, 1) for part in part_of_step(group, step, 5.0 + group)]
    found = calibrate(journal_of((0.0, RUN), *parts))
    assert found.num_steps == 3
    assert found.compute_s == pytest.approx(5.5)
    assert found.reduce_s == pytest.approx(2.0)  # from the contribution of the slower group
    assert found.jitter == pytest.approx(1.4826 * 0.5 / 5.5)
    assert (found.detect_s, found.rebuild_s, found.patch_s) == (None, None, None)
    assert set(found.costs) == {"compute_s", "reduce_s", "jitter"}


def test_compute_is_counted_per_shard_whatever_the_load() -> None:
    parts = part_of_step(0, 0, 6.0, num_microbatches=8)
    assert calibrate(journal_of((0.0, RUN), *parts)).compute_s == pytest.approx(3.0)


def test_recoveries_give_their_stages_and_their_steps_no_compute() -> None:
    clean = [*part_of_step(0, 0, 5.0), *part_of_step(1, 0, 5.0)]
    found = calibrate(journal_of((0.0, RUN), *clean, *part_of_step(0, 1, 1.0), *loss_in(1, 0.5, num_patched=2)))
    assert (found.num_steps, found.num_recoveries) == (1, 1)
    assert found.compute_s == pytest.approx(5.0)
    assert found.detect_s == pytest.approx(0.5)
    assert (found.agree_s, found.rebuild_s, found.retry_s) == (0.25, 0.125, 0.0625)
    assert found.patch_s == pytest.approx(0.25)


def test_what_was_measured_are_costs_of_the_cost_model() -> None:
    clean = [*part_of_step(0, 0, 5.0), *part_of_step(1, 0, 5.0)]
    found = calibrate(journal_of((0.0, RUN), *clean, *loss_in(1, 0.5, num_patched=2)))
    terms = CostModel(**found.costs).terms()
    assert {name: terms[name] for name in found.costs} == found.costs


def test_a_journal_with_nothing_to_measure_says_so() -> None:
    with pytest.raises(ValueError, match="no run record"):
        calibrate(journal_of())
    with pytest.raises(ValueError, match="no step that was committed without a loss"):
        calibrate(journal_of((0.0, RUN)))
