"""The client of the outer store, over a store in memory and over the embedded one."""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest

from spare_megatron.core.outer.entries import (
    Arrival,
    CloseRound,
    Contribution,
    Done,
    Lease,
    OpenRound,
    OuterEntry,
    Revision,
    SiteId,
)
from spare_megatron.core.outer.rounds import RoundFold
from spare_megatron.store import tcp_store
from spare_megatron.store.interface import ControlStore
from spare_megatron.store.outer_log import OuterLog
from spare_megatron.store.tcp_store import TcpControlStore, listen
from tests.memory_store import MemoryStore as CountingStore
from tests.unit.memory_store import MemoryStore

START = Revision(0, "start")
A, B = SiteId(0), SiteId(1)


@pytest.fixture(params=["memory", "embedded"])
def store(request: pytest.FixtureRequest) -> Iterator[ControlStore]:
    if request.param == "memory":
        yield MemoryStore()  # type: ignore[misc]
        return
    server = listen("127.0.0.1", timedelta(seconds=20))
    yield TcpControlStore("127.0.0.1", server.port)


def arrival(site: SiteId, *, step: int = 9, incarnation: int = 0) -> Arrival:
    return Arrival(site=site, incarnation=incarnation, round=1, weight=4, step=step, revision=START)


def lease(site: SiteId, incarnation: int = 0) -> Lease:
    return Lease(site=site, incarnation=incarnation, beats=1, revision=START)


def test_of_two_entries_for_one_place_the_first_stands(store: ControlStore) -> None:
    log = OuterLog(store, 2)
    assert log.read(0) == []
    first = OpenRound(round=1, site=A, base=START)
    assert log.append(0, first) == first
    assert log.append(0, OpenRound(round=1, site=B, base=START)) == first
    close = CloseRound(round=1, sites=(Contribution(A, 0, 4, 9),))
    log.append(1, close)
    assert [log.read(0), log.read(1), log.read(2)] == [[first, close], [close], []]


def test_sites_have_the_same_settings(store: ControlStore) -> None:
    """Else the results of their rounds would differ, which looks like wrong numbers of one of them."""
    log = OuterLog(store, 2)
    log.require_alike("sites.bits=8")
    log.require_alike("sites.bits=8")
    with pytest.raises(ValueError, match=r"other sites have sites\.bits=8, and this one has sites\.bits=4"):
        log.require_alike("sites.bits=4")


def test_a_store_that_has_begun_anew_knows_no_arrival(store: ControlStore) -> None:
    log = OuterLog(store, 2)
    assert not log.has_arrived(arrival(A))
    log.arrive(arrival(A))
    assert (log.has_arrived(arrival(A)), log.has_arrived(arrival(A, incarnation=1))) == (True, False)


def test_a_site_that_comes_late_reads_a_long_log_in_few_requests() -> None:
    """One by one it would fall behind a link of 50 ms for minutes; a new entry alone takes no more than that did."""
    store = CountingStore({})
    log, late = (OuterLog(store, 2) for _ in range(2))  # type: ignore[arg-type]
    entries = [OpenRound(round=number, site=A, base=START) for number in range(1, 1001)]
    for index, entry in enumerate(entries):
        log.append(index, entry)
    found: list[OuterEntry] = []
    while len(some := late.read(len(found))) > 1:
        found += some
    assert found + some == entries
    assert store.num_reads < 60
    log.append(1000, entries[0])
    num_before = store.num_reads
    assert late.read(1000) == [entries[0]]
    assert store.num_reads <= num_before + 2


def test_a_new_leader_of_a_site_finds_what_the_site_has_voted(store: ControlStore) -> None:
    log = OuterLog(store, 2)
    assert log.arrive(arrival(A, step=9)).step == 9
    assert log.arrive(arrival(A, step=12)).step == 9
    done = Done(site=A, incarnation=0, round=1, attempt=0, digest="x")
    assert log.finish(done) == done
    assert log.finish(Done(site=A, incarnation=0, round=1, attempt=0, digest="y")).digest == "x"


def test_votes_are_those_of_the_round_under_way_and_of_present_incarnations(store: ControlStore) -> None:
    log, rounds = OuterLog(store, 2), RoundFold(2)
    rounds.apply(OpenRound(round=1, site=A, base=START))
    log.arrive(arrival(A))
    log.arrive(arrival(B))
    found = log.votes(rounds, {A: lease(A), B: lease(B, incarnation=1)})
    assert dict(found.arrivals) == {A: arrival(A)}
    rounds.apply(CloseRound(round=1, sites=(Contribution(A, 0, 4, 9), Contribution(B, 1, 4, 9))))
    votes = {site: Done(site=site, incarnation=site, round=1, attempt=0, digest="x") for site in (A, B)}
    for vote in votes.values():
        log.finish(vote)
    log.finish(Done(site=B, incarnation=0, round=1, attempt=0, digest="y"))
    assert log.votes(rounds, {}).done == votes


def test_every_start_of_a_site_is_an_incarnation_of_its_own(store: ControlStore) -> None:
    log = OuterLog(store, 2)
    assert [log.claim(A, start) for start in ("run-1", "run-1", "run-2", "run-1")] == [0, 0, 1, 0]
    assert log.claim(B, "run-3") == 0


def test_leases_are_there_until_they_end(store: ControlStore) -> None:
    log = OuterLog(store, 2)
    assert log.leases() == {}
    log.renew(lease(A), 30.0)
    log.renew(lease(B), 30.0)
    assert log.leases() == {A: lease(A), B: lease(B)}
    log.end_lease(A)
    assert log.leases() == {B: lease(B)}


@pytest.mark.parametrize("is_late", [False, True], ids=["before torch waits for it", "after that"])
def test_a_lease_that_another_site_ends_meanwhile_is_none(monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> None:
    """The read waited for it, and the error ended the thread that follows the outer log."""
    monkeypatch.setattr(tcp_store, "_DELETED_S", 0.1)
    server = listen("127.0.0.1", timedelta(seconds=20))
    log, other = (OuterLog(TcpControlStore("127.0.0.1", server.port), 2) for _ in range(2))
    for site in (A, B):
        log.renew(lease(site), 30.0)
    client = log._store._client  # type: ignore[attr-defined]

    def check(keys: list[str]) -> bool:
        found = bool(client.check(keys))
        if not is_late:
            other.end_lease(B)
        return found

    def multi_get(keys: list[str]) -> list[bytes]:
        found = list(client.multi_get(keys))
        return [found[0], b""] if is_late else found

    log._store._client = SimpleNamespace(check=check, multi_get=multi_get, set_timeout=client.set_timeout)  # type: ignore[attr-defined]
    assert log.leases() == {A: lease(A)}


def test_the_address_of_a_site_is_the_last_one_written(store: ControlStore) -> None:
    log = OuterLog(store, 2)
    log.put_address(A, "there 1 token")
    log.put_address(A, "here 2 token")
    assert log.addresses([A, B]) == {A: "here 2 token", B: None}
