"""Losses in the middle of a recovery, groups whose rank raises, and who computes what after a loss."""

import itertools
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ContributionRecord, LossRecord, RecoveryRecord, UpdateRecord
from spare_megatron.process.reports import GroupLost
from tests.integration.reference import assert_exact
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import (
    Run,
    assert_masked,
    complete_run,
    entries_of,
    fenced_groups,
    kill,
    patched_in,
    tiny_config,
)

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("phase", [FaultPoint.BACKWARD, FaultPoint.IN_REDUCE, FaultPoint.AFTER_VOTE])
def test_two_groups_lost_in_one_phase_of_one_step_are_both_masked(
    text_corpus: Path, tmp_path: Path, phase: FaultPoint
) -> None:
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    config = tiny_config(text_corpus, layout, faults=[kill(phase, 1, 0), kill(phase, 1, 2, 1)])
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(4))))
    assert_masked(run)
    assert_exact(run, range(4))
    assert_recovered_at_once(run, 1, {0, 2}, until_step=1 + (phase is FaultPoint.AFTER_VOTE))


def test_the_last_to_vote_may_die_before_it_writes_the_commit(text_corpus: Path, tmp_path: Path) -> None:
    """All others have voted and wait for an entry that only the last voter would have written."""
    fault = kill(FaultPoint.AFTER_VOTE, 1, 1)
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), faults=[fault])
    # Waiting where the sum is complete makes it the last to vote.
    watch = Watch(dump_steps=frozenset({1}), after_other_votes=frozenset({(1, 1, FaultPoint.AFTER_REDUCE)}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    assert_exact(run, [1])
    assert [entry["entry"] for entry in entries_of(run.journal)[1:3]] == ["fence", "commit"]
    assert patched_in(run.journal)[1] == 0


def test_a_loss_in_the_first_step_is_masked_though_other_groups_are_not_known_to_be_ready(
    text_corpus: Path, tmp_path: Path
) -> None:
    """A fast group can be lost in step 0 before a slow one has reported to the supervisor that it is ready."""
    config = tiny_config(text_corpus, LayoutConfig(num_groups=3), faults=[kill(FaultPoint.FORWARD, 0, 1)])
    watch = Watch(dump_steps=frozenset(range(4)), late_groups=frozenset({0, 2}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    assert_exact(run, range(4))


def assert_recovered_at_once(run: Run, step: int, lost: set[int], *, until_step: int | None = None) -> None:
    """Every group that survives to the end reports recoveries of just these groups, in the step or up to another."""
    steps = range(step, (step if until_step is None else until_step) + 1)
    records = [record for record in run.journal.of(RecoveryRecord) if record.step in steps]
    survivors = set(range(run.config.layout.num_groups)) - fenced_groups(run.journal)
    for survivor in survivors:
        assert {group for r in records if r.group == survivor for group in r.lost} == lost


# -------------------------------------------------------------------------------------------------- ranks that raise


@pytest.mark.parametrize(
    "phases",
    [
        (FaultPoint.FORWARD, FaultPoint.SEND, FaultPoint.IN_REDUCE),
        (FaultPoint.BACKWARD, FaultPoint.BEFORE_REDUCE, FaultPoint.AFTER_VOTE),
    ],
    ids=lambda phases: "-".join(phases),
)
def test_a_group_whose_rank_raises_is_lost_and_its_traceback_reported(
    text_corpus: Path, tmp_path: Path, phases: tuple[FaultPoint, ...]
) -> None:
    """One after another, in a phase each of steps 1, 3 and 5."""
    layout = LayoutConfig(num_groups=4, pipeline_parallel=2)
    raised = {2 * group + 1: (group, phase) for group, phase in enumerate(phases)}
    faults = [
        FaultConfig(phase=phase, step=step, group=group, rank=1, kind="raise")
        for step, (group, phase) in raised.items()
    ]
    config = tiny_config(text_corpus, layout, steps=7, faults=faults)
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(1, 7))))
    assert_masked(run)
    assert_exact(run, range(1, 7))
    lost = [event for event in run.events if isinstance(event, GroupLost)]
    assert [event.record.group for event in lost] == [one.group for one in run.journal.of(LossRecord)] == [0, 1, 2]
    for event, (step, (_, phase)) in zip(lost, raised.items(), strict=True):
        assert "Traceback" in event.traceback
        assert f"InjectedFault: {phase} of step {step}" in event.traceback
        assert "faults.trace asked for it" in event.record.cause


# ----------------------------------------------------------------------------------------------------------- reorder


def test_one_lost_group_of_four_costs_each_survivor_two_microbatches(text_corpus: Path, tmp_path: Path) -> None:
    """Three hosts a shard: the four microbatches go to both surviving hosts, then 16 are dealt to 3 groups."""
    config = tiny_config(
        text_corpus, LayoutConfig(num_groups=4), faults=[kill("forward", 1, 2)], redundancy=3, num_microbatches=4
    )
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(4))))
    assert_masked(run)
    assert_exact(run, range(4))
    assert sorted(record.num_patched for record in run.journal.of(RecoveryRecord)) == [0, 2, 2]
    assert makespans_of(run) == [4, 4, 6, 6]


def test_stack_granularity_moves_and_patches_whole_shards(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(
        text_corpus,
        LayoutConfig(num_groups=4),
        faults=[kill("backward", 1, 2), kill("in_reduce", 2, 0)],
        redundancy=3,
        num_microbatches=4,
        granularity="stack",
    )
    run = complete_run(config, tmp_path / "run", Watch(dump_steps=frozenset(range(4))))
    assert_masked(run)
    assert_exact(run, range(4))
    for record in run.journal.of(ContributionRecord):
        assert all(sorted(indices) == [0, 1, 2, 3] for indices in record.microbatches.values())
    assert sorted(r.num_patched for r in run.journal.of(RecoveryRecord) if r.step == 1) == [0, 0, 4]
    assert makespans_of(run) == [4, 4, 8, 8]


def makespans_of(run: Run) -> list[int]:
    """The makespan of each step, on which all groups agree."""
    records = sorted(run.journal.of(UpdateRecord), key=lambda record: record.step)
    by_step = [{r.makespan for r in same} for _, same in itertools.groupby(records, lambda record: record.step)]
    assert all(len(makespans) == 1 for makespans in by_step)
    return [makespan for makespans in by_step for makespan in makespans]
