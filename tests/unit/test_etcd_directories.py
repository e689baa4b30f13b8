"""What one connection to etcd follows: few directories at a time, and of the log no more than it may still ask for."""

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest

from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.partition_saver import SaveBoard
from spare_megatron.store import etcd_watch, keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.etcd_gateway import EtcdGateway, StoreFull, decoded, encoded
from spare_megatron.store.etcd_store import EtcdControlStore
from spare_megatron.store.interface import StoreTimeout
from spare_megatron.store.spec import EtcdStoreSpec

pytestmark = pytest.mark.timeout(60)

WAIT_S = 30.0
SPEC = EtcdStoreSpec(endpoints=("http://127.0.0.1:1",), prefix="/run", timeout_s=WAIT_S)


class Etcd:
    """Keys with the revision that made them, and the watches that receive new ones."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[str, tuple[str, int]] = {}
        self.streams: list[Stream] = []
        self.num_watches = self.num_values_read = 0
        self.last_key = ""
        """That of the write after which it is full, and which comes when a client asks for it."""

    @property
    def revision(self) -> int:
        return len(self.values) + 1

    def put(self, key: str, value: str) -> None:
        with self.changed:
            self.values[f"{SPEC.prefix}/{key}"] = (value, self.revision + 1)
            for stream in self.streams:
                stream.send(self.pairs(*stream.keys, self.revision))

    def pairs(self, start: str, end: str, from_revision: int) -> list[dict[str, str]]:
        return [
            {"key": encoded(key), "value": encoded(value), "create_revision": str(made), "mod_revision": str(made)}
            for key, (value, made) in self.values.items()
            if start <= key < end and made >= from_revision
        ]


class Stream:
    """The events of one watch, and the socket that ends it."""

    def __init__(self, keys: tuple[str, str]) -> None:
        self.keys = keys
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def send(self, pairs: list[dict[str, str]]) -> None:
        self._messages.put({"events": [{"kv": pair} for pair in pairs]})

    def messages(self) -> Iterator[dict[str, Any]]:
        return iter(self._messages.get, None)

    def shutdown(self, how: int) -> None:
        self._messages.put(None)


class Gateway:
    """The requests of who follows directories, answered from memory."""

    read = EtcdGateway.read

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    def another(self) -> "Gateway":
        self._etcd.num_watches += 1
        return Gateway(self._etcd)

    def call(self, path: str, body: Mapping[str, str]) -> dict[str, Any]:
        assert path == "/v3/kv/range"
        with self._etcd.changed:
            pairs = self._etcd.pairs(decoded(body["key"]), decoded(body["range_end"]), 0)
            self._etcd.num_values_read += len(pairs)
            return {"header": {"revision": str(self._etcd.revision)}, "kvs": pairs}

    @contextlib.contextmanager
    def stream(
        self, path: str, body: Mapping[str, Mapping[str, str]], try_s: float
    ) -> Iterator[tuple[Stream, Iterator[dict[str, Any]]]]:
        assert path == "/v3/watch"
        request = body["create_request"]
        stream = Stream((decoded(request["key"]), decoded(request["range_end"])))
        with self._etcd.changed:
            stream.send(self._etcd.pairs(*stream.keys, int(request["start_revision"])))
            self._etcd.streams.append(stream)
            self._etcd.changed.notify_all()
        yield stream, stream.messages()
        with self._etcd.changed:
            self._etcd.streams.remove(stream)
            self._etcd.changed.notify_all()

    def check_space(self) -> None:
        if self._etcd.last_key:
            self._etcd.put(self._etcd.last_key, "the last")
            raise StoreFull("etcd is full")

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a watch does not report is not found by a later read, either, so that nothing depends on the time."""
    monkeypatch.setattr(etcd_watch, "_RECHECK_S", 1e6)
    monkeypatch.setattr(etcd_watch, "_LONGEST_RECHECK_S", 1e6)


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


@pytest.fixture
def store(etcd: Etcd) -> Iterator[EtcdControlStore]:
    store = EtcdControlStore(SPEC, Gateway(etcd))  # type: ignore[arg-type]
    yield store
    store.close()
    with etcd.changed:
        assert etcd.changed.wait_for(lambda: not etcd.streams, WAIT_S)


def values_kept(store: EtcdControlStore) -> int:
    return sum(len(directory._watch._values) for directory in store._followed.values() if directory._watch)


