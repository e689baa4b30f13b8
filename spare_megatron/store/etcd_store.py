"""The production control store: etcd v3, replicated by raft.

Every write is idempotent, so a write whose answer is lost is repeated. Counters use etcd's versions of keys, which rise
by one with every write, so that counting needs no prior read; a counter has one key per power of two, as a transaction
may write a key only once.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from spare_megatron.store.etcd_gateway import EtcdGateway, EtcdMessage, StoreLacks, decoded, encoded, key_range
from spare_megatron.store.etcd_watch import EtcdDirectory, values_of
from spare_megatron.store.interface import StoreTimeout, lost_key
from spare_megatron.store.keys import LOG
from spare_megatron.store.spec import EtcdStoreSpec
from spare_megatron.store.tcp_store import listen, without_name_lookups

_OPERATIONS = 128
"""etcd's default limit of operations per transaction."""
_MOST_DIRECTORIES = 3
"""Directories that a connection asks about in turn, at most: the log, the keys of one save or gathering, one more."""


class EtcdControlStore:
    """A client of etcd; a `ControlStore`. All keys of a run lie under the prefix of its spec."""

    def __init__(self, spec: EtcdStoreSpec, gateway: EtcdGateway | None = None) -> None:
        self._spec = spec
        self._gateway = gateway or EtcdGateway(spec)
        self._followed: dict[tuple[str, str], EtcdDirectory] = {}
        """Watched directories by key range, least recently used first."""
        self._leases: dict[str, str] = {}

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        compare, reads = [_is_absent(self._key(key))], [self._range(key)]
        if after is not None:
            compare.append(_compare_creation(self._key(after), "GREATER"))
            reads.append(self._range(after))
        answer = self._transact(compare, [self._put(key, value)], reads)
        if answer.get("succeeded"):
            return value
        found = [values_of(response["response_range"]) for response in answer["responses"]]
        if after is not None and not found[1]:
            raise lost_key(after)
        return found[0][self._key(key)]

    def put(self, key: str, value: str) -> None:
        self._transact([], [self._put(key, value)], [])

    def put_counted(self, key: str, value: str, counter: str, weight: int = 1, forget: Sequence[str] = ()) -> int:
        digits = [self._put(f"{counter}/{power}", "") for power in range(weight.bit_length()) if weight >> power & 1]
        gone = [self._delete(old) for old in forget]
        folder = self._directory(f"{counter}/")
        count = {"request_range": key_range(*folder)}
        answer = self._transact([_is_absent(self._key(key))], [self._put(key, value), *digits, *gone, count], [count])
        # The sum of no digits is 0: a request that is repeated after the counter was removed.
        return _sum_of(answer["responses"][-1]["response_range"], folder[0])

    def counted(self, counter: str) -> int:
        folder = self._directory(f"{counter}/")
        return _sum_of(self._gateway.read(*folder), folder[0])

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _OPERATIONS // 2):
            some = keys[start : start + _OPERATIONS // 2]
            self._transact([], [*map(self._delete, some), *map(self._delete_counter, some)], [])

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            answer = self._gateway.call("/v3/lease/keepalive", {"ID": lease})
            if not int(answer["result"].get("TTL", 0)):
                lease = None  # it has expired
        if lease is None:
            lease = str(self._gateway.call("/v3/lease/grant", {"TTL": str(ttl_s)})["ID"])
        pair = {"key": encoded(self._key(key)), "value": encoded(value), "lease": lease}
        try:
            self._gateway.call("/v3/kv/put", pair)
        except StoreLacks:  # it has expired since: this process was stopped in between, or etcd was away
            self.beat(key, value, ttl_s)
        else:
            self._leases[key] = lease

    def get(self, keys: Sequence[str]) -> list[str | None]:
        names = [self._key(key) for key in keys]
        if not names:
            return []
        # One request for any number of keys, and a consistent snapshot.
        found = values_of(self._gateway.read(min(names), max(names) + "\0"))
        return [found.get(name) for name in names]

    def exists(self, key: str) -> bool:
        return self._find(key, 0.0) is not None

    def wait(self, key: str, timeout_s: float) -> str:
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            value = self._find(key, max(left_s, 0.0))
            if value is not None:
                return value
            if left_s <= 0:
                raise StoreTimeout(f"{key} was not written within {timeout_s:g} s")

    def rendezvous(
        self,
        prefix: str,
        rank: int,
        timeout_s: float,
        former: tuple[str, int] | None = None,  # noqa: ARG002  (its server process has dropped it)
    ) -> Any:
        """Rank 0 serves a TCPStore of its own and publishes its address here; the others connect to that.

        A communicator's members exchange some N^2 small values, too many to replicate by consensus, and the loss of a
        member ends the communicator in any case.
        """
        # Another thread may be using this object's connection.
        store = EtcdControlStore(self._spec, self._gateway.another())
        try:
            return store._meet(f"{prefix}/address", rank, timeout_s)
        finally:
            store.close()

    def local_host(self) -> str:
        return self._gateway.local_host()

    def clear(self) -> None:
        self._gateway.call("/v3/kv/deleterange", key_range(*self._directory("")))

    def close(self) -> None:
        self._gateway.close()
        for directory in self._followed.values():
            directory.close()

    def break_off(self) -> None:
        self._gateway.break_off()

    # --------------------------------------------------------------------------------------------------- requests

    def _key(self, key: str) -> str:
        return f"{self._spec.prefix}/{key}"

    def _put(self, key: str, value: str) -> EtcdMessage:
        return {"request_put": {"key": encoded(self._key(key)), "value": encoded(value)}}

    def _delete(self, key: str) -> EtcdMessage:
        return {"request_delete_range": {"key": encoded(self._key(key))}}

    def _delete_counter(self, counter: str) -> EtcdMessage:
        return {"request_delete_range": key_range(*self._directory(f"{counter}/"))}

    def _range(self, key: str) -> EtcdMessage:
        return {"request_range": {"key": encoded(self._key(key))}}

    def _transact(
        self, compare: list[EtcdMessage], success: list[EtcdMessage], failure: list[EtcdMessage]
    ) -> EtcdMessage:
        return self._gateway.call("/v3/kv/txn", {"compare": compare, "success": success, "failure": failure})

    def _directory(self, key: str) -> tuple[str, str]:
        """The key range of the directory that holds this key; of the key alone if it lies in none."""
        folder, slash, _ = self._key(key).rpartition("/")
        if folder == self._spec.prefix and key:
            return self._key(key), self._key(key) + "\0"
        return folder + slash, folder + chr(ord(slash) + 1)

    # ---------------------------------------------------------------------------------------------------- waiting

    def _find(self, key: str, timeout_s: float) -> str | None:
        """The key's value if it appears within this time; returns None earlier if a read has to confirm its absence."""
        keys = self._directory(key)
        directory = self._followed.pop(keys, None)
        if directory is None:
            directory = EtcdDirectory(self._gateway, keys, is_ordered=keys[0] == self._key(LOG))
        self._followed[keys] = directory
        if len(self._followed) > _MOST_DIRECTORIES:
            self._followed.pop(next(iter(self._followed))).close()
        return directory.find(self._key(key), timeout_s)

    def _meet(self, key: str, rank: int, timeout_s: float) -> Any:
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_s)
        if rank != 0:
            host, port = self.wait(key, timeout_s).rsplit(" ", 1)
            with without_name_lookups():
                return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        host = self._gateway.local_host()
        store = listen(host, timeout)
        self.put(key, f"{host} {store.port}")
        return store


def _sum_of(digits: EtcdMessage, directory: str) -> int:
    """Value of the counter in this directory: the sum of each power of two times the number of its writes."""
    pairs = digits.get("kvs", [])
    return sum(int(pair["version"]) << int(decoded(pair["key"]).removeprefix(directory)) for pair in pairs)


def _is_absent(name: str) -> EtcdMessage:
    return _compare_creation(name, "EQUAL")


def _compare_creation(name: str, result: str) -> EtcdMessage:
    """Compares the revision that created the key, 0 of an absent one, with 0."""
    return {"key": encoded(name), "target": "CREATE", "result": result, "create_revision": "0"}
