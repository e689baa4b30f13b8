"""When checkpoints are taken and which are kept: fixed intervals, failures, and what follows from measurements."""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.core.log.entries import SaveEnd
from spare_megatron.core.log.membership import LogTerms
from spare_megatron.core.saves.checkpoint_policy import (
    PRIOR_SAVE_S,
    Experience,
    SavePolicy,
    Saves,
    emergency_save,
    superseded,
)
from spare_megatron.core.saves.survival import optimal_cadence_s, time_to_wipe_out_s
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import Hosts, PartitionCopy, PartitionSetup, first_ownership
from spare_megatron.tools.simulate.engine import simulate
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario

RING = make_placement("golomb", 4, 2)
TERMS = LogTerms(placement=RING, num_steps=1000)
ALL_MEMBERS = tuple(Member(GroupId(group)) for group in range(4))
GROUPS = tuple(member.group for member in ALL_MEMBERS)


def saves_of(**policy: float) -> Saves:
    return Saves(SavePolicy(**policy), TERMS)  # type: ignore[arg-type]


def is_due(saves: Saves, step: int, at_s: float) -> bool:
    return saves.is_due(step, at_s, GROUPS, is_last=False)


def test_a_save_is_due_an_interval_after_the_last_was_begun() -> None:
    saves = saves_of(interval_s=80.0)
    assert [is_due(saves, 1, at_s) for at_s in (79.9, 80.0)] == [False, True]
    assert saves.start_save(1, 100.0, ALL_MEMBERS, 0).member == ALL_MEMBERS[0]
    assert [is_due(saves, 2, at_s) for at_s in (179.9, 180.0)] == [False, True]
    assert saves.start_save(2, 200.0, ALL_MEMBERS, 0).member == ALL_MEMBERS[1]


def test_a_save_that_failed_is_due_again_soon_and_later_with_each_failure() -> None:
    saves = saves_of(interval_s=80.0)
    waits = []
    at_s = 0.0
    for step in range(1, 7):
        at_s += 80.0
        saves.start_save(step, at_s, ALL_MEMBERS, 0)
        saves.on_commit(at_s, 4, [SaveEnd(step, False, 0.0)])
        waits.append(next(wait for wait in range(200) if is_due(saves, step + 1, at_s + wait)))
    assert waits == [10, 20, 40, 80, 80, 80]
    saves.start_save(9, at_s, ALL_MEMBERS, 0)
    saves.on_commit(at_s, 4, [SaveEnd(9, True, 0.0)])
    assert not is_due(saves, 10, at_s + 79.0)


def test_what_a_lost_group_was_saving_is_due_at_once() -> None:
    saves = saves_of(interval_s=50.0)
    action = saves.start_save(50, 1.0, ALL_MEMBERS, 0)
    saves.on_loss([ALL_MEMBERS[3]])
    saves.on_commit(1.0, 3, [])
    assert not is_due(saves, 51, 1.0)
    saves.on_loss([action.member])
    saves.on_commit(1.0, 2, [])
    assert is_due(saves, 51, 1.0)
    assert saves.start_save(51, 1.0, ALL_MEMBERS, 0).member != action.member


def test_a_restart_undoes_the_saves_of_later_steps() -> None:
    saves = saves_of(interval_s=80.0)
    for step in (4, 8):
        saves.start_save(step, float(step), ALL_MEMBERS, 0)
    assert saves.saved == {0, 4, 8}
    saves.on_restart(6, 9.0)
    assert saves.saved == {0, 4}
    saves.start_save(8, 12.0, ALL_MEMBERS, 0)
    assert saves.saved == {0, 4, 8}


def test_of_what_was_saved_the_step_alone_is_kept() -> None:
    """Each save once kept its action, which names every group: most of what a long run of many groups held."""
    saves = saves_of(interval_s=80.0)
    voters = tuple(Member(GroupId(group)) for group in range(1000))
    assert saves.start_save(4, 4.0, voters, 0).voters is voters
    assert saves.saved == {0, 4}
    assert not any(isinstance(holder, SaveCheckpoint) for holder in gc.get_referrers(voters))


def test_a_late_report_of_an_earlier_save_does_not_count_for_the_present_one() -> None:
    saves = saves_of(interval_s=80.0)
    saves.start_save(1, 80.0, ALL_MEMBERS, 0)
    saves.start_save(2, 160.0, ALL_MEMBERS, 0)
    saves.on_commit(161.0, 4, [SaveEnd(1, False, 0.0)])
    assert not is_due(saves, 3, 200.0)


