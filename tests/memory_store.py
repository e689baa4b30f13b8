"""A control store in memory that counts what it is asked."""

from collections.abc import Sequence
from typing import Any

from spare_megatron.store.interface import StoreTimeout


class MemoryStore:
    """A control store for one thread. It knows who has asked for what."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.num_casts = self.num_waits = self.num_reads = 0

    def put_counted(self, key: str, value: str, counter: str, weight: int, forget: Sequence[str]) -> int:
        self.num_casts += 1
        self.data[key] = value
        self.data[counter] = self.data.get(counter, 0) + weight
        self.delete(forget)
        return int(self.data[counter])

    def put(self, key: str, value: str) -> None:
        self.data[key] = value

    def counted(self, counter: str) -> int:
        return int(self.data.get(counter, 0))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.data.pop(key, None)

    def get(self, keys: Sequence[str]) -> list[str | None]:
        self.num_reads += 1
        return [self.data.get(key) for key in keys]

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        return str(self.data.setdefault(key, value))

    def exists(self, key: str) -> bool:
        return key in self.data

    def wait(self, key: str, timeout_s: float) -> str:
        self.num_waits += 1
        if key not in self.data:
            raise StoreTimeout(f"{key} was not written within {timeout_s:g} s")
        return str(self.data[key])
