"""Replays: of a simulated run nothing is left to explain; of a changed one exactly what was changed."""

import dataclasses
from collections.abc import Callable

import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import ContributionRecord, EntryRecord, RecoveryRecord, UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.recoveries import find_recoveries
from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate import run_replay
from spare_megatron.tools.simulate.calibrate import calibrate
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec, Loss
from spare_megatron.tools.simulate.measured import WARM_UP_STEPS, LossTime, in_order, read_joins, read_steps
from spare_megatron.tools.simulate.run_replay import RunReplay, replay
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.world import World

COSTS = CostModel(
    compute_s=40.0,
    pipeline_fill=0.5,
    full_speed_groups=2.0,
    reduce_s=2.0,
    update_s=0.5,
    detect_s=3.0,
    agree_s=1.0,
    retry_s=0.25,
)
BASE = Scenario(
    name="small",
    num_groups=5,
    redundancy=4,
    microbatches_per_shard=4,
    num_steps=40,
    costs=COSTS,
    save_interval_s=float("inf"),
)


def journal_of(*losses: tuple[float, int], **changes: object) -> Journal:
    trace = tuple(Loss(at_s=at_s, groups=(GroupId(group),)) for at_s, group in losses)
    scenario = dataclasses.replace(BASE, failures=FailureSpec(kind="trace", trace=trace) if trace else FailureSpec())
    lines: list[Line] = []
    simulate(dataclasses.replace(scenario, **changes), 0, journal=lines.append)  # type: ignore[arg-type]
    return in_order(lines)


def in_reduction(step: int, *losses: tuple[float, int], **changes: object) -> float:
    """A second before the end of the reduction of a step, after these losses."""
    lines = journal_of(*losses, **changes).lines
    return 1.0 + max(at.at_s for at in lines if isinstance(at.record, ContributionRecord) and at.record.step == step)


def times_of(found: RunReplay) -> list[tuple[float, float | None]]:
    times = [one.time for one in (*found.steps, *found.recoveries, *found.joins)]
    return [(time.measured_s, time.predicted_s) for time in times]


def test_the_replay_of_a_simulated_run_is_the_run() -> None:
    first = (615.0, 1)
    second = (in_reduction(15, first), 3)
    third = (in_reduction(25, first, second) + 9.0, 4)  # during the next step
    journal = journal_of(first, second, third)
    found = replay(journal, COSTS)
    assert [step.num_alive for step in found.steps] == [5, 4, 3, 2]
    assert len(found.recoveries) == 3
    for measured_s, predicted_s in times_of(found):
        assert predicted_s == pytest.approx(measured_s, rel=1e-9)
    again = replay(journal, CostModel(**calibrate(journal).costs))
    for measured_s, predicted_s in times_of(again):
        assert predicted_s == pytest.approx(measured_s, rel=1e-6)


def test_two_losses_in_one_step_are_replayed_at_their_moments() -> None:
    first = (615.0, 1)
    while_patching = (in_reduction(5, first) - 6.0, 3)
    journal = journal_of(first, while_patching)
    assert [recovery.lost for recovery in find_recoveries(journal)] == [(1, 3)]
    found = replay(journal, COSTS)
    for measured_s, predicted_s in times_of(found):
        assert predicted_s == pytest.approx(measured_s, rel=1e-9)


def test_a_run_is_simulated_once_however_many_losses_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = run_with_joins()
    computed: list[int] = []
    compute = World.compute

    def counted(self: World, step: int, stacks: float) -> None:
        computed.append(step)
        compute(self, step, stacks)

    monkeypatch.setattr(World, "compute", counted)
    assert len(replay(journal, WITH_JOINS).recoveries) == 3
    assert computed == list(range(40))


