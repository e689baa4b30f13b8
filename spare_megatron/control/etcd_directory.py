"""A directory of etcd as one thread asks about it: a watch, and reads that confirm what the watch says."""

import time

from spare_megatron.control.etcd_gateway import EtcdGateway, Message, StoreFull, decoded, encoded
from spare_megatron.control.etcd_watch import EtcdWatch

_RECHECK_S = 1.0
"""A watch that says nothing is checked by a read: a member cut off from the others says nothing, either."""
_RECHECK_READS, _LONGEST_RECHECK_S = 20.0, 5.0
"""Where reads are slow, later, by so many times what the last one took: waiting must not keep a slow cluster busy."""


class EtcdDirectory:
    """A directory that is being followed.

    Args:
        gateway: The connection of whoever asks.
        keys: First key of the directory, and the key after it.
        is_ordered: Its keys are written in the order of their texts. Who has been told the value of one asks for later
            ones, so only from there on are values kept; earlier ones are read when they are asked for.
    """

    def __init__(self, gateway: EtcdGateway, keys: tuple[str, str], *, is_ordered: bool) -> None:
        self._gateway = gateway
        self._keys = keys
        self._is_ordered = is_ordered
        self._first = keys[0]
        """The watch tells of every key from this one on."""
        self._check_at_s = 0.0
        """When a read is to confirm what the watch says."""
        self._watch: EtcdWatch | None = None

    def find(self, key: str, timeout_s: float) -> str | None:
        """The key's value, if the watch has it or is told of it within this time, or before the next check of it."""
        watch = self._watch or self._open(key)
        if key < self._first:
            value = values_of(self._read_one(key)).get(key)
            if value is not None:
                return value
            self._first = key  # not written when the watch began, so neither was any after it
        value = watch.value(key, min(timeout_s, max(0.0, self._check_at_s - time.monotonic())))
        began_s = time.monotonic()
        if value is None and began_s >= self._check_at_s:
            value = self._confirmed(key)
            self._checked(began_s)
            if value is not None:
                self.close()  # it should have said so: its member may be cut off
        elif value is not None and self._is_ordered and key > self._first:
            watch.let_go_before(key)
            self._first = key
        return value

    def _confirmed(self, key: str) -> str | None:
        """The key's value by reads.

        Raises:
            StoreFull: There is none, and none can be written any more.
        """
        value = values_of(self._read_one(key)).get(key)
        if value is None:
            try:
                self._gateway.check_space()
            except StoreFull:
                # It may be the last that was written: all have to see the same end of what they follow.
                value = values_of(self._read_one(key)).get(key)
                if value is None:
                    raise
        return value

    def close(self) -> None:
        """Ends the watch. The next question begins another."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _open(self, key: str) -> EtcdWatch:
        began_s = time.monotonic()
        self._first = key if self._is_ordered else self._keys[0]
        answer = self._read(self._first, self._keys[1])
        self._checked(began_s)
        revision = int(answer["header"]["revision"]) + 1
        self._watch = EtcdWatch(self._gateway.another(), self._keys, values_of(answer), revision)
        return self._watch

    def _read_one(self, key: str) -> Message:
        return self._read(key, key + "\0")

    def _read(self, start: str, end: str) -> Message:
        return self._gateway.call("/v3/kv/range", {"key": encoded(start), "range_end": encoded(end)})

    def _checked(self, began_s: float) -> None:
        """Notes that the watch need not be checked for a while, after a read that began at this time."""
        now_s = time.monotonic()
        self._check_at_s = now_s + min(max(_RECHECK_S, _RECHECK_READS * (now_s - began_s)), _LONGEST_RECHECK_S)


def values_of(answer: Message) -> dict[str, str]:
    """Value by key of a range."""
    return {decoded(pair["key"]): decoded(pair.get("value", "")) for pair in answer.get("kvs", [])}
