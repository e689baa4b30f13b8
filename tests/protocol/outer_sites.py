"""Histories of the outer log: sites that compute, arrive, exchange and vote, in an order that a generator chooses.

A state is the set of all steps that are in it, so that what is counted twice, or lost, is seen. Everything that decides
is the real code, over the real client of a store in memory; the time is virtual.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from spare_megatron.core.outer import decisions, entries
from spare_megatron.core.outer.decisions import LeaseWatch, Own, RoundVotes
from spare_megatron.core.outer.entries import Arrival, Done, Lease, OuterEntry, Revision, SiteId
from spare_megatron.core.outer.rounds import RoundFold, RoundPhase
from spare_megatron.store.outer_log import OuterLog
from tests.protocol.violation import Violation
from tests.unit.memory_store import MemoryStore

WAIT_S = 30.0
EXCHANGE_S = 20.0
SLACK_S = 20.0
"""Of a site that moves rarely."""
MOST_MOVES = 6000
_LEFT_BY_FAULTS = 4
Content = frozenset[int]
START = Revision(0, "start")


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterProtocol:
    """What is under test: the decisions, and what a site does with them."""

    next_entry: Callable[[RoundFold, Own, RoundVotes, LeaseWatch, float], OuterEntry | None] = decisions.next_entry
    may_arrive: Callable[[RoundFold, Own], bool] = decisions.may_arrive
    donor: Callable[..., SiteId | None] = decisions.donor
    clears_work: bool = True
    """A site that has taken an outer step counts what it computes from there on."""
    awaits_commit: bool = True
    """A site takes the result over once it is committed, not once it has voted."""
    computes_anew: bool = True
    """A site computes the result anew once the round has lost a site."""


@dataclass(slots=True)
class Saved:
    """A checkpoint of a site."""

    revision: Revision
    content: Content
    work: list[int]


class Site:
    """A site's run: its state, and the thread of its leader that follows the outer log."""

    def __init__(self, world: "World", site: SiteId, saved: Saved) -> None:
        self.world, self.site = world, site
        self.revision, self.content, self.work = saved.revision, saved.content, list(saved.work)
        self.saved = saved
        self.since_try = 0
        self.beats = self.progress = 0
        self.connect()

    def connect(self) -> None:
        """Folds the outer log from its beginning."""
        world = self.world
        world.num_starts += 1
        self.log = OuterLog(world.store, world.num_sites)  # type: ignore[arg-type]
        self.incarnation = self.log.claim(self.site, str(world.num_starts))
        self.rounds, self.watch = RoundFold(world.num_sites), LeaseWatch(WAIT_S)
        self.epoch = world.store_epoch
        self.pending: tuple[int, OuterEntry] | None = None
        self.arrived: Arrival | None = None
        self.arrived_at_s = 0.0
        self.has_gone_on = False
        self.fetched: dict[SiteId, Content] = {}
        self.result: Content = frozenset()
        self.voted = -1

    @property
    def own(self) -> Own:
        closed = self.rounds.phase is RoundPhase.CLOSED and self.takes_part
        lacks = frozenset(self.rounds.sites if closed else ()) - {self.site, *self.fetched}
        return Own(
            site=self.site,
            incarnation=self.incarnation,
            revision=self.revision,
            is_due=self.since_try >= self.world.every_steps and self.arrived is None,
            lacks=lacks,
            has_gone_on=self.has_gone_on,
        )

    @property
    def takes_part(self) -> bool:
        one = self.rounds.sites.get(self.site)
        return one is not None and one.incarnation == self.incarnation

    @property
    def is_waiting(self) -> bool:
        return self.arrived is not None and not self.has_gone_on

    def serves(self, number: int) -> bool:
        """Whether others may fetch the difference with which the site has arrived in a round."""
        return self.arrived is not None and self.arrived.round == number and not self.has_gone_on

    # ------------------------------------------------------------------------------------------------------ moves

    def move(self) -> None:
        if self.epoch != self.world.store_epoch:
            self.connect()
        is_cut = self.world.is_cut(self.site)
        if self.is_waiting:
            if is_cut and self.world.now_s - self.arrived_at_s > WAIT_S:
                self.go_on()
        elif self.world.random.random() < 0.5:
            self.compute(is_cut=is_cut)
            return
        if not is_cut:
            self.follow()

    def compute(self, *, is_cut: bool) -> None:
        """A step; at its commit the site may arrive."""
        self.world.num_steps += 1
        self.work.append(self.world.num_steps)
        self.since_try += 1
        if self.world.random.random() < 0.2:
            self.saved = Saved(self.revision, self.content, list(self.work))
        if is_cut or self.arrived is not None or not self.world.protocol.may_arrive(self.rounds, self.own):
            return
        vote = Arrival(
            site=self.site,
            incarnation=self.incarnation,
            round=self.rounds.round,
            weight=len(self.work),
            step=self.world.num_steps,
            revision=self.revision,
        )
        self.arrived, self.arrived_at_s = self.log.arrive(vote), self.world.now_s
        self.fetched, self.voted = {}, -1
        self.world.arrived[self.site, self.incarnation, vote.round] = vote, frozenset(self.work)

    def go_on(self) -> None:
        """Stops waiting, and computes further steps."""
        self.world.counts["went on"] += self.takes_part
        self.has_gone_on, self.since_try = True, 0

    def leave(self) -> None:
        """The round that the site has arrived in is over for it."""
        if self.is_waiting:
            self.world.waited(self.world.now_s - self.arrived_at_s, self.rounds.attempt)
        self.arrived, self.has_gone_on, self.since_try = None, False, 0

    def follow(self) -> None:
        now_s, world = self.world.now_s, self.world
        self.beats += 1
        if self.pending is not None:  # decided in an earlier move: others may have written since
            self.log.append(*self.pending)
            world.observe()
            self.pending = None
        while found := self.log.read(self.rounds.head):
            for entry in found:
                self.on_entry(entry)
                self.watch.on_entry(now_s)
        lease = Lease(
            site=self.site,
            incarnation=self.incarnation,
            beats=self.beats,
            progress=self.progress,
            head=self.rounds.head,
            revision=self.revision,
        )
        self.log.renew(lease, WAIT_S)
        leases = self.log.leases()
        self.watch.on_leases(leases, now_s)
        if self.arrived is None:
            self.take_over(leases)
        elif self.is_waiting and self.rounds.phase is RoundPhase.CLOSED and self.takes_part:
            self.exchange()
        votes = self.log.votes(self.rounds, leases)
        entry = world.protocol.next_entry(self.rounds, self.own, votes, self.watch, now_s)
        if entry is not None:
            self.pending = (self.rounds.head, entry)

    def on_entry(self, entry: OuterEntry) -> None:
        had_part = self.takes_part
        if contradictions := self.rounds.apply(entry):
            raise Violation(f"{entry} cannot follow: {contradictions}")
        if isinstance(entry, entries.CommitRound) and had_part and self.is_waiting:
            self.adopt(Revision(entry.round, entry.digest))
        is_over = isinstance(entry, entries.CommitRound) or (had_part and not self.takes_part)
        was_left_out = isinstance(entry, entries.CloseRound) and not self.takes_part
        if self.arrived is not None and (is_over or was_left_out or isinstance(entry, entries.OpenRound)):
            self.leave()

    def take_over(self, leases: dict[SiteId, Lease]) -> None:
        """A site whose state is not what rounds continue takes it from one that has it."""
        giver = self.world.protocol.donor(self.rounds, self.own, self.watch.live(self.world.now_s))
        other = self.world.sites.get(giver) if giver is not None else None
        if other is None or other.revision != leases[other.site].revision or not self.world.reaches(self, other):
            return
        self.world.counts["took over"] += 1
        self.revision, self.content, self.work, self.since_try = other.revision, other.content, [], 0
        self.world.on_state(self)

    def exchange(self) -> None:
        """Fetches a difference, or votes with the result of all."""
        if self.own.lacks:
            other = self.world.sites.get(self.world.random.choice(sorted(self.own.lacks)))
            if other is not None and self.world.reaches(self, other) and other.serves(self.rounds.round):
                self.fetched[other.site] = frozenset(other.work)
                self.progress += 1
            return
        if self.voted == self.rounds.attempt:
            return
        self.fetched[self.site] = frozenset(self.work)
        if self.voted < 0 or self.world.protocol.computes_anew:
            self.result = self.content.union(*(self.fetched[site] for site in self.rounds.sites))
        result = self.result
        if self.world.is_wrong(self.site):
            result |= {-self.world.num_starts}
        digest = f"{hash((self.rounds.round, result)) & 0xFFFFFFFFFFFF:x}"
        self.world.results[digest] = result
        self.voted = self.rounds.attempt
        self.log.finish(
            Done(
                site=self.site,
                incarnation=self.incarnation,
                round=self.rounds.round,
                attempt=self.rounds.attempt,
                digest=digest,
            )
        )
        self.progress += 1
        if not self.world.protocol.awaits_commit:
            self.adopt(Revision(self.rounds.round, digest))

    def adopt(self, revision: Revision) -> None:
        self.revision, self.content = revision, self.world.results[revision.digest]
        if self.world.protocol.clears_work:
            self.work = []
        self.world.on_state(self)


