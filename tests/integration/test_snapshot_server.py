"""A snapshot server in its own process, with ranks as clients and faults at the worst moments."""

import hashlib
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import torch

from spare_megatron.core.log.actions import TakeSnapshot
from spare_megatron.core.log.events import HeldPartition
from spare_megatron.core.log.votes import Held
from spare_megatron.formats.frames import Address, NotOffered
from spare_megatron.formats.pieces import LARGEST_PIECE_BYTES, Piece
from spare_megatron.mcore.gradients.host_copies import HostCopies, TensorBytes
from spare_megatron.mcore.state import OutgoingState, StateCopy
from spare_megatron.process.snapshot_wire import CopyWanted, Part, SnapshotServerAddress
from spare_megatron.process.specs import NodeSpec
from spare_megatron.stacking.layout import GroupId, PartitionId
from spare_megatron.state.snapshot import mapped_files
from spare_megatron.state.snapshot import snapshot_server as snapshot_server_module
from spare_megatron.state.snapshot.mapped_files import MappedFile
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient, SnapshotServerGone
from spare_megatron.state.snapshot.snapshot_server import NodeSnapshotServer
from spare_megatron.state.snapshot.snapshotter import Snapshotter
from spare_megatron.state.transfer.piece_client import PieceClient
from tests.cudart_stand_in import CudartStandIn
from tests.integration.snapshot_memory import memory_files
from tests.rank_context import rank_context

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]

HOST = "127.0.0.1"
START_S = 30.0
_inherited: set[int] = set()
"""Inodes of memory that the server has from this process: mappings of earlier tests that are not collected yet."""


@dataclass(frozen=True, slots=True)
class Node:
    """The part of a NodeSpec that a snapshot server needs."""

    run_dir: Path
    node: int = 0


@contextmanager
def running_server(run_dir: Path) -> Iterator[NodeSnapshotServer]:
    """A snapshot server that answers."""
    snapshot_server = NodeSnapshotServer(cast(NodeSpec, Node(run_dir)), multiprocessing.get_context("fork"))
    _inherited.clear()
    _inherited.update(memory_of(os.getpid()))
    try:
        await_server(snapshot_server)
        yield snapshot_server
    finally:
        snapshot_server.stop()
    assert multiprocessing.active_children() == []


@pytest.fixture
def snapshot_server(tmp_path: Path) -> Iterator[NodeSnapshotServer]:
    with running_server(tmp_path) as snapshot_server:
        yield snapshot_server


def await_server(snapshot_server: NodeSnapshotServer) -> None:
    """Its first incarnation, or the next, has come up. Polled as by a supervisor: threads of the
    last one may not have ended yet.
    """
    end_s = time.monotonic() + START_S
    while True:
        snapshot_server.ensure_running()
        try:
            SnapshotClient(snapshot_server.address, 99).pass_over(1, (0,))
            return
        except SnapshotServerGone:
            assert time.monotonic() < end_s
            time.sleep(0.01)


def fill(contents: Iterable[bytes]) -> Callable[[Sequence[MappedFile]], None]:
    def write(files: Sequence[MappedFile]) -> None:
        for file, content in zip(files, contents, strict=True):
            file.memory[: len(content)] = content

    return write


def copy(client: SnapshotClient, attempt: int, previous: int, content: bytes) -> str:
    (digest,) = client.copy(attempt, (previous,), {None: len(content)}, fill([content]))
    return digest


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fetched(client: SnapshotClient, position: int, attempt: int, num_bytes: int) -> bytes:
    """What others get of it over the network."""
    pieces = PieceClient(Address.parse(client.list_intact(HOST).server), START_S)
    try:
        return bytes(pieces.fetch(str(position), attempt, Piece(0, num_bytes)))
    finally:
        pieces.close()


def server_pid() -> int:
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    return child.pid


def num_kept() -> int:
    """Lots of memory for snapshots that the server has."""
    return len(memory_of(server_pid()) - _inherited)


def memory_of(pid: int) -> set[int]:
    """Inodes of the memory for snapshots that a process has open."""
    return {file.stat().st_ino for file in memory_files(pid)}


