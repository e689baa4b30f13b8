"""The thread that keeps a site in touch with the others, over a store in memory."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.core.log.votes import RoundResult
from spare_megatron.core.outer.decisions import WENT_ON
from spare_megatron.core.outer.entries import (
    CommitRound,
    Contribution,
    OpenRound,
    Revision,
    SiteId,
    WithoutSite,
    decode_entry,
    encode_entry,
)
from spare_megatron.core.outer.rounds import RoundPhase
from spare_megatron.rank import sync
from spare_megatron.rank.outer_link import Arriving, OuterLink, View
from spare_megatron.store import keys
from spare_megatron.store.etcd_gateway import StoreRefused
from spare_megatron.store.interface import StoreLost
from tests.memory_store import MemoryStore

FIRST = Revision(0, "first")


class Cut(threading.Event):
    """Set while a site is cut off from the store."""

    num_refused = 0
    error = StoreLost("cut off")


class Store(MemoryStore):
    """What one site sees of the store of all; it can be cut off."""

    def __init__(self, data: dict[str, Any], is_cut: Cut) -> None:
        super().__init__(data)
        self._is_cut = is_cut

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        self.put(key, value)

    def get(self, keys: Any) -> list[str | None]:
        if self._is_cut.is_set():
            self._is_cut.num_refused += 1
            raise self._is_cut.error
        return super().get(keys)


class Sites:
    """Links of so many sites."""

    def __init__(self, num_sites: int) -> None:
        self.data: dict[str, Any] = {}
        self.cuts = [Cut() for _ in range(num_sites)]
        self.links = [self.start(site) for site in range(num_sites)]

    def start(self, site: int, **settings: Any) -> OuterLink:
        sites = SitesConfig(
            endpoints=("tcp://127.0.0.1:1",), num_sites=len(self.cuts), site=site, wait_s=1.0, **settings
        )
        link = OuterLink(lambda: Store(self.data, self.cuts[site]), sites, f"start {site}", FIRST)  # type: ignore[arg-type,return-value]
        link.start()
        return link

    def arrive(self, step: int) -> None:
        for link in self.links:
            link.is_due, link.arriving = True, Arriving(4, step, "{}")
            link.hurry()

    def vote(self, *digests: str) -> None:
        for link, digest in zip(self.links, digests, strict=True):
            link.done = (link.view.round, link.view.attempt, digest)


@pytest.fixture
def sites() -> Iterator[Sites]:
    found = Sites(2)
    yield found
    for link in found.links:
        link.end(is_final=True)
        link.join(10.0)


def until(is_met: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20.0
    while not is_met():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_sites_that_vote_alike_hold_the_result(sites: Sites) -> None:
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    sites.arrive(20)
    until(lambda: all(link.view.phase is RoundPhase.CLOSED and len(link.view.sites) == 2 for link in sites.links))
    assert [one.weight for one in sites.links[0].view.sites.values()] == [4, 4]
    sites.vote("new", "new")
    until(lambda: all(link.view.revision == Revision(1, "new") for link in sites.links))
    for link in sites.links:
        link.hold(Revision(1, "new"))
    until(lambda: all(link.view.donor is None and link.view.phase is RoundPhase.IDLE for link in sites.links))


def test_a_site_with_another_result_is_left_out_and_knows_whom_to_take_it_from(sites: Sites) -> None:
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    sites.arrive(20)
    until(lambda: all(link.view.phase is RoundPhase.CLOSED and len(link.view.sites) == 2 for link in sites.links))
    sites.vote("new", "other")
    until(lambda: sites.links[0].view.attempt == 1)
    sites.links[0].done = (1, 1, "alone")
    until(lambda: sites.links[0].view.revision == Revision(1, "alone"))
    sites.links[0].hold(Revision(1, "alone"))
    sites.links[1].hold(FIRST)
    until(lambda: sites.links[1].view.donor == SiteId(0))
    assert (sites.links[1].view.revision, sites.links[0].view.donor) == (Revision(1, "alone"), None)


def test_what_a_site_has_taken_over_is_no_reason_for_a_round(sites: Sites) -> None:
    """Whatever the store said before, though it answers late."""
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    sites.arrive(20)
    until(lambda: all(link.view.phase is RoundPhase.CLOSED and len(link.view.sites) == 2 for link in sites.links))
    sites.vote("new", "new")
    until(lambda: all(link.view.revision == Revision(1, "new") for link in sites.links))
    sites.links[0].hold(Revision(1, "new"))
    until(lambda: sites.links[1].view.donor == SiteId(0))
    sites.cuts[1].set()
    sites.links[1].hold(Revision(1, "new"))
    assert sites.links[1].view.donor is None
    sites.cuts[1].clear()
    seen_at_s = sites.links[1].seen_at_s
    until(lambda: sites.links[1].seen_at_s > seen_at_s)
    assert (sites.links[1].view.donor, sites.links[1].view.is_wanted) == (None, False)


def test_a_site_that_is_cut_off_knows_it_and_the_others_go_on(sites: Sites) -> None:
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    sites.cuts[1].set()
    sites.links[0].is_due, sites.links[0].arriving = True, Arriving(4, 20, "{}")
    sites.links[0].hurry()
    until(lambda: list(sites.links[0].view.sites) == [0])
    assert time.monotonic() - sites.links[1].answered_at_s > 0.5
    sites.cuts[1].clear()
    cut_until_s = time.monotonic()
    until(lambda: sites.links[1].seen_at_s > cut_until_s)
    assert sites.links[1].view.phase is RoundPhase.CLOSED


def test_a_site_that_the_store_refuses_says_so_once_and_in_its_rounds(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    link, cut = sites.links[1], sites.cuts[1]
    cut.error = StoreRefused("etcd refuses trainer: permission denied")
    cut.set()
    until(lambda: cut.num_refused == 2)
    site = sync.Sites.__new__(sync.Sites)
    site._site, site._settings, site._link = SiteId(1), SitesConfig(wait_s=1.0), link
    assert site._why_over(link.view, 2.0, is_old=False) == str(cut.error)
    cut.clear()
    until(lambda: not link.refusal)
    assert capsys.readouterr().out == f"{cut.error}\n"


def test_a_round_that_all_sites_have_gone_on_from_is_given_up_at_once_though_it_was_committed(sites: Sites) -> None:
    """As where the store stops when all have voted, and is back when all have gone on: one commits the round then."""
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    sites.arrive(20)
    until(lambda: all(link.view.phase is RoundPhase.CLOSED and len(link.view.sites) == 2 for link in sites.links))
    for link, cut in zip(sites.links, sites.cuts, strict=True):
        cut.set()
        link.hold(FIRST)
    commit = CommitRound(round=1, sites=(SiteId(0), SiteId(1)), digest="new")
    Store(sites.data, Cut()).put_if_absent(keys.entry(2), encode_entry(commit))
    for cut in sites.cuts:
        cut.clear()
    until(lambda: all(link.view.head == 3 and link.view.revision == FIRST for link in sites.links))
    sites.arrive(24)
    until(lambda: all(link.view.round == 2 and len(link.view.sites) == 2 for link in sites.links))
    assert [one.step for one in sites.links[0].view.sites.values()] == [24, 24]


def test_a_site_that_has_gone_on_computes_no_result_for_the_round_that_it_left() -> None:
    """The first it sees of a store that is back may be the round in which it had arrived some steps before."""
    site = sync.Sites.__new__(sync.Sites)  # without its constructor, which needs a run
    site._site = SiteId(0)
    sites = {one: Contribution(one, 0, 4, 20) for one in map(SiteId, (0, 1))}
    view = View(incarnation=0, round=3, phase=RoundPhase.CLOSED, sites=sites, addresses={SiteId(1): {0: "there"}})
    targets = []
    for step in (20, 24):
        site._round = sync._Round(key=(0, step), began_s=0.0, moved_s=0.0)
        targets.append(site._target(view))
    assert targets[0] is not None
    assert (targets[0].weights, targets[1]) == ({0: 4, 1: 4}, None)


def test_a_log_of_another_version_ends_the_link_with_the_reason(sites: Sites) -> None:
    """Rounds then end at once, and their records say why."""
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    entry = encode_entry(OpenRound(round=1, site=SiteId(0), base=FIRST))
    Store(sites.data, Cut()).put(keys.entry(0), entry.replace('"version":1', '"version":99'))
    until(lambda: all(link.failure for link in sites.links))
    assert "99" in sites.links[0].failure


def test_a_site_with_other_settings_takes_no_part(sites: Sites) -> None:
    """Its result would differ in every round, as if its numbers were wrong."""
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    sites.links[1].end(is_final=True)
    sites.links[1].join(10.0)
    sites.links[1] = sites.start(1, momentum=0.8)
    until(lambda: bool(sites.links[1].failure))
    assert "have sites.bits=32, sites.learning_rate=0.7, sites.momentum=0.9, and this one" in sites.links[1].failure
    assert not sites.links[0].failure


def test_what_a_site_arrived_with_in_a_lost_log_keeps_it_out_of_no_round_of_the_new_one(sites: Sites) -> None:
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    first, second = sites.links
    first.is_due, first.arriving = True, Arriving(4, 20, "{}")
    first.hurry()
    until(lambda: keys.arrival(1, 0, 0) in sites.data)
    for cut in sites.cuts:
        cut.set()
    first.hold(FIRST)  # and trains on
    until(lambda: all(cut.num_refused for cut in sites.cuts))
    sites.data.clear()
    for cut in sites.cuts:
        cut.clear()
    second.is_due, second.arriving = True, Arriving(4, 40, "{}")
    second.hurry()
    until(lambda: first.view.is_wanted)
    first.arriving = Arriving(9, 45, "{}")
    first.hurry()
    until(lambda: len(second.view.sites) == 2)
    assert (second.view.round, [one.weight for one in second.view.sites.values()]) == (1, [9, 4])


def test_a_round_that_an_earlier_leader_of_the_site_has_closed_is_left_by_the_next(sites: Sites) -> None:
    """That one knows of no arrival, and has no differences of that step."""
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    sites.links[1].end(is_final=True)
    sites.links[1].join(10.0)
    sites.links[0].is_due, sites.links[0].arriving = True, Arriving(4, 20, "{}")
    sites.links[0].hurry()
    until(lambda: list(sites.links[0].view.sites) == [0])
    sites.links[0].end(is_final=False)
    sites.links[0].join(10.0)
    sites.links[0] = sites.start(0)
    sites.links[0].arriving = Arriving(8, 24, "{}")
    until(lambda: sites.links[0].view.head == 3)
    assert decode_entry(sites.data[keys.entry(2)]) == WithoutSite(round=1, site=SiteId(0), reason=WENT_ON)
    assert sites.links[0].view.phase is RoundPhase.IDLE


def test_a_site_that_has_its_result_waits_while_another_makes_progress() -> None:
    """One that gave up would have computed for nothing: the other commits without it, and it takes that state."""
    site = sync.Sites.__new__(sync.Sites)
    site._site, site._settings = SiteId(0), SitesConfig(endpoints=("tcp://127.0.0.1:1",), wait_s=1e-6)
    site._ctx = SimpleNamespace(agreement=SimpleNamespace(is_over=lambda _: False), controller=SimpleNamespace(head=9))  # type: ignore[assignment]
    site._round = sync._Round(key=(0, 20), began_s=0.0, moved_s=0.0)
    sites = {one: Contribution(one, 0, 4, 20) for one in map(SiteId, (0, 1))}
    link = SimpleNamespace(done=None, failure="", refusal="", seen_at_s=1.0)
    site._link = link  # type: ignore[assignment]
    status = sync.Status(progress=7, failure="site 1: cut")
    ends = []
    for progress in (1, 2, 3, 3):
        link.view = View(incarnation=0, round=3, phase=RoundPhase.CLOSED, sites=sites, progress=progress)
        link.answered_at_s = time.monotonic() + 60.0
        ends.append(site._order([status]).end)
    assert ends == [None, None, None, RoundResult()]
    assert site._round.reason == "no progress for 2e-06 s; site 1: cut"
