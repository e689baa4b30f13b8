"""What a site may do in a round: the next entry of the outer log, whether it arrives, and from whom it takes the state.

Every site's leader decides by the log, the votes and the leases, all read anew after the last entry; times are on its
own monotonic clock. Whichever leader appends first is right, and the others fold its entry.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from spare_megatron.core.outer import entries
from spare_megatron.core.outer.entries import Done, Lease, OuterEntry, Revision, SiteId
from spare_megatron.core.outer.rounds import KnownRevision, RoundFold, RoundPhase

WENT_ON = "it has gone on without the result"
"""The reason of a site that leaves a round by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A site as its leader knows it."""

    site: SiteId
    incarnation: int
    revision: Revision
    is_due: bool = False
    """It has computed `sites.every_steps` since its last outer step, and since it last went on without one."""
    lacks: frozenset[SiteId] = frozenset()
    """Sites whose differences it has yet to fetch in the closed round."""
    has_gone_on: bool = False
    """It has computed further steps since it arrived in the round under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundVotes:
    """Votes of the round under way: of the incarnations that leases name, or those that the round is closed with."""

    arrivals: Mapping[SiteId, entries.Arrival] = field(default_factory=dict)
    done: Mapping[SiteId, Done] = field(default_factory=dict)


class LeaseWatch:
    """Watches the leases of all sites. A site whose lease has not moved for `wait_s` is not live."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._read_at_s: float | None = None
        self._began_s = 0.0
        self._leases: dict[SiteId, Lease] = {}
        self._beat_at_s: dict[SiteId, float] = {}
        self._moved_at_s: dict[SiteId, float] = {}

    def on_leases(self, leases: Mapping[SiteId, Lease], now_s: float) -> None:
        """Notes the leases that are in the store. After a long gap all begin anew: what was missed is no evidence."""
        is_late = self._read_at_s is not None and now_s - self._read_at_s > self.wait_s / 2
        self._read_at_s = now_s
        for site, lease in leases.items():
            before = None if is_late else self._leases.get(site)
            if before is None or (before.incarnation, before.beats) != (lease.incarnation, lease.beats):
                self._beat_at_s[site] = now_s
            if before is None or (before.incarnation, before.progress) != (lease.incarnation, lease.progress):
                self._moved_at_s[site] = now_s
        self._leases = dict(leases)
        if is_late:
            self._began_s = now_s

    def on_entry(self, now_s: float) -> None:
        """Notes that an entry was read: from here on all sites have `wait_s` to do what it asks for."""
        self._began_s = now_s

    def live(self, now_s: float) -> dict[SiteId, Lease]:
        return {site: one for site, one in self._leases.items() if now_s - self._beat_at_s[site] < self.wait_s}

    def has_waited(self, now_s: float) -> bool:
        """Whether the last entry was read `wait_s` ago."""
        return now_s - self._began_s >= self.wait_s

    def is_quiet(self, site: SiteId, now_s: float) -> bool:
        """Whether the site has made no progress for `wait_s` since the last entry."""
        return now_s - max(self._began_s, self._moved_at_s.get(site, self._began_s)) >= self.wait_s


def next_entry(rounds: RoundFold, own: Own, votes: RoundVotes, watch: LeaseWatch, now_s: float) -> OuterEntry | None:
    """The entry that the site may append at `rounds.head`; None while there is nothing to decide."""
    live = watch.live(now_s)
    if rounds.phase is RoundPhase.CLOSED:
        return _decide(rounds, own, votes.done, watch, now_s)
    base = newest_held(rounds, live)
    if rounds.phase is RoundPhase.IDLE or base != rounds.revision:
        if own.is_due and own.revision == base:
            return entries.OpenRound(round=rounds.next_round(base), site=own.site, base=base)
        return None
    arrived = tuple(
        entries.Contribution(site, one.incarnation, one.weight, one.step)
        for site, one in sorted(votes.arrivals.items())
        if one.revision == base and site in live and one.incarnation == live[site].incarnation
    )
    awaited = {site for site, lease in live.items() if _holds(rounds.known[-1], lease)}
    is_closing = awaited <= {one.site for one in arrived} or watch.has_waited(now_s)
    return entries.CloseRound(round=rounds.round, sites=arrived) if arrived and is_closing else None


def _decide(
    rounds: RoundFold, own: Own, done: Mapping[SiteId, Done], watch: LeaseWatch, now_s: float
) -> OuterEntry | None:
    """The next entry of a closed round."""
    live = watch.live(now_s)
    if own.has_gone_on and _takes_part(rounds, own.site, own.incarnation):
        return entries.WithoutSite(round=rounds.round, site=own.site, reason=WENT_ON)
    digests = {
        site: vote.digest
        for site, vote in done.items()
        if vote.attempt == rounds.attempt and _takes_part(rounds, site, vote.incarnation)
    }
    missing = [site for site in rounds.sites if site not in digests]
    if not missing:
        return _commit(rounds, digests)
    for site in missing:
        if site not in live or live[site].incarnation != rounds.sites[site].incarnation:
            return entries.WithoutSite(round=rounds.round, site=site, reason="its lease has ended")
    # A site that lacks differences suspects those that should send them; any other those that have not voted.
    is_fetching = own.site in missing and _takes_part(rounds, own.site, own.incarnation)
    suspects: Collection[SiteId] = own.lacks if is_fetching else missing
    for site in sorted(suspects):
        if site in rounds.sites and watch.is_quiet(own.site if is_fetching else site, now_s):
            reason = f"no progress for {watch.wait_s:g} s in the exchange with site {own.site}"
            return entries.WithoutSite(round=rounds.round, site=site, reason=reason)
    return None


def _commit(rounds: RoundFold, digests: Mapping[SiteId, str]) -> OuterEntry:
    """The commit, if all have the same result; else a site leaves whose result is not the most common one."""
    counts = Counter(digests[site] for site in rounds.sites)
    right, _ = counts.most_common(1)[0]  # of those with equally many votes the one of the lowest site
    wrong = [site for site in rounds.sites if digests[site] != right]
    if wrong:
        return entries.WithoutSite(round=rounds.round, site=wrong[0], reason=f"its result differs from {right[:12]}")
    return entries.CommitRound(round=rounds.round, sites=tuple(rounds.sites), digest=right)


def _takes_part(rounds: RoundFold, site: SiteId, incarnation: int) -> bool:
    return site in rounds.sites and rounds.sites[site].incarnation == incarnation


def _holds(known: KnownRevision, lease: Lease) -> bool:
    """Whether the live site holds the revision, or is on the way to: it has not acted upon its entry yet."""
    return lease.revision == known.revision or (lease.site in known.sites and lease.head < known.head)


def newest_held(rounds: RoundFold, live: Mapping[SiteId, Lease]) -> Revision | None:
    """The revision that the next round continues: the newest that is not lost.

    It is lost if all sites that held it are live and no live site holds it. A site that is away may still hold it:
    then the others compute on, but open no round. In an empty log any state is as good: the one of the latest round.
    """
    for known in reversed(rounds.known):
        is_away = any(site not in live for site in known.sites)
        if is_away or any(_holds(known, lease) for lease in live.values()):
            return known.revision
    held = [(lease.revision.round, -site, lease.revision) for site, lease in live.items()]
    return max(held)[2] if held else None


def may_arrive(rounds: RoundFold, own: Own) -> bool:
    """Whether the site, at its next commit, votes that it has arrived, if it has computed a microbatch."""
    return rounds.phase is RoundPhase.OPEN and own.revision == rounds.revision and not own.has_gone_on


def donor(rounds: RoundFold, own: Own, live: Mapping[SiteId, Lease]) -> SiteId | None:
    """The site whose state this one takes over, as its own is not what rounds continue; None: its own is, or no site
    that holds it is live.
    """
    newest = newest_held(rounds, live)
    if own.revision == newest:
        return None
    holders = [site for site, lease in live.items() if lease.revision == newest and site != own.site]
    return min(holders, default=None)
