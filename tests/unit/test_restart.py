"""With whom training starts again after a wipe-out, and from where."""

from dataclasses import replace
from random import Random

import pytest

from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.controller.restart import RestartLimits, Restarts, Search, decide_restart
from spare_megatron.core.log.actions import (
    Action,
    AppendEntry,
    CheckpointCandidate,
    ReadFiles,
    Reading,
    StopWipeOut,
    WithdrawCandidates,
)
from spare_megatron.core.log.entries import Entry, Fence, GiveUp, Restart
from spare_megatron.core.log.events import EntryRead, RestartState, RunStarted, WaitingRead
from spare_megatron.core.log.membership import LogTerms
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.placement import make_placement

RING = make_placement("golomb", 3, 2)
TERMS = LogTerms(placement=RING, num_steps=99)
LIMITS = RestartLimits(max_restarts=1, window_s=60.0, wait_s=5.0)
GONE = "/shared/checkpoints is not the folder that the run began with"


def waiting(group: int, *steps: int, failure: str = "") -> RestartState:
    """A group with checkpoints of no files, of which there is nothing to read."""
    return RestartState(
        member=Member(GroupId(group), 1), candidates=tuple(map(CheckpointCandidate, steps)), failure=failure
    )


def decide(*waits: RestartState, waited_s: float, first_step: int = 0) -> Restart | GiveUp | CheckpointCandidate | None:
    return decide_restart(9, Search(replace(TERMS, first_step=first_step), waits, waited_s, LIMITS), 0)


def restart(step: int, *groups: int) -> Restart:
    return Restart(step=step, members=tuple(Member(GroupId(group), 1) for group in groups))


def test_the_newest_checkpoint_that_all_find_whole_is_loaded_by_all() -> None:
    found = decide(waiting(2, 4, 2), waiting(0, 6, 4, 2), waiting(1, 6, 4), waited_s=0.0)
    assert found == Restart(step=4, members=tuple(Member(GroupId(group), 1) for group in range(3)))


def test_further_groups_that_wait_are_not_counted_as_those_that_are_missing() -> None:
    present = waiting(0, 4), waiting(1, 8, 4), waiting(3, 4)
    assert decide(*present, waited_s=0.1) is None, "group 2 may come, with the newest one"
    assert decide(*present, waiting(2, 8, 4), waited_s=0.1) == restart(4, 0, 1, 2, 3)


def test_a_group_that_cannot_look_for_checkpoints_is_waited_for() -> None:
    """Folders come back. Until then the run does not begin from nothing, though no group finds a checkpoint."""
    blind = [waiting(group, failure=GONE) for group in range(3)]
    assert decide(*blind, waited_s=4.9) is None
    assert decide(waiting(0, 4), waiting(1, 4), blind[2], waited_s=4.9) is None
    assert decide(waiting(0, 4), waiting(1, 4), waiting(2, 4), waited_s=4.9) == decide(
        waiting(0, 4), waiting(1, 4), waiting(2, 4), waited_s=0.0
    )


def test_the_others_start_without_a_group_that_cannot_look() -> None:
    found = decide(waiting(0, 4), waiting(1, 4), waiting(2, failure=GONE), waited_s=5.0)
    assert found == Restart(step=4, members=(Member(GroupId(0), 1), Member(GroupId(1), 1)))


def test_where_no_group_can_read_the_folders_the_run_ends_and_says_why() -> None:
    found = decide(*(waiting(group, failure=GONE) for group in range(3)), waited_s=5.0)
    assert isinstance(found, GiveUp)
    assert found.step == 9
    assert "checkpoint.restart_wait_s=5" in found.reason
    assert found.reason.count(GONE) == 1


