"""The fold of the outer log: which round is under way with which sites, and which state the next one continues."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from spare_megatron.core.outer import entries
from spare_megatron.core.outer.entries import Contribution, Revision, SiteId


class RoundPhase(StrEnum):
    IDLE = "idle"
    """Between two rounds."""
    OPEN = "open"
    """Sites arrive."""
    CLOSED = "closed"
    """Sites exchange differences, and vote on the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRevision:
    """A revision as the log has it."""

    revision: Revision
    sites: frozenset[SiteId]
    """Those that held it when the entry was written."""
    head: int
    """Entries of the log, that one included."""


class RoundFold:
    """State of the outer loop between two entries of its log. All sites have the same after the same entries."""

    def __init__(self, num_sites: int) -> None:
        self.num_sites = num_sites
        self.head = 0  # entries folded, and the index of the next one
        self.round = 0  # the last one opened; the first is 1
        self.phase = RoundPhase.IDLE
        self.known: list[KnownRevision] = []  # revisions that later ones continue, oldest first
        self.sites: dict[SiteId, Contribution] = {}  # that are left in the closed round, ascending
        self.attempt = 0  # sites that the closed round has lost

    @property
    def revision(self) -> Revision | None:
        """The state that the round under way continues, or the next one; None before the first entry."""
        return self.known[-1].revision if self.known else None

    def next_round(self, base: Revision) -> int:
        """The number of the round that is opened next. A new log begins after the state that it continues."""
        return max(self.round, base.round) + 1

    def apply(self, entry: entries.OuterEntry) -> tuple[str, ...]:
        """Folds the next entry. Returns why no correct site writes it here; such an entry changes nothing."""
        self.head += 1
        contradictions = tuple(self._contradictions(entry))
        if contradictions:
            return contradictions
        match entry:
            case entries.OpenRound():
                self._on_open(entry)
            case entries.CloseRound():
                self.phase, self.attempt = RoundPhase.CLOSED, 0
                self.sites = {one.site: one for one in entry.sites}
            case entries.WithoutSite():
                del self.sites[entry.site]
                self.attempt += 1
                if not self.sites:
                    self.phase = RoundPhase.IDLE
            case entries.CommitRound():
                self._know(Revision(entry.round, entry.digest), entry.sites)
                self.phase, self.sites = RoundPhase.IDLE, {}
        return ()

    def _on_open(self, entry: entries.OpenRound) -> None:
        self.round, self.phase = entry.round, RoundPhase.OPEN
        while self.known and self.revision != entry.base:  # all of them, if it is of a log that was lost
            self.known.pop()
        if not self.known:
            self._know(entry.base, (entry.site,))

    def _know(self, revision: Revision, sites: tuple[SiteId, ...]) -> None:
        self.known.append(KnownRevision(revision=revision, sites=frozenset(sites), head=self.head))

    def _contradictions(self, entry: entries.OuterEntry) -> Iterator[str]:
        what = f"round {entry.round}"
        match entry:
            case entries.OpenRound():
                if self.phase is RoundPhase.CLOSED:
                    yield f"{what} is opened while round {self.round} is closed and undecided"
                if entry.round != (due := self.next_round(entry.base)):
                    yield f"{what} is opened in place of round {due}"
                yield from self._unknown(what, [entry.site])
                return
            case entries.CloseRound():
                if (entry.round, RoundPhase.OPEN) != (self.round, self.phase):
                    yield f"{what} is closed, and round {self.round} is {self.phase}"
                sites = [one.site for one in entry.sites]
                if not sites or sites != sorted(set(sites)) or min(one.weight for one in entry.sites) < 1:
                    yield f"{what} is closed with {entry.sites}: distinct sites in order, each with a weight"
                yield from self._unknown(what, sites)
                return
        if (entry.round, RoundPhase.CLOSED) != (self.round, self.phase):
            yield f"{what} is decided, and round {self.round} is {self.phase}"
        elif isinstance(entry, entries.WithoutSite):
            if entry.site not in self.sites:
                yield f"{what} loses site {entry.site}, which takes no part in it"
        elif entry.sites != tuple(self.sites):
            yield f"{what} is committed with sites {entry.sites} in place of {tuple(self.sites)}"

    def _unknown(self, what: str, sites: list[SiteId]) -> Iterator[str]:
        if any(not 0 <= site < self.num_sites for site in sites):
            yield f"{what} names sites {sites}, and sites.num_sites is {self.num_sites}"
