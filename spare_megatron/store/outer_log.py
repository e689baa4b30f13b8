"""Client of the outer store: the outer log that sites fold, their votes, leases and addresses.

It is a control store of its own, shared by all sites of a training, whose keys no run removes. Entries and votes are
written once, so that a new leader of a site finds what an earlier one has voted.
"""

import math
from collections.abc import Mapping, Sequence

from spare_megatron.core.outer.decisions import RoundVotes
from spare_megatron.core.outer.entries import Arrival, Done, Lease, OuterEntry, SiteId, decode_entry, encode_entry
from spare_megatron.core.outer.rounds import RoundFold, RoundPhase
from spare_megatron.formats.codec import decode, encode
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, read_values


class OuterLog:
    """The outer log over one store connection; for one thread. Any method may raise StoreLost, after which the rounds
    are to be folded anew over a new connection: an embedded store may have begun with an empty log.
    """

    def __init__(self, store: ControlStore, num_sites: int) -> None:
        self._store = store
        self._log = DecisionLog(store)
        self._sites = [SiteId(site) for site in range(num_sites)]

    def require_alike(self, settings: str) -> None:
        """Raises ValueError if sites that came first have others."""
        if (first := self._store.put_if_absent(keys.OUTER_SETTINGS, settings)) != settings:
            raise ValueError(
                f"outer log: other sites have {first}, and this one has {settings}, with which its rounds would have "
                f"other results: set the same at all sites. To change them at all, delete the key {keys.OUTER_SETTINGS}"
            )

    def claim(self, site: SiteId, start: str) -> int:
        """The incarnation of a start of the site's run, named uniquely: the same for each leader that claims for it."""
        incarnation = 0
        while self._store.put_if_absent(keys.site_incarnation(site, incarnation), start) != start:
            incarnation += 1
        return incarnation

    def read(self, head: int) -> list[OuterEntry]:
        """Entries from the index on: at least half of them. If there is one or none, that was the last."""
        found = self._log.read_few(head, 1)  # in fewer requests, if it is the only one
        return [decode_entry(text) for text in found + (self._log.read(head + 1) if found else [])]

    def append(self, head: int, entry: OuterEntry) -> OuterEntry:
        """Writes the entry if the index is free; returns the entry that stands there."""
        return decode_entry(self._log.append(head, encode_entry(entry)))

    def arrive(self, vote: Arrival) -> Arrival:
        """Casts the vote; returns the one that counts, which an earlier leader of the site may have cast."""
        key = keys.arrival(vote.round, vote.site, vote.incarnation)
        return decode(self._store.put_if_absent(key, encode(vote)), Arrival)

    def has_arrived(self, vote: Arrival) -> bool:
        """Whether the store has a vote of the site in this round: one that has begun anew has none."""
        return self._store.get([keys.arrival(vote.round, vote.site, vote.incarnation)]) != [None]

    def finish(self, vote: Done) -> Done:
        """As `arrive`, on a closed round."""
        key = keys.done(vote.round, vote.attempt, vote.site, vote.incarnation)
        return decode(self._store.put_if_absent(key, encode(vote)), Done)

    def votes(self, rounds: RoundFold, leases: Mapping[SiteId, Lease]) -> RoundVotes:
        """The votes that count in the round under way; `leases` name the incarnations that may arrive."""
        number = rounds.round
        if rounds.phase is RoundPhase.OPEN:
            wanted = [keys.arrival(number, site, one.incarnation) for site, one in leases.items()]
            arrivals = [vote for vote in read_values(self._store, wanted, Arrival) if vote is not None]
            return RoundVotes(arrivals={vote.site: vote for vote in arrivals})
        wanted = [keys.done(number, rounds.attempt, site, one.incarnation) for site, one in rounds.sites.items()]
        done = [vote for vote in read_values(self._store, wanted, Done) if vote is not None]
        return RoundVotes(done={vote.site: vote for vote in done})

    def renew(self, lease: Lease, wait_s: float) -> None:
        """Writes the site's lease, which ends `wait_s` later unless it is written again."""
        self._store.beat(keys.lease(lease.site), encode(lease), math.ceil(wait_s))

    def end_lease(self, site: SiteId) -> None:
        """Ends the lease of a site whose run ends."""
        self._store.delete([keys.lease(site)])

    def leases(self) -> dict[SiteId, Lease]:
        """All leases that are there; `LeaseWatch` knows which of them still move."""
        found = read_values(self._store, [keys.lease(site) for site in self._sites], Lease)
        return {lease.site: lease for lease in found if lease is not None}

    def put_address(self, site: SiteId, address: str) -> None:
        """Writes where the site serves its differences, in place of what an earlier leader wrote."""
        self._store.put(keys.speaker(site), address)

    def addresses(self, sites: Sequence[SiteId]) -> dict[SiteId, str | None]:
        return dict(zip(sites, self._store.get([keys.speaker(site) for site in sites]), strict=True))
