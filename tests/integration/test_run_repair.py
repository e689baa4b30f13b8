"""State partitions that have lost hosts get others while training goes on, so that the next loss finds a copy."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from spare_megatron.config.schema import FaultConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import ParamsRecord, RedundancyRecord, RepairRecord, UpdateRecord
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.process.reports import GroupRejoined
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.state_partitions import Ownership, PartitionCopy, PartitionSetup, first_ownership
from tests.integration.mcore_group import run_group
from tests.integration.repair_group import repair_while_training
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import Run, assert_masked, complete_run, entries_of, kill, tiny_config

STEPS = 10
REPAIRED = 5
"""A step that is reduced only when all copies are whole."""
LAYOUT = LayoutConfig(num_groups=4)


def stacked_config(
    corpus: Path, layout: LayoutConfig, redundancy: int, faults: list[FaultConfig], rejoins: int = 0
) -> RunConfig:
    optimizer = OptimizerConfig(sharding="stacked", redundancy=redundancy)
    return tiny_config(
        corpus,
        layout,
        steps=STEPS,
        faults=faults,
        mode="reproducible",
        optimizer=optimizer,
        rejoins=rejoins,
        hidden_dropout=0.1,
    )


def ownership_of(num_groups: int, redundancy: int) -> Ownership:
    members = [Member(GroupId(group)) for group in range(num_groups)]
    return first_ownership(PartitionSetup(num_groups=num_groups, redundancy=redundancy), members)


@pytest.fixture(scope="module")
def run_without_faults(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Run]:
    """The same run as another, without faults and with whole state in every group; once for each layout."""

    @cache
    def whole_run(corpus: Path, layout: LayoutConfig) -> Run:
        config = tiny_config(corpus, layout, steps=STEPS, mode="reproducible", hidden_dropout=0.1)
        return complete_run(config, tmp_path_factory.mktemp("whole") / "run")

    def of(run: Run) -> Run:
        return whole_run(Path(run.config.data.corpus), run.config.layout)

    return of


def assert_bitwise(run: Run, whole: Run) -> None:
    """Every element is updated in the same way by every group."""
    assert whole.summary.params_sha256 == run.summary.params_sha256
    assert whole.summary.final_loss == run.summary.final_loss


def restored_before(run: Run, step: int) -> set[tuple[int, int]]:
    """Partition and group of the copies that commits up to this step have made hosts of."""
    commits = [entry for entry in entries_of(run.journal) if entry["entry"] == "commit" and entry["step"] < step]
    return {(number, member[0]) for entry in commits for number, member in entry["restored"]}


def last_groups(run: Run) -> set[int]:
    return {record.group for record in run.journal.of(UpdateRecord) if record.step == STEPS - 1}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_second_host_of_a_state_partition_is_lost_after_the_repair(
    text_corpus: Path, tmp_path: Path, stages: int, run_without_faults: Callable[[Run], Run]
) -> None:
    """Without the repair that would be a state wipe-out: the two were all the hosts it had."""
    first = Member(GroupId(1))
    ownership = ownership_of(4, 2)
    number = next(number for number, row in enumerate(ownership.hosts) if first in row)
    (second,) = [host for host in ownership.hosts[number] if host != first]
    faults = [kill(FaultPoint.FORWARD, 2, first.group), kill(FaultPoint.BACKWARD, REPAIRED + 2, second.group)]
    layout = replace(LAYOUT, pipeline_parallel=stages)
    config = stacked_config(text_corpus, layout, 2, faults)
    run = complete_run(config, tmp_path / "run", Watch(whole_copies=frozenset({REPAIRED})))
    assert_masked(run)
    asked = ownership.for_members([member for member in ownership.members if member != first]).repairs
    assert restored_before(run, REPAIRED + 1) == {(repair.partition, repair.receiver.group) for repair in asked}
    assert last_groups(run) == {0, 1, 2, 3} - {first.group, second.group}
    assert run.summary.slices_repaired >= len(asked)
    assert len(run.summary.full_redundancy_s) >= 1
    assert_bitwise(run, run_without_faults(run))


@pytest.mark.timeout(180)
def test_a_donor_lost_during_the_repair_is_replaced_by_another_host(
    text_corpus: Path, tmp_path: Path, run_without_faults: Callable[[Run], Run]
) -> None:
    """No donor gives anything before it is lost. The new copy then goes on alone when all hosts are lost."""
    first = Member(GroupId(1))
    ownership = ownership_of(4, 3)
    left = ownership.for_members([member for member in ownership.members if member != first])
    number, donor, receiver = left.repairs[0]
    (other,) = [host for host in left.hosts[number] if host != donor]
    faults = [
        kill(FaultPoint.FORWARD, 2, first.group),
        kill(FaultPoint.FORWARD, 3, donor.group),
        kill(FaultPoint.FORWARD, REPAIRED + 2, other.group),
    ]
    config = stacked_config(text_corpus, LAYOUT, 3, faults)
    watch = Watch(whole_copies=frozenset({REPAIRED}), no_pieces_before=4)
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    made = run.journal.of(RepairRecord)
    assert {(record.slice, record.group) for record in made} >= {(number, receiver.group)}
    assert donor.group not in {record.donor for record in made}
    assert last_groups(run) == {receiver.group}
    assert_bitwise(run, run_without_faults(run))


@pytest.mark.timeout(180)
def test_a_group_that_came_back_gets_copies_of_all_state_partitions(
    text_corpus: Path, tmp_path: Path, run_without_faults: Callable[[Run], Run]
) -> None:
    """All others are lost then."""
    admitted = 3
    faults = [kill(FaultPoint.FORWARD, 2, 1), *(kill(FaultPoint.FORWARD, REPAIRED + 2, group) for group in (0, 2))]
    config = stacked_config(text_corpus, LayoutConfig(num_groups=3), 3, faults, rejoins=1)
    watch = Watch(
        awaited=frozenset({(admitted, Member(GroupId(1), 1))}),
        whole_copies=frozenset({REPAIRED}),
    )
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    assert (1, 1, admitted + 1) in {
        (e.member.group, e.member.incarnation, e.step) for e in run.events if isinstance(e, GroupRejoined)
    }
    assert restored_before(run, REPAIRED + 1) == {(number, 1) for number in range(3)}
    assert 1 in last_groups(run)
    assert_bitwise(run, run_without_faults(run))


@pytest.mark.timeout(180)
def test_a_group_that_came_back_takes_its_state_partitions_over_and_both_that_had_them_are_lost(
    text_corpus: Path, tmp_path: Path, run_without_faults: Callable[[Run], Run]
) -> None:
    """Without the moves that would be a state wipe-out. State is compared after losses and before a release."""
    first, back, repaired_at, admitted, moved_at = Member(GroupId(1)), Member(GroupId(1), 1), 2, 3, 5
    lost_at = STEPS - 1  # so that no other group comes back
    left = ownership_of(4, 2).for_members([Member(GroupId(group)) for group in (0, 2, 3)])
    repaired = left.with_copies([PartitionCopy(repair.partition, repair.receiver) for repair in left.repairs])
    moves = repaired.for_members([*repaired.members, back]).moves
    others = {move.donor.group for move in moves}
    assert all({host.group for host in repaired.hosts[move.partition]} == others for move in moves)
    faults = [
        kill(FaultPoint.FORWARD, 1, first.group),
        *(kill(FaultPoint.BACKWARD, lost_at, group) for group in sorted(others)),
    ]
    config = stacked_config(text_corpus, LAYOUT, 2, faults, rejoins=1)
    config = replace(config, train=replace(config.train, params_check_every_steps=0))
    watch = Watch(awaited=frozenset({(admitted, back)}), whole_copies=frozenset({repaired_at, moved_at}))
    run = complete_run(config, tmp_path / "run", watch)
    assert_masked(run)
    commits = {entry["step"]: entry for entry in entries_of(run.journal) if entry["entry"] == "commit"}
    by_step = {step: named(commit["restored"]) for step, commit in commits.items() if admitted < step < lost_at}
    assert set().union(*by_step.values()) == {(move.partition, back.group, back.incarnation) for move in moves}
    released_at = {
        (number, group): step for step, commit in commits.items() for number, group, _ in named(commit["released"])
    }
    assert set(released_at) == {(move.partition, move.donor.group) for move in moves}
    for step, made in by_step.items():
        donors = {(move.partition, move.donor.group) for move in moves if (move.partition, *back) in made}
        assert {released_at[donor] for donor in donors} <= {step + 1}
        compared = {record.group for record in run.journal.of(ParamsRecord) if record.step == step + 1}
        assert compared == ({0, 1, 2, 3} if made else set())
    last = {record.group: record.num_hosted for record in run.journal.of(RedundancyRecord) if record.step <= lost_at}
    assert last == dict.fromkeys(range(4), 2)
    assert run.summary.slices_moved == len(moves)
    assert last_groups(run) == {0, 1, 2, 3} - others
    assert_bitwise(run, run_without_faults(run))


def named(copies: list[tuple[int, tuple[int, int]]]) -> set[tuple[int, int, int]]:
    """Partition, group and incarnation of copies in a log entry."""
    return {(number, group, incarnation) for number, (group, incarnation) in copies}


def group_config(corpus: Path, **settings: str) -> RunConfig:
    config = tiny_config(corpus, LayoutConfig(num_groups=3), steps=1000, **settings)
    config = replace(config, optimizer=replace(config.optimizer, sharding="stacked"))
    prepare_index(config)
    return config


@pytest.mark.timeout(120)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_made_while_training_are_those_of_the_donor(text_corpus: Path, precision: str) -> None:
    config = group_config(text_corpus, precision=precision)
    (figures,) = run_group(repair_while_training, config, 500, 1e9)
    assert figures["partitions"] == 2
    assert figures["pieces"] > 10
    assert figures["steps"] >= 1
