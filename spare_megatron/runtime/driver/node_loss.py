"""Nodes that are lost before training begins: others watch a node only once it has begun to beat."""

from collections.abc import Iterator

from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.control.store import ControlStore
from spare_megatron.core.topology import Layout
from spare_megatron.journal.records import LossRecord
from spare_megatron.runtime.process.readiness import note_ready
from spare_megatron.runtime.supervisor.parts import present_members, tell_fenced
from spare_megatron.runtime.vote.detect import fence


def fence_node(store: ControlStore, layout: Layout, node: int, cause: str) -> Iterator[LossRecord]:
    """Fences one after the other the groups that have ranks on the node, so that nobody waits for them any more.

    Args:
        store: The control store.
        layout: Of the run.
        node: The node.
        cause: Why, for people.
    """
    log = DecisionLog(store)
    for member in present_members(store, layout.groups_on(node)):
        group = member.group
        index = fence(log, member, cause, from_index=0)
        if len(layout.nodes_of(group)) > 1:
            tell_fenced(store, member, index, -1, cause)
        note_ready(store, group, "the driver", layout.num_groups)
        yield LossRecord(
            group=group, rank=-1, cause=cause, entry_index=index, incarnation=member.incarnation, pending=[]
        )
