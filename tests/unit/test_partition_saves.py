"""Saves whose partitions several groups write: complete or abandoned, for any loss at any time."""

import itertools
import random
from collections.abc import Sequence

import pytest

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.core.log.entries import Commit, Fence, encode_entry
from spare_megatron.core.saves.partition_copies import Abandon, Publish, WritePartitions, next_move
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
from spare_megatron.stacking.state_partitions import PartitionSetup, first_ownership
from spare_megatron.state.checkpoint.checkpoint_folder import StoredFile
from spare_megatron.state.checkpoint.partition_saver import SaveBoard, SaveFailed, WrittenShare
from spare_megatron.store import keys
from tests.unit.memory_store import MemoryStore

HEAD = 5


def save_of(num_groups: int, redundancy: int, saver: int = 0) -> SaveCheckpoint:
    members = tuple(Member(GroupId(group)) for group in range(num_groups))
    ownership = first_ownership(PartitionSetup(num_groups=num_groups, redundancy=redundancy), members)
    return SaveCheckpoint(
        step=3, member=members[saver], voters=members, epoch=0, hosts=ownership.hosts, owners=ownership.owners
    )


def test_a_save_is_complete_or_abandoned_and_never_torn() -> None:
    """Groups are lost at any moment, read of losses at different times, and act in any order."""
    ends = [type(end_of_a_save(random.Random(seed))) for seed in range(500)]
    assert min(ends.count(kind) for kind in (Publish, Abandon, type(None))) > 10


def end_of_a_save(rng: random.Random) -> Publish | Abandon | None:
    """What the group that saves comes to, held against what must be so then; None where it is lost before."""
    save = save_of(rng.randint(2, 6), 2, saver=0)
    log: list[Member] = []
    num_read = dict.fromkeys(save.voters, 0)
    written: set[PartitionId] = set()
    end: Publish | Abandon | None = None
    for _ in range(400):
        left = [member for member in save.voters if member not in log]
        if len(left) > 1 and rng.random() < 0.15:
            log.append(rng.choice(left))
            continue
        if not left:
            break
        member = rng.choice(left)
        num_read[member] = rng.randint(num_read[member], len(log))
        move = next_move(save, member, written, log[: num_read[member]])
        match move:
            case WritePartitions(partitions=partitions):
                assert all(member in save.hosts[number] for number in partitions)
                written.update(partitions)
            case Publish() if member == save.member:
                end = move
                break
            case Abandon() if member == save.member:
                end = move
                break
    everything = set(range(len(save.hosts)))
    if isinstance(end, Publish):
        assert written == everything
    elif isinstance(end, Abandon):
        assert any(set(save.hosts[number]) <= set(log) for number in everything - written)
    else:
        assert save.member in log
    return end


def test_without_losses_every_partition_is_written_once_by_its_owner() -> None:
    save = save_of(5, 3)
    moves = {member: next_move(save, member, [], []) for member in save.voters}
    assert moves == {
        member: WritePartitions(
            partitions=tuple(PartitionId(i) for i, owner in enumerate(save.owners) if owner == member)
        )
        for member in save.voters
    }


def test_what_a_lost_group_has_written_is_not_written_again() -> None:
    save = save_of(4, 2)
    lost = save.owners[2]
    (run_remote_supervisor,) = set(save.hosts[2]) - {lost}
    own = tuple(PartitionId(number) for number, owner in enumerate(save.owners) if owner == run_remote_supervisor)
    assert next_move(save, run_remote_supervisor, [], [lost]) == WritePartitions(
        partitions=tuple(sorted((*own, PartitionId(2))))
    )
    assert next_move(save, run_remote_supervisor, [PartitionId(2)], [lost]) == WritePartitions(partitions=own)


def test_a_lost_saver_ends_the_save_for_all() -> None:
    save = save_of(4, 2)
    others = save.voters[1:]
    assert {type(next_move(save, member, [], [save.member])) for member in others} == {Abandon}


# ------------------------------------------------------------------------------------------------------- the board


def board_of(store: MemoryStore, voters: Sequence[Member]) -> SaveBoard:
    return SaveBoard(store, HEAD, voters)  # type: ignore[arg-type]


def share_of(member: Member, *partitions: int) -> WrittenShare:
    files = {"__0_0.distcp": StoredFile(num_bytes=7, sha256="ab")}
    numbers = tuple(map(PartitionId, partitions))
    return WrittenShare(member=member, partitions=numbers, folder=f"slices-{member.group}", files=files)


def test_groups_learn_what_each_has_written_and_that_the_save_has_ended() -> None:
    store, voters = MemoryStore(), save_of(3, 2).voters
    boards = [board_of(store, voters) for _ in voters]
    boards[1].report(voters[1], [share_of(voters[1], 1)])
    boards[2].report(voters[2], [share_of(voters[2], 2), share_of(voters[2], 0)])
    assert boards[0].read_shares() == [share_of(voters[1], 1), share_of(voters[2], 2), share_of(voters[2], 0)]
    assert not boards[1].has_folder()
    boards[0].announce_folder()
    assert (boards[1].has_folder(), boards[1].has_ended()) == (True, False)
    boards[0].announce_end()
    assert boards[1].has_ended()
    for board, member in zip(boards, voters, strict=True):
        board.remove_report(member)
    assert boards[0].read_shares() == []


def test_a_writer_that_fails_reports_why() -> None:
    store, voters = MemoryStore(), save_of(3, 2).voters
    board_of(store, voters).report(voters[1], (), "no space left")
    with pytest.raises(SaveFailed, match="group 1: no space left"):
        board_of(store, voters).read_shares()


def test_losses_are_those_of_the_log_since_the_save_began() -> None:
    store, voters = MemoryStore(), save_of(4, 2).voters
    store.put(keys.entry(HEAD - 1), encode_entry(Fence(group=GroupId(0))))
    board = board_of(store, voters)
    assert board.read_fenced() == frozenset()
    entries = (Fence(group=GroupId(2)), Commit(step=3, attempt=3), Fence(group=GroupId(1), incarnation=0))
    for index, entry in zip(itertools.count(HEAD), entries, strict=False):
        store.put(keys.entry(index), encode_entry(entry))
    assert board.read_fenced() == {voters[1], voters[2]}
    store.put(keys.entry(HEAD + 3), encode_entry(Fence(group=GroupId(3), incarnation=2)))
    assert board.read_fenced() == set(voters[1:])