def slower_after(journal: Journal, at_s: float, pause_s: float, step: int) -> Journal:
    """The same run, had it stood still for a while then, in this step."""

    def later(line: Line) -> Line:
        if line.at_s <= at_s:
            return line
        record = line.record
        if isinstance(record, UpdateRecord) and record.step == step:
            record = dataclasses.replace(record, step_s=record.step_s + pause_s)
        if isinstance(record, RecoveryRecord) and record.noticed_at_s < at_s:
            record = dataclasses.replace(record, agree_s=record.agree_s + pause_s)
        elif isinstance(record, RecoveryRecord):
            times = {name: getattr(record, name) + pause_s for name in ("computed_at_s", "noticed_at_s")}
            record = dataclasses.replace(record, **times)  # type: ignore[arg-type]
        return dataclasses.replace(line, at_s=line.at_s + pause_s, record=record)

    return in_order([later(line) for line in journal.lines])


def test_a_loss_after_a_slow_reduction_that_it_did_not_stop_is_replayed_in_its_step() -> None:
    """It was replayed as long after the compute as it had come, steps later, with the next loss while it was away."""
    in_update_s = in_reduction(5) + 4.1  # the reduction is over 4 s after this second
    changes = {"redundancy": 2, "repair_s": 0.0}
    losses = [(in_update_s, 1)]
    losses.append((in_reduction(9, *losses, **changes) - 20.0, 2))
    journal = journal_of(*losses, **changes)
    assert {"restart"}.isdisjoint(record.entry["entry"] for record in journal.of(EntryRecord))
    contributed_s = max(
        at.at_s for at in journal.lines if isinstance(r := at.record, ContributionRecord) and r.step == 5
    )
    found = replay(slower_after(journal, contributed_s, 700.0, step=5), COSTS)
    again = replay(journal, COSTS)
    assert found.wall.measured_s == pytest.approx(again.wall.measured_s + 700.0)
    assert found.wall.predicted_s == pytest.approx(again.wall.predicted_s, abs=1.0)
    assert [recovery.step for recovery in found.recoveries] == [6, 9]
    for recovery in found.recoveries:
        assert recovery.time.predicted_s == pytest.approx(recovery.time.measured_s, rel=1e-9)


def test_single_slow_steps_and_recoveries_count_for_the_wall_time_and_for_no_other() -> None:
    """A run of 70 s in which one recovery took 6 s was predicted to take 12% less."""
    changes = {"repair_s": 0.0, "num_steps": 60}
    losses: list[tuple[float, int]] = []
    for step in (8, 16, 24, 32):
        losses.append((in_reduction(step, *losses, **changes), 1))
    journal = journal_of(*losses, **changes)
    usual = replay(journal, CostModel(**calibrate(journal).costs))
    slow = slower_after(journal, losses[2][0] + 4.5, 300.0, step=24)  # noticed after 3 s, agreed on after another
    began_s = next(step.began_at_s for step in read_steps(slow) if step.step == 50)
    slow = slower_after(slow, began_s + 1.0, 200.0, step=50)
    began_s = next(step.began_at_s for step in read_steps(slow) if step.step == 19)
    slow = slower_after(slow, began_s + 1.0, 100.0, step=19)
    found = calibrate(slow)
    assert found.costs == pytest.approx(calibrate(journal).costs)
    assert found.scatter.recovery_s == pytest.approx(300.0 / 4)
    assert found.scatter.warm_up_s == pytest.approx(100.0 / 12, rel=0.01)
    predicted = replay(slow, CostModel(**found.costs), found.scatter)
    assert predicted.wall.measured_s == pytest.approx(usual.wall.measured_s + 600.0)
    assert predicted.wall.error == pytest.approx(0.0, abs=0.02)
    without = replay(slow, CostModel(**found.costs))
    assert without.wall.error == pytest.approx(-600.0 / predicted.wall.measured_s, abs=0.02)
    assert predicted.steps == without.steps
    assert predicted.recoveries == without.recoveries