def test_one_group_that_finds_nothing_does_not_send_all_back_to_the_beginning() -> None:
    waits = [waiting(0, 6, 4), waiting(1, 6, 4), waiting(2)]
    assert decide(*waits, waited_s=4.9) is None, "perhaps it is started again, and finds them"
    assert decide(*waits, waited_s=5.0) == restart(6, 0, 1)
    # Any two of the three have hosts of all shards, and one alone does not.
    assert decide(waiting(0, 8, 6), waiting(1, 6, 4), waiting(2, 4), waited_s=5.0) == restart(6, 0, 1)


def test_training_starts_over_only_where_no_group_finds_a_checkpoint() -> None:
    assert decide(*(waiting(group) for group in range(3)), waited_s=0.0) == restart(0, 0, 1, 2)
    assert decide(*(waiting(group, 5) for group in range(3)), waited_s=0.0, first_step=5) == restart(5, 0, 1, 2)
    found = decide(waiting(0, 6), waiting(1, 4), waiting(2), waited_s=5.0)
    assert isinstance(found, GiveUp)
    assert "group 0 [6]; group 1 [4]; group 2 none" in found.reason


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_wipe_out_ends_the_run_that_may_not_start_again_or_is_given_up(max_restarts: int) -> None:
    setup = ControllerSetup(
        placement=RING,
        microbatches_per_shard=1,
        num_steps=9,
        restarts=replace(LIMITS, max_restarts=max_restarts),
    )
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)

    def read(entry: Entry) -> Action:
        return controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)[-1]

    for group in range(2):
        read(Fence(group=GroupId(group)))
    stop = read(Fence(group=GroupId(2)))
    assert isinstance(stop, StopWipeOut)
    assert (stop.reason, stop.is_final) == ("", max_restarts == 0)
    given_up = read(GiveUp(step=0, reason="no group has come back"))
    assert given_up == replace(stop, reason="no group has come back", is_final=True)


def test_what_this_training_has_not_saved_is_no_checkpoint_of_it() -> None:
    """A save may end after the wipe-out that undid its step."""
    restarts = Restarts(LIMITS, TERMS)
    restarts.on_wipe_out(StopWipeOut(step=9))
    waits = tuple(waiting(group, 8, 6, 4) for group in range(3))
    event = WaitingRead(group=GroupId(0), waiting=waits, waited_s=0.0)
    (append,) = restarts.decide(event, {0, 4, 6}, {}, 0.0, 7)
    assert append.entry == restart(6, 0, 1, 2)


def test_a_restart_names_the_stages_of_its_members_if_some_have_fewer() -> None:
    restarts = Restarts(LIMITS, replace(TERMS, num_stages=4))
    restarts.on_wipe_out(StopWipeOut(step=9))
    for stages, listed in ((None, ()), (3, (4, 4, 3))):
        waits = (waiting(0, 4), waiting(1, 4), replace(waiting(2, 4), stages=stages))
        event = WaitingRead(group=GroupId(0), waiting=waits, waited_s=0.0)
        (append,) = restarts.decide(event, {4}, {}, 0.0, 7)
        assert append.entry == replace(restart(4, 0, 1, 2), stages=listed)


# ---------------------------------------------------------------------------------------------------------- reading

NEW, OLD = (
    CheckpointCandidate(step=6, num_files=4, digest="new"),
    CheckpointCandidate(step=4, num_files=4, digest="old"),
)
ALL = (0, 1, 2, 3)


def reader(
    group: int, *readings: Reading, candidates: tuple[CheckpointCandidate, ...] = (NEW, OLD), silent_s: float = 0.0
) -> RestartState:
    return RestartState(
        member=Member(GroupId(group), 1),
        candidates=candidates,
        readings=readings,
        is_reading=silent_s > 0.0,
        silent_s=silent_s,
    )


def asked(group: int, *waits: RestartState, waited_s: float = 0.0) -> object:
    """What follows for the group."""
    restarts = Restarts(LIMITS, TERMS)
    restarts.on_wipe_out(StopWipeOut(step=9))
    event = WaitingRead(group=GroupId(group), waiting=waits, waited_s=waited_s)
    actions = restarts.decide(event, range(10), {}, 0.0, 7)
    return actions[0] if actions else None


