"""What a recovery takes, and how much is computed again for it: one count in records, summary and metrics."""

from random import Random

import pytest

from spare_megatron.rank.recovery_clock import RecoveryClock
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import Microbatch, Work, work_of

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
