"""The etcd client where things break: members that die or hang, answers that are lost, history that is compacted."""

import itertools
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.core.outer.decisions import LeaseWatch, Own, next_entry
from spare_megatron.core.outer.entries import Arrival, CloseRound, Lease, OpenRound, Revision, SiteId
from spare_megatron.core.outer.rounds import RoundFold
from spare_megatron.stacking.layout import Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.etcd_gateway import EtcdGateway, EtcdMessage
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.etcd_watch import EtcdWatch
from spare_megatron.store.interface import StoreLost
from spare_megatron.store.outer_log import OuterLog
from spare_megatron.store.spec import EtcdStoreSpec
from tests.integration.etcd_cluster import EtcdCluster, running_cluster

pytestmark = pytest.mark.timeout(120)

FAILOVER_S = 30.0
"""Far more than an election and some tries take, for a busy machine; far less than any timeout here."""

BEAT_TTL_S = 2
"""The shortest that etcd keeps."""


def spec_of(*endpoints: str, timeout_s: float = 30.0) -> EtcdStoreSpec:
    return EtcdStoreSpec(endpoints=endpoints, prefix=f"/test/{secrets.token_hex(8)}", timeout_s=timeout_s)


def watch_of(store: EtcdControlStore) -> EtcdWatch:
    (directory,) = store._followed.values()
    assert directory._watch is not None
    return directory._watch


@pytest.fixture
def own_cluster(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdCluster]:
    with running_cluster(etcd_binary, tmp_path) as cluster:
        yield cluster


class LossyProxy:
    """A proxy before one member that loses the answers it is asked to lose, after the member has given them."""

    def __init__(self, endpoint: str, loses: Callable[[], bool]) -> None:
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._loses = loses
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._target, timeout=10) as member:
            while request := _whole_message(client):
                member.sendall(request)
                answer = _whole_message(member)
                if self._loses():
                    self.num_lost += 1
                    return
                client.sendall(answer)

    def close(self) -> None:
        self._listener.close()


def _whole_message(sock: socket.socket) -> bytes:
    """An HTTP message of known length; empty when there is none any more."""
    message = b""
    while b"\r\n\r\n" not in message:
        part = sock.recv(1 << 16)
        if not part:
            return b""
        message += part
    head, _, body = message.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: *(\d+)", head)
    assert found is not None
    while len(body) < int(found[1]):
        body += sock.recv(1 << 16)
    return head + b"\r\n\r\n" + body


# ------------------------------------------------------------------------------------------------------ lost answers


def test_a_write_whose_answer_is_lost_is_found_to_be_ones_own(etcd_cluster: EtcdCluster) -> None:
    # Not by their numbers: an answer that is late on a busy machine is asked for again.
    answers = iter([True])
    with closing(LossyProxy(etcd_cluster.endpoints[0], lambda: next(answers, False))) as proxy:
        store = EtcdControlStore(spec_of(proxy.endpoint))
        assert store.put_if_absent("key", "mine") == "mine"
        assert proxy.num_lost == 1
        answers = iter([True])
        assert store.put_if_absent("key", "later") == "mine"
        assert proxy.num_lost == 2


def test_nothing_is_written_after_a_key_that_is_gone(etcd_cluster: EtcdCluster) -> None:
    """Whether it is gone is decided with the write; one who asked before would write into an emptied store."""
    store = EtcdControlStore(spec_of(*etcd_cluster.endpoints))
    store.put("log/0", "entry")
    assert store.put_if_absent("log/1", "next", after="log/0") == "next"
    assert store.put_if_absent("log/1", "late", after="log/0") == "next"
    store.delete(["log/0"])
    for key in ("log/1", "log/2"):
        with pytest.raises(StoreLost, match="has lost log/0"):
            store.put_if_absent(key, "late", after="log/0")
    assert store.get(["log/1", "log/2"]) == ["next", None]