class World:
    """One history."""

    def __init__(self, random: Random, protocol: OuterProtocol) -> None:
        self.random, self.protocol = random, protocol
        self.num_sites, self.every_steps = random.randint(1, 4), random.randint(2, 6)
        self.now_s = 0.0
        self.store, self.store_epoch = MemoryStore(), 0
        self.num_starts = self.num_steps = self.num_moves = 0
        self.counts: Counter[str] = Counter()
        self.arrived: dict[tuple[SiteId, int, int], tuple[Arrival, Content]] = {}
        self.results: dict[str, Content] = {}
        self.contents: dict[Revision, Content] = {START: frozenset()}
        self._log: list[OuterEntry] = []
        self._rounds = RoundFold(self.num_sites)
        self._cut_until_s: dict[object, float] = {}
        self._wrong: set[SiteId] = set()
        self._returns: list[tuple[float, Site]] = []
        self.sites: dict[SiteId, Site] = {}
        for site in map(SiteId, range(self.num_sites)):
            self.sites[site] = Site(self, site, Saved(START, frozenset(), []))

    def run(self) -> None:
        """Raises Violation."""
        faults, last_s = self.random.randint(0, _LEFT_BY_FAULTS), 40.0 * self.every_steps
        at_s = sorted(self.random.uniform(0.0, last_s) for _ in range(faults))
        end_round: int | None = None
        while True:
            self.num_moves += 1
            self.now_s += self.random.expovariate(self.num_sites / 1.0)
            while at_s and at_s[0] < self.now_s:
                at_s.pop(0)
                self._strike()
            for one in [one for one in self._returns if one[0] < self.now_s]:
                self._returns.remove(one)
                self.sites[one[1].site] = Site(self, one[1].site, one[1].saved)
            if self.sites:
                self.random.choice(list(self.sites.values())).move()
            if not at_s and not self._returns and self.now_s > max([last_s, *self._cut_until_s.values()]):
                end_round = self._rounds.round if end_round is None else end_round
                if self._is_joined(end_round):
                    return
            if self.num_moves > MOST_MOVES:
                raise Violation(f"no progress after round {self._rounds.round}, which is {self._rounds.phase}")

    def _is_joined(self, after: int) -> bool:
        revisions = {one.revision for one in self.sites.values()}
        return len(revisions) == 1 and revisions.pop().round > after + 1

    # ----------------------------------------------------------------------------------------------------- faults

    def _strike(self) -> None:
        kind = self.random.choice(["crash", "crash", "cut", "cut", "link", "outage", "loss", "wrong"])
        site = self.random.choice([*self.sites] or [SiteId(0)])
        until_s = self.now_s + self.random.choice([5.0, 25.0, 60.0, 150.0])
        match kind:
            case "crash":
                if site in self.sites:
                    self._returns.append((until_s, self.sites.pop(site)))
            case "cut":
                self._cut_until_s[site] = until_s
            case "link":
                self._cut_until_s[frozenset((site, SiteId(self.random.randrange(self.num_sites))))] = until_s
            case "outage":
                self._cut_until_s["store"] = until_s
            case "loss":
                self.store.values.clear()
                self.store_epoch += 1
                self._log, self._rounds = [], RoundFold(self.num_sites)
            case "wrong":
                self._wrong.add(site)
        self.counts[kind] += 1

    def is_cut(self, site: SiteId) -> bool:
        return max(self._cut_until_s.get(site, 0.0), self._cut_until_s.get("store", 0.0)) > self.now_s

    def reaches(self, one: Site, other: Site) -> bool:
        pair = frozenset((one.site, other.site))
        return self._cut_until_s.get(pair, 0.0) <= self.now_s and not self.is_cut(other.site)

    def is_wrong(self, site: SiteId) -> bool:
        """Whether the site computes a wrong result, once. Two sites with different results do not show whose is."""
        if site in self._wrong and len(self.sites[site].rounds.sites) > 2:
            self._wrong.discard(site)
            self.counts["wrong result"] += 1
            return True
        return False

    # ------------------------------------------------------------------------------------------------- invariants

    def waited(self, seconds: float, attempts: int) -> None:
        limit_s = (2 + attempts) * WAIT_S + EXCHANGE_S + SLACK_S * self.num_sites
        if seconds > limit_s:
            raise Violation(f"a site waits {seconds:.0f} s in a round that lost {attempts} sites")

    def on_state(self, site: Site) -> None:
        known = self.contents.get(site.revision)
        if known is None:
            raise Violation(f"site {site.site} has {site.revision}, which no round has made")
        if known != site.content:
            raise Violation(f"site {site.site} holds another state than {site.revision}")

    def observe(self) -> None:
        """Folds what was written, before any site reads it."""
        log = OuterLog(self.store, self.num_sites)  # type: ignore[arg-type]
        for entry in log.read(self._rounds.head):  # one, as this follows each write
            before, sites = self._rounds.revision, dict(self._rounds.sites)
            attempt = self._rounds.attempt
            if contradictions := self._rounds.apply(entry):
                raise Violation(f"{entry} cannot follow: {contradictions}")
            self.counts[type(entry).__name__] += 1
            match entry:
                case entries.OpenRound():
                    self._on_open(entry, before)
                case entries.CommitRound():
                    assert before is not None
                    self._on_commit(entry, before, sites, attempt)

    def _on_open(self, entry: entries.OpenRound, before: Revision | None) -> None:
        if before is None or entry.base == before:
            return
        self.counts["given up"] += 1
        away = [one.revision for _, one in self._returns]
        held = [one.revision for one in self.sites.values() if not self.is_cut(one.site)]
        if before in held and before not in away and before.round > entry.base.round:
            raise Violation(f"{before} is given up, and a site holds it")

    def _on_commit(
        self, entry: entries.CommitRound, base: Revision, sites: dict[SiteId, entries.Contribution], attempt: int
    ) -> None:
        leases = {
            site: Lease(site=site, incarnation=one.incarnation, beats=0, revision=base) for site, one in sites.items()
        }
        probe = RoundFold(self.num_sites)
        probe.round, probe.phase, probe.sites, probe.attempt = entry.round, RoundPhase.CLOSED, sites, attempt
        done = OuterLog(self.store, self.num_sites).votes(probe, leases).done  # type: ignore[arg-type]
        if {site: vote.digest for site, vote in done.items()} != dict.fromkeys(entry.sites, entry.digest):
            raise Violation(f"round {entry.round} is committed without equal votes of {entry.sites}: {done}")
        result = self.contents[base]
        for site, one in sites.items():
            vote, work = self.arrived[site, one.incarnation, entry.round]
            if vote.revision != base:
                raise Violation(f"round {entry.round} counts {vote.revision} of site {site}, and continues {base}")
            if len(work) != one.weight or result & work:
                raise Violation(f"round {entry.round} counts steps of site {site} with another weight, or twice")
            result |= work
        if self.results[entry.digest] != result:
            raise Violation(f"round {entry.round} has made another state than the sum of its sites")
        self.contents[Revision(entry.round, entry.digest)] = result


def run_outer_histories(
    seeds: Iterable[int], protocol: OuterProtocol = OuterProtocol()
) -> tuple[Counter[str], dict[int, str]]:
    """Runs the history of every seed, up to the first violation; returns what happened, and the violation."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = World(Random(seed), protocol)
        try:
            world.run()
        except Violation as violation:
            return counts, {seed: str(violation)}
        finally:
            counts += world.counts
    return counts, {}
