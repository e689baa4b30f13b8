"""A site's part in the outer log, in a thread beside the training: only this thread waits for the outer store."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.core.outer.decisions import LeaseWatch, Own, donor, may_arrive, newest_held, next_entry
from spare_megatron.core.outer.entries import Arrival, Contribution, Done, Lease, Revision, SiteId
from spare_megatron.core.outer.rounds import RoundFold, RoundPhase
from spare_megatron.formats.codec import decode
from spare_megatron.process.processes import say
from spare_megatron.store.etcd_gateway import StoreRefused
from spare_megatron.store.interface import ControlStore, StoreLost
from spare_megatron.store.outer_log import OuterLog

_POLL_S = 0.05
"""While the site takes part in a round."""
_REST_S = 0.5
_LEASES_PER_WAIT = 8


class Arriving(NamedTuple):
    """What the site contributes to a round, and where its ranks serve it: addresses by position, as JSON."""

    weight: int
    step: int
    addresses: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The outer log and the leases as last read."""

    incarnation: int = -1
    head: int = 0
    round: int = 0
    phase: RoundPhase = RoundPhase.IDLE
    attempt: int = 0
    sites: Mapping[SiteId, Contribution] = field(default_factory=dict)
    """Of the closed round."""
    addresses: Mapping[SiteId, Mapping[int, str]] = field(default_factory=dict)
    """Of these sites and the donor: address by position."""
    revision: Revision | None = None
    """The newest one."""
    donor: SiteId | None = None
    """The site from which this one is to take that."""
    is_wanted: bool = False
    """The site may arrive in an open round."""
    progress: int = 0
    """Changes when another site of the closed round makes progress."""


