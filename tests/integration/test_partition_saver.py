"""What the groups of one save do together: each in a thread, with one rank, over one store."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from spare_megatron.core.log.entries import Fence, encode_entry
from spare_megatron.core.saves.partition_copies import WritePartitions
from spare_megatron.mcore.group_checkpoint import METADATA_FNAME
from spare_megatron.stacking.layout import Member, PartitionId
from spare_megatron.state.checkpoint.checkpoint_folder import StoredFile
from spare_megatron.state.checkpoint.partition_saver import PartitionSaver, SaveBoard, SaveFailed
from spare_megatron.store import keys
from tests.unit.memory_store import MemoryStore
from tests.unit.test_checkpoint_validity import HEAD, save_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]

TIMEOUT_S = 40.0
SAVE = save_of(4, 2)
SAVER, *OTHERS = SAVE.voters


def alone(work: Callable[[], object]) -> list[object]:
    """The agreement of a group of one rank."""
    return [work()]


def write(folder: Path, move: WritePartitions) -> dict[str, StoredFile]:
    assert folder.is_dir()
    file = StoredFile(num_bytes=len(move.partitions), sha256="")
    return {"__0_0.distcp": file, METADATA_FNAME: file}


def board_of(store: MemoryStore) -> SaveBoard:
    return SaveBoard(store, HEAD, SAVE.voters)  # type: ignore[arg-type]


def saver_of(member: Member, store: MemoryStore, aside: Path, timeout_s: float = TIMEOUT_S) -> PartitionSaver:
    return PartitionSaver(
        action=SAVE,
        member=member,
        board=board_of(store),
        aside=aside,
        agree=alone,  # type: ignore[arg-type]
        write=write,
        timeout_s=timeout_s,
    )


def run_all(savers: Sequence[PartitionSaver]) -> list[Future[bool]]:
    threads = ThreadPoolExecutor(len(savers))
    return [threads.submit(saver.run) for saver in savers]


def fence(store: MemoryStore, index: int, member: Member) -> None:
    store.put(keys.entry(HEAD + index), encode_entry(Fence(group=member.group)))


def test_every_state_partition_is_written_and_reported_to_the_saver(tmp_path: Path) -> None:
    store = MemoryStore()
    board_of(store).announce_folder()
    savers = [saver_of(member, store, tmp_path) for member in SAVE.voters]
    first, *others = run_all(savers)
    assert first.result(TIMEOUT_S)
    assert sorted(number for share in savers[0].shares for number in share.partitions) == [0, 1, 2, 3]
    assert {name for share in savers[0].shares for name in share.files} == {"__0_0.distcp"}
    assert not any(other.done() for other in others)  # who saves may yet be lost
    board_of(store).announce_end()
    assert [other.result(TIMEOUT_S) for other in others] == [False] * 3


def test_another_host_writes_for_a_lost_group_and_none_before_there_is_a_folder(tmp_path: Path) -> None:
    store, lost = MemoryStore(), OTHERS[1]
    savers = [saver_of(member, store, tmp_path) for member in SAVE.voters if member != lost]
    futures = run_all(savers)
    fence(store, 0, lost)
    assert list(tmp_path.iterdir()) == []
    board_of(store).announce_folder()
    assert futures[0].result(TIMEOUT_S)
    written = {number: share.member for share in savers[0].shares for number in share.partitions}
    assert sorted(written) == [0, 1, 2, 3]
    assert written[PartitionId(2)] in set(SAVE.hosts[2]) - {lost}
    fence(store, 1, SAVER)
    for other in futures[1:]:
        with pytest.raises(SaveFailed, match="group 0, which saves, is lost"):
            other.result(TIMEOUT_S)


def test_a_state_partition_that_loses_all_hosts_fails_the_save(tmp_path: Path) -> None:
    store = MemoryStore()
    for index, host in enumerate(SAVE.hosts[2]):
        fence(store, index, host)
    with pytest.raises(SaveFailed, match=r"all hosts of partitions \[2\] were lost"):
        saver_of(SAVER, store, tmp_path).run()


def test_a_wait_for_a_silent_group_ends_in_time(tmp_path: Path) -> None:
    store = MemoryStore()
    board_of(store).announce_folder()
    with pytest.raises(SaveFailed, match=r"longer than checkpoint.timeout_s=0.5"):
        saver_of(SAVER, store, tmp_path, timeout_s=0.5).run()