def test_a_vote_whose_answer_is_lost_counts_once(etcd_cluster: EtcdCluster) -> None:
    answers = iter([True])
    with closing(LossyProxy(etcd_cluster.endpoints[0], lambda: next(answers, False))) as proxy:
        log = DecisionLog(EtcdControlStore(spec_of(proxy.endpoint)))
        assert [log.cast(0, Member(group), {Member(group): "ok"}) for group in range(3)] == [1, 2, 3]
        assert proxy.num_lost == 1


def test_a_vote_that_is_cast_twice_counts_once(etcd_cluster: EtcdCluster) -> None:
    log = DecisionLog(EtcdControlStore(spec_of(*etcd_cluster.endpoints)))
    assert [
        log.cast(1, Member(0), {Member(0): "ok"}),
        log.cast(1, Member(0), {Member(0): "ok"}),
        log.cast(1, Member(1), {Member(1): "ok"}),
    ] == [1, 1, 2]


def test_writers_agree_while_answers_are_lost_at_random(etcd_cluster: EtcdCluster) -> None:
    """Every third answer is lost; each writer reads of every entry what all others read, and every vote counts."""
    generator, lock = random.Random(7), threading.Lock()

    def loses() -> bool:
        with lock:
            return generator.random() < 0.33

    with closing(LossyProxy(etcd_cluster.endpoints[0], loses)) as proxy:
        spec = spec_of(proxy.endpoint)

        def write(group: int) -> list[str]:
            log = DecisionLog(EtcdControlStore(spec))
            entries = [log.append(index, f"{index} by {group}") for index in range(20)]
            log.cast(0, Member(group), {Member(group): "ok"})
            return entries

        with ThreadPoolExecutor(6) as pool:
            read = list(pool.map(write, range(6), timeout=100))
        assert all(entries == read[0] for entries in read)
        assert DecisionLog(EtcdControlStore(spec)).cast(0, Member(6), {Member(6): "ok"}) == 7
        assert proxy.num_lost > 20


# ------------------------------------------------------------------------------------------------ members that break


def test_sites_agree_on_a_round_and_a_lease_ends_by_itself(etcd_cluster: EtcdCluster) -> None:
    """As with the embedded store, whose leases stay and stand still; see tests/unit/test_outer_log.py."""
    start, spec = Revision(0, "start"), spec_of(*etcd_cluster.endpoints)
    sites = [SiteId(site) for site in range(2)]
    logs = {site: OuterLog(EtcdControlStore(spec), 2) for site in sites}
    rounds, watch = RoundFold(2), LeaseWatch(30.0)
    for site, log in logs.items():
        assert log.claim(site, f"start {site}") == 0
        log.renew(Lease(site=site, incarnation=0, beats=1, revision=start), 30.0 if site else BEAT_TTL_S)
    opened = OpenRound(round=1, site=sites[0], base=start)
    assert [log.append(0, opened) for log in logs.values()] == [opened] * 2
    for site, log in logs.items():
        log.arrive(Arrival(site=site, incarnation=0, round=1, weight=4, step=9, revision=start))
    for entry in logs[sites[1]].read(0):
        rounds.apply(entry)
    watch.on_leases(leases := logs[sites[1]].leases(), 0.0)
    own = Own(site=sites[1], incarnation=0, revision=start)
    entry = next_entry(rounds, own, logs[sites[1]].votes(rounds, leases), watch, 0.0)
    assert isinstance(entry, CloseRound)
    assert [one.site for one in entry.sites] == sites
    until_s = time.monotonic() + FAILOVER_S
    while logs[sites[1]].leases().keys() != {sites[1]}:
        assert time.monotonic() < until_s, "the lease of site 0 does not end"
        time.sleep(0.1)


