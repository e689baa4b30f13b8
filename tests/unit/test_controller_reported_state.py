"""The controller where votes report partition digests: which groups are fenced, which copies count."""

from spare_megatron.core.log.actions import (
    AttemptFinish,
    AttemptReduce,
    ComputeStep,
    GatherParams,
    ReadEntry,
    StartRepairs,
    StopWipeOut,
    UpdateModel,
)
from spare_megatron.core.log.entries import Commit, Fence, Finish, Retry
from spare_megatron.core.log.votes import PartitionDigest, Vote
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import PartitionCopy
from tests.unit.test_controller_partitions import decided, fold, kinds, last_attempt, make_controller


def vote_with(attempt: AttemptReduce | AttemptFinish, partitions: dict[int, str], params: str = "a") -> Vote:
    """A vote with these digests of state partitions, by their numbers."""
    digests = tuple(PartitionDigest(PartitionId(number), sha256) for number, sha256 in partitions.items())
    return Vote(is_complete=True, plan_digest=attempt.plan_digest, params_digest=params, partition_digests=digests)


def test_after_an_owner_was_wrong_all_gather_anew_from_its_replicas_and_compute_from_zero() -> None:
    """Partition 0 is on groups 0, 2 and 3, and its owner is 0."""
    controller = make_controller(redundancy=3)
    begun = fold(controller, Commit(step=0, attempt=0))
    attempt = last_attempt(begun)
    wrong, right = vote_with(attempt, {0: "x"}, "x"), vote_with(attempt, {0: "y"}, "y")
    cast = {"g0": wrong, "g1": vote_with(attempt, {}, "x"), "g2": right, "g3": right}
    fenced = decided(controller, attempt, **cast)
    assert isinstance(fenced, Fence)
    assert (fenced.group, fenced.discard) == (0, True)
    assert StartRepairs in kinds(fold(controller, fenced))
    retry = decided(controller, attempt, **cast)
    assert retry == Retry(step=1, attempt=1, recompute=True, gather=True)
    gather, *rest = fold(controller, retry)
    assert isinstance(gather, GatherParams)
    assert gather.is_anew
    assert gather.owners[0].group in (2, 3)
    assert kinds(rest) == [ComputeStep, AttemptReduce, ReadEntry]


def test_two_hosts_that_differ_are_a_wipe_out_that_says_so() -> None:
    """Partition 0 is on groups 0 and 3."""
    controller = make_controller(redundancy=2)
    attempt = last_attempt(fold(controller, Commit(step=0, attempt=0)))
    others = vote_with(attempt, {})
    cast = {"g0": vote_with(attempt, {0: "x"}), "g1": others, "g2": others, "g3": vote_with(attempt, {0: "y"})}
    first = decided(controller, attempt, **cast)
    fold(controller, first)
    second = decided(controller, attempt, **cast)
    [stop] = fold(controller, second)
    assert isinstance(stop, StopWipeOut)
    assert 0 in stop.partitions
    assert stop.cause == "groups [0, 3] hold different state of partition 0 before step 1, and no majority is right"


def test_where_hosts_differ_and_others_report_nothing_all_report_before_any_is_fenced() -> None:
    """Partition 0 is on groups 0, 2 and 3. Group 3 may have copied from 0, and would stay while 0 and 2 are fenced."""
    controller = make_controller(redundancy=3)
    attempt = last_attempt(fold(controller, Commit(step=0, attempt=0)))
    cast = {"g0": vote_with(attempt, {0: "x"}), "g1": vote_with(attempt, {}), "g2": vote_with(attempt, {0: "y"})}
    entry = decided(controller, attempt, **cast)
    assert entry == Retry(step=1, attempt=1, recompute=True, gather=True)
    [gather] = [action for action in fold(controller, entry) if isinstance(action, GatherParams)]
    assert gather.is_anew, "groups that gather anew report their state"


def test_a_copy_is_proven_by_the_commit_that_has_compared_it_with_all_other_hosts() -> None:
    """Partition 0 is on groups 0, 2 and 3."""
    controller = make_controller(redundancy=3)
    attempt = last_attempt(fold(controller, Commit(step=0, attempt=0)))
    fresh = Vote(
        is_complete=True,
        plan_digest=attempt.plan_digest,
        params_digest="a",
        partition_digests=(PartitionDigest(PartitionId(0), "x", is_proven=False),),
    )
    proven = vote_with(attempt, {0: "x"})
    for cast, is_proven in (
        ({"g3": fresh}, False),
        ({"g0": proven, "g3": fresh}, False),
        ({"g0": proven, "g2": proven, "g3": fresh}, True),
    ):
        commit = decided(controller, attempt, **cast)
        assert isinstance(commit, Commit)
        assert commit.proven == ((PartitionCopy(PartitionId(0), Member(GroupId(3))),) if is_proven else ())
    update = fold(controller, commit)[0]
    assert isinstance(update, UpdateModel)
    assert update.proven == commit.proven


def test_state_is_compared_once_more_before_the_run_ends() -> None:
    controller = make_controller(redundancy=3, steps=1)
    [finish] = [a for a in fold(controller, Commit(step=0, attempt=0)) if isinstance(a, AttemptFinish)]
    right, wrong = vote_with(finish, {0: "y"}), vote_with(finish, {0: "x"})
    cast = {"g0": wrong, "g1": vote_with(finish, {}), "g2": right, "g3": right}
    fold(controller, decided(controller, finish, **cast))
    retry = decided(controller, finish, **cast)
    assert retry == Retry(step=1, attempt=1, recompute=True, gather=True)
    gather, again, _ = fold(controller, retry)
    assert isinstance(gather, GatherParams)
    assert gather.is_anew
    assert isinstance(again, AttemptFinish)
    assert decided(controller, again) == Finish(step=1, attempt=2)