def test_a_snapshot_is_kept_until_the_one_after_the_next_is_taken(snapshot_server: NodeSnapshotServer) -> None:
    """Two lots of memory do for any number of snapshots."""
    client = SnapshotClient(snapshot_server.address, 3)
    contents = {attempt: os.urandom(5000) for attempt in range(1, 7)}
    for attempt, content in contents.items():
        assert copy(client, attempt, attempt - 1, content) == sha256(content)
        kept = [one for one in (attempt - 1, attempt) if one in contents]
        assert client.list_intact(HOST).held == tuple(Held(one, 3, sha256(contents[one])) for one in kept)
        assert num_kept() == len(kept)
    assert fetched(client, 3, 5, 5000) == contents[5]
    assert client.memory(5, None)[:5000] == contents[5]
    with pytest.raises(SnapshotServerGone, match="does not hold attempt 4 of rank 3"):
        client.memory(4, None)
    assert SnapshotClient(snapshot_server.address, 2).list_intact(HOST).held == ()
    with pytest.raises(NotOffered):
        fetched(client, 3, 4, 5000)


def test_a_position_that_others_keep_from_now_on_takes_no_memory(snapshot_server: NodeSnapshotServer) -> None:
    client = SnapshotClient(snapshot_server.address, 0)
    for attempt in (1, 2):
        copy(client, attempt, attempt - 1, bytes(9000))
    client.pass_over(2, (1,))  # of a group beside this one, and late
    assert [one.attempt for one in client.list_intact(HOST).held] == [1, 2]
    client.pass_over(3, (2,))
    assert [one.attempt for one in client.list_intact(HOST).held] == [2]
    assert num_kept() == 2, "a lot of memory for the next one, which may be taken here"
    client.pass_over(4, (3,))
    assert client.list_intact(HOST).held == ()
    assert num_kept() == 0


def test_partitions_are_kept_beside_the_rest_and_go_when_others_keep_them(snapshot_server: NodeSnapshotServer) -> None:
    """Two groups on the node: the first stores partition 0 and all other state, the second partition 1, later 0."""
    zero, one = PartitionId(0), PartitionId(1)
    groups = [SnapshotClient(snapshot_server.address, 2) for _ in range(2)]
    kept: list[dict[PartitionId | None, bytes]] = [
        {zero: os.urandom(700), None: os.urandom(900)},
        {one: os.urandom(300)},
    ]
    for attempt in (1, 2, 3):
        for client, contents in zip(groups, kept, strict=True):
            sizes = {number: len(content) for number, content in contents.items()}
            digests = client.copy(attempt, (attempt - 1,), sizes, fill(contents.values()))
            assert digests == [sha256(content) for content in contents.values()]
    listed = groups[0].list_intact(HOST)
    assert listed == groups[1].list_intact(HOST)
    assert listed.held == tuple(Held(attempt, 2, sha256(kept[0][None])) for attempt in (2, 3))
    both = {**kept[0], **kept[1]}
    assert set(listed.partitions) == {
        HeldPartition(attempt, number, sha256(both[number])) for attempt in (2, 3) for number in (zero, one)
    }
    assert groups[1].memory(3, zero)[:700] == kept[0][zero]
    assert SnapshotClient(snapshot_server.address, 1).list_intact(HOST).partitions == ()
    assert num_kept() == 3 * 2
    for attempt in (4, 5, 6):
        groups[0].pass_over(attempt, (attempt - 1,))
        groups[1].copy(attempt, (attempt - 1,), {zero: 50}, fill([bytes(50)]))
    assert {(held.attempt, held.partition) for held in groups[0].list_intact(HOST).partitions} == {(5, zero), (6, zero)}
    assert num_kept() == 2


def test_snapshots_may_change_their_size(snapshot_server: NodeSnapshotServer) -> None:
    client = SnapshotClient(snapshot_server.address, 0)
    for attempt, num_bytes in enumerate((10, 5000, 20, 5 * 2**20, 5000, 5 * 2**20, 2**20 + 1, 2**20, 2**20 + 1)):
        content = os.urandom(num_bytes)
        assert copy(client, attempt, attempt - 1, content) == sha256(content)
        assert client.memory(attempt, None)[:num_bytes] == content
        assert fetched(client, 0, attempt, min(num_bytes, LARGEST_PIECE_BYTES)) == content[:LARGEST_PIECE_BYTES]
    assert num_kept() == 2