def test_who_asks_about_two_directories_in_turn_opens_two_watches(etcd: Etcd, store: EtcdControlStore) -> None:
    board = SaveBoard(store, 100, [Member(GroupId(0), 0)])
    for index in range(100):
        etcd.put(keys.entry(index), "entry")
    for _ in range(20):
        assert not board.has_ended()
        assert board.read_fenced() == frozenset()
    assert etcd.num_watches == 2
    assert etcd.num_values_read == 0


def test_what_is_written_in_either_directory_is_noticed(etcd: Etcd, store: EtcdControlStore) -> None:
    for index in range(20):
        assert not store.exists(keys.entry(index))
        assert not store.exists(f"save/7/{index}")
        etcd.put(f"save/7/{index}", f"share {index}")
        etcd.put(keys.entry(index), f"entry {index}")
        assert store.wait(keys.entry(index), WAIT_S) == f"entry {index}"
        assert store.wait(f"save/7/{index}", WAIT_S) == f"share {index}"
    assert etcd.num_watches == 2


def test_what_was_written_last_before_it_was_full_is_found_and_nothing_after_it(
    etcd: Etcd, store: EtcdControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups have to agree on the last entry of the log, or what they save does not belong together."""
    for name in ("_RECHECK_S", "_RECHECK_READS"):
        monkeypatch.setattr(etcd_watch, name, 0.0)  # what the watch does not report is read each time
    log = DecisionLog(store)
    assert not log.has(0)
    etcd.last_key = keys.entry(0)
    assert log.has(0)
    with pytest.raises(StoreFull):
        log.wait(1, WAIT_S)


def test_the_directory_that_was_asked_about_longest_ago_is_dropped(etcd: Etcd, store: EtcdControlStore) -> None:
    for folder in "abca":
        store.exists(f"{folder}/key")
    assert etcd.num_watches == 3
    store.exists("d/key")
    for folder in "dac":
        store.exists(f"{folder}/key")
    assert etcd.num_watches == 4
    with etcd.changed:
        assert etcd.changed.wait_for(lambda: {stream.keys[0][-2] for stream in etcd.streams} == set("acd"), WAIT_S)
    etcd.put("b/key", "value")
    assert store.exists("b/key")
    assert etcd.num_watches == 5


def test_of_a_long_log_only_what_comes_next_is_read_and_kept(etcd: Etcd, store: EtcdControlStore) -> None:
    for index in range(500):
        etcd.put(keys.entry(index), f"entry {index}")
    log = DecisionLog(store)
    for index in range(480, 500):
        assert log.has(index)
        assert log.wait(index, WAIT_S) == f"entry {index}"
    assert etcd.num_values_read == 20
    for index in range(500, 1000):
        etcd.put(keys.entry(index), f"entry {index}")
        assert log.wait(index, WAIT_S) == f"entry {index}"
        assert values_kept(store) == 1
    assert etcd.num_watches == 1


def test_who_looks_beyond_the_head_and_back_still_gets_the_next_entry(etcd: Etcd, store: EtcdControlStore) -> None:
    for index in range(100):
        etcd.put(keys.entry(index), f"entry {index}")
    log = DecisionLog(store)
    assert [index for index in (127, 63, 95, 111, 103, 99, 101, 100) if log.has(index)] == [63, 95, 99]
    for index in range(100, 130):
        etcd.put(keys.entry(index), f"entry {index}")
    assert [log.wait(index, WAIT_S) for index in (100, 129, 5)] == ["entry 100", "entry 129", "entry 5"]
    assert etcd.num_watches == 1


@pytest.mark.parametrize("seed", range(20))
def test_every_entry_is_found_in_whatever_order_it_is_asked_for(etcd: Etcd, store: EtcdControlStore, seed: int) -> None:
    random, length, log = Random(seed), 0, DecisionLog(store)
    for _ in range(300):
        index = random.randrange(length + 5)
        match random.choice(("write", "has", "wait", "wait")):
            case "write":
                etcd.put(keys.entry(length), f"entry {length}")
                length += 1
            case "has":
                assert not log.has(index) or index < length
            case "wait" if index < length:
                assert log.wait(index, WAIT_S) == f"entry {index}"
            case _:
                with pytest.raises(StoreTimeout):
                    log.wait(index, 0.0)
    assert etcd.num_watches == 1
