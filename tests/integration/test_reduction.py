"""The buckets of one rank over its attempts, with a communicator that completes them as late as it may."""

import errno
import math
import os

import pytest

from spare_megatron.core.log.bucket_window import MAX_STAGED, WINDOW, BucketWindow
from spare_megatron.core.log.gradient_guard import GradientFinding, UnsoundGradient
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from tests.integration.attempt_stand_ins import NUM_BUCKETS, Rank


def test_an_attempt_stages_a_few_buckets_at_a_time_and_nothing_as_large_as_all_gradients() -> None:
    rank = Rank(num_sums=NUM_BUCKETS)
    vote = rank.attempt(0)
    assert (vote.is_complete, vote.num_complete) == (True, (NUM_BUCKETS,))
    assert rank.communicator.most_in_flight == WINDOW
    assert len(rank.sums.stagings) == MAX_STAGED
    assert {staging.numel() for staging in rank.sums.stagings} == {11}
    assert NUM_BUCKETS - MAX_STAGED <= len(rank.sums.put_back) < NUM_BUCKETS, "the last are not known to be everywhere"
    assert rank.sums.put_back == sorted(rank.sums.put_back)
    rank.buckets.commit()
    assert rank.sums.put_back == list(range(NUM_BUCKETS))
    assert bool((rank.sums.local == 2.0).all())
    assert rank.probe.calls == [
        FaultPoint.BEFORE_REDUCE,
        FaultPoint.IN_REDUCE,
        FaultPoint.AFTER_REDUCE,
        FaultPoint.AFTER_VOTE,
    ]


@pytest.mark.parametrize("num_complete", range(NUM_BUCKETS))
def test_a_failed_attempt_leaves_the_local_sums_of_all_that_others_may_not_hold(num_complete: int) -> None:
    # The other has completed as many as it needed to post the last that is complete here, and maybe all of these.
    window = BucketWindow(NUM_BUCKETS, 0)
    window.num_complete = num_complete
    for num_kept in range(window.num_everywhere, num_complete + 1):
        rank = Rank(num_sums=num_complete)
        vote = rank.attempt(0)
        assert (vote.is_complete, vote.num_complete) == (False, (num_complete,))
        rank.communicator.num_left = NUM_BUCKETS
        vote = rank.attempt(1, num_kept)
        assert vote.is_complete
        rank.buckets.commit()
        # Once over two groups each, whether in the first attempt or in the second.
        assert bool((rank.sums.local == 2.0).all())
        assert rank.sums.kept == [0, num_kept]
        contributions = [record for record in rank.records if hasattr(record, "microbatches")]
        assert [record.kept for record in contributions] == [[], [num_kept]]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_sum_that_contradicts_its_checksum_is_not_committed_and_found_in_its_attempt(overlaps: bool) -> None:
    rank = Rank(num_sums=3 * NUM_BUCKETS, overlaps=overlaps)
    rank.sums.wrong = {5: 1, 7: 1}
    if overlaps:
        rank.compute(0)(NUM_BUCKETS)
    vote = rank.attempt(0)
    assert (vote.is_complete, vote.has_wrong_sum) == (False, True)
    [record] = [record for record in rank.records if hasattr(record, "evidence")]
    assert record.evidence == "rank 0: the sum of bucket 5 contradicts its checksum"
    with pytest.raises(AssertionError, match="complete sum"):
        rank.buckets.commit()
    rank.sums.local.fill_(1.0)  # all is computed again
    vote = rank.attempt(1)
    assert (vote.is_complete, vote.has_wrong_sum) == (True, False)
    rank.buckets.commit()
    assert bool((rank.sums.local == 2.0).all())


def test_a_wrong_sum_before_the_attempt_breaks_is_reported_too() -> None:
    rank = Rank(num_sums=4)
    rank.sums.wrong = {2: 1}
    vote = rank.attempt(0)
    assert (vote.is_complete, vote.num_complete, vote.has_wrong_sum) == (False, (4,), True)


def test_more_than_it_holds_is_not_taken_for_kept() -> None:
    rank = Rank(num_sums=3)
    rank.attempt(0)
    with pytest.raises(RuntimeError, match="4 buckets are kept, and this rank holds 3"):
        rank.attempt(1, 4)