def dying_rank(address: SnapshotServerAddress, report: Connection) -> None:
    """Is killed when half of its copy is made."""
    with Client(address.name, "AF_UNIX", authkey=address.key) as connection:
        connection.send(CopyWanted(position=0, attempt=2, kept=(1,), num_bytes={Part(0): 4000}))
        assert connection.recv() == ""
        memory = mmap.mmap(recv_handle(connection), 4000)
        memory[:2000] = bytes([255]) * 2000
        report.send("half")
        signal.pause()


def test_a_rank_that_is_killed_while_it_copies_leaves_the_snapshot_before(snapshot_server: NodeSnapshotServer) -> None:
    client, content = SnapshotClient(snapshot_server.address, 0), os.urandom(4000)
    copy(client, 1, -1, content)
    ours, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=dying_rank, args=(snapshot_server.address, theirs))
    rank.start()
    assert ours.poll(START_S)
    assert ours.recv() == "half"
    rank.kill()
    rank.join()
    assert client.list_intact(HOST).held == (Held(1, 0, sha256(content)),)
    assert fetched(client, 0, 1, 4000) == content
    later = os.urandom(4000)
    assert copy(client, 3, 1, later) == sha256(later)
    assert [one.attempt for one in client.list_intact(HOST).held] == [1, 3]


def test_a_killed_server_loses_its_snapshots_and_the_next_has_its_address(
    snapshot_server: NodeSnapshotServer,
) -> None:
    client, content = SnapshotClient(snapshot_server.address, 0), os.urandom(4000)
    copy(client, 1, -1, content)
    pid = server_pid()

    def strike(files: Sequence[MappedFile]) -> None:
        os.kill(pid, signal.SIGKILL)

    with pytest.raises(SnapshotServerGone):
        client.copy(2, (1,), {None: 4000}, strike)
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with pytest.raises(SnapshotServerGone):
        client.list_intact(HOST)
    await_server(snapshot_server)
    assert server_pid() != pid
    assert client.list_intact(HOST).held == ()
    assert copy(client, 3, 1, content) == sha256(content)


def test_a_rank_registers_the_two_files_in_turn_once_although_sizes_differ(
    snapshot_server: NodeSnapshotServer,
) -> None:
    """A description is some bytes longer or shorter each time. The first copy into a file comes before."""
    cudart = CudartStandIn()
    client = SnapshotClient(snapshot_server.address, 0, cudart)
    found: list[int | None] = []
    for attempt in range(1, 7):
        content = os.urandom(2**20 - 3 + attempt)

        def write(files: Sequence[MappedFile], content: bytes = content) -> None:
            fill([content])(files)
            found.append(files[0].range_bytes)

        (digest,) = client.copy(attempt, (attempt - 1,), {None: len(content)}, write)
        assert digest == sha256(content)
        assert client.memory(attempt, None)[: len(content)] == content
    # The third snapshot fills its room, and the fourth needs more: the files are replaced once.
    assert found == [None, None, mapped_files.RANGE_BYTES, None, None, mapped_files.RANGE_BYTES]
    assert client.mapped.registered_bytes == sum(cudart.registered.values()) == 2 * 2 * 2**20
    client.pass_over(7, (6,))
    assert cudart.registered == {}


def test_where_cuda_refuses_the_memory_copies_are_made_as_before(snapshot_server: NodeSnapshotServer) -> None:
    client = SnapshotClient(snapshot_server.address, 0, CudartStandIn(refuses_from=1))
    for attempt in (1, 2, 3):
        content = os.urandom(5000)
        assert copy(client, attempt, attempt - 1, content) == sha256(content)
    assert client.mapped.failure.endswith("cudaError 2")
    assert client.mapped.registered_bytes == 0