def test_a_group_writes_until_its_own_save_has_ended_whatever_is_saved_meanwhile() -> None:
    """The latest save alone was known: a drain let the writer of an earlier one go, whose checkpoint was lost."""
    saves = saves_of(interval_s=80.0)
    first, second, third = (saves.start_save(step, 80.0 * step, ALL_MEMBERS, 0).member for step in (1, 2, 3))
    assert saves.writers == {first, second, third}
    saves.on_commit(250.0, 4, [SaveEnd(2, True, 0.0)])
    assert saves.writers == {first, third}
    saves.on_loss([third])
    saves.on_commit(251.0, 3, [])
    assert saves.writers == {first}
    assert is_due(saves, 4, 251.0), "what a lost group was saving last is due at once"
    saves.on_restart(1, 260.0)
    assert saves.writers == set()


def test_the_cadence_begins_with_the_prior_and_follows_what_is_measured() -> None:
    experience = Experience(1000.0, TERMS)
    first = experience.cadence(GROUPS)
    time_s = time_to_wipe_out_s({2: 4}, 2, 1000.0, None)
    assert (first.group_interval_s, first.absence_s, first.time_to_wipe_out_s) == (1000.0, None, time_s)
    assert first.interval_s == optimal_cadence_s(PRIOR_SAVE_S, time_s)
    experience.on_commit(500.0, 4)
    experience.on_save(4.0)
    experience.on_loss([GroupId(1)])
    second = experience.cadence(GROUPS[:1] + GROUPS[2:])
    assert (second.save_s, second.num_losses, second.exposure_s) == (4.0, 1, 2000.0)
    assert second.group_interval_s == (1000.0 + 2000.0) / 2
    experience.on_restart()
    experience.on_commit(530.0, 4)
    assert experience.cadence(GROUPS).exposure_s == 5000.0, "a step of 3 groups, cut in half, and one of 4; no restart"


@pytest.mark.parametrize("step_s", [0.2, 2.0, 8.0])
def test_the_rate_of_losses_that_are_all_wipe_outs_is_estimated_without_bias(step_s: float) -> None:
    """Losses of a Poisson process every 10 s, each followed by a restart of a minute."""
    rng = np.random.default_rng(5)
    experience = Experience(40.0, LogTerms(placement=make_placement("golomb", 4, 1), num_steps=1))
    at_s, left_s, num_losses = 0.0, 10.0, 0
    while num_losses < 3000:
        if left_s > step_s:
            left_s, at_s = left_s - step_s, at_s + step_s
            experience.on_commit(at_s, 4)
        else:
            at_s, left_s, num_losses = at_s + left_s + 60.0, rng.exponential(10.0), num_losses + 1
            experience.on_loss([GROUPS[0]])
            experience.on_restart()
    assert experience.cadence(GROUPS).time_to_wipe_out_s == pytest.approx(10.0, rel=0.05)


def test_fewer_survivors_save_more_often_and_returns_less() -> None:
    alone, returns = Experience(1000.0, TERMS), Experience(1000.0, TERMS)
    three = (GroupId(0), GroupId(1), GroupId(2))
    for experience in (alone, returns):
        experience.on_loss([GroupId(3)])
    returns.on_commit(10.0, 3)
    alone.on_commit(10.0, 3)
    returns.on_admission([GroupId(3)])
    assert alone.cadence(three).interval_s < alone.cadence(GROUPS).interval_s
    assert returns.cadence(GROUPS).absence_s == 10.0
    assert returns.cadence(GROUPS).interval_s > alone.cadence(GROUPS).interval_s