@pytest.mark.parametrize("overlaps", [False, True])
def test_suspect_losses_are_journaled_before_an_unsound_gradient_ends_the_attempt(overlaps: bool) -> None:
    """They say which samples may be behind it."""
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=overlaps)
    if overlaps:
        rank.compute(0)
    rank.sums.of(NUM_BUCKETS - 1)[3] = math.nan
    with pytest.raises(UnsoundGradient, match="is not finite"):
        rank.attempt(0)
    assert rank.judged == [0]


@pytest.mark.parametrize("bucket", [0, NUM_BUCKETS - 1])
def test_nothing_leaves_a_rank_that_finds_one_bucket_unsound(bucket: int) -> None:
    rank = Rank(num_sums=NUM_BUCKETS)
    rank.sums.of(bucket)[3] = math.nan
    with pytest.raises(UnsoundGradient, match="is not finite"):
        rank.attempt(0)
    assert rank.sums.stagings == []


@pytest.mark.parametrize("overlaps", [False, True])
def test_each_bucket_is_compared_with_its_checksum_before_it_is_sent(overlaps: bool) -> None:
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=overlaps)
    rank.sums.found = "the local sum of bucket 3 is not what was added to it"
    assert rank.attempt(0).is_complete
    assert rank.sums.compared == list(range(NUM_BUCKETS))
    assert rank.buckets.wrong_numbers() == rank.sums.found


def test_a_bucket_that_is_not_sent_as_it_is_unsound_is_compared_with_what_was_added_to_it() -> None:
    rank = Rank(num_sums=NUM_BUCKETS)
    rank.sums.of(5)[3] = math.nan
    with pytest.raises(UnsoundGradient, match="is not finite"):
        rank.attempt(0)
    assert rank.sums.compared == [5]


def test_a_contribution_is_journaled_before_the_ranks_of_its_group_go_on() -> None:
    rank = Rank(num_sums=NUM_BUCKETS)

    def agree(value: int) -> int:
        journaled.append([type(record).__name__ for record in rank.records])
        assert rank.sums.stagings == []
        return value

    journaled: list[list[str]] = []
    rank.agreement.highest = agree
    assert rank.attempt(0).is_complete
    assert journaled == [[], ["ContributionRecord"]]


def test_a_group_that_brings_nothing_for_its_gradients_are_unsound_journals_nothing() -> None:
    """`spare check` took it for one whose wrong parameters had gone into the sum."""
    rank = Rank(num_sums=NUM_BUCKETS)
    rank.agreement.highest = lambda _value: int(GradientFinding.NOT_FINITE)  # of another rank
    with pytest.raises(UnsoundGradient, match="is not finite"):
        rank.attempt(0)
    assert rank.records == []


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("bucket", range(NUM_BUCKETS))
def test_a_bucket_that_is_unsound_in_another_group_ends_the_attempt_and_stands_in_no_place(
    bucket: int, overlaps: bool
) -> None:
    window = BucketWindow(NUM_BUCKETS, 0)
    window.num_complete = bucket
    for num_kept in range(window.num_everywhere, bucket + 1):
        rank = Rank(num_sums=NUM_BUCKETS, overlaps=overlaps)
        rank.communicator.unsound = bucket
        if overlaps:
            rank.compute(0)(NUM_BUCKETS)
        vote = rank.attempt(0)
        assert (vote.is_complete, vote.num_complete) == (False, (bucket,))
        assert rank.records[-1].evidence == f"bucket {bucket}: the gradients of 1 groups are unsound"
        assert rank.num_posted <= bucket + WINDOW
        assert all(put < bucket for put in rank.sums.put_back)
        assert bool((rank.sums.local[10 * bucket :] == 1.0).all()), "to be summed again"
        rank.communicator.in_flight.clear()  # the next has a communicator of its own
        rank.communicator.unsound, rank.communicator.num_left = None, NUM_BUCKETS
        assert rank.attempt(1, num_kept).is_complete
        rank.buckets.commit()
        assert bool((rank.sums.local == 2.0).all())


def test_no_rank_waits_for_sums_of_a_step_whose_parameters_some_group_could_not_gather() -> None:
    rank = Rank(num_sums=NUM_BUCKETS)
    rank.agreement.broken[0] = "group 1: it could not gather"
    vote = rank.attempt(0)
    assert (vote.is_complete, rank.num_posted) == (False, 0)
    assert rank.attempt(1).is_complete


