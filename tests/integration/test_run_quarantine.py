"""Whole runs with slow groups, which get less work, and with machines in quarantine."""

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import AuditConfig, ClusterConfig, FaultConfig, FaultsConfig, LayoutConfig, RunConfig
from spare_megatron.driver.planned_faults import resolve_trace
from spare_megatron.driver.run import look_at_machine
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import (
    ContributionRecord,
    ExaminationRecord,
    FaultRecord,
    LadderRecord,
    PacesRecord,
    PlacesRecord,
)
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.process.reports import MachineQuarantined, RunEvent
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    Run,
    complete_run,
    entries_of,
    fenced_groups,
    kill,
    losses_of,
    params_of,
    tiny_config,
)

pytestmark = pytest.mark.timeout(300)

SLOW_GROUP_STEPS, GROUP_SLOW_FROM, LOST_IN = 24, 3, 16
MICROBATCHES = 6
SLOW = FaultConfig(phase=FaultPoint.FORWARD, kind="slow", step=GROUP_SLOW_FROM, group=1, rank=0, factor=4.0)


def test_a_slow_group_gets_less_work_and_nothing_else_changes(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=SLOW_GROUP_STEPS,
        faults=[SLOW, kill("forward", LOST_IN, 1)],
        num_microbatches=MICROBATCHES,
        mode="reproducible",
        rejoins=1,
        deal_by_pace=True,
    )
    run = complete_run(config, tmp_path / "slow")
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary.reasons
    assert {(fault.kind, fault.group) for fault in run.journal.of(FaultRecord)} == {("slow", 1), ("kill", 1)}
    assert fenced_groups(run.journal) == {1}

    changes = run.journal.of(PacesRecord)
    by_step = defaultdict(list)
    for change in changes:
        by_step[change.step].append(change.permille)
    assert all(permille == of_step[0] for of_step in by_step.values() for permille in of_step), "all folds agree"
    known_in = min(step for step, (permille, *_) in by_step.items() if int(permille.get("1", 0)) > 2000)
    assert GROUP_SLOW_FROM + 3 <= known_in < LOST_IN
    loads = {
        (record.step, record.group): sum(map(len, record.microbatches.values()))
        for record in run.journal.of(ContributionRecord)
    }
    assert loads[GROUP_SLOW_FROM, 1] == MICROBATCHES
    [_, lost] = resolve_trace(config)
    assert loads[LOST_IN - 1, 1] < lost.ordinal, "it struck although the group did not come so far"
    assert loads.get((known_in, 1), 0) < MICROBATCHES < max(loads[known_in, group] for group in (0, 2, 3))
    assert any(entry.get("paces") for entry in entries_of(run.journal))
    texts = [event.text for event in read_run_state(run.run_dir).events()]
    assert any(f"from step {known_in} on work is dealt by pace" in text for text in texts)

    calm = complete_run(
        replace(config, faults=FaultsConfig(), spare=replace(config.spare, deal_by_pace=False)), tmp_path / "calm"
    )
    assert calm.journal.of(PacesRecord) == []
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert params_of(run)[SLOW_GROUP_STEPS] == params_of(calm)[SLOW_GROUP_STEPS]


STEPS, AUDITED, BACK_FROM = 7, 2, 5
HEARTBEAT_S = 1.5
"""Sets how long the machine waits for its next examination, and what a change is taken to cost."""


