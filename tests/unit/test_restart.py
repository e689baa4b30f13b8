"""With whom training starts again after a wipe-out, and from where."""

from spare_megatron.core.messages import Restart, StopWipeOut
from spare_megatron.core.placement import make_placement
from spare_megatron.core.restart import RestartLimits, Restarts, decide_restart
from spare_megatron.core.restart_messages import GiveUp, Waiting, WaitingRead
from spare_megatron.core.topology import GroupId, Member

RING = make_placement("golomb", 3, 2)
LIMITS = RestartLimits(max_restarts=1, window_s=60.0, wait_s=5.0)
GONE = "/shared/checkpoints is not the folder that the run began with"


def waiting(group: int, *steps: int, failure: str = "") -> Waiting:
    return Waiting(member=Member(GroupId(group), 1), steps=steps, failure=failure)


def decide(*waits: Waiting, waited_s: float, first_step: int = 0) -> Restart | GiveUp | None:
    return decide_restart(9, RING, waits, waited_s, 0, LIMITS, first_step=first_step)


def restart(step: int, *groups: int) -> Restart:
    return Restart(step=step, members=tuple(Member(GroupId(group), 1) for group in groups))


def test_the_newest_checkpoint_that_all_find_whole_is_loaded_by_all() -> None:
    found = decide(waiting(2, 4, 2), waiting(0, 6, 4, 2), waiting(1, 6, 4), waited_s=0.0)
    assert found == Restart(step=4, members=tuple(Member(GroupId(group), 1) for group in range(3)))


def test_who_cannot_look_for_checkpoints_is_waited_for() -> None:
    """Folders come back. Until then the run does not begin from nothing, though nobody finds a checkpoint."""
    blind = [waiting(group, failure=GONE) for group in range(3)]
    assert decide(*blind, waited_s=4.9) is None
    assert decide(waiting(0, 4), waiting(1, 4), blind[2], waited_s=4.9) is None
    assert decide(waiting(0, 4), waiting(1, 4), waiting(2, 4), waited_s=4.9) == decide(
        waiting(0, 4), waiting(1, 4), waiting(2, 4), waited_s=0.0
    )


def test_the_others_start_without_who_cannot_look() -> None:
    found = decide(waiting(0, 4), waiting(1, 4), waiting(2, failure=GONE), waited_s=5.0)
    assert found == Restart(step=4, members=(Member(GroupId(0), 1), Member(GroupId(1), 1)))


def test_where_nobody_can_look_the_run_ends_and_says_why() -> None:
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


def test_training_begins_anew_only_where_nobody_finds_anything() -> None:
    assert decide(*(waiting(group) for group in range(3)), waited_s=0.0) == restart(0, 0, 1, 2)
    assert decide(*(waiting(group, 5) for group in range(3)), waited_s=0.0, first_step=5) == restart(5, 0, 1, 2)
    found = decide(waiting(0, 6), waiting(1, 4), waiting(2), waited_s=5.0)
    assert isinstance(found, GiveUp)
    assert "group 0 [6]; group 1 [4]; group 2 none" in found.reason


def test_what_this_training_has_not_saved_is_no_checkpoint_of_it() -> None:
    """A save may end after the wipe-out that undid its step."""
    restarts = Restarts(LIMITS, RING)
    restarts.wiped_out(StopWipeOut(step=9))
    event = WaitingRead(waiting=tuple(waiting(group, 8, 6, 4) for group in range(3)), waited_s=0.0)
    (append,) = restarts.decide(event, {0, 4, 6}, {}, 0.0, 7)
    assert append.entry == restart(6, 0, 1, 2)
