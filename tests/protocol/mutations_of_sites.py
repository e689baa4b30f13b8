"""Mutations of the outer log: bugs planted in what sites decide, and in what they do with it."""

from collections.abc import Mapping
from dataclasses import replace

from spare_megatron.core.outer import decisions
from spare_megatron.core.outer.decisions import LeaseWatch, Own, RoundVotes
from spare_megatron.core.outer.entries import CommitRound, Lease, OuterEntry, SiteId, WithoutSite
from spare_megatron.core.outer.rounds import RoundFold, RoundPhase
from tests.protocol.outer_sites import OuterProtocol


def counts_stale(rounds: RoundFold, own: Own, votes: RoundVotes, watch: LeaseWatch, now_s: float) -> OuterEntry | None:
    """Takes every arrival for one with the state that the round continues."""
    found = {site: replace(vote, revision=rounds.revision) for site, vote in votes.arrivals.items()}
    return decisions.next_entry(rounds, own, replace(votes, arrivals=found), watch, now_s)


def arrives_stale(rounds: RoundFold, own: Own) -> bool:
    return rounds.phase is RoundPhase.OPEN


def commits_early(rounds: RoundFold, own: Own, votes: RoundVotes, watch: LeaseWatch, now_s: float) -> OuterEntry | None:
    """Commits what it has voted for, whatever others have."""
    if rounds.phase is RoundPhase.CLOSED and own.site in votes.done and own.site in rounds.sites:
        digest = votes.done[own.site].digest
        return CommitRound(round=rounds.round, sites=tuple(rounds.sites), digest=digest)
    return decisions.next_entry(rounds, own, votes, watch, now_s)


def commits_most(rounds: RoundFold, own: Own, votes: RoundVotes, watch: LeaseWatch, now_s: float) -> OuterEntry | None:
    """Commits the most common result without a word about those that have another one."""
    found = decisions.next_entry(rounds, own, votes, watch, now_s)
    if isinstance(found, WithoutSite) and found.reason.startswith("its result differs"):
        digests = [votes.done[site].digest for site in rounds.sites]
        return CommitRound(round=found.round, sites=tuple(rounds.sites), digest=max(digests, key=digests.count))
    return found


def forgets_gone(rounds: RoundFold, own: Own, votes: RoundVotes, watch: LeaseWatch, now_s: float) -> OuterEntry | None:
    """Lets a round be committed that it does not wait for any more."""
    return decisions.next_entry(rounds, replace(own, has_gone_on=False), votes, watch, now_s)


def waits_forever(rounds: RoundFold, own: Own, votes: RoundVotes, watch: LeaseWatch, now_s: float) -> OuterEntry | None:
    """Leaves no site out that lives and makes no progress."""
    found = decisions.next_entry(rounds, own, votes, watch, now_s)
    return None if isinstance(found, WithoutSite) and found.reason.startswith("no progress") else found


def gives_up(rounds: RoundFold, own: Own, votes: RoundVotes, watch: LeaseWatch, now_s: float) -> OuterEntry | None:
    """Takes a state for lost whose sites are away."""
    if rounds.known and rounds.phase is not RoundPhase.CLOSED:
        held = {lease.revision for lease in watch.live(now_s).values()}
        folded = [one for one in rounds.known if one.revision in held] or rounds.known[:1]
        pruned = RoundFold(rounds.num_sites)
        pruned.round, pruned.phase, pruned.known = rounds.round, rounds.phase, folded
        return decisions.next_entry(pruned, own, votes, watch, now_s)
    return decisions.next_entry(rounds, own, votes, watch, now_s)


def takes_any(rounds: RoundFold, own: Own, live: Mapping[SiteId, Lease]) -> SiteId | None:
    """Takes the state over from any other site, when its own is stale."""
    if own.revision == decisions.newest_held(rounds, live):
        return None
    return min((site for site in live if site != own.site), default=None)


MUTATIONS_OF_SITES = {
    "counts a stale revision": OuterProtocol(next_entry=counts_stale, may_arrive=arrives_stale),
    "closes a round without votes": OuterProtocol(next_entry=commits_early),
    "commits a result that differs": OuterProtocol(next_entry=commits_most),
    "applies a round twice": OuterProtocol(clears_work=False),
    "takes a result before its commit": OuterProtocol(awaits_commit=False),
    "votes with the result of an earlier attempt": OuterProtocol(computes_anew=False),
    "commits for a site that has gone on": OuterProtocol(next_entry=forgets_gone),
    "waits for a site without progress": OuterProtocol(next_entry=waits_forever),
    "gives up a state of a site that is away": OuterProtocol(next_entry=gives_up),
    "takes over a stale state": OuterProtocol(donor=takes_any),
}
