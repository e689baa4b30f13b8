"""The fold of the outer log, and what sites decide by it."""

from collections.abc import Sequence

import pytest

from spare_megatron.core.outer.decisions import WENT_ON, LeaseWatch, Own, RoundVotes, donor, may_arrive, next_entry
from spare_megatron.core.outer.entries import (
    Arrival,
    CloseRound,
    CommitRound,
    Contribution,
    Done,
    Lease,
    OpenRound,
    OuterEntry,
    Revision,
    SiteId,
    WithoutSite,
    decode_entry,
    encode_entry,
)
from spare_megatron.core.outer.rounds import RoundFold, RoundPhase

START = Revision(0, "start")
WAIT_S = 30.0
A, B, C = map(SiteId, range(3))


def open_round(number: int, base: Revision = START, site: SiteId = A) -> OpenRound:
    return OpenRound(round=number, site=site, base=base)


def close(number: int, *sites: SiteId) -> CloseRound:
    return CloseRound(round=number, sites=tuple(Contribution(site, 0, 5, 100) for site in sites))


def commit(number: int, *sites: SiteId, digest: str = "") -> CommitRound:
    return CommitRound(round=number, sites=sites, digest=digest or f"state {number}")


def after(*entries: OuterEntry) -> RoundFold:
    rounds = RoundFold(num_sites=3)
    for entry in entries:
        assert rounds.apply(entry) == ()
    return rounds


def committed(number: int = 1) -> list[OuterEntry]:
    """The entries of a first round of sites A and B."""
    return [open_round(1), close(1, A, B), commit(1, A, B)]


def lease(site: SiteId, revision: Revision = START, beats: int = 0, *, head: int = 0, progress: int = 0) -> Lease:
    return Lease(site=site, incarnation=0, beats=beats, progress=progress, head=head, revision=revision)


def watching(*leases: Lease, now_s: float = 0.0) -> LeaseWatch:
    watch = LeaseWatch(WAIT_S)
    watch.on_leases({one.site: one for one in leases}, now_s)
    watch.on_entry(now_s)
    return watch


def arrivals(*sites: SiteId, revision: Revision = START, incarnation: int = 0) -> RoundVotes:
    votes = [
        Arrival(site=site, incarnation=incarnation, round=1, weight=5, step=100, revision=revision) for site in sites
    ]
    return RoundVotes(arrivals={one.site: one for one in votes})


def done(*sites: SiteId, attempt: int = 0, digests: Sequence[str] = ()) -> RoundVotes:
    found = digests or ["state 1"] * len(sites)
    votes = [
        Done(site=site, incarnation=0, round=1, attempt=attempt, digest=digest)
        for site, digest in zip(sites, found, strict=True)
    ]
    return RoundVotes(done={one.site: one for one in votes})


def own(site: SiteId = A, revision: Revision = START, *lacks: SiteId, is_due: bool = False, on: bool = False) -> Own:
    return Own(site=site, incarnation=0, revision=revision, is_due=is_due, lacks=frozenset(lacks), has_gone_on=on)


def test_a_round_is_opened_closed_and_committed() -> None:
    rounds = after(open_round(1))
    assert (rounds.phase, rounds.round, rounds.revision) == (RoundPhase.OPEN, 1, START)
    rounds = after(open_round(1), close(1, A, B))
    assert (rounds.phase, list(rounds.sites)) == (RoundPhase.CLOSED, [A, B])
    rounds = after(*committed())
    assert (rounds.phase, rounds.revision, rounds.head) == (RoundPhase.IDLE, Revision(1, "state 1"), 3)


def test_a_round_that_loses_a_site_is_committed_by_the_others() -> None:
    rounds = after(open_round(1), close(1, A, B), WithoutSite(round=1, site=A), commit(1, B))
    assert rounds.revision == Revision(1, "state 1")


def test_a_round_that_loses_all_sites_makes_no_state() -> None:
    rounds = after(open_round(1), close(1, A), WithoutSite(round=1, site=A))
    assert (rounds.phase, rounds.revision) == (RoundPhase.IDLE, START)
    assert rounds.apply(open_round(2)) == ()


@pytest.mark.parametrize(
    ("before", "entry", "why"),
    [
        ([], open_round(2), "in place of round 1"),
        ([], close(1, A), "is closed, and round 0 is idle"),
        ([open_round(1)], close(1), "distinct sites"),
        ([open_round(1)], close(1, B, A), "distinct sites"),
        ([open_round(1)], close(1, SiteId(3)), "num_sites is 3"),
        ([open_round(1)], commit(1, A), "is decided, and round 1 is open"),
        ([open_round(1), close(1, A, B)], open_round(2), "is closed and undecided"),
        ([open_round(1), close(1, A, B)], commit(1, A), "in place of"),
        ([open_round(1), close(1, A, B)], WithoutSite(round=1, site=C), "takes no part"),
        (committed(), commit(1, A, B), "is decided, and round 1 is idle"),
    ],
)
def test_an_entry_that_cannot_follow_is_named_and_changes_nothing(
    before: list[OuterEntry], entry: OuterEntry, why: str
) -> None:
    rounds, same = after(*before), after(*before)
    [found] = rounds.apply(entry)
    assert why in found
    assert rounds.head == same.head + 1
    assert (rounds.phase, rounds.round, rounds.known, rounds.sites) == (same.phase, same.round, same.known, same.sites)