def test_hosts_in_different_domains_are_replayed_where_they_were() -> None:
    """With the placement that knows of no domains neighbours share a shard, and the loss of both is a wipe-out."""
    journal = journal_of((2500.0, 1), (4500.0, 2), num_groups=8, redundancy=2, groups_per_domain=4)
    assert {"restart"}.isdisjoint(record.entry["entry"] for record in journal.of(EntryRecord))
    found = replay(journal, COSTS)
    assert [step.num_alive for step in found.steps] == [8, 7, 6]
    for measured_s, predicted_s in times_of(found):
        assert predicted_s == pytest.approx(measured_s, rel=1e-9)


@pytest.mark.parametrize("lost_in_it", [2, 3], ids=["earlier", "one in the same step"])
def test_a_group_lost_after_the_sum_is_lost_after_it_again(lost_in_it: int) -> None:
    """With three of five groups away the fourth is one too many, but for a sum that is complete: they are back then."""

    def run(*losses: Loss) -> Journal:
        scenario = dataclasses.replace(BASE, failures=FailureSpec(kind="trace", trace=losses))
        lines: list[Line] = []
        simulate(scenario, 0, journal=lines.append)
        return in_order(lines)

    def times(number: int) -> tuple[float, float]:
        steps = read_steps(journal_of(*((loss.at_s, int(loss.groups[0])) for loss in away[:number])))
        return steps[16].began_at_s, steps[16].ended_at_s

    away: list[Loss] = []
    for group in (1, 2, 3):
        began_s, _ = times(len(away))
        at_s = (began_s if group >= lost_in_it else 600.0) + group
        away.append(Loss(at_s=at_s, groups=(GroupId(group),)))
    began_s, ended_s = times(3)
    back = [dataclasses.replace(loss, repair_s=began_s + 10.0 - loss.at_s) for loss in away]
    journal = run(*back, Loss(at_s=ended_s - COSTS.update_s / 2, groups=(GroupId(4),)))
    assert {"restart"}.isdisjoint(record.entry["entry"] for record in journal.of(EntryRecord))
    found = replay(journal, dataclasses.replace(COSTS, reduce_s=2 * COSTS.reduce_s))
    assert found.wall.predicted_s is not None
    assert found.wall.measured_s < found.wall.predicted_s < 1.1 * found.wall.measured_s


def test_slower_processors_are_predicted_to_be_slower() -> None:
    journal = journal_of((615.0, 1))
    found = replay(journal, dataclasses.replace(COSTS, compute_s=2 * COSTS.compute_s))
    reduce_s = (COSTS.reduce_s + COSTS.update_s) * 5 / 2
    step = found.steps[0].time
    assert step.predicted_s == pytest.approx(2 * step.measured_s - reduce_s)
    assert found.steps[0].time.error == pytest.approx(1 - reduce_s / step.measured_s)
    assert found.median_recovery is not None
    assert found.median_recovery.error is not None
    assert found.median_recovery.error > 0.5


def test_times_that_the_simulator_has_nothing_like_are_not_predicted() -> None:
    """A group lost when all survivors held the sum: nothing is patched, and the step is not reduced again."""
    journal = journal_of((615.0, 1))
    without_retry = tuple(
        line
        for line in journal.lines
        if not (isinstance(r := line.record, EntryRecord) and r.entry["entry"] == "retry")
    )
    found = replay(Journal(lines=without_retry), COSTS)
    assert [recovery.time.predicted_s for recovery in found.recoveries] == [None]
    assert found.median_recovery is None


def test_a_run_is_replayed_up_to_the_first_restart() -> None:
    restarted = replay(journal_of((615.0, 1), redundancy=1, save_interval_s=400.0), COSTS)
    assert [step.num_alive for step in restarted.steps] == [5]
    assert restarted.recoveries == ()


def test_a_wipe_out_that_the_run_did_not_have_leaves_its_wall_time_unpredicted() -> None:
    """As where another version of the run's code placed shards otherwise."""
    lines = journal_of((615.0, 1)).lines
    frail = [
        dataclasses.replace(line, record=dataclasses.replace(line.record, redundancy=1))
        if isinstance(line.record, RunRecord)
        else line
        for line in lines
    ]
    found = replay(in_order(frail), COSTS)
    assert found.wall.predicted_s is None
    assert found.wall.error is None
    assert [recovery.time.predicted_s for recovery in found.recoveries] == [None]