def files(group: int, *waits: RestartState, waited_s: float = 0.0) -> tuple[int, ...]:
    found = asked(group, *waits, waited_s=waited_s)
    assert isinstance(found, ReadFiles)
    assert found.candidate == NEW
    return found.numbers


def test_each_file_of_the_newest_checkpoint_is_read_by_one_group_before_anybody_loads_it() -> None:
    waits = [reader(group) for group in range(3)]
    assert [files(group, *waits) for group in range(3)] == [(0, 3), (1,), (2,)]
    waits[1:] = [reader(1, Reading(NEW, whole=(1,))), reader(2, Reading(NEW, whole=(2,)))]
    assert [files(group, *waits) for group in range(3)] == [(0, 3), (), ()]
    waits[0] = reader(0, Reading(NEW, whole=(0, 3)))
    assert decide(*waits, waited_s=0.0) == restart(6, 0, 1, 2)


def test_reading_starts_before_all_groups_are_there_and_a_missing_one_is_replaced() -> None:
    waits = [reader(0), reader(1)]
    assert [files(group, *waits) for group in range(2)] == [(0, 3), (1,)]
    assert [files(group, *waits, waited_s=5.0) for group in range(2)] == [(0, 2), (1, 3)]


def test_a_group_that_makes_progress_reading_is_never_given_up_however_long_it_takes() -> None:
    waits = [reader(group, Reading(NEW, num_bytes=group), silent_s=4.9) for group in range(3)]
    assert [files(group, *waits, waited_s=1e6) for group in range(3)] == [(0, 3), (1,), (2,)]


def test_a_group_that_makes_no_progress_is_replaced_and_left_out() -> None:
    waits = [reader(0, Reading(NEW, whole=(0, 3))), reader(1, Reading(NEW, whole=(1,))), reader(2, silent_s=5.0)]
    assert [files(group, *waits, waited_s=9.0) for group in range(2)] == [(2,), ()]
    waits[0] = reader(0, Reading(NEW, whole=(0, 2, 3)))
    assert decide(*waits, waited_s=9.0) == restart(6, 0, 1)
    stuck = decide(*(reader(group, silent_s=5.0) for group in range(3)), waited_s=9.0)
    assert isinstance(stuck, GiveUp)
    assert "group 0 made no progress in reading checkpoints for checkpoint.restart_wait_s=5" in stuck.reason


def test_what_another_incarnation_or_checkpoint_of_the_step_has_read_does_not_count() -> None:
    other = Reading(CheckpointCandidate(step=6, num_files=4, digest="another"), whole=ALL)
    waits = [reader(group, other) for group in range(3)]
    assert [files(group, *waits) for group in range(3)] == [(0, 3), (1,), (2,)]


def test_what_one_group_finds_damaged_is_read_by_one_more_group_only() -> None:
    bad = Reading(NEW, damaged=(1,), reason="step-00000006: 1.distcp has changed")
    waits = [reader(0, Reading(NEW, whole=(0, 3))), reader(1, bad), reader(2, Reading(NEW, whole=(2,)))]
    assert [files(group, *waits) for group in range(3)] == [(), (), (1,)]
    waits[2] = reader(2, Reading(NEW, whole=(2,), damaged=(1,), reason=bad.reason))
    for group in range(3):
        assert asked(group, *waits) == WithdrawCandidates(reasons={NEW: bad.reason})
    # A group that has not withdrawn it may have older ones to name.
    waits[:2] = [replace(item, candidates=(OLD,)) for item in waits[:2]]
    assert asked(0, *waits) is None
    waits[2] = replace(waits[2], candidates=(OLD,))
    assert decide(*waits, waited_s=0.0) == OLD, "it is to be read now"