def test_a_rank_gives_up_the_memory_of_a_server_that_is_gone(snapshot_server: NodeSnapshotServer) -> None:
    """Whether it notices by a request that fails, or only finds other files."""
    cudart, content = CudartStandIn(), os.urandom(4000)
    client, late = (SnapshotClient(snapshot_server.address, position, cudart) for position in (0, 1))
    for attempt in (1, 2):
        copy(client, attempt, attempt - 1, content)
        copy(late, attempt, attempt - 1, content)
    assert len(cudart.registered) == 4
    os.kill(server_pid(), signal.SIGKILL)
    with pytest.raises(SnapshotServerGone):
        copy(client, 3, 2, content)
    assert len(cudart.registered) == 2
    await_server(snapshot_server)
    for attempt in (4, 5, 6):
        for one in (client, late):
            assert copy(one, attempt, attempt - 1, content) == sha256(content)
            assert fetched(one, int(one is late), attempt, 4000) == content
    assert len(cudart.registered) == 4
    client.close()
    late.close()
    assert cudart.registered == {}


@pytest.mark.parametrize("refuses_from", [None, 1])
def test_records_say_what_is_registered_and_nothing_is_at_the_end_of_training(
    snapshot_server: NodeSnapshotServer, refuses_from: int | None
) -> None:
    cudart, cpu = CudartStandIn(refuses_from), torch.device("cpu")
    client = SnapshotClient(snapshot_server.address, 0, cudart)
    state = torch.zeros(1000, dtype=torch.uint8)
    outgoing = OutgoingState(description=b"", tensors=TensorBytes([state]))
    trainer = SimpleNamespace(state_copy=lambda: StateCopy(outgoing, HostCopies(cpu)))
    snapshotter = Snapshotter(rank_context(trainer=trainer), client)
    for step in range(1, 5):
        state.fill_(step)
        snapshotter.start_copy(
            TakeSnapshot(step=step, attempt=step, kept=(step - 1,), settled_by=step + 1, holders=((GroupId(0),),))
        )
        snapshotter.await_copy(step + 1)
        [record] = snapshotter.take_finished()
        assert record.is_kept
        assert client.memory(step, None)[:1008] == bytes(8) + bytes([step]) * 1000
        assert record.registered_bytes == (0 if refuses_from else min(step, 2) * 2**20)
        assert record.not_registered == (f"cudaHostRegister of {2**20} bytes: cudaError 2" if refuses_from else "")
        assert record.copy_s >= record.register_s >= 0
    assert len(cudart.registered) == (0 if refuses_from else 2)
    snapshotter.finish()
    assert cudart.registered == {}
    assert client.list_intact(HOST).held[-1].attempt == 4, "the server keeps them"


def flip_bit(kept: list[mmap.mmap], content: bytes, files: Sequence[MappedFile]) -> None:
    (file,) = files
    file.memory[: len(content)] = content
    kept.append(file.memory)


def test_a_flipped_bit_in_the_server_s_memory_is_found_by_the_checksum(snapshot_server: NodeSnapshotServer) -> None:
    """The rank's mapping is the server's memory."""
    client, content = SnapshotClient(snapshot_server.address, 0), os.urandom(4000)
    kept: list[mmap.mmap] = []
    for attempt in (1, 2):
        client.copy(attempt, (attempt - 1,), {None: 4000}, partial(flip_bit, kept, content))
    kept[1][1234] = kept[1][1234] ^ 16
    listed = client.list_intact(HOST)
    assert listed.held == (Held(1, 0, sha256(content)),)
    assert listed.damaged == (2,)
    assert client.list_intact(HOST).damaged == ()
    assert num_kept() == 1


def test_more_memory_than_there_is_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is forked, so it sees the patched function."""
    monkeypatch.setattr(snapshot_server_module, "available_bytes", lambda: 4000)
    with running_server(tmp_path) as snapshot_server:
        client = SnapshotClient(snapshot_server.address, 0)
        with pytest.raises(SnapshotServerGone, match=r"no 5000 bytes.*75% of the 4000"):
            copy(client, 1, -1, bytes(5000))
        copy(client, 2, -1, bytes(3000))


def test_what_is_left_of_the_machine_s_memory_is_known() -> None:
    assert 0 < snapshot_server_module.available_bytes() < psutil.virtual_memory().total


def test_strangers_are_not_answered(snapshot_server: NodeSnapshotServer) -> None:
    stranger = SnapshotClient(SnapshotServerAddress(name=snapshot_server.address.name, key=b"guessed"), 0)
    with pytest.raises(SnapshotServerGone):
        stranger.list_intact(HOST)
    await_server(snapshot_server)
