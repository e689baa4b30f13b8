"""Groups that come back after a loss, while the others train on."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ContributionRecord, EntryRecord, ParamsRecord, StartRecord, UpdateRecord
from spare_megatron.journal.state.follow import read_run_state
from spare_megatron.process.reports import GroupRejoined, RanksStarted
from spare_megatron.stacking.layout import GroupId, Member
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, assert_masked, complete_run, entries_of, kill, tiny_config

pytestmark = pytest.mark.timeout(120)

STEPS = 12
AWAITED = 6
"""The step at whose end the group that was lost is admitted: all wait until it is up again."""
WATCH = Watch(awaited=frozenset({(AWAITED, Member(GroupId(1), 1))}))


def rejoined(run: Run) -> list[tuple[int, int, int]]:
    """Group, incarnation and first step of those that came back."""
    return [(e.member.group, e.member.incarnation, e.step) for e in run.events if isinstance(e, GroupRejoined)]


@pytest.mark.parametrize(
    "layout",
    [LayoutConfig(num_groups=3), LayoutConfig(num_groups=3, pipeline_parallel=2)],
    ids=["one_rank", "stages"],
)
def test_a_lost_group_comes_back_and_takes_its_load_again(
    text_corpus: Path, tmp_path: Path, layout: LayoutConfig
) -> None:
    config = tiny_config(text_corpus, layout, steps=STEPS, faults=[kill(FaultPoint.BACKWARD, 2, 1)], rejoins=1)
    watch = replace(WATCH, dump_steps=frozenset({0, 3, STEPS - 2, STEPS - 1}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    ((group, incarnation, step),) = rejoined(run)
    assert (group, incarnation, step) == (1, 1, AWAITED + 1)
    admissions = [entry for entry in entries_of(run.journal) if entry.get("admit")]
    assert [(entry["step"] + 1, entry["admit"]) for entry in admissions] == [(step, [[1, 1]])]
    first = min(record.step for record in run.journal.of(ContributionRecord) if record.incarnation == 1)
    texts = [event.text for event in read_run_state(run.run_dir).events() if "rejoined" in event.text]
    assert texts == [f"group 1 rejoined, and takes part from step {first} on"]
    updates = run.journal.of(UpdateRecord)
    assert {update.group for update in updates if update.step == STEPS - 1} == {0, 1, 2}
    assert {update.makespan for update in updates if update.step == STEPS - 1} == {2}, "every group has one shard again"
    assert {update.makespan for update in updates if update.step == 3} == {3}
    ends = [record.sha256 for record in run.journal.of(ParamsRecord) if record.step == STEPS and record.sha256]
    assert len(ends) == 3
    assert len(set(ends)) == 1
    assert_exact(run, [0, 3, STEPS - 2, STEPS - 1])


def test_a_group_comes_back_on_a_node_that_has_no_other(text_corpus: Path, tmp_path: Path) -> None:
    cluster = ClusterConfig(device="cpu", num_nodes=3)
    layout = LayoutConfig(num_groups=3)
    faults = [kill(FaultPoint.FORWARD, 2, 1)]
    config = tiny_config(text_corpus, layout, steps=STEPS, faults=faults, rejoins=1, cluster=cluster)
    run = complete_run(config, tmp_path / "run", WATCH)
    assert_masked(run)
    assert [group for group, _, _ in rejoined(run)] == [1]


def test_spares_take_the_place_of_a_lost_group_and_change_no_bit(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    """Twice: those that took the place of the first are made up for."""
    layout = LayoutConfig(num_groups=3, pipeline_parallel=2)
    faults = [kill(FaultPoint.BACKWARD, 3, 1, rank=1), kill(FaultPoint.IN_REDUCE, AWAITED + 3, 2)]
    config = tiny_config(
        text_corpus, layout, steps=STEPS, faults=faults, rejoins=1, spares=1, mode="reproducible", hidden_dropout=0.1
    )
    whole = fault_free(config)
    awaited = {(AWAITED, Member(GroupId(1), 1)), (STEPS - 2, Member(GroupId(2), 1))}
    watch = Watch(awaited=frozenset(awaited), whole_spares=frozenset({2, AWAITED + 2}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    assert rejoined(run) == [(1, 1, AWAITED + 1), (2, 1, STEPS - 1)]
    assert run.journal.of(StartRecord) == [
        StartRecord(group=group, incarnation=1, num_ranks=2, num_spares=2) for group in (1, 2)
    ]
    pids = [frozenset(event.pids.values()) for event in run.events if isinstance(event, RanksStarted)]
    assert [len(after - before) for before, after in pairwise(pids)] == [2, 2], "whole groups are started again"
    assert run.summary.params_sha256 == whole.summary.params_sha256


def test_a_group_is_given_up_after_its_last_restart(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(
        text_corpus, LayoutConfig(num_groups=3), steps=STEPS, faults=[kill(FaultPoint.FORWARD, 2, 1)], rejoins=0
    )
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    assert rejoined(run) == []
    assert not any(record.entry.get("admit") for record in run.journal.of(EntryRecord))