NO_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_rank_that_cannot_build_its_communicator_reports_it_at_once_and_names_what_it_lacks() -> None:
    rank = Rank(num_sums=NUM_BUCKETS)
    rank.communicator.error_of_build = NO_FILES
    vote = rank.attempt(0)
    assert (vote.is_complete, rank.num_posted) == (False, 0)
    assert vote.failure == "too many open files; raise `ulimit -n`"
    evidence = f"rebuild: {NO_FILES} ({vote.failure})"
    assert rank.records[-1].evidence == evidence
    assert rank.agreement.broken == {0: f"group 0: {evidence}"}
    rank.communicator.error_of_build = None
    vote = rank.attempt(1)
    assert (vote.is_complete, vote.failure) == (True, "")


def test_a_rank_that_waits_for_one_that_has_failed_gives_up_with_its_evidence_and_has_not_failed_itself() -> None:
    rank = Rank(num_sums=NUM_BUCKETS)
    rank.agreement.broken[0] = reported = "group 3: rebuild: too many open files"
    vote = rank.attempt(0)
    assert (vote.is_complete, vote.failure) == (False, "")
    assert rank.records[-1].evidence == reported
    assert rank.agreement.broken == {0: reported}


def test_a_lost_peer_is_no_failure_of_ones_own_but_is_reported_too() -> None:
    rank = Rank(num_sums=1)
    vote = rank.attempt(0)
    assert (vote.is_complete, vote.failure) == (False, "")
    assert rank.agreement.broken == {0: "group 0: connection: closed by peer"}


# -------------------------------------------------------------------------------------------------- leaving early


def test_buckets_leave_while_others_are_computed_as_soon_as_they_are_ready() -> None:
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=True)
    report = rank.compute(0)
    assert [type(record).__name__ for record in rank.records] == ["ContributionRecord"], "before anything leaves"
    counts = []
    for num_ready in (1, 2, NUM_BUCKETS):
        report(num_ready)
        counts.append(rank.num_posted)
        rank.communicator.wait(lambda: False)  # the first in flight is complete
    assert counts == [1, 2, MAX_STAGED], "no more are ready, or may be staged"
    vote = rank.attempt(0)
    assert vote.is_complete
    rank.buckets.commit()
    assert bool((rank.sums.local == 2.0).all())
    assert len(rank.sums.stagings) <= MAX_STAGED
    assert len([record for record in rank.records if hasattr(record, "microbatches")]) == 1
    assert rank.probe.calls == [
        FaultPoint.BEFORE_REDUCE,
        FaultPoint.IN_REDUCE,
        FaultPoint.AFTER_REDUCE,
        FaultPoint.AFTER_VOTE,
    ]


def test_without_a_communicator_nothing_leaves_early() -> None:
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=True)
    rank.communicator.is_built = False
    rank.compute(0)(NUM_BUCKETS)
    assert rank.num_posted == 0
    assert rank.attempt(0).is_complete


def test_a_second_attempt_sends_early_what_is_not_kept() -> None:
    rank = Rank(num_sums=5, overlaps=True)
    rank.compute(0)(3)
    assert rank.attempt(0).num_complete == (5,)
    rank.communicator.num_left = NUM_BUCKETS
    posted = rank.num_posted
    report = rank.compute(1, 4)
    report(4)
    assert rank.num_posted == posted, "all that is ready is kept"
    report(5)
    assert rank.num_posted == posted + 1
    assert rank.attempt(1, 4).is_complete
    rank.buckets.commit()
    assert bool((rank.sums.local == 2.0).all())


def test_a_rank_with_an_unsound_bucket_raises_with_its_group_once_its_sum_arrives() -> None:
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=True)
    rank.sums.of(3)[0] = math.nan
    report = rank.compute(0)
    for num_ready in range(1, NUM_BUCKETS + 1):
        report(num_ready)
        rank.communicator.wait(lambda: False)
    num_posted = rank.num_posted
    assert 3 < num_posted <= 3 + WINDOW
    assert rank.sums.num_reads == 0, "sending waits for no norm"
    with pytest.raises(UnsoundGradient, match="is not finite"):
        rank.attempt(0)
    assert rank.num_posted == num_posted
    assert all(put < 3 for put in rank.sums.put_back)
    assert rank.agreement.votes == []


def test_a_rank_with_an_unsound_bucket_raises_although_its_sum_never_arrives() -> None:
    rank = Rank(num_sums=3, overlaps=True)
    rank.sums.of(3)[0] = math.nan
    rank.compute(0)(NUM_BUCKETS)
    with pytest.raises(UnsoundGradient, match="is not finite"):
        rank.attempt(0)


