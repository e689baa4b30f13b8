"""Which checkpoints hold wrong state, or may, by what the log says after they were begun."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from spare_megatron.core.audits.audits import Dispute
from spare_megatron.core.log.actions import RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.log.entries import Commit, Entry, Fence, Halt, Restart, Retry, Undo
from spare_megatron.core.saves.checkpoint_validity import CheckpointValidity, why_refused
from spare_megatron.stacking.layout import GroupId, Member, ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.state_partitions import PartitionSetup, first_ownership

MEMBERS = tuple(Member(GroupId(group)) for group in range(4))
SAVE = SaveCheckpoint(step=8, member=MEMBERS[0], voters=MEMBERS, epoch=3)
OWNERSHIP = first_ownership(PartitionSetup(num_groups=4, redundancy=2), MEMBERS)
SAVE_OF_PARTITIONS = replace(SAVE, hosts=OWNERSHIP.hosts, owners=OWNERSHIP.owners)
COMMIT = Commit(step=8, attempt=8)
ANEW = Retry(step=8, attempt=8, recompute=True, gather=True)


def wrong(group: int, incarnation: int = 0) -> Fence:
    return Fence(group=GroupId(group), incarnation=incarnation, reason="it differs", discard=True)


def killed(group: int) -> Fence:
    return Fence(group=GroupId(group), reason="SIGKILL")


def raised(group: int) -> Fence:
    return Fence(group=GroupId(group), reason="it raised", error="the gradient of step 8 is not finite")


REFUSED: dict[str, tuple[Sequence[Entry], str]] = {
    "its writer is fenced": ([wrong(0)], "group 0: it differs"),
    "what is wrong shows one update later": ([COMMIT, wrong(0)], "group 0: it differs"),
    "its writer is lost before another is fenced": ([killed(0), wrong(2)], "group 2: it differs"),
    "its writer is lost after another was fenced": ([wrong(2), ANEW, killed(0)], "group 2: it differs"),
    "its writer is fenced after it was lost": ([killed(0), wrong(0)], "group 0: it differs"),
    "its writer raises": ([raised(0)], "group 0: the gradient of step 8 is not finite"),
    "its writer raises one update later": ([COMMIT, raised(0)], "group 0: the gradient of step 8 is not finite"),
    "no group is known to be wrong": ([Halt(step=8, reason="all differ", discard=True)], "all differ"),
    "that shows one update later": ([COMMIT, Halt(step=9, reason="all differ", discard=True)], "all differ"),
    "all gather anew": ([ANEW], "groups hold different parameters, and it is unknown which are right"),
}
WRONG_SUM = replace(ANEW, wrong_sums=(GroupId(1),))
DISPUTED = Retry(step=8, attempt=8, disputes=(Dispute(microbatch=Microbatch(ShardId(0), 0), statements=(), asked=()),))
COUNTED: dict[str, Sequence[Entry]] = {
    "a sum changed on its way": [WRONG_SUM],
    "groups computed a microbatch differently, and one of them is lost": [DISPUTED, killed(2), ANEW],
    "two microbatches were disputed, one after the other": [DISPUTED, wrong(2), DISPUTED, ANEW],
    "two commits have come after it": [COMMIT, COMMIT, wrong(0), ANEW, raised(0)],
    "another is fenced": [wrong(2), ANEW, COMMIT, wrong(1)],
    "its writer is killed": [killed(0), COMMIT, wrong(2)],
    "its writer is killed when it was compared, and another is fenced": [COMMIT, killed(0), wrong(2)],
    "another raises": [raised(2), COMMIT, raised(1)],
    "a later incarnation of its writer is fenced": [killed(0), COMMIT, wrong(0, 1)],
    "so it is in the same step, to which a pause has admitted it": [COMMIT, killed(0), wrong(0, 1)],
    "the run halts for something else": [Halt(step=8, reason="groups have different plans")],
    "an attempt fails": [Retry(step=8, attempt=8)],
    "it was loaded": [Restart(step=8, members=MEMBERS), wrong(0)],
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_does_not_count_where(case: str) -> None:
    entries, reason = REFUSED[case]
    validity = CheckpointValidity()
    validity.on_save(SAVE)
    *before, found = map(validity.fold, entries)
    assert found == (RefuseCheckpoint(step=8, member=SAVE.member, epoch=3, reason=reason),)
    assert not any(before)
    assert validity.fold(wrong(0)) == (), "that is reported once"
    assert why_refused(SAVE, iter(entries)) == reason


@pytest.mark.parametrize("case", COUNTED)
def test_a_checkpoint_counts_where(case: str) -> None:
    assert why_refused(SAVE, iter(COUNTED[case])) == ""


@pytest.mark.parametrize("loss", [wrong(3), raised(3)])
def test_any_host_of_a_state_partition_may_have_written_wrong_state(loss: Fence) -> None:
    assert why_refused(SAVE, iter([loss])) == ""
    assert why_refused(SAVE_OF_PARTITIONS, iter([COMMIT, loss])).startswith("group 3: ")


def test_two_checkpoints_may_be_compared_at_a_time() -> None:
    validity = CheckpointValidity()
    validity.on_save(SAVE)
    validity.fold(COMMIT)
    validity.on_save(replace(SAVE, step=9, member=MEMBERS[1]))
    assert [refused.step for refused in validity.fold(wrong(1))] == [9]
    assert [refused.step for refused in validity.fold(wrong(0))] == [8]


def test_an_undo_refuses_what_was_compared_long_ago() -> None:
    """And nothing that it does not make void, nor what is saved again of as many steps."""
    validity = CheckpointValidity()
    validity.on_save(replace(SAVE, step=6))
    validity.on_save(SAVE)
    for entry in (COMMIT, COMMIT, COMMIT, wrong(2)):
        assert validity.fold(entry) == ()
    validity.on_save(replace(SAVE, step=11))
    found = validity.fold(Undo(step=7, attempt=12, snapshot=6))
    assert [(one.step, one.member) for one in found] == [(8, SAVE.member), (11, SAVE.member)]
    assert not validity.unsettled
    validity.on_save(SAVE)
    assert validity.fold(Undo(step=8, attempt=20, snapshot=18)) == ()
    assert [one.step for one in validity.fold(Undo(step=5, attempt=22, snapshot=18))] == [6, 8]
    entries = [COMMIT, COMMIT, wrong(2), Undo(step=7, attempt=12, snapshot=6)]
    assert why_refused(SAVE, iter(entries)).startswith("steps after the first 7 hold wrong numbers")
    assert why_refused(replace(SAVE, step=7), iter(entries)) == ""