def test_writes_go_on_after_the_leader_is_killed(own_cluster: EtcdCluster) -> None:
    leader = own_cluster.leader()
    stores = [EtcdControlStore(spec_of(*own_cluster.endpoints)) for _ in own_cluster.endpoints]
    for turn, store in enumerate(stores):
        store._gateway._turn = turn  # one client at each member
        store.put("key", "before")
    own_cluster.kill(leader)
    for store in stores:
        began_s = time.monotonic()
        assert store.put_if_absent("other", "after") == "after"
        assert time.monotonic() - began_s < FAILOVER_S
        assert store.get(["key"]) == ["before"]
    assert own_cluster.leader() != leader


def test_the_store_is_not_taken_for_lost_while_its_leader_is_stopped_in_good_order(own_cluster: EtcdCluster) -> None:
    """A member that ends answers what it will not serve any more, with codes of its own."""
    spec, leader = spec_of(*own_cluster.endpoints), own_cluster.leader()
    beating, writing, waiting = (EtcdControlStore(spec) for _ in range(3))
    all_began, has_stopped, has_waited = threading.Barrier(4), threading.Event(), threading.Event()

    def repeat(store: EtcdControlStore, ask: Callable[[str], object], ends: threading.Event) -> None:
        store._gateway._turn = leader
        ask("0")
        all_began.wait(FAILOVER_S)
        for number in itertools.count(1):
            ask(str(number))
            if ends.is_set():
                return

    with ThreadPoolExecutor(3) as pool:
        waits = pool.submit(repeat, waiting, lambda number: waiting.wait(f"log/{number}", 2 * FAILOVER_S), has_stopped)
        waits.add_done_callback(lambda _: has_waited.set())
        others = [
            pool.submit(repeat, writing, lambda number: writing.put(f"log/{number}", "entry"), has_waited),
            pool.submit(repeat, beating, lambda number: beating.beat("beat/0", number, 60), has_waited),
        ]
        try:
            all_began.wait(FAILOVER_S)
            own_cluster.stop(leader)
        finally:
            has_stopped.set()
        for asked in (waits, *others):
            asked.result(FAILOVER_S)
    assert own_cluster.leader() != leader


@pytest.mark.parametrize("breaks", [EtcdCluster.kill, EtcdCluster.pause], ids=["killed", "paused"])
def test_a_waiter_sees_a_write_although_the_member_of_its_watch_breaks(
    own_cluster: EtcdCluster, breaks: Callable[[EtcdCluster, int], None]
) -> None:
    spec = spec_of(*own_cluster.endpoints)
    waiting, writing = EtcdControlStore(spec), EtcdControlStore(spec)
    assert not waiting.exists("log/0")
    member = watch_of(waiting)._gateway._turn % len(own_cluster.endpoints)
    writing._gateway._turn = member + 1
    with ThreadPoolExecutor(1) as pool:
        entry = pool.submit(waiting.wait, "log/0", 60.0)
        breaks(own_cluster, member)
        began_s = time.monotonic()
        writing.put_if_absent("log/0", "entry")
        assert entry.result(60) == "entry"
        assert time.monotonic() - began_s < FAILOVER_S
    assert waiting.put_if_absent("log/1", "next") == "next"


def test_without_a_quorum_nothing_is_written_and_the_store_is_lost_in_time(own_cluster: EtcdCluster) -> None:
    EtcdControlStore(spec_of(*own_cluster.endpoints)).put("key", "value")
    store = EtcdControlStore(spec_of(*own_cluster.endpoints, timeout_s=2.0))
    for member in (0, 1):
        own_cluster.kill(member)
    began_s = time.monotonic()
    with pytest.raises(StoreLost, match=r"control\.store_timeout_s=2"):
        store.put_if_absent("other", "value")
    with pytest.raises(StoreLost):
        store.wait("log/0", 60.0)
    assert time.monotonic() - began_s < FAILOVER_S