def test_a_round_that_continues_an_earlier_state_makes_later_ones_void() -> None:
    rounds = after(*committed(), open_round(2, START))
    assert rounds.revision == START
    assert rounds.known[0].sites == {A}


def test_a_state_that_the_log_does_not_know_makes_all_that_it_knows_void() -> None:
    rounds = after(*committed(), open_round(6, Revision(5, "of a log that was lost")))
    assert [one.revision.round for one in rounds.known] == [5]


def test_a_log_that_was_lost_begins_anew_with_any_state() -> None:
    rounds = after(open_round(8, Revision(7, "seventh")))
    assert (rounds.round, rounds.revision) == (8, Revision(7, "seventh"))


@pytest.mark.parametrize("entry", [*committed(), WithoutSite(round=1, site=B, reason="silent")])
def test_entries_survive_their_encoding(entry: OuterEntry) -> None:
    assert decode_entry(encode_entry(entry)) == entry


@pytest.mark.parametrize("text", ['{"entry":"openround","version":2}', '{"entry":"other","version":1}'])
def test_an_entry_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="all sites must run the same version"):
        decode_entry(text)


# ---------------------------------------------------------------------------------------------------------- decisions


def test_the_first_site_with_enough_steps_opens_a_round() -> None:
    watch = watching(lease(A), lease(B))
    assert next_entry(after(), own(), RoundVotes(), watch, 0.0) is None
    assert next_entry(after(), own(is_due=True), RoundVotes(), watch, 0.0) == open_round(1)


def test_a_round_closes_once_all_live_sites_have_arrived() -> None:
    rounds, watch = after(open_round(1)), watching(lease(A), lease(B))
    assert may_arrive(rounds, own(B))
    assert next_entry(rounds, own(), arrivals(A), watch, 1.0) is None
    assert next_entry(rounds, own(), arrivals(A, B), watch, 1.0) == close(1, A, B)


def test_a_round_waits_for_a_live_site_no_longer_than_it_may() -> None:
    rounds, watch = after(open_round(1)), watching(lease(A), lease(B))
    for beats, now_s in enumerate((10.0, 20.0, 29.0), start=1):
        watch.on_leases({A: lease(A, beats=beats), B: lease(B, beats=beats)}, now_s)
        assert next_entry(rounds, own(), arrivals(A), watch, now_s) is None
    assert next_entry(rounds, own(), arrivals(A), watch, WAIT_S) == close(1, A)


def test_a_round_does_not_wait_for_a_site_that_is_away() -> None:
    rounds, watch = after(open_round(1)), watching(lease(A), lease(B))
    for beats, now_s in enumerate((10.0, 20.0, 30.0), start=1):
        watch.on_leases({A: lease(A, beats=beats), B: lease(B)}, now_s)
    watch.on_entry(30.0)
    assert next_entry(rounds, own(), arrivals(A), watch, 30.0) == close(1, A)


def test_a_watcher_that_was_suspended_takes_what_it_missed_for_no_evidence() -> None:
    rounds, watch = after(open_round(1)), watching(lease(A), lease(B))
    watch.on_leases({A: lease(A), B: lease(B)}, 100.0)
    assert set(watch.live(100.0)) == {A, B}
    assert next_entry(rounds, own(), arrivals(A), watch, 100.0) is None


def test_a_site_with_a_stale_state_is_neither_counted_nor_waited_for() -> None:
    newest = Revision(1, "state 1")
    rounds = after(*committed(), open_round(2, newest))
    watch = watching(lease(A, newest, head=4), lease(B, newest, head=4), lease(C))
    votes = RoundVotes(
        arrivals=dict(arrivals(A, B, revision=newest).arrivals) | dict(arrivals(C, revision=START).arrivals)
    )
    assert next_entry(rounds, own(A, newest), votes, watch, 0.0) == close(2, A, B)
    assert not may_arrive(rounds, own(C))
    assert donor(rounds, own(C), watch.live(0.0)) == A


def test_an_earlier_incarnation_does_not_count() -> None:
    watch = watching(lease(A), lease(B))
    votes = RoundVotes(arrivals=dict(arrivals(A).arrivals) | dict(arrivals(B, incarnation=1).arrivals))
    watch.on_entry(-WAIT_S)
    assert next_entry(after(open_round(1)), own(), votes, watch, 0.0) == close(1, A)


def test_a_round_is_committed_by_equal_votes_of_all() -> None:
    rounds, watch = after(open_round(1), close(1, A, B)), watching(lease(A), lease(B))
    assert next_entry(rounds, own(), done(A), watch, 0.0) is None
    assert next_entry(rounds, own(), done(A, B), watch, 0.0) == commit(1, A, B)


