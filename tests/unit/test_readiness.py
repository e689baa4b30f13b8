"""When a run begins: with every group ready or lost, whichever group dies while reporting it."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest

from spare_megatron.process.readiness import GroupsMissing, note_ready, wait_until_ready
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store import keys
from spare_megatron.store.interface import StoreTimeout

NUM_GROUPS = 2
REPORTS = [(GroupId(0), "itself"), (GroupId(1), "itself"), (GroupId(1), "node 0"), (GroupId(1), "node 1")]


class Died(Exception):
    """The process is gone."""


class Store:
    """A control store whose client dies after so many writes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.writes_left = 99

    def _write(self, key: str, value: str) -> None:
        if not self.writes_left:
            raise Died
        self.writes_left -= 1
        self.values[key] = value

    def put(self, key: str, value: str) -> None:
        self._write(key, value)

    def put_counted(self, key: str, value: str, counter: str) -> int:
        assert key not in self.values
        self._write(key, value)
        self.counts[counter] = self.counts.get(counter, 0) + 1
        return self.counts[counter]

    def wait(self, key: str, timeout_s: float) -> str:
        if key not in self.values:
            raise StoreTimeout(f"{key} was not written within {timeout_s:g} s")
        return self.values[key]

    def get(self, keys: Sequence[str]) -> list[str | None]:
        return [self.values.get(key) for key in keys]


def begins_after(reports: Sequence[tuple[GroupId, str]], *, dies: int | None = None, after: int = 0) -> int | None:
    """How many have reported when all begin; one of them dies after so many of its writes."""
    store: Any = Store()
    for number, (group, reporter) in enumerate(reports):
        store.writes_left = after if number == dies else 99
        try:
            note_ready(store, group, reporter, NUM_GROUPS)
        except Died:
            continue
        if keys.ALL_GROUPS_READY in store.values:
            return number + 1
    return None


def test_all_groups_start_when_none_is_waited_for_and_not_before() -> None:
    for reports in itertools.permutations(REPORTS):
        first = next(
            number + 1 for number in range(len(reports)) if {group for group, _ in reports[: number + 1]} == {0, 1}
        )
        assert begins_after(reports) == first


def test_a_group_that_dies_while_it_reports_ready_is_reported_by_its_node() -> None:
    ready, other, node = REPORTS[1], REPORTS[0], REPORTS[2]
    for after in range(3):
        for reports in ((ready, other, node), (other, ready, node), (ready, node, other)):
            begun = begins_after(reports, dies=reports.index(ready), after=after)
            assert begun is not None, f"{reports} with a death after {after} writes"
            assert begun >= 1 + max(reports.index(other), min(reports.index(ready), reports.index(node)))


def test_a_group_that_waits_in_vain_names_those_that_are_missing() -> None:
    """The message was only that a key of the store was not written, and the run named the group that waited as lost."""
    store: Any = Store()
    for group in (GroupId(0), GroupId(2)):
        note_ready(store, group, "itself", 4)
    with pytest.raises(GroupsMissing, match=re.escape("groups [1, 3] did not start")) as raised:
        wait_until_ready(store, 4, startup_timeout_s=7.0)
    assert "control.startup_timeout_s=7" in str(raised.value)
    for group in (GroupId(1), GroupId(3)):
        note_ready(store, group, "node 0", 4)
    wait_until_ready(store, 4, startup_timeout_s=7.0)
