"""The production control store: etcd v3, replicated by raft.

Every write can be sent twice without harm, which is what makes a lost answer harmless: a compare-and-set that was
applied finds its own value standing, and a counted key is counted only where it was absent. A counter is etcd's own
version of a key, which rises by one with every write, so that counting needs no read before it.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from spare_megatron.control.etcd_gateway import EtcdGateway, Message, decoded, encoded
from spare_megatron.control.etcd_watch import EtcdWatch
from spare_megatron.control.spec import EtcdStoreSpec
from spare_megatron.control.store import StoreTimeout
from spare_megatron.control.tcp_store import listen

_RECHECK_S = 1.0
"""A watch that says nothing is checked by a read: a member cut off from the others says nothing, either."""


class EtcdControlStore:
    """A client of etcd; a `ControlStore`. All keys of a run stand under the prefix of its spec."""

    def __init__(self, spec: EtcdStoreSpec) -> None:
        self._spec = spec
        self._gateway = EtcdGateway(spec)
        self._watch: EtcdWatch | None = None
        self._asked = ("", 0, 0.0)
        """The key that `exists` was asked for last, the revision at which it was absent, when that was read."""

    def put_if_absent(self, key: str, value: str) -> str:
        answer = self._transact(_is_absent(self._key(key)), [self._put(key, value)], [self._range(key)])
        if answer.get("succeeded"):
            return value
        return _values(answer["responses"][0]["response_range"])[self._key(key)]

    def put(self, key: str, value: str) -> None:
        self._transact([], [self._put(key, value)], [])

    def put_counted(self, key: str, value: str, counter: str, obsolete: Sequence[str] = ()) -> int:
        removals = [{"request_delete_range": {"key": encoded(self._key(name))}} for name in obsolete]
        count = [self._put(counter, ""), self._range(counter)]
        answer = self._transact(
            _is_absent(self._key(key)), [*count, self._put(key, value), *removals], [self._range(counter)]
        )
        pairs = answer["responses"][1 if answer.get("succeeded") else 0]["response_range"].get("kvs", [])
        return int(pairs[0]["version"]) if pairs else 0

    def get(self, keys: Sequence[str]) -> list[str | None]:
        names = [self._key(key) for key in keys]
        if not names:
            return []
        # One request whatever their number, and all of one moment.
        found = _values(self._read(min(names), max(names) + "\0"))
        return [found.get(name) for name in names]

    def exists(self, key: str) -> bool:
        asked, revision, read_at_s = self._asked
        if key == asked and self._watch is not None and time.monotonic() - read_at_s < _RECHECK_S:
            return self._watch.value(revision, 0.0) is not None
        value, revision = self._look(key, is_recheck=key == asked)
        self._asked = (key, revision, time.monotonic()) if value is None else ("", 0, 0.0)
        return value is not None

    def wait(self, key: str, timeout_s: float) -> str:
        end_s = time.monotonic() + timeout_s
        is_recheck = False
        while True:
            value, revision = self._look(key, is_recheck=is_recheck)
            is_recheck = True
            left_s = end_s - time.monotonic()
            if value is None and self._watch is not None and left_s > 0:
                value = self._watch.value(revision, min(left_s, _RECHECK_S))
            if value is not None:
                return value
            if left_s <= 0:
                raise StoreTimeout(f"{key} was not written within {timeout_s:g} s")

    def rendezvous(self, prefix: str, rank: int, timeout_s: float) -> Any:
        """Rank 0 serves a TCPStore of its own and writes its address here; the others connect to that.

        A communicator's members exchange some N^2 small values, which is nothing for a consensus to replicate, and
        a member's death ends its communicator in any case.
        """
        store = EtcdControlStore(self._spec)  # this may be called while another thread uses the present one
        try:
            return store._meet(f"{prefix}/address", rank, timeout_s)
        finally:
            store.close()

    def clear(self) -> None:
        start, end = self._directory("")
        self._gateway.call("/v3/kv/deleterange", {"key": encoded(start), "range_end": encoded(end)})

    def close(self) -> None:
        """Drops the connections."""
        self._gateway.close()
        self._end_watch()

    # --------------------------------------------------------------------------------------------------- requests

    def _key(self, key: str) -> str:
        return f"{self._spec.prefix}/{key}"

    def _put(self, key: str, value: str) -> Message:
        return {"request_put": {"key": encoded(self._key(key)), "value": encoded(value)}}

    def _range(self, key: str) -> Message:
        return {"request_range": {"key": encoded(self._key(key))}}

    def _transact(self, compare: list[Message], success: list[Message], failure: list[Message]) -> Message:
        return self._gateway.call("/v3/kv/txn", {"compare": compare, "success": success, "failure": failure})

    def _read(self, start: str, end: str) -> Message:
        return self._gateway.call("/v3/kv/range", {"key": encoded(start), "range_end": encoded(end)})

    def _directory(self, key: str) -> tuple[str, str]:
        """The range of keys beside this one; that of the key alone where it stands in no directory."""
        folder, slash, _ = self._key(key).rpartition("/")
        if folder == self._spec.prefix and key:
            return self._key(key), self._key(key) + "\0"
        return folder + slash, folder + chr(ord(slash) + 1)

    # ---------------------------------------------------------------------------------------------------- waiting

    def _look(self, key: str, *, is_recheck: bool) -> tuple[str | None, int]:
        """The key's value now, and the revision of this answer; from then on the watch tells of it."""
        keys = self._directory(key)
        if self._watch is not None and self._watch.keys != keys:
            self._end_watch()
        if self._watch is not None:
            self._watch.look_for(self._key(key))
        answer = self._read(self._key(key), self._key(key) + "\0")
        value, revision = _values(answer).get(self._key(key)), int(answer["header"]["revision"])
        if value is None and self._watch is None:
            self._watch = EtcdWatch(EtcdGateway(self._spec), keys, revision + 1, self._key(key))
        if value is not None and is_recheck:
            self._end_watch()  # it should have said so: its member may be cut off
        return value, revision

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _meet(self, key: str, rank: int, timeout_s: float) -> Any:
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_s)
        if rank != 0:
            host, port = self.wait(key, timeout_s).rsplit(" ", 1)
            return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        host = self._gateway.local_host()
        store = listen(host, timeout)
        self.put(key, f"{host} {store.port}")
        return store


def _is_absent(name: str) -> list[Message]:
    return [{"key": encoded(name), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}]


def _values(answer: Message) -> dict[str, str]:
    """Value by key of a range."""
    return {decoded(pair["key"]): decoded(pair.get("value", "")) for pair in answer.get("kvs", [])}
