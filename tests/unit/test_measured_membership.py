"""Who was lost and admitted again, when, and what recoveries take, from hand-made journals."""

from random import Random

import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import EntryRecord, FaultRecord, LossRecord, Record, UpdateRecord
from spare_megatron.rank.recovery_clock import RecoveryClock
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import Microbatch, Work, work_of
from spare_megatron.tools.simulate.measured import JoinTime, LossTime, MeasuredStep, in_order, read_joins, read_losses
from tests.unit.journal_in_memory import run_record

RUN = run_record(2, name="hand-made", microbatches_per_shard=4, num_steps=30)
STEP_S = 10.0


def journal_of(*records: tuple[float, Record]) -> Journal:
    return in_order([Line(source="test", at_s=at_s, record=record) for at_s, record in ((0.0, RUN), *records)])


def step_of(step: int, *, groups: int = 2, lasts_s: float = 9.0, disturbance: str = "") -> MeasuredStep:
    """It ends a second before the next one begins, unless it lasts longer than usual."""
    began_s = step * STEP_S
    return MeasuredStep(
        step=step,
        loads=dict.fromkeys(range(groups), 4),
        compute_s=dict.fromkeys(range(groups), 5.0),
        reduce_s=1.0,
        update_s=1.0,
        step_s=lasts_s,
        began_at_s=began_s,
        ended_at_s=began_s + lasts_s,
        disturbance=disturbance,  # type: ignore[arg-type]
    )


def entry(index: int, **fields: object) -> EntryRecord:
    return EntryRecord(group=0, index=index, entry=fields)


def commit(index: int, step: int, attempt: int, **more: object) -> EntryRecord:
    return entry(index, entry="commit", step=step, attempt=attempt, **more)


def update(group: int, step: int) -> UpdateRecord:
    return UpdateRecord(
        group=group,
        step=step,
        attempt=step,
        num_microbatches=8,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        makespan=4,
        step_s=9.0,
    )


STEPS = tuple(step_of(step) for step in range(6))


def test_a_group_is_lost_in_two_incarnations_and_not_in_the_one_that_never_joined() -> None:
    journal = journal_of(
        (9.0, commit(0, 0, 0)),
        (12.0, FaultRecord(group=1, rank=0, step=1, phase="forward", kind="kill")),
        (13.0, entry(1, entry="fence", group=1, incarnation=0)),
        (13.5, LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=1)),
        (14.0, entry(2, entry="retry", step=1, attempt=1)),
        (15.0, entry(3, entry="fence", group=1, incarnation=1)),  # it waited to be admitted
        (19.0, commit(4, 1, 2, admit=[[1, 1], [1, 2]])),
        (29.0, commit(5, 2, 3)),
        (29.5, update(1, 2)),
        (34.0, LossRecord(group=1, rank=0, cause="SIGSEGV", entry_index=6, incarnation=2)),
        (34.5, entry(6, entry="fence", group=1, incarnation=2)),
    )
    assert read_losses(journal, STEPS) == (
        LossTime(group=1, step=1, into_s=pytest.approx(2.0), back_after=1),
        LossTime(group=1, step=3, into_s=pytest.approx(4.0), back_after=None),
    )


def test_a_fault_that_a_group_survived_dates_no_later_loss() -> None:
    journal = journal_of(
        (12.0, FaultRecord(group=1, rank=0, step=1, phase="forward", kind="slow")),
        (18.0, update(1, 1)),
        (33.0, entry(0, entry="fence", group=1, incarnation=0)),
    )
    assert [(loss.step, loss.into_s) for loss in read_losses(journal, STEPS)] == [(3, pytest.approx(3.0))]


def test_a_loss_while_groups_are_admitted_is_found_in_the_step_that_follows() -> None:
    journal = journal_of((19.5, LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=0)))
    assert [(loss.step, loss.into_s) for loss in read_losses(journal, STEPS)] == [(2, 0.0)]


def test_losses_after_the_last_step_are_left_out() -> None:
    journal = journal_of((59.5, LossRecord(group=1, rank=0, cause="SIGKILL", entry_index=0)))
    assert read_losses(journal, STEPS) == ()
    assert read_losses(journal, ()) == ()


