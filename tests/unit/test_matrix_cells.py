"""The fault matrix as a table: nothing is missing from it, and its draws are fair and repeatable."""

from collections import Counter

import pytest

from spare_megatron.driver.planned_faults import PHASES_AFTER_A_LOSS
from spare_megatron.faults.points import (
    PHASES_BETWEEN_STEPS,
    PHASES_OF_A_BUCKET,
    PHASES_WITH_PARTITIONS,
    FaultPoint,
)
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import PartitionSetup, first_ownership
from tests.matrix.cells import (
    CELLS,
    HOSTS,
    KINDS,
    MOMENTS,
    NUM_GROUPS,
    NUM_STAGES,
    PARTITION_REDUNDANCY,
    PAUSE_CELLS,
    REFORM_CELLS,
    draw_faults,
    sample_cells,
)

OF_STEPS = set(FaultPoint) - PHASES_BETWEEN_STEPS - PHASES_OF_A_BUCKET
AGAIN = {FaultPoint.BEFORE_REDUCE, FaultPoint.IN_REDUCE, FaultPoint.AFTER_REDUCE, FaultPoint.AFTER_VOTE}


def test_every_kind_meets_every_phase_and_every_stage_of_a_recovery() -> None:
    """Those between steps, which tests/stages has, apart. No rank waits for a copy that hangs."""
    assert {moment.phase for moment in MOMENTS} == OF_STEPS
    assert {m.phase for m in MOMENTS if m.in_recovery} == {
        FaultPoint.PATCH,
        FaultPoint.REBUILD,
        FaultPoint.REPAIR,
        FaultPoint.EVALUATION_PATCH,
    } | AGAIN
    assert {m.phase for m in MOMENTS if m.is_again} == AGAIN
    assert {m.phase for m in MOMENTS if m.is_stacked} == PHASES_WITH_PARTITIONS
    assert len({str(cell) for cell in CELLS}) == len(CELLS) == len(KINDS) * len(MOMENTS) - 1 == 109


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_has_each_kind_equally_often_and_no_moment_twice(seed: int) -> None:
    cells = sample_cells(10, seed)
    assert Counter(cell.kind for cell in cells) == dict.fromkeys(KINDS, 2)
    assert len({cell.moment for cell in cells}) == 10
    assert cells == sample_cells(10, seed)


def test_samples_come_to_every_cell() -> None:
    assert {cell for seed in range(200) for cell in sample_cells(10, seed)} == set(CELLS)


def test_both_hosts_of_a_shard_are_lost_at_every_moment_and_some_state_partition_never_with_them() -> None:
    assert {cell.phase for cell in PAUSE_CELLS} == OF_STEPS - PHASES_AFTER_A_LOSS
    assert {cell.phase for cell in REFORM_CELLS} == {cell.phase for cell in PAUSE_CELLS}
    assert len({str(cell) for cell in (*PAUSE_CELLS, *REFORM_CELLS)}) == len(PAUSE_CELLS) + len(REFORM_CELLS) == 76
    assert set(make_placement("golomb", NUM_GROUPS, 2).hosts[1]) == set(HOSTS)
    partitioning = PartitionSetup(num_groups=NUM_GROUPS, redundancy=PARTITION_REDUNDANCY)
    whole = first_ownership(partitioning, [Member(GroupId(group)) for group in range(NUM_GROUPS)])
    whole.for_members(member for member in whole.members if member.group not in HOSTS)


def test_faults_of_a_cell_hit_different_groups_and_follow_from_the_seed() -> None:
    for cell in CELLS:
        faults = draw_faults(cell, 7)
        assert len({fault.group for fault in faults}) == len(faults) == (2 if cell.moment.in_recovery else 1)
        assert (faults[-1].kind, faults[-1].phase) == (cell.kind, cell.moment.phase)
        assert faults == draw_faults(cell, 7)


def test_a_group_that_is_hit_while_it_copies_has_something_to_copy() -> None:
    cell = next(cell for cell in CELLS if cell.moment.phase is FaultPoint.REPAIR)
    partitioning = PartitionSetup(num_groups=NUM_GROUPS, redundancy=PARTITION_REDUNDANCY)
    whole = first_ownership(partitioning, [Member(GroupId(group)) for group in range(NUM_GROUPS)])
    for seed in range(20):
        before, fault = draw_faults(cell, seed)
        left = whole.for_members(member for member in whole.members if member.group != before.group)
        assert fault.group in {repair.receiver.group for repair in left.repairs}
        assert fault.group != before.group
        left.for_members(member for member in left.members if member.group != fault.group)  # no partition is lost


def test_every_rank_of_every_group_is_a_victim_with_some_seed() -> None:
    victims = [draw_faults(CELLS[-1], seed)[-1] for seed in range(100)]
    assert len({(victim.group, victim.rank) for victim in victims}) == NUM_GROUPS * NUM_STAGES
