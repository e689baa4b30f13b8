"""A control store of one process, for what talks to one."""

from collections import Counter
from collections.abc import Mapping, Sequence


class MemoryStore:
    """A `ControlStore` that no other process reaches, as far as tests need one.

    Args:
        values: What stands in it at first.
    """

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self.values = dict(values or {})
        self._counters: Counter[str] = Counter()

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        self.put(key, value)

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        return self.values.setdefault(key, value)

    def put_counted(self, key: str, value: str, counter: str) -> int:
        self._counters[counter] += key not in self.values
        self.put(key, value)
        return self._counters[counter]

    def get(self, keys: Sequence[str]) -> list[str | None]:
        return [self.values.get(key) for key in keys]

    def exists(self, key: str) -> bool:
        return key in self.values

    def wait(self, key: str, timeout_s: float) -> str:
        return self.values[key]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.values.pop(key, None)