def test_a_rank_raises_what_another_rank_of_its_group_found() -> None:
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=True)
    rank.compute(0)(NUM_BUCKETS)
    rank.agreement.found = GradientFinding.NOT_FINITE
    with pytest.raises(UnsoundGradient, match="is not finite"):
        rank.attempt(0)
    assert rank.agreement.votes == []


def test_a_group_whose_own_checks_have_found_wrong_numbers_votes_so_instead_of_raising_for_its_gradients() -> None:
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=True)
    rank.compute(0)(NUM_BUCKETS)
    rank.agreement.found = GradientFinding.OUTLYING
    rank.agreement.stated = "rank 0: " + 200 * "x"
    vote = rank.attempt(0)
    assert (vote.wrong_positions, vote.wrong_numbers) == ((0,), ("rank 0: " + 200 * "x")[:150])
    [record] = [record for record in rank.records if hasattr(record, "evidence")]
    assert record.evidence == f"own checks found wrong numbers: rank 0: {200 * 'x'}; rank 1: another one"
    rank = Rank(num_sums=NUM_BUCKETS)  # before anything is staged, gradients end the attempt all the same
    rank.agreement.highest = lambda _value: int(GradientFinding.OUTLYING)
    rank.agreement.stated = "rank 0: a product"
    with pytest.raises(UnsoundGradient, match="times its median"):
        rank.attempt(0)
    assert rank.agreement.votes == []


# ------------------------------------------------------------------------------- leaving early, in a group of several


def test_a_rank_of_several_posts_each_bucket_where_it_is_ready_and_waits_there_for_the_window() -> None:
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=True, is_alone=False)
    report = rank.compute(0)
    for num_ready in (1, 2, 3, 7, 7, NUM_BUCKETS):
        report(num_ready)
        assert rank.num_posted == num_ready
        assert rank.communicator.most_in_flight <= WINDOW
    assert len(rank.sums.stagings) == MAX_STAGED
    assert rank.probe.interrupted == [Operation.REDUCE] * 5, "once at each point"
    assert rank.attempt(0).is_complete
    rank.buckets.commit()
    assert bool((rank.sums.local == 2.0).all())


def test_a_rank_of_several_waits_for_its_communicator_at_the_first_point_and_sends_nothing_if_that_is_in_vain() -> None:
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=True, is_alone=False)
    rank.communicator.is_built = False
    rank.compute(0)(1)
    assert rank.num_posted == 1
    rank = Rank(num_sums=NUM_BUCKETS, overlaps=True, is_alone=False)
    rank.agreement.head_is_written = True
    report = rank.compute(0)
    report(1)
    rank.agreement.head_is_written = False
    report(2)
    vote = rank.attempt(0)
    assert (rank.num_posted, vote.is_complete, vote.num_complete) == (0, False, (0,))
    assert rank.attempt(1).is_complete


def test_a_rank_of_several_whose_wait_is_in_vain_sends_nothing_more_in_this_attempt() -> None:
    rank = Rank(num_sums=2, overlaps=True, is_alone=False)
    report = rank.compute(0)
    report(6)
    num_posted = rank.num_posted
    assert 2 < num_posted < 6
    rank.communicator.num_left = NUM_BUCKETS
    report(NUM_BUCKETS)
    vote = rank.attempt(0)
    assert (rank.num_posted, vote.is_complete, vote.num_complete) == (num_posted, False, (2,))
    assert rank.attempt(1, 2).is_complete


@pytest.mark.parametrize("bucket", range(NUM_BUCKETS))
def test_ranks_have_sent_the_same_buckets_whenever_they_learn_of_an_unsound_sum(bucket: int) -> None:
    """A sum that some member does not post would hold up what is posted after it."""
    num_posted = set()
    for learns_late in (False, True):
        rank = Rank(num_sums=NUM_BUCKETS, overlaps=True, is_alone=False)
        rank.communicator.unsound = bucket
        report = rank.compute(0)
        for num_ready in range(1, NUM_BUCKETS + 1):
            report(num_ready)
            while not learns_late and rank.communicator.wait(lambda: False):
                pass
        vote = rank.attempt(0)
        assert (vote.is_complete, vote.num_complete) == (False, (bucket,))
        num_posted.add(rank.num_posted)
    assert len(num_posted) == 1
