"""Losses before training begins: a broken machine is left out, a fault of the program ends the run."""

import pytest

from spare_megatron.core.controller.controller import ControllerSetup
from spare_megatron.core.controller.start import EarlyLoss, Start
from spare_megatron.stacking.layout import GroupId, Layout
from spare_megatron.stacking.placement import make_placement
from spare_megatron.stacking.state_partitions import PartitionSetup

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
