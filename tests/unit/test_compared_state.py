"""What is decided where groups have the same parameters, and other state that differs: each holds all of it."""

import pytest

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.entries import Commit, Entry, Fence, Finish, Retry
from spare_megatron.core.log.events import RunStarted
from spare_megatron.core.log.votes import Vote
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.stacking.layout import GroupId
from tests.unit.test_controller import fold, halted, make_controller
from tests.unit.test_controller_params import decided

Cast = dict[GroupId, Vote]


def with_state(digests: str, **donors: int) -> Cast:
    """Votes of groups 0, 1, ..., a letter for each digest, . for no vote; `g1=0`: group 1 has it from group 0."""
    return {
        GroupId(group): Vote(
            is_complete=True,
            plan_digest="p",
            params_digest="same",
            state_digest=digest,
            copied_from=None if f"g{group}" not in donors else GroupId(donors[f"g{group}"]),
        )
        for group, digest in enumerate(digests)
        if digest != "."
    }


def begun(num_groups: int) -> Controller:
    controller = make_controller(num_groups=num_groups, redundancy=num_groups)
    controller.handle(RunStarted(), now_s=0.0)
    return controller


def fences_of(controller: Controller, cast: Cast) -> tuple[list[int], Entry]:
    """Groups fenced for wrong state, and the entry that follows."""
    groups = []
    while isinstance(entry := decided(controller, cast), Fence):
        assert entry.discard
        assert "its state before step 0 differs from that of " in entry.reason
        groups.append(int(entry.group))
        fold(controller, entry)
    return groups, entry


def test_where_all_agree_the_step_is_committed() -> None:
    assert fences_of(begun(4), with_state("aaaa", g3=0)) == ([], Commit(step=0, attempt=0))


def test_a_donor_with_wrong_state_is_fenced_with_its_newcomer() -> None:
    groups, entry = fences_of(begun(4), with_state("bbaa", g1=0))
    assert groups == [0, 1]
    assert entry == Retry(step=0, attempt=0, recompute=True)


def test_two_newcomers_of_one_donor_do_not_outvote_the_others() -> None:
    groups, _ = fences_of(begun(5), with_state("bbbaa", g1=0, g2=0))
    assert groups == [0, 1, 2]


def test_a_newcomer_whose_copy_differs_from_its_donor_is_fenced_alone() -> None:
    groups, _ = fences_of(begun(4), with_state("abaa", g1=0))
    assert groups == [1]


def test_a_group_that_is_no_donor_is_found_as_well() -> None:
    groups, _ = fences_of(begun(4), with_state("aaba", g1=0))
    assert groups == [2]


@pytest.mark.parametrize(
    ("digests", "donors"),
    [
        ("bba", {"g1": 0}),  # the donor, its newcomer, and one more
        (".ab", {"g1": 0}),  # the same, and the donor is lost before it reports: the newcomer's digest stands for it
        ("abb", {"g1": 0, "g2": 0}),  # a donor alone, which may have changed since, or before
        ("bbaa", {"g1": 0, "g3": 2}),
        ("ab", {"g1": 0}),
    ],
)
def test_without_a_majority_the_run_halts(digests: str, donors: dict[str, int]) -> None:
    controller = begun(len(digests))
    if digests.startswith("."):
        fold(controller, Fence(group=GroupId(0)))
    assert "the same parameters and different state: " in halted(controller, with_state(digests, **donors))


def test_a_group_without_a_state_digest_is_not_compared() -> None:
    cast = with_state("aaa", g1=0) | {GroupId(3): Vote(is_complete=True, plan_digest="p", params_digest="same")}
    assert decided(begun(4), cast) == Commit(step=0, attempt=0)


def test_wrong_parameters_are_reported_before_wrong_state() -> None:
    cast = with_state("aab")
    cast[GroupId(1)] = Vote(is_complete=True, plan_digest="p", params_digest="other", state_digest="a")
    entry = decided(begun(3), cast)
    assert isinstance(entry, Fence)
    assert (entry.group, entry.reason) == (1, "its parameters before step 0 differ from those of 2 groups")


def test_what_was_saved_after_the_last_step_is_saved_again_by_a_group_with_right_state() -> None:
    """No update follows in whose parameters it would show."""
    controller = make_controller(steps=1, saves=SavePolicy(saves_last=True))
    controller.handle(RunStarted(), now_s=0.0)
    fold(controller, Commit(step=0, attempt=0, save=True))
    entry = decided(controller, with_state("baaa"))
    assert isinstance(entry, Fence)
    assert (entry.group, entry.reason) == (0, "its state before step 1 differs from that of 3 groups")
    fold(controller, entry)
    again = decided(controller, with_state("baaa"))
    assert isinstance(again, Retry)
    fold(controller, again)
    assert decided(controller, with_state(".aaa")) == Finish(step=1, attempt=2)