def test_votes_on_an_earlier_attempt_do_not_count() -> None:
    rounds, watch = after(open_round(1), close(1, A, B, C), WithoutSite(round=1, site=C)), watching(lease(A), lease(B))
    assert next_entry(rounds, own(), done(A, B), watch, 0.0) is None
    assert next_entry(rounds, own(), done(A, B, attempt=1), watch, 0.0) == commit(1, A, B)


@pytest.mark.parametrize(("digests", "wrong"), [("xxy", C), ("xyy", A), ("xyz", B), ("xyx", B)])
def test_a_site_with_another_result_leaves_the_round(digests: str, wrong: SiteId) -> None:
    rounds, watch = after(open_round(1), close(1, A, B, C)), watching(lease(A), lease(B), lease(C))
    found = next_entry(rounds, own(), done(A, B, C, digests=digests), watch, 0.0)
    assert isinstance(found, WithoutSite)
    assert found.site == wrong


def test_a_site_that_is_gone_leaves_the_round_unless_it_has_voted() -> None:
    rounds, watch = after(open_round(1), close(1, A, B)), watching(lease(A))
    found = next_entry(rounds, own(A, START, B), RoundVotes(), watch, 0.0)
    assert found == WithoutSite(round=1, site=B, reason="its lease has ended")
    assert next_entry(rounds, own(), done(A, B), watch, 0.0) == commit(1, A, B)


def test_of_two_sites_that_do_not_reach_each_other_each_suspects_the_other() -> None:
    rounds, watch = after(open_round(1), close(1, A, B)), watching(lease(A), lease(B))
    for beats, now_s in enumerate((10.0, 20.0, 30.0), start=1):
        watch.on_leases({A: lease(A, beats=beats), B: lease(B, beats=beats)}, now_s)
    for site, other in ((A, B), (B, A)):
        found = next_entry(rounds, own(site, START, other), RoundVotes(), watch, WAIT_S)
        assert isinstance(found, WithoutSite)
        assert found.site == other


def test_an_exchange_that_makes_progress_may_take_long() -> None:
    rounds, watch = after(open_round(1), close(1, A, B)), watching(lease(A), lease(B))
    for beats in range(1, 20):
        now_s = 10.0 * beats
        watch.on_leases({A: lease(A, beats=beats), B: lease(B, beats=beats, progress=beats)}, now_s)
        assert next_entry(rounds, own(), done(A), watch, now_s) is None
    for beats in range(20, 23):
        watch.on_leases({A: lease(A, beats=beats), B: lease(B, beats=beats, progress=19)}, 10.0 * beats)
    found = next_entry(rounds, own(), done(A), watch, 220.0)
    assert isinstance(found, WithoutSite)
    assert found.site == B


def test_a_site_that_has_gone_on_leaves_the_round_although_all_have_voted() -> None:
    rounds, watch = after(open_round(1), close(1, A, B)), watching(lease(A), lease(B))
    found = next_entry(rounds, own(on=True), done(A, B), watch, 0.0)
    assert found == WithoutSite(round=1, site=A, reason=WENT_ON)


def test_the_others_wait_for_a_state_that_a_site_may_still_hold() -> None:
    rounds = after(open_round(1), close(1, A), commit(1, A))
    watch = watching(lease(B, head=3))
    assert next_entry(rounds, own(B, is_due=True), RoundVotes(), watch, 0.0) is None
    assert donor(rounds, own(B), watch.live(0.0)) is None


def test_a_state_that_no_site_holds_is_given_up() -> None:
    rounds = after(open_round(1), close(1, A), commit(1, A))
    watch = watching(lease(A, head=3), lease(B, head=3))
    assert next_entry(rounds, own(B, is_due=True), RoundVotes(), watch, 0.0) == open_round(2, START, B)


def test_a_site_that_has_not_read_its_commit_yet_counts_as_holding_its_state() -> None:
    rounds = after(open_round(1), close(1, A), commit(1, A))
    watch = watching(lease(A, head=2), lease(B, head=3))
    assert next_entry(rounds, own(B, is_due=True), RoundVotes(), watch, 0.0) is None


def test_an_open_round_is_opened_anew_if_its_state_is_lost() -> None:
    rounds = after(open_round(1), close(1, A), commit(1, A), open_round(2, Revision(1, "state 1")))
    watch = watching(lease(A, head=4), lease(B, head=4))
    assert next_entry(rounds, own(B, is_due=True), RoundVotes(), watch, 0.0) == open_round(3, START, B)


def test_an_empty_log_begins_with_the_latest_state() -> None:
    seventh = Revision(7, "seventh")
    watch = watching(lease(A), lease(B, seventh))
    assert next_entry(after(), own(A, is_due=True), RoundVotes(), watch, 0.0) is None
    assert donor(after(), own(A), watch.live(0.0)) == B
    assert next_entry(after(), own(B, seventh, is_due=True), RoundVotes(), watch, 0.0) == open_round(8, seventh, B)
