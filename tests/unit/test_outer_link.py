"""The thread that keeps a site in touch with the others, over a store in memory."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.core.outer.entries import CommitRound, Contribution, OpenRound, Revision, SiteId, encode_entry
from spare_megatron.core.outer.rounds import RoundPhase
from spare_megatron.rank import sync
from spare_megatron.rank.outer_link import Arriving, OuterLink, View
from spare_megatron.store import keys
from spare_megatron.store.interface import StoreLost
from tests.memory_store import MemoryStore

FIRST = Revision(0, "first")


class Store(MemoryStore):
    """What one site sees of the store of all; it can be cut off."""

    def __init__(self, data: dict[str, Any], is_cut: threading.Event) -> None:
        super().__init__(data)
        self._is_cut = is_cut

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        self.put(key, value)

    def get(self, keys: Any) -> list[str | None]:
        if self._is_cut.is_set():
            raise StoreLost("cut off")
        return super().get(keys)


class Sites:
    """Links of so many sites."""

    def __init__(self, num_sites: int) -> None:
        self.data: dict[str, Any] = {}
        self.cuts = [threading.Event() for _ in range(num_sites)]
        self.links = [self._link(site, num_sites) for site in range(num_sites)]
        for link in self.links:
            link.start()

    def _link(self, site: int, num_sites: int) -> OuterLink:
        settings = SitesConfig(endpoints=("tcp://127.0.0.1:1",), num_sites=num_sites, site=site, wait_s=1.0)
        return OuterLink(lambda: Store(self.data, self.cuts[site]), settings, f"start {site}", FIRST)  # type: ignore[arg-type,return-value]

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


def test_a_round_that_all_sites_have_gone_on_from_is_given_up_at_once_though_it_was_committed(sites: Sites) -> None:
    """As where the store stops when all have voted, and is back when all have gone on: one commits the round then."""
    until(lambda: all(link.view.incarnation == 0 for link in sites.links))
    sites.arrive(20)
    until(lambda: all(link.view.phase is RoundPhase.CLOSED and len(link.view.sites) == 2 for link in sites.links))
    for link, cut in zip(sites.links, sites.cuts, strict=True):
        cut.set()
        link.hold(FIRST)
    commit = CommitRound(round=1, sites=(SiteId(0), SiteId(1)), digest="new")
    Store(sites.data, threading.Event()).put_if_absent(keys.entry(2), encode_entry(commit))
    for cut in sites.cuts:
        cut.clear()
    until(lambda: all(link.view.head == 3 and link.view.revision == FIRST for link in sites.links))
    sites.arrive(24)
    until(lambda: all(link.view.round == 2 and len(link.view.sites) == 2 for link in sites.links))


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
    Store(sites.data, threading.Event()).put(keys.entry(0), entry.replace('"version":1', '"version":99'))
    until(lambda: all(link.failure for link in sites.links))
    assert "99" in sites.links[0].failure
