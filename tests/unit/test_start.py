"""Losses before training begins: a broken machine is left out, a fault of the program ends the run."""

import itertools
import re
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

import pytest

from spare_megatron.core.controller.controller import ControllerSetup
from spare_megatron.core.controller.start import EarlyLoss, Start
from spare_megatron.core.log.entries import Fence, decode_entry
from spare_megatron.process.readiness import GroupsMissing, note_ready, wait_until_ready
from spare_megatron.stacking.layout import GroupId, Layout
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import PartitionSetup
from spare_megatron.store import keys
from spare_megatron.store.interface import StoreTimeout
from spare_megatron.supervisor.places.group_rendezvous import fence_node
from spare_megatron.supervisor.store_watch import NUM_WATCHED, NodeSilent, StoreLink
from tests.unit.memory_store import MemoryStore

NUM_GROUPS = 8
ERROR = "ImportError: libcudart.so.12: cannot open shared object file"


MISSING = "node 3: its supervisor did not connect"


def start(num_nodes: int, redundancy: int = 4, num_groups: int = NUM_GROUPS, **fixed: object) -> Start:
    placement = make_placement("golomb", num_groups, redundancy, 1)
    setup = ControllerSetup(placement=placement, microbatches_per_shard=1, num_steps=1, **fixed)  # type: ignore[arg-type]
    return Start(Layout(num_groups=num_groups, num_nodes=num_nodes), setup)


def raised(group: int, error: str = ERROR) -> EarlyLoss:
    return EarlyLoss(group=GroupId(group), rank=0, cause=error, error=error)


def killed(group: int) -> EarlyLoss:
    return EarlyLoss(group=GroupId(group), rank=0, cause="SIGKILL")


def missing(group: int) -> EarlyLoss:
    """Its node is not there."""
    return EarlyLoss(group=GroupId(group), rank=-1, cause=MISSING)


def test_one_group_may_raise_as_often_as_it_likes() -> None:
    begun = start(num_nodes=1)
    assert [begun.lose(raised(3)) for _ in range(5)] == [""] * 5


def test_a_node_on_which_nothing_works_is_left_out() -> None:
    """Its groups 6 and 7, each more than once."""
    begun = start(num_nodes=4)
    assert {begun.lose(raised(group)) for group in (6, 7, 6, 7)} == {""}


def test_what_two_nodes_raise_ends_the_run_and_is_named() -> None:
    begun = start(num_nodes=4)
    assert begun.lose(raised(6)) == begun.lose(raised(7)) == ""
    reason = begun.lose(raised(0))
    assert reason.startswith("groups [0, 6, 7] raised the same before training began")
    assert reason.endswith(f"rank 0: {ERROR}")


def test_what_may_be_the_devices_of_two_nodes_does_not_end_the_run_before_all_are_lost() -> None:
    begun = start(num_nodes=4)
    error = "RuntimeError: CUDA error: unspecified launch failure"
    assert {begun.lose(raised(group, error)) for group in (6, 0)} == {""}


def test_on_a_single_node_two_groups_are_enough() -> None:
    begun = start(num_nodes=1)
    assert begun.lose(raised(6)) == ""
    assert "groups [1, 6] raised the same" in begun.lose(raised(1))


def test_different_exceptions_are_faults_of_different_machines() -> None:
    begun = start(num_nodes=1)
    assert begun.lose(raised(6)) == ""
    assert begun.lose(raised(1, "OSError: no such device")) == ""


def test_what_holds_for_all_groups_ends_the_run_at_once() -> None:
    loss = EarlyLoss(group=GroupId(2), rank=1, cause="ValueError: data.access=shared", concerns_all=True)
    assert start(num_nodes=4).lose(loss) == (
        "group 2 was lost before training began: rank 1: ValueError: data.access=shared"
    )


def test_when_all_are_lost_an_exception_is_named_rather_than_a_signal() -> None:
    begun = start(num_nodes=1)
    losses = [killed(group) for group in range(NUM_GROUPS)]
    losses[4] = raised(4)
    reasons = [begun.lose(loss) for loss in losses]
    assert set(reasons[:-1]) == {""}
    assert reasons[-1] == f"all groups were lost before training began; group 4: rank 0: {ERROR}"


@pytest.mark.parametrize(
    "fixed", [{}, {"partitions": PartitionSetup(num_groups=NUM_GROUPS, redundancy=1), "last_resort": True}]
)
def test_groups_that_raised_and_alone_host_something_cannot_be_done_without(fixed: dict[str, object]) -> None:
    begun = start(num_nodes=8, redundancy=1, **fixed)
    reason = begun.lose(raised(5))
    assert reason.startswith(
        "groups [5] were lost before training began, and no other group hosts what they host; group 5: rank 0"
    )
    assert ERROR in reason


def test_data_that_all_can_read_needs_no_host() -> None:
    assert start(num_nodes=8, redundancy=1, last_resort=True).lose(raised(5)) == ""


def test_groups_that_are_killed_may_come_back() -> None:
    """The kernel may have had no memory for all of them at once."""
    assert start(num_nodes=8, redundancy=1).lose(killed(5)) == ""


def test_a_run_starts_without_a_node_that_others_replace() -> None:
    begun = start(num_nodes=4)
    assert {begun.lose(loss) for loss in (missing(6), missing(7), missing(6), killed(0))} == {""}


def test_a_node_that_alone_hosts_something_cannot_be_done_without_and_is_named() -> None:
    """Unlike for a killed group, it is not known whether it comes."""
    assert start(num_nodes=8, redundancy=1).lose(missing(5)) == (
        f"groups [5] were lost before training began, and no other group hosts what they host; group 5: {MISSING}"
    )


def test_groups_that_raised_or_are_missing_may_together_be_all_hosts_of_a_shard() -> None:
    begun = start(num_nodes=4, redundancy=2)
    hosts = make_placement("golomb", NUM_GROUPS, 2, 1).hosts[0]
    reasons = [begun.lose(raised(hosts[0])), begun.lose(missing(hosts[1]))]
    assert reasons[0] == ""
    assert f"groups {sorted(map(int, hosts))} were lost before training began" in reasons[1]


def test_when_all_nodes_are_missing_the_first_is_named() -> None:
    begun = start(num_nodes=4)
    reasons = [begun.lose(missing(group)) for group in range(NUM_GROUPS)]
    assert reasons[-1] == f"all groups were lost before training began; group 0: {MISSING}"


NUM_REPORTING = 2
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
            note_ready(store, group, reporter, NUM_REPORTING)
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