def test_a_join_costs_what_the_next_step_ends_later_than_usual() -> None:
    journal = journal_of(
        (8.0, entry(0, entry="fence", group=1, incarnation=0)),
        (9.0, commit(1, 0, 0, admit=[[1, 1]])),
        (19.0, commit(2, 1, 1)),
    )
    after = (step_of(1, lasts_s=12.5, disturbance="join"), *STEPS[2:])
    # Step 2 ends 6.5 s after step 1, and is as quiet as the others: the median of 6.5, 10, 10, 10 counts.
    assert read_joins(journal, (STEPS[0], *after)) == (JoinTime(step=1, groups=(1,), pause_s=pytest.approx(3.5)),)


@pytest.mark.parametrize("what", ["a loss in it", "no quiet step", "no step before"])
def test_a_join_that_cannot_be_distinguished_from_other_events_measures_nothing(what: str) -> None:
    journal = journal_of((8.0, entry(0, entry="fence", group=1)), (9.0, commit(1, 0, 0, admit=[[1, 1]])))
    joined = step_of(1, lasts_s=12.5, disturbance="loss" if what == "a loss in it" else "join")
    others = tuple(step_of(step, groups=1 if what == "no quiet step" else 2) for step in range(2, 6))
    steps = (joined, *others) if what == "no step before" else (STEPS[0], joined, *others)
    assert read_joins(journal, steps) == ()


SHAPE = (4, 3)
GROUPS = [GroupId(group) for group in range(4)]


def work(owners: dict[int, list[tuple[int, int]]]) -> Work:
    return work_of({GroupId(group): [Microbatch(*item) for item in items] for group, items in owners.items()}, SHAPE)


def drawn_work(random: Random, groups: list[GroupId]) -> Work:
    items = [(shard, index) for shard in range(SHAPE[0]) for index in range(SHAPE[1]) if random.random() < 0.4]
    owners: dict[int, list[tuple[int, int]]] = {group: [] for group in groups}
    for item in items:
        owners[random.choice(groups)].append(item)
    return work(owners)


def clocks() -> dict[GroupId, RecoveryClock]:
    return {group: RecoveryClock(group, lambda *_: None) for group in GROUPS}


def recovered(group: RecoveryClock) -> int:
    return sum(record.num_patched for record in group.pop_finished())


def test_a_group_that_is_lost_while_it_computes_a_patch_has_computed_nothing_that_counts() -> None:
    """The metrics counted its part as well, and the summary did not."""
    survivors = clocks()
    del survivors[GROUPS[3]]
    for clock in survivors.values():
        clock.on_computed()
        clock.on_group_lost(5, GROUPS[3])
        clock.on_patched(work({0: [(3, 0)], 1: [(3, 1)], 2: [(3, 2)]}))
    del survivors[GROUPS[2]]
    for clock in survivors.values():
        clock.on_group_lost(5, GROUPS[2])
        clock.on_patched(work({0: [(2, 0), (3, 2)], 1: [(2, 1)]}))
        clock.on_reduced(1e12)
    assert [clock.on_commit() for clock in survivors.values()] == [5, 5]
    assert [recovered(clock) for clock in survivors.values()] == [3, 2]


def test_a_step_that_is_computed_again_without_a_loss_is_no_recovery() -> None:
    [clock, *_] = clocks().values()
    clock.on_patched(work({0: [(0, 0)]}))
    assert (clock.on_commit(), recovered(clock)) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_metrics_and_records_add_up_to_the_same(seed: int) -> None:
    """In 1,000 drawn steps: losses before, in and after patches, steps begun anew, pauses, evaluations in between."""
    random, of_metrics, of_records, num_hit = Random(seed), 0, 0, 0
    for step in range(250):
        survivors = clocks()
        for clock in survivors.values():
            clock.on_computed()
        for _ in range(random.randint(0, 8)):
            match random.choice(["loss", "patch", "patch", "decided", "pause"]):
                case "loss" if len(survivors) > 1:
                    lost = random.choice(list(survivors))
                    del survivors[lost]
                    for clock in survivors.values():
                        clock.on_group_lost(step, lost)
                case "patch":
                    patch = drawn_work(random, list(survivors))
                    for clock in survivors.values():
                        clock.on_patched(patch)
                case "decided":
                    for clock in survivors.values():
                        clock.on_decided()
                case "pause" if random.random() < 0.2:
                    for clock in survivors.values():
                        clock.on_pause()
        for clock in survivors.values():
            clock.on_reduced(1e12)
        [counted] = {clock.on_commit() for clock in survivors.values()}
        of_metrics += counted
        of_records += sum(map(recovered, survivors.values()))
        num_hit += counted > 0
    assert of_metrics == of_records
    assert num_hit > 50