class OuterLink(threading.Thread):
    """Keeps the lease of a site, folds the outer log, votes and appends what is due.

    The main thread says what the site holds and does, and reads `view`; what it sets counts from the next turn on.
    `start`: unique name of this start of the site.
    """

    def __init__(self, open_store: Callable[[], ControlStore], sites: SitesConfig, start: str, held: Revision) -> None:
        super().__init__(name="outer-log", daemon=True)
        self._open_store, self._sites, self._start = open_store, sites, start
        self._site = SiteId(sites.site)
        self._ends = threading.Event()
        self._hurries = threading.Event()
        self._is_final = False
        self._beats = 0
        self._renewed_at_s = 0.0
        self._renewed: tuple[int, Revision] | None = None
        self._arrived: Arrival | None = None
        self._published = ""
        self.held, self.held_at = held, 0  # the revision, and entries acted on since the site came to hold it
        self.is_due = False
        self.arriving: Arriving | None = None
        self.done: tuple[int, int, str] | None = None  # round, attempt, digest
        self.lacks: frozenset[SiteId] = frozenset()
        self.progress = 0
        self.failure = ""
        """Why it follows the outer log no longer."""
        self.refusal = ""
        """Why the store, which it asks again and again, has refused it since it last answered."""
        self._showing = threading.Lock()
        self.view = View()
        self.seen_at_s = self.answered_at_s = time.monotonic()
        """Since when `view` has been that of the store, and when the store answered last."""

    def hold(self, revision: Revision) -> None:
        """The site holds this from now on, and has acted on all that `view` says."""
        with self._showing:
            self.held, self.held_at = revision, self.view.head
            self.view = replace(self.view, donor=None, is_wanted=False)  # which are about another revision
        self.is_due, self.arriving, self.done = False, None, None

    def hurry(self) -> None:
        self._hurries.set()

    def end(self, *, is_final: bool) -> None:
        """Ends the thread; with `is_final` also the lease, as the site's run is over."""
        self._is_final = is_final
        self._ends.set()
        self._hurries.set()

    def run(self) -> None:
        log: OuterLog | None = None
        while not self._ends.is_set():
            try:
                store = self._open_store()
                log = OuterLog(store, self._sites.num_sites)
                self._follow(log)
            except StoreLost as error:
                if isinstance(error, StoreRefused) and self.refusal != (refusal := str(error)):
                    self.refusal = refusal
                    say(refusal)
                self._ends.wait(_REST_S)
            except ValueError as error:  # of another version, or of another training: the site goes on alone
                self.failure = str(error)
                say(error)
                return
        if log is not None and self._is_final:
            with contextlib.suppress(StoreLost):  # else it ends by itself
                log.end_lease(self._site)

    def _follow(self, log: OuterLog) -> None:
        rounds, watch = RoundFold(self._sites.num_sites), LeaseWatch(self._sites.wait_s)
        log.require_alike(self._sites.rule)
        incarnation = log.claim(self._site, self._start)
        self._published = ""  # an embedded store may have begun anew, and its rounds have the numbers of earlier ones
        self._arrived = self._arrived if self._arrived is not None and log.has_arrived(self._arrived) else None
        while not self._ends.is_set():
            is_active = self._turn(log, rounds, watch, incarnation)
            self._hurries.clear()
            rest_s = min(_REST_S, self._sites.wait_s / (2 * _LEASES_PER_WAIT))
            if is_active:
                self._ends.wait(_POLL_S)
            else:
                self._hurries.wait(rest_s)

    def _turn(self, log: OuterLog, rounds: RoundFold, watch: LeaseWatch, incarnation: int) -> bool:
        """Whether the next turn is to follow at once."""
        while found := log.read(rounds.head):
            self.answered_at_s = time.monotonic()
            for entry in found:
                if errors := rounds.apply(entry):
                    raise ValueError(f"outer log entry {rounds.head - 1}: {errors[0]}")
            watch.on_entry(time.monotonic())
            if len(found) == 1:
                break  # no other one was there
        with self._showing:
            if self.arriving is None:
                self.held_at = rounds.head  # it takes over the result of no round that it does not await
        self._renew(log, incarnation)
        leases, now_s = log.leases(), time.monotonic()
        watch.on_leases(leases, now_s)
        own, arriving, done = self._own(rounds, incarnation), self.arriving, self.done
        if arriving is not None and arriving.addresses != self._published:  # also in a round where another group spoke
            log.put_address(self._site, arriving.addresses)
            self._published = arriving.addresses
        if arriving is not None and may_arrive(rounds, own):
            self._arrived = log.arrive(
                Arrival(
                    site=self._site,
                    incarnation=incarnation,
                    round=rounds.round,
                    weight=arriving.weight,
                    step=arriving.step,
                    revision=own.revision,
                )
            )
        if done is not None and rounds.phase is RoundPhase.CLOSED and done[:2] == (rounds.round, rounds.attempt):
            vote = Done(site=self._site, incarnation=incarnation, round=done[0], attempt=done[1], digest=done[2])
            log.finish(vote)
        appended = next_entry(rounds, own, log.votes(rounds, leases), watch, now_s)
        if appended is not None:
            log.append(rounds.head, appended)
        self._show(log, rounds, own, watch.live(now_s))
        return appended is not None or arriving is not None

    def _own(self, rounds: RoundFold, incarnation: int) -> Own:
        arrived, arriving, closed_with = self._arrived, self.arriving, rounds.sites.get(self._site)
        if arrived is not None and (arrived.round, arrived.incarnation) != (rounds.round, incarnation):
            arrived = None
        if arriving is None:
            has_gone_on = arrived is not None
        else:  # what is in the closed round may be from an earlier leader of the site
            has_gone_on = any(one is not None and one.step != arriving.step for one in (arrived, closed_with))
        return Own(
            site=self._site,
            incarnation=incarnation,
            revision=self.held,
            is_due=self.is_due,
            lacks=self.lacks,
            has_gone_on=has_gone_on,
        )

    def _renew(self, log: OuterLog, incarnation: int) -> None:
        now_s, shown = time.monotonic(), (self.progress, self.held)
        if shown == self._renewed and now_s - self._renewed_at_s < self._sites.wait_s / _LEASES_PER_WAIT:
            return
        self._beats, self._renewed, self._renewed_at_s = self._beats + 1, shown, now_s
        lease = Lease(
            site=self._site,
            incarnation=incarnation,
            beats=self._beats,
            progress=shown[0],
            head=self.held_at,
            revision=shown[1],
        )
        log.renew(lease, self._sites.wait_s)

    def _show(self, log: OuterLog, rounds: RoundFold, own: Own, live: Mapping[SiteId, Lease]) -> None:
        giver = donor(rounds, own, live)
        others = [site for site in (*rounds.sites, giver) if site is not None and site != self._site]
        texts = log.addresses(others) if others else {}
        shown = View(
            incarnation=own.incarnation,
            head=rounds.head,
            round=rounds.round,
            phase=rounds.phase,
            attempt=rounds.attempt,
            sites=dict(rounds.sites),
            addresses={site: decode(text, dict[int, str]) for site, text in texts.items() if text is not None},
            revision=newest_held(rounds, live),
            donor=giver,
            is_wanted=may_arrive(rounds, own) and self._arrived_in(rounds.round) is None,
            progress=sum(live[site].progress for site in others if site in live),
        )
        self.answered_at_s, self.refusal = time.monotonic(), ""
        with self._showing:
            if own.revision == self.held:
                self.view, self.seen_at_s = shown, self.answered_at_s

    def _arrived_in(self, number: int) -> Arrival | None:
        return self._arrived if self._arrived is not None and self._arrived.round == number else None
