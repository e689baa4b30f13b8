"""Runs whose groups can all read all data: a shard without a host is no wipe-out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ContributionRecord, UpdateRecord
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from tests.integration.broken_rank import elsewhere, unreadable
from tests.integration.fault_free import FaultFreeRuns
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, assert_masked, complete_run, kill, losses_of, params_of, tiny_config

pytestmark = pytest.mark.timeout(150)

ORPHANED = 1
"""The shard whose hosts are lost."""
HOSTS = {0, 1}


def shared(corpus: Path, faults: list[FaultConfig], layout: LayoutConfig, **more: Any) -> RunConfig:
    """Two hosts a shard, and sums that do not depend on who computes."""
    config = tiny_config(
        corpus, layout, steps=6, faults=faults, redundancy=2, mode="reproducible", hidden_dropout=0.1, **more
    )
    return replace(config, data=replace(config.data, access="shared"))


def who_computed(run: Run, shard: int, step: int) -> set[int]:
    last = max(record.attempt for record in run.journal.of(UpdateRecord) if record.step == step)
    records = [record for record in run.journal.of(ContributionRecord) if record.attempt == last]
    return {record.group for record in records if str(shard) in record.microbatches}


@pytest.mark.parametrize(
    ("second", "stages"),
    [(kill(FaultPoint.BACKWARD, 1, 1), 2), (kill(FaultPoint.IN_REDUCE, 3, 1), 1)],
    ids=["at_once", "later"],
)
def test_losing_all_hosts_of_a_shard_changes_no_bit(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns, second: FaultConfig, stages: int
) -> None:
    assert set(map(int, make_placement("golomb", 4, 2).hosts[ORPHANED])) == HOSTS
    layout = LayoutConfig(num_groups=4, pipeline_parallel=stages)
    whole = fault_free(shared(text_corpus, [], layout))
    run = complete_run(shared(text_corpus, [kill(FaultPoint.FORWARD, 1, 0), second], layout), tmp_path / "run")
    assert_masked(run)
    assert who_computed(run, ORPHANED, 5) <= {2, 3}
    if second.step > 1:  # group 0 owed a microbatch of each of its shards, which has one other host
        assert [who_computed(run, shard, 1) for shard in (0, ORPHANED)] == [{3}, {1}]
    assert losses_of(run.journal) == losses_of(whole.journal)
    assert run.summary.params_sha256 == whole.summary.params_sha256
    shared_steps = params_of(run).keys() & params_of(whole).keys()
    assert all(params_of(run)[step] == params_of(whole)[step] for step in shared_steps)


def test_hosts_that_come_back_take_their_shards_again(
    text_corpus: Path, tmp_path: Path, fault_free: FaultFreeRuns
) -> None:
    layout, back_after = LayoutConfig(num_groups=4), 3
    whole = fault_free(shared(text_corpus, [], layout))
    faults = [kill(FaultPoint.FORWARD, 1, group) for group in HOSTS]
    watch = Watch(awaited=frozenset((back_after, Member(GroupId(group), 1)) for group in HOSTS))
    run = complete_run(shared(text_corpus, faults, layout, rejoins=1), tmp_path / "run", watch)
    assert_masked(run)
    assert run.summary.groups_rejoined == 2
    assert who_computed(run, ORPHANED, back_after) <= {2, 3}
    assert who_computed(run, ORPHANED, 5) <= HOSTS
    assert run.summary.params_sha256 == whole.summary.params_sha256


@pytest.mark.parametrize(
    ("rank_main", "reason"),
    [(elsewhere, "reads other samples than"), (unreadable, "needs every group to read all data")],
    ids=["other_data", "unreadable"],
)
def test_a_group_that_does_not_read_what_the_others_read_is_refused_at_the_start(
    text_corpus: Path, tmp_path: Path, rank_main: Any, reason: str
) -> None:
    config = shared(text_corpus, [], LayoutConfig(num_groups=3), num_microbatches=1)
    config = replace(config, train=replace(config.train, steps=2))  # all of the last step is looked at
    summary = start_run(config, tmp_path / "run", lambda _: None, rank_main=rank_main)
    assert summary.outcome == "failed"
    assert "lost before training began" in summary.outcome_reason
    assert "data.access=shared" in summary.outcome_reason
    assert reason in summary.outcome_reason
    assert summary.steps_committed == 0