def test_an_outvoted_machine_stays_out_until_its_examination_passes_and_no_bit_changes(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Its layer drifts for some seconds, in which its matrix products do, too: in the first examination, also if that
    is late, and not any more in the third, 18 s later.
    """
    fault = FaultConfig(phase=FaultPoint.FORWARD, step=AUDITED, group=2, kind="drift", seconds=15.0)
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=STEPS,
        faults=[fault],
        mode="reproducible",
        rejoins=1,
        cluster=ClusterConfig(device="cpu", num_nodes=4),
        heartbeat_s=HEARTBEAT_S,
    )
    config = replace(config, audit=AuditConfig(every_steps=AUDITED + 1))
    watch = Watch(awaited=frozenset({(BACK_FROM - 1, Member(GroupId(2), 1))}))
    run = complete_run(config, tmp_path / "run", watch)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    assert [record.kind for record in run.journal.of(FaultRecord)] == ["drift"]
    assert fenced_groups(run.journal) == {2}
    begun, ended = {record.index: record for record in run.journal.of(PlacesRecord)}.values()
    assert [(machine, cause) for machine, cause, _ in begun.quarantined] == [(2, "outvoted")]
    assert "agree on other values" in str(begun.quarantined[0][2])
    assert ended.released == [2]
    *failed, passed = run.journal.of(ExaminationRecord)
    reasons = [one.reason for one in failed]
    assert any("values of a product in float32 on cpu are wrong" in reason for reason in reasons), reasons
    assert (passed.machine, passed.reason) == (2, "")
    assert set() < {*passed.likes} <= {"0", "1", "3"}, "a busy one may be late"
    assert passed.own is not None
    assert set() < {*passed.own["linked"]} <= {0, 1, 3}, "known content has gone there and come back"
    assert [event.machine for event in run.events if isinstance(event, MachineQuarantined)] == [2]
    assert len([event for event in run.events if isinstance(event, ExaminationRecord)]) == len(failed) + 1
    run_state = read_run_state(run.run_dir)
    assert run_state.quarantined == {}
    texts = " ".join(event.text for event in run_state.events())
    assert re.search(
        r"machine 2 stays in quarantine: \d+ of 65536 values of a product in float32 on cpu are wrong", texts
    )
    assert "machine 2 has passed its examination" in texts

    calm = complete_run(replace(config, faults=FaultsConfig()), tmp_path / "calm")
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert params_of(run)[STEPS] == params_of(calm)[STEPS]


def examined_before_the_last_step(config: RunConfig, folder: Path) -> Run:
    is_examined = folder / "examined"

    def on_event(event: RunEvent) -> None:
        if isinstance(event, ExaminationRecord):
            is_examined.touch()

    watch = Watch(files=frozenset({(config.train.steps - 1, is_examined)}))
    run = complete_run(config, folder / "run", watch, on_event)
    assert (run.summary.outcome, run.summary.verdict) == ("finished", "valid"), run.summary
    return run


MORE_STEPS = 30


def test_machines_that_train_do_the_same_between_two_steps_and_no_bit_changes(
    text_corpus: Path, tmp_path: Path
) -> None:
    """The others go on without the machine that is examined. The last step waits for its examination."""
    fault = FaultConfig(phase=FaultPoint.FORWARD, step=AUDITED, group=2, kind="drift", seconds=1.0)
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=MORE_STEPS,
        faults=[fault],
        mode="reproducible",
        rejoins=1,
        cluster=ClusterConfig(device="cpu", num_nodes=4),
        heartbeat_s=2 * HEARTBEAT_S,
    )
    config = replace(config, audit=AuditConfig(every_steps=AUDITED + 1))
    run = examined_before_the_last_step(config, tmp_path)
    assert [record.kind for record in run.journal.of(FaultRecord)] == ["drift"]
    assert fenced_groups(run.journal) == {2}
    likes = [like for record in run.journal.of(ExaminationRecord) for like in record.likes.values()]
    assert any(AUDITED <= like["after_step"] < MORE_STEPS - 1 for like in likes), likes

    calm = complete_run(replace(config, faults=FaultsConfig()), tmp_path / "calm")
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert params_of(run)[MORE_STEPS] == params_of(calm)[MORE_STEPS]


SLOW_STEPS, SLOW_FROM = 120, 4


def test_a_slow_machine_is_drained_examined_and_replaced_by_a_spare_one_and_no_bit_changes(
    text_corpus: Path, tmp_path: Path
) -> None:
    """Its passes are slow for as long as the run lasts, so it stays out. The last step waits for its examination."""
    fault = FaultConfig(
        phase=FaultPoint.FORWARD, step=SLOW_FROM, group=1, rank=0, kind="slow", factor=40.0, seconds=600.0
    )
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        steps=SLOW_STEPS,
        faults=[fault],
        mode="reproducible",
        rejoins=1,
        cluster=ClusterConfig(device="cpu", num_nodes=4),
        heartbeat_s=HEARTBEAT_S,
    )
    config = replace(
        config,
        layout=LayoutConfig(num_groups=3, max_groups=4),
        spare=replace(config.spare, redundancy=3),
        data=replace(config.data, access="shared"),
    )
    assert problems(config, look_at_machine(config)) == []
    run = examined_before_the_last_step(config, tmp_path)
    assert [record.kind for record in run.journal.of(FaultRecord)] == ["slow"]
    (drain,) = [record for record in run.journal.of(LadderRecord) if record.rule == "drain"]
    assert (drain.machine, drain.cause, drain.replacement) == (1, "compute", "group")
    (begun,) = {record.index: record for record in run.journal.of(PlacesRecord)}.values()
    assert [(machine, cause) for machine, cause, _ in begun.quarantined] == [(1, "slow")]
    entries = entries_of(run.journal)
    (left,) = [entry for entry in entries if entry.get("drain")]
    assert left["drain"] == [[1, 0]]
    (came,) = [entry for entry in entries if entry.get("admit")]
    assert came["admit"] == [[3, 1]]
    assert fenced_groups(run.journal) == set()
    examined = run.journal.of(ExaminationRecord)
    assert examined
    assert all("a matrix product takes" in record.reason for record in examined), examined
    computed = {(record.step, record.group) for record in run.journal.of(ContributionRecord) if record.microbatches}
    assert all((step, 1) not in computed for step in range(left["step"] + 1, SLOW_STEPS))
    assert (SLOW_STEPS - 1, 3) in computed
    assert "slow" in {one.cause for one in read_run_state(run.run_dir).quarantined.values()}

    calm = complete_run(replace(config, faults=FaultsConfig()), tmp_path / "calm")
    assert losses_of(run.journal) == losses_of(calm.journal)
    assert params_of(run)[SLOW_STEPS] == params_of(calm)[SLOW_STEPS]
