"""Nodes that are lost before training begins: who fences their groups, and who watches those behind them."""

import itertools
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

import pytest

from spare_megatron.control.decision_log import entry_key
from spare_megatron.core.messages import Fence, decode_entry
from spare_megatron.core.topology import GroupId, Layout
from spare_megatron.runtime.driver.node_loss import fence_node
from spare_megatron.runtime.process.readiness import ALL_GROUPS_READY, note_ready
from spare_megatron.runtime.supervisor.store_link import NUM_WATCHED, NodeSilent, StoreLink

CAUSE = "node 1: its supervisor has not come"
WAIT_S = 30.0


class Store:
    """A control store in memory, in which some nodes have begun to beat and stand still."""

    def __init__(self, *still: int) -> None:
        self.values = {f"beat/{node}": "7" for node in still}
        self.num_told = itertools.count(1)

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def put_if_absent(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def put_counted(self, key: str, value: str, counter: str) -> int:
        self.values[key] = value
        return next(self.num_told)

    def get(self, keys: Sequence[str]) -> list[str | None]:
        return [self.values.get(key) for key in keys]

    def exists(self, key: str) -> bool:
        return key in self.values

    def wait(self, key: str, timeout_s: float) -> str:
        return self.values[key]

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        self.values[key] = value


def fences(store: Store) -> list[tuple[int, int, str]]:
    """Group, life and reason of each, in the order of the log."""
    texts = [store.values[entry_key(index)] for index in range(len(store.values)) if entry_key(index) in store.values]
    entries = [decode_entry(text) for text in texts]
    return [(entry.group, entry.incarnation, entry.reason) for entry in entries if isinstance(entry, Fence)]


def test_all_groups_of_a_node_are_fenced_once_and_nobody_waits_for_them() -> None:
    layout = Layout(num_groups=4, num_nodes=2)
    store: Any = Store()
    for group in (GroupId(0), GroupId(1)):
        note_ready(store, group, "itself", 4)
    records = list(fence_node(store, layout, 1, CAUSE))
    assert [(record.group, record.rank, record.cause, record.entry_index) for record in records] == [
        (2, -1, CAUSE, 0),
        (3, -1, CAUSE, 1),
    ]
    assert store.exists(ALL_GROUPS_READY)
    assert list(fence_node(store, layout, 1, "again")) != []
    assert fences(store) == [(2, 0, CAUSE), (3, 0, CAUSE)]
    assert not [key for key in store.values if key.startswith("lost/")]


def test_the_other_nodes_of_a_divided_group_are_told() -> None:
    store: Any = Store()
    store.put("incarnation/0", "2")  # it has been started again already
    [record] = fence_node(store, Layout(num_groups=2, pipeline_parallel=2, num_nodes=4), 1, CAUSE)
    assert (record.group, record.incarnation) == (0, 2)
    assert store.values["lost/0/2"] == f'[0, -1, "{CAUSE}"]'
    assert not store.exists(ALL_GROUPS_READY)


@pytest.mark.timeout(60)
def test_nodes_behind_those_that_never_came_are_watched_once_training_has_begun() -> None:
    """Each node watches the next few. Where none of those before it came, nobody found a node lost."""
    num_nodes = NUM_WATCHED + 3
    last = num_nodes - 1
    store: Any = Store(last)
    store.put(ALL_GROUPS_READY, "yes")
    inbox, outbox = Pipe(duplex=False)
    link = StoreLink(
        node=0,
        layout=Layout(num_groups=num_nodes, num_nodes=num_nodes),
        interval_s=0.05,
        connect=lambda: store,
        outbox=outbox,
    )
    link.start()
    assert inbox.poll(WAIT_S)
    silent = inbox.recv()
    link.stop(WAIT_S)
    assert isinstance(silent, NodeSilent)
    assert silent.node == last


@pytest.mark.timeout(60)
def test_before_training_begins_nodes_are_waited_for() -> None:
    """They are not taken for lost, nor anybody else watched in their place; a beat of them is heard then."""
    store: Any = Store(NUM_WATCHED + 1)
    inbox, outbox = Pipe(duplex=False)
    layout = Layout(num_groups=NUM_WATCHED + 2, num_nodes=NUM_WATCHED + 2)
    link = StoreLink(node=0, layout=layout, interval_s=0.05, connect=lambda: store, outbox=outbox)
    for _ in range(NUM_WATCHED):
        link._beat(store)
    assert link._silent == set()
    assert not inbox.poll()