def test_pauses_save_for_lost_state_only_where_groups_come_back_in_time() -> None:
    def experience(pause_s: float | None) -> Experience:
        found = Experience(1000.0, TERMS, pause_s)
        found.on_loss([GroupId(3)])
        found.on_commit(100.0, 3)
        found.on_admission([GroupId(3)])
        return found

    restarts, brief, long = (experience(pause_s).cadence(GROUPS) for pause_s in (None, 10.0, 6000.0))
    assert restarts.time_to_wipe_out_s < brief.time_to_wipe_out_s < long.time_to_wipe_out_s
    assert brief.time_to_wipe_out_s == time_to_wipe_out_s({2: 4}, 2, brief.group_interval_s, 100.0, 10.0)
    all_lost_s = long.group_interval_s * (1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert long.time_to_wipe_out_s == pytest.approx(all_lost_s), "all groups, and with them all state, without returns"
    never = Experience(1000.0, TERMS, 600.0)
    assert never.cadence(GROUPS).time_to_wipe_out_s == time_to_wipe_out_s({2: 4}, 2, 1000.0, None)


def test_before_the_first_return_groups_are_expected_back_after_the_configured_absence() -> None:
    found = Experience(1000.0, TERMS, 10.0, 100.0)
    first = found.cadence(GROUPS)
    assert first.absence_s == 100.0
    assert first.time_to_wipe_out_s == time_to_wipe_out_s({2: 4}, 2, 1000.0, 100.0, 10.0)
    found.on_loss([GroupId(3)])
    found.on_commit(90.0, 3)
    assert found.cadence(GROUPS[:3]).absence_s == 100.0
    found.on_commit(501.0, 3)
    assert found.cadence(GROUPS[:3]).absence_s is None, "away for five times as long: not expected any more"
    found.on_admission([GroupId(3)])
    assert found.cadence(GROUPS).absence_s == 501.0, "what is measured replaces it"


def test_partitions_without_a_copy_count_and_the_less_the_faster_they_are_copied() -> None:
    members = [Member(GroupId(group)) for group in range(7)]
    ring = make_placement("golomb", 7, 3)
    partitions = PartitionSetup(num_groups=7, redundancy=2)
    owned = first_ownership(partitions, members)
    experience = Experience(1000.0, LogTerms(placement=ring, num_steps=1, partitions=partitions), 600.0)
    groups = tuple(member.group for member in members)
    shards_s = Experience(1000.0, LogTerms(placement=ring, num_steps=1), 600.0).cadence(groups).time_to_wipe_out_s
    state_s = time_to_wipe_out_s({2: 7}, 2, 1000.0, None)
    found_s = experience.cadence(groups, owned.hosts).time_to_wipe_out_s
    assert found_s == pytest.approx(1 / (1 / shards_s + 1 / state_s))
    experience.on_loss([GroupId(6)])
    lacking = owned.for_members(members[:6])
    experience.on_commit(10.0, 6, lacks_copies=True)
    copies = [PartitionCopy(repair.partition, repair.receiver) for repair in lacking.repairs]
    assert copies
    assert not lacking.with_copies(copies).repairs
    experience.on_commit(20.0, 6)
    interval_s = experience.cadence(groups[:6], lacking.hosts).group_interval_s
    alone, left = Counter(map(len, lacking.hosts)), frozenset(groups[:6])
    shards_s = time_to_wipe_out_s(
        Counter(ring.alive_mask(left)[ring.host_array].sum(axis=1).tolist()), 3, interval_s, None, 600.0
    )
    state_s = time_to_wipe_out_s(alone, 2, interval_s, 20.0)
    found_s = experience.cadence(groups[:6], lacking.hosts).time_to_wipe_out_s
    assert found_s == pytest.approx(1 / (1 / shards_s + 1 / state_s))


def test_what_is_committed_without_a_host_for_the_next_step_is_saved_before_the_wipe_out() -> None:
    experience = Experience(1000.0, TERMS)
    left = next((a, b) for a in GROUPS for b in GROUPS if RING.uncovered(frozenset((a, b))))
    assert experience.cadence(left).interval_s == 0.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saves_by_what_a_run_measures_lose_no_more_than_the_best_fixed_interval() -> None:
    """Saves and rework, on eight seeds, with a prior that is off by a factor of five either way."""
    base = Scenario(
        name="sweep",
        num_groups=12,
        redundancy=2,
        microbatches_per_shard=2,
        num_steps=2000,
        costs=CostModel(compute_s=1.0, reduce_s=0.1, save_s=2.0, restart_s=60.0, detect_s=0.1),
        failures=FailureSpec(mean_s=40.0),
    )

    def lost_s(scenario: Scenario) -> float:
        results = [simulate(scenario, seed) for seed in range(8)]
        assert sum(result.restarts for result in results) > 50
        return sum(result.terms["save"] + result.terms["rework"] for result in results)

    planned_s = base.save_cadence_s()
    fixed_s = [lost_s(replace(base, save_interval_s=share * planned_s)) for share in (0.65, 0.8, 1.0, 1.25, 1.6)]
    for factor in (0.2, 5.0):
        assert lost_s(replace(base, expected_group_life_s=factor * 40.0 * 12)) < 1.05 * min(fixed_s)


def test_without_a_store_two_groups_save_or_all_that_may_be_the_last_with_a_partition() -> None:
    hosts = first_ownership(PartitionSetup(num_groups=4, redundancy=2), ALL_MEMBERS).hosts
    left = ALL_MEMBERS[1:]  # the first group is lost

    def savers(hosts: Hosts, step: int = 7, *, first_step: int = 0, has_params: bool = True) -> list[Member]:
        saves = [
            emergency_save(member, step, left, 3, hosts, first_step=first_step, has_params=has_params)
            for member in ALL_MEMBERS
        ]
        return [save.member for save in saves if save is not None]

    assert savers(()) == [ALL_MEMBERS[1], ALL_MEMBERS[2]], "one of them may be lost at the same time"
    assert savers(hosts) == list(left)
    assert savers(hosts, has_params=False) == savers((), has_params=False) == []
    assert savers(hosts, step=0) == savers((), step=0) == [], "there is nothing yet that a run could go on from"
    assert savers(hosts, first_step=7) == savers((), first_step=7) == [], "it would replace what the run began with"
    assert savers(hosts, first_step=6) == list(left)
    save = emergency_save(left[0], 7, left, 3, hosts, first_step=0, has_params=True)
    assert save == SaveCheckpoint(step=7, member=left[0], voters=left, epoch=3, hosts=hosts)


STEPS = [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("keep_last", "keep_every_steps", "kept"),
    [(1, None, [50]), (3, None, [30, 40, 50]), (1, 20, [10, 20, 40, 50]), (9, None, STEPS)],
)
def test_the_newest_and_one_of_each_stretch_are_kept(
    keep_last: int, keep_every_steps: int | None, kept: Sequence[int]
) -> None:
    assert set(STEPS) - superseded(STEPS, [], keep_last, keep_every_steps) == set(kept)


@pytest.mark.parametrize(
    ("unverified", "keep_last", "kept"),
    [
        ([50], 1, [40, 50]),
        ([50], 2, [30, 40, 50]),
        ([40, 50], 1, [30, 40, 50]),
        ([20, 50], 1, [40, 50]),  # undone, and of no use any more
        (STEPS, 1, STEPS),
        ([60], 1, [50]),
    ],
)
def test_what_may_turn_out_to_be_wrong_supersedes_nothing(
    unverified: Sequence[int], keep_last: int, kept: Sequence[int]
) -> None:
    """With keep_last=1 the one that was refused was the only one."""
    assert set(STEPS) - superseded(STEPS, unverified, keep_last, None) == set(kept)


def test_one_verified_checkpoint_of_each_interval_is_kept_permanently() -> None:
    assert set(STEPS) - superseded(STEPS, [20, 50], 1, 20) == {10, 30, 40, 50}


def test_what_was_kept_permanently_stays_so_as_checkpoints_come_and_go() -> None:
    present: set[int] = set()
    for step in range(3, 100, 3):
        present.add(step)
        present -= superseded(present, [step], 2, 25)
    assert sorted(present) == [3, 27, 51, 75, 93, 96, 99]


@pytest.mark.parametrize(
    ("audited_steps", "unverified", "kept"),
    [
        (None, [], [50]),
        (9, [], [50]),
        (10, [], [10, 50]),
        (39, [], [30, 50]),
        (39, [30], [20, 50]),
        (60, [], [50]),
        (60, [50], [40, 50]),
    ],
)
def test_the_newest_that_is_audited_is_kept(
    audited_steps: int | None, unverified: Sequence[int], kept: Sequence[int]
) -> None:
    assert set(STEPS) - superseded(STEPS, unverified, 1, None, audited_steps) == set(kept)


def test_there_is_always_a_checkpoint_that_is_audited_once_one_was() -> None:
    present: set[int] = set()
    for step in range(3, 100, 3):
        audited_steps = step - step % 20
        present.add(step)
        present -= superseded(present, [step], 2, None, audited_steps)
        assert (step < 20) or any(audited_steps - 3 < one <= audited_steps for one in present)
