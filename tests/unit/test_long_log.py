"""A log of months: a reader that starts at its first entry asks for many at a time."""

import math
from collections.abc import Sequence

import pytest

from spare_megatron.config.schema import LayoutConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.core.log.actions import FinishRun
from spare_megatron.core.log.entries import Commit, encode_entry
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.log_follower import LogFollower, controller_setup

NUM_STEPS = 4000


class Store:
    """Holds a log; what is asked for is counted. A key that was asked for in a row must lie beside the others."""

    def __init__(self, *entries: str) -> None:
        self.values = {keys.entry(index): entry for index, entry in enumerate(entries)}
        self.num_requests = 0

    def get(self, keys: Sequence[str]) -> list[str | None]:
        self.num_requests += 1
        assert list(keys) == sorted(keys)
        return [self.values.get(key) for key in keys]


def test_names_of_entries_are_in_the_order_of_the_entries() -> None:
    numbers = [0, 1, 9, 10, 99, 100, 12345, 99_999_999]
    assert sorted(map(keys.entry, numbers)) == list(map(keys.entry, numbers))


def test_at_least_half_of_what_is_written_is_read_and_nothing_else() -> None:
    for length in range(40):
        entries = [f"entry {index}" for index in range(length)]
        for index in range(length + 1):
            for most in (1, 2, 3, 8, 64):
                store = Store(*entries)
                found = DecisionLog(store).read(index, most)  # type: ignore[arg-type]
                assert found == entries[index : index + len(found)]
                assert min(most, length - index) >= len(found) >= min(most, length - index) / 2
                assert store.num_requests <= math.log2(most) + 3


def test_a_long_log_is_followed_in_few_requests() -> None:
    """It took two for each entry: minutes, in a run of a million steps."""
    config = RunConfig(
        layout=LayoutConfig(num_groups=3), spare=SpareConfig(redundancy=2), train=TrainConfig(steps=NUM_STEPS)
    )
    store = Store(*(encode_entry(Commit(step=step, attempt=step)) for step in range(NUM_STEPS)))
    num_folded = 0

    def count() -> None:
        nonlocal num_folded
        num_folded += 1

    follower = LogFollower(DecisionLog(store), controller_setup(config))  # type: ignore[arg-type]
    assert follower.stop(count) == FinishRun(step=NUM_STEPS)
    assert num_folded == NUM_STEPS
    assert store.num_requests < 50


@pytest.mark.parametrize("length", [0, 1, 700])
def test_a_second_read_returns_only_new_entries(length: int) -> None:
    store = Store(*(f"entry {index}" for index in range(length)))
    log = DecisionLog(store)  # type: ignore[arg-type]
    head = 0
    while found := log.read(head, 512):
        head += len(found)
    assert head == length
    store.values[keys.entry(length)] = "one more"
    assert log.read(head, 512) == ["one more"]
