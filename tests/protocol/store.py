"""A simulated control store: requests travel, are applied in any order, and their answers travel back.

The real callers (`DecisionLog`, `GroupAgreement`, `detect.fence`) are synchronous. `conversation` turns one call of
them into a generator of requests: the call is made again after every answer, with the answers so far, and stopped at
the first request that has none. They keep no state of their own, so every repetition takes the same way.
"""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spare_megatron.store.decision_log import DecisionLog
from tests.protocol.violation import Violation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the store, on its way."""

    operation: str
    arguments: tuple[Any, ...]


class _Unanswered(Exception):
    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.request = request


class _Connection:
    """A `ControlStore` that knows the answers to the first requests, and stops at the next."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = iter(answers)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        for answer in self._answers:
            return answer
        raise _Unanswered(Request(operation, arguments))

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        return self._ask("put_if_absent", key, value)

    def put(self, key: str, value: str) -> None:
        return self._ask("put", key, value)

    def get(self, keys: Sequence[str]) -> list[str | None]:
        return self._ask("get", tuple(keys))

    def exists(self, key: str) -> bool:
        return self._ask("exists", key)

    def wait(self, key: str, timeout_s: float) -> str:
        return self._ask("wait", key)

    def put_counted(self, key: str, value: str, counter: str, weight: int = 1, forget: Sequence[str] = ()) -> int:
        # One request after another, as in the embedded store: its caller may die between any two of them.
        self._ask("put", key, value)
        count = self._ask("count_up", counter, weight)
        self.delete(forget)
        return count

    def counted(self, counter: str) -> int:
        [value] = self._ask("get", (counter,))
        return int(value or "0")

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask("delete", key)


def conversation(call: Callable[[Any], T]) -> Generator[Request, Any, T]:
    """What the call returns, after it has had all the answers that it asks for."""
    answers: list[Any] = []
    while True:
        try:
            return call(_Connection(answers))
        except _Unanswered as unanswered:
            answers.append((yield unanswered.request))


class UncheckedLog(DecisionLog):
    """Looks nothing up again: no store here loses its log, and no history depends on the time that it takes."""

    def check(self, interval_s: float | None = None) -> None:
        pass


class Store:
    """The data. What is written once stays as it is; every writer of a log entry is shown to `on_entry`."""

    def __init__(self, on_entry: Callable[[int, str, str], None]) -> None:
        self.data: dict[str, str] = {}
        self.is_up = True
        self._on_entry = on_entry

    def has(self, key: str) -> bool:
        return key in self.data

    def cast_on(self, attempt: int) -> set[tuple[int, int]]:
        """Groups, with their incarnations, whose votes on the attempt are here."""
        cast = [text for key, text in self.data.items() if key.startswith(f"vote/{attempt}/")]
        return {(group, number) for text in cast for _, voters in json.loads(text) for group, number in voters}

    def is_applicable(self, request: Request) -> bool:
        """Whether the request would be answered now."""
        return self.is_up and (request.operation != "wait" or request.arguments[0] in self.data)

    def apply(self, request: Request, client: str) -> Any:
        """Carries a request out; returns its answer."""
        operation, arguments = request.operation, request.arguments
        key = arguments[0]
        if operation in ("put", "count_up", "delete") and _is_entry(key):
            raise Violation(f"{client} changes {key}, which is written once by compare-and-set")
        match operation:
            case "put_if_absent":
                return self._put_if_absent(key, arguments[1], client)
            case "put":
                self.data[key] = arguments[1]
            case "get":
                return [self.data.get(key) for key in arguments[0]]
            case "exists":
                return key in self.data
            case "wait":
                return self.data[key]
            case "count_up":
                self.data[key] = str(int(self.data.get(key, "0")) + arguments[1])
                return int(self.data[key])
            case "delete":
                self.data.pop(key, None)
        return None

    def _put_if_absent(self, key: str, value: str, client: str) -> str:
        if key in self.data:
            return self.data[key]
        self.data[key] = value
        if _is_entry(key):
            self._on_entry(int(key.removeprefix("log/")), value, client)
        return value


def _is_entry(key: str) -> bool:
    return key.startswith("log/") and key.removeprefix("log/").isdigit()