WITH_JOINS = dataclasses.replace(COSTS, join_s=7.0)


def run_with_joins() -> Journal:
    """Group 1 is lost in a step and twice in a reduction, group 3 with it the last time, and all come back."""
    changes = {"costs": WITH_JOINS, "repair_s": 250.0}
    losses = [(615.0, 1)]
    losses.append((in_reduction(15, *losses, **changes), 1))
    last_s = in_reduction(25, *losses, **changes)
    return journal_of(*losses, (last_s, 1), (last_s + 0.5, 3), **changes)


def test_the_replay_of_a_run_whose_groups_come_back_is_the_run() -> None:
    journal = run_with_joins()
    incarnations = [tuple(r.entry["admit"]) for r in journal.of(EntryRecord) if r.entry.get("admit") and r.group == 0]
    assert incarnations == [((1, 1),), ((1, 2),), ((1, 3), (3, 1))]
    found = replay(journal, WITH_JOINS)
    assert [(step.num_alive, step.num_steps > 0) for step in found.steps] == [(5, True), (4, True), (3, True)]
    assert [recovery.lost for recovery in found.recoveries] == [(1,), (1,), (1, 3)]
    assert [join.groups for join in found.joins] == [(1,), (1,), (1, 3)]
    for measured_s, predicted_s in times_of(found):
        assert predicted_s == pytest.approx(measured_s, rel=1e-9)
    assert found.wall.predicted_s == pytest.approx(found.wall.measured_s, rel=1e-9)
    assert found.median_join is not None
    assert found.median_join.measured_s == pytest.approx(WITH_JOINS.join_s)
    again = replay(journal, CostModel(**calibrate(journal).costs))
    for measured_s, predicted_s in times_of(again):
        assert predicted_s == pytest.approx(measured_s, rel=1e-6)


def test_steps_after_groups_came_back_measure_as_those_before() -> None:
    journal = run_with_joins()
    steps = read_steps(journal)
    joins = {join.step for join in read_joins(journal, steps)}
    assert {step.step for step in steps if step.disturbance == "join"} == {
        step for join in joins for step in range(join, join + WARM_UP_STEPS)
    }
    assert sum(step.is_clean and step.step > max(joins) for step in steps) > 5


def test_a_simulated_recovery_adds_up_to_what_the_step_took_longer() -> None:
    journal = journal_of((615.0, 1))
    [recovery] = find_recoveries(journal)
    assert (recovery.detect_s, recovery.agree_s) == (0.0, pytest.approx(1.0))  # the survivors computed meanwhile
    records = journal.of(RecoveryRecord)
    assert {record.group for record in records} == {0, 2, 3, 4}
    assert recovery.num_patched == 4
    # Four groups compute a microbatch each, 1.5 of 4.5 with the fill, at half of full speed.
    assert recovery.patch_s == pytest.approx(40.0 * 3.0 / 4.5)
    # 0.25 s and the reduction over four groups.
    assert (recovery.rebuild_s, recovery.reduce_s) == (0.0, pytest.approx(0.25 + 2.0 * 2))


@pytest.mark.parametrize(
    "without", [lambda record: isinstance(record, RunRecord), lambda record: not isinstance(record, RunRecord)]
)
def test_a_journal_with_nothing_to_replay_says_so(without: Callable[[object], bool]) -> None:
    lines = tuple(line for line in journal_of().lines if not without(line.record))
    with pytest.raises(ValueError, match="no committed step to replay"):
        replay(Journal(lines=lines), COSTS)


def test_a_loss_of_a_group_that_was_added_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an IndexError."""
    added = LossTime(group=BASE.num_groups, step=5, into_s=1.0, back_after=None)
    monkeypatch.setattr(run_replay, "read_losses", lambda *_: (added,))
    with pytest.raises(ValueError, match="lost group 5, which was added to its first 5"):
        replay(journal_of((615.0, 4)), COSTS)
