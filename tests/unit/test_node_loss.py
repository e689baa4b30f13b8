"""Nodes that are lost before training begins: who fences their groups, and who watches those behind them."""

from multiprocessing import Pipe
from typing import Any

import pytest

from spare_megatron.core.log.entries import Fence, decode_entry
from spare_megatron.process.readiness import note_ready
from spare_megatron.stacking.layout import GroupId, Layout
from spare_megatron.store import keys
from spare_megatron.supervisor.places.group_rendezvous import fence_node
from spare_megatron.supervisor.store_watch import NUM_WATCHED, NodeSilent, StoreLink
from tests.unit.memory_store import MemoryStore

CAUSE = "node 1: its supervisor did not connect"
WAIT_S = 30.0


def store_of(*still: int) -> Any:
    """One in which these nodes have begun to beat, and stand still."""
    return MemoryStore({f"beat/{node}": "7" for node in still})


def fences(store: MemoryStore) -> list[tuple[int, int, str]]:
    """Group, incarnation and reason of each, in the order of the log."""
    texts = [store.values[keys.entry(index)] for index in range(len(store.values)) if keys.entry(index) in store.values]
    entries = [decode_entry(text) for text in texts]
    return [(entry.group, entry.incarnation, entry.reason) for entry in entries if isinstance(entry, Fence)]


def test_all_groups_of_a_node_are_fenced_once_and_not_waited_for() -> None:
    layout = Layout(num_groups=4, num_nodes=2)
    store = store_of()
    for group in (GroupId(0), GroupId(1)):
        note_ready(store, group, "itself", 4)
    records = list(fence_node(store, layout, 1, CAUSE))
    assert [(record.group, record.rank, record.cause, record.entry_index) for record in records] == [
        (2, -1, CAUSE, 0),
        (3, -1, CAUSE, 1),
    ]
    assert store.exists(keys.ALL_GROUPS_READY)
    assert list(fence_node(store, layout, 1, "again")) != []
    assert fences(store) == [(2, 0, CAUSE), (3, 0, CAUSE)]
    assert not [key for key in store.values if key.startswith("lost/")]


def test_the_other_nodes_of_a_divided_group_learn_of_its_loss() -> None:
    store = store_of()
    store.put("incarnation/0", "2")  # it has been started again already
    [record] = fence_node(store, Layout(num_groups=2, pipeline_parallel=2, num_nodes=4), 1, CAUSE)
    assert (record.group, record.incarnation) == (0, 2)
    assert store.values["lost/0/2"] == f'[0,-1,"{CAUSE}"]'
    assert not store.exists(keys.ALL_GROUPS_READY)


@pytest.mark.timeout(60)
def test_nodes_behind_those_that_never_came_are_watched_once_training_has_begun() -> None:
    """Each node watches the next few. If none of those before it came, no node found it lost."""
    num_nodes = NUM_WATCHED + 3
    last = num_nodes - 1
    store = store_of(last)
    store.put(keys.ALL_GROUPS_READY, "yes")
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
    """They are not taken for lost, nor is another node watched in their place; a beat of them counts then."""
    store = store_of(NUM_WATCHED + 1)
    inbox, outbox = Pipe(duplex=False)
    layout = Layout(num_groups=NUM_WATCHED + 2, num_nodes=NUM_WATCHED + 2)
    link = StoreLink(node=0, layout=layout, interval_s=0.05, connect=lambda: store, outbox=outbox)
    for _ in range(NUM_WATCHED):
        link._beat(store)
    assert link._silent == set()
    assert not inbox.poll()
