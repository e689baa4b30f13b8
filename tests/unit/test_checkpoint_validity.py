"""Which checkpoints may hold wrong state, reading them beside all else, and saves that several groups write."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spare_megatron.core.audits.audits import Dispute
from spare_megatron.core.log.actions import Reading, RefuseCheckpoint, SaveCheckpoint
from spare_megatron.core.log.entries import Commit, Entry, Fence, Halt, Restart, Retry, Undo, encode_entry
from spare_megatron.core.saves.checkpoint_validity import CheckpointValidity, why_refused
from spare_megatron.core.saves.partition_copies import Abandon, Publish, WritePartitions, next_move
from spare_megatron.stacking.layout import GroupId, Member, PartitionId, ShardId
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.state_partitions import PartitionSetup, first_ownership
from spare_megatron.state.checkpoint import checkpoint_reader
from spare_megatron.state.checkpoint.checkpoint_folder import StoredFile
from spare_megatron.state.checkpoint.checkpoint_reader import CheckpointReader
from spare_megatron.state.checkpoint.partition_saver import SaveBoard, SaveFailed, WrittenShare
from spare_megatron.state.checkpoint.verification import DamagedCheckpoint, candidate_of, glance
from spare_megatron.store import keys
from tests.unit.memory_store import MemoryStore
from tests.unit.test_checkpoints import cut_short, flip_a_bit, save

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


TIMEOUT_S = 30.0


def read_all(reader: CheckpointReader, path: Path, *numbers: int) -> Reading:
    """What there is to say of the checkpoint when all of it is read that was asked for."""
    checkpoint = glance(path)
    offer = candidate_of(checkpoint.manifest)
    reader.read(offer, checkpoint, numbers)
    done = threading.Event()
    while reader.is_reading:
        assert not done.wait(0.001)
    return next(reading for reading in reader.readings() if reading.candidate == offer)


def test_files_are_read_once_and_a_flipped_bit_is_found(tmp_path: Path) -> None:
    reader, path = CheckpointReader(), save(tmp_path, 10)
    flip_a_bit(path / "1.distcp")
    assert read_all(reader, path, 0)[1:] == ((0,), (), "", 2000)
    reason = "step-00000010: 1.distcp does not fit its SHA-256: its content has changed"
    assert read_all(reader, path, 0, 1)[1:] == ((0,), (1,), reason, 4000)


@pytest.mark.parametrize("harm", [cut_short, Path.unlink])
def test_the_quick_check_finds_missing_data_but_no_flipped_bit(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = save(tmp_path, 10)
    flip_a_bit(path / "0.distcp")
    glance(path)
    harm(path / "1.distcp")
    with pytest.raises(DamagedCheckpoint, match=r"step-00000010: 1\.distcp"):
        glance(path)


def test_other_files_under_the_same_step_are_another_checkpoint(tmp_path: Path) -> None:
    first, second = (glance(save(tmp_path / name, step)) for name, step in (("a", 10), ("b", 10)))
    assert candidate_of(first.manifest) == candidate_of(second.manifest), "all of it is the same"
    assert candidate_of(first.manifest) != candidate_of(glance(save(tmp_path, 11)).manifest)


def test_reading_does_not_block_and_stops_when_it_is_no_longer_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a checkpoint that takes longer to read than a group may take to start."""
    is_under_way, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(folder: Path, name: str, stored: object, on_read: Callable[[int], None]) -> None:
        on_read(7)
        is_under_way.set()
        assert may_go_on.wait(TIMEOUT_S)
        try:
            on_read(8)
        finally:
            ended.set()

    monkeypatch.setattr(checkpoint_reader, "verify_file", slow)
    reader, checkpoint = CheckpointReader(), glance(save(tmp_path, 10))
    reader.read(candidate_of(checkpoint.manifest), checkpoint, [0])
    assert is_under_way.wait(TIMEOUT_S)
    assert reader.is_reading
    [reading] = reader.readings()
    assert reading[1:] == ((), (), "", 7), "others see that it gets on"
    reader.stop()
    assert (reader.readings(), reader.is_reading) == ((), False)
    may_go_on.set()
    assert ended.wait(TIMEOUT_S)
    assert reader.readings() == ()


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