def test_a_group_that_alone_finds_a_file_damaged_does_not_send_the_others_back() -> None:
    bad = Reading(NEW, damaged=(1,), reason="step-00000006: 1.distcp cannot be read")
    rest = Reading(NEW, whole=(0, 3)), Reading(NEW, whole=(1, 2))
    waits = [
        reader(0, rest[0], candidates=(NEW,)),
        reader(1, bad, candidates=(NEW,)),
        reader(2, rest[1], candidates=(NEW,)),
    ]
    assert asked(0, *waits) is None
    found = asked(1, *waits)
    assert isinstance(found, WithdrawCandidates)
    assert found.reasons == {NEW: f"{bad.reason}; another group finds it whole"}
    waits[1] = replace(waits[1], candidates=())
    assert decide(*waits, waited_s=4.9) is None
    assert decide(*waits, waited_s=5.0) == restart(6, 0, 2)


def test_the_last_group_alone_needs_no_second_witness() -> None:
    bad = Reading(NEW, damaged=(2,), reason="gone")
    ring = make_placement("golomb", 1, 1)
    search = Search(LogTerms(placement=ring, num_steps=99), [reader(0, bad)], 0.0, LIMITS)
    assert search.refused_by(GroupId(0)) == {NEW: "gone"}


@pytest.mark.parametrize("seed", range(40))
def test_in_whatever_order_groups_read_the_newest_sound_checkpoint_is_found(seed: int) -> None:
    """Each group acts on what it reads, the others have not read it yet; some die and come back with nothing read.

    The storage is known here: which files are damaged, and whose way to it is bad. From it follows the outcome.
    """
    random = Random(seed)
    candidates = [CheckpointCandidate(step, random.randint(1, 6), f"of {step}") for step in (2, 4, 6, 8)]
    damaged = {
        candidate: {n for n in range(candidate.num_files) if random.random() < 0.2} for candidate in candidates[1:]
    }
    read: dict[int, dict[CheckpointCandidate, tuple[set[int], set[int]]]] = {group: {} for group in range(3)}
    withdrawn: dict[int, set[CheckpointCandidate]] = {group: set() for group in range(3)}
    incarnations = [1, 1, 1]
    restarts = Restarts(LIMITS, TERMS)
    restarts.on_wipe_out(StopWipeOut(step=9))

    def say(group: int) -> RestartState:
        return RestartState(
            member=Member(GroupId(group), incarnations[group]),
            candidates=tuple(candidate for candidate in reversed(candidates) if candidate not in withdrawn[group])[:2],
            readings=tuple(
                Reading(candidate, tuple(whole), tuple(bad), "bad" if bad else "")
                for candidate, (whole, bad) in read[group].items()
            ),
        )

    announced = {group: say(group) for group in range(3)}
    for _ in range(2000):
        group = random.randrange(3)
        if random.random() < 0.02 and sum(incarnations) < 8:
            incarnations[group], read[group], withdrawn[group] = incarnations[group] + 1, {}, set()
        announced[group] = say(group)
        event = WaitingRead(group=GroupId(group), waiting=tuple(announced.values()), waited_s=0.0)
        for action in restarts.decide(
            event, range(10), {GroupId(g): incarnation - 1 for g, incarnation in enumerate(incarnations)}, 0.0, 7
        ):
            match action:
                case ReadFiles(candidate=candidate, numbers=numbers) if numbers:
                    number = random.choice(numbers)
                    found = read[group].setdefault(candidate, (set(), set()))
                    found[number in damaged.get(candidate, ())].add(number)
                case WithdrawCandidates(reasons=reasons):
                    withdrawn[group] |= set(reasons)
                case AppendEntry(entry=entry):
                    expected = max(candidate.step for candidate in candidates if not damaged.get(candidate))
                    assert entry == Restart(
                        step=expected,
                        members=tuple(Member(GroupId(g), incarnation) for g, incarnation in enumerate(incarnations)),
                    )
                    return
    pytest.fail("training never starts again")