def test_a_waiter_outlives_the_compaction_of_the_event_it_waits_for(etcd_cluster: EtcdCluster) -> None:
    spec = spec_of(*etcd_cluster.endpoints)
    waiting, writing, gateway = EtcdControlStore(spec), EtcdControlStore(spec), EtcdGateway(spec)
    assert not waiting.exists("log/0")
    for index in range(5):
        writing.put(f"other/{index}", "value")
    revision = gateway.call("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
    gateway.call("/v3/kv/compaction", {"revision": revision, "physical": True})
    watch = watch_of(waiting)
    watch._next_revision = 1
    watch._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    writing.put("log/0", "entry")
    assert waiting.wait("log/0", FAILOVER_S) == "entry"


# ------------------------------------------------------------------------------------------------------ runs, leases


def test_runs_with_other_prefixes_see_nothing_of_each_other(etcd_cluster: EtcdCluster) -> None:
    one, other = (EtcdControlStore(spec_of(*etcd_cluster.endpoints)) for _ in range(2))
    one.put("log/0", "entry")
    assert other.get(["log/0"]) == [None]
    other.clear()
    assert one.get(["log/0"]) == ["entry"]
    one.clear()
    assert one.get(["log/0"]) == [None]


def test_a_beat_vanishes_after_its_owner_has_gone(etcd_cluster: EtcdCluster) -> None:
    spec = spec_of(*etcd_cluster.endpoints)
    owner, other = EtcdControlStore(spec), EtcdControlStore(spec)
    began_s = beat_at_s = time.monotonic()
    while beat_at_s - began_s < 2 * BEAT_TTL_S:  # longer than it lasts without beats
        beat_at_s = time.monotonic()
        owner.beat("beat/0", "alive", BEAT_TTL_S)
        # A busy machine may keep this thread itself waiting for longer than the beat lasts.
        assert other.get(["beat/0"]) == ["alive"] or time.monotonic() - beat_at_s >= BEAT_TTL_S
        time.sleep(0.2)
    owner.close()
    while other.get(["beat/0"]) != [None]:
        assert time.monotonic() - beat_at_s < FAILOVER_S
        time.sleep(0.1)
    assert time.monotonic() - beat_at_s > 0.5 * BEAT_TTL_S, "it lasts for some time after the last beat"


def test_a_beat_after_its_lease_has_run_out_is_seen_again(etcd_cluster: EtcdCluster) -> None:
    spec = spec_of(*etcd_cluster.endpoints)
    owner = EtcdControlStore(spec)
    owner.beat("beat/0", "alive", ttl_s=60)
    EtcdGateway(spec).call("/v3/lease/revoke", {"ID": owner._leases["beat/0"]})
    assert owner.get(["beat/0"]) == [None]
    owner.beat("beat/0", "again", ttl_s=60)
    assert owner.get(["beat/0"]) == ["again"]


def test_a_beat_whose_lease_runs_out_while_its_process_is_stopped_is_seen_again(etcd_cluster: EtcdCluster) -> None:
    """Stopped between keeping the lease and writing, the node asked in vain for a minute, and gave the store up."""
    spec = spec_of(*etcd_cluster.endpoints)
    owner = EtcdControlStore(spec)
    owner.beat("beat/0", "alive", ttl_s=60)
    lease, call = owner._leases["beat/0"], owner._gateway.call
    asked: list[str] = []

    def stopped_before_it_writes(path: str, body: Mapping[str, Any]) -> EtcdMessage:
        asked.append(path)
        if path == "/v3/kv/put" and asked.count(path) == 1:
            EtcdGateway(spec).call("/v3/lease/revoke", {"ID": lease})
        return call(path, body)

    owner._gateway.call = stopped_before_it_writes  # type: ignore[method-assign]
    owner.beat("beat/0", "again", ttl_s=60)
    assert asked == ["/v3/lease/keepalive", "/v3/kv/put", "/v3/lease/grant", "/v3/kv/put"]
    assert owner.get(["beat/0"]) == ["again"]
    assert owner._leases["beat/0"] != lease
