"""The snapshot server of a node: a process that holds snapshots in shared memory and outlives the ranks."""

import contextlib
import errno
import hashlib
import mmap
import os
import secrets
import signal
import threading
from collections.abc import Collection
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from multiprocessing.context import BaseContext
from multiprocessing.reduction import send_handle
from pathlib import Path

from spare_megatron.core.log.events import HeldPartition
from spare_megatron.core.log.votes import Held
from spare_megatron.formats.frames import NotOffered
from spare_megatron.formats.pieces import Piece
from spare_megatron.process import snapshot_wire as wire
from spare_megatron.process.processes import Child, end_child, log_to_file, say, start_child
from spare_megatron.process.specs import NodeSpec
from spare_megatron.state.transfer.piece_server import PieceServer

_BACKLOG = 64

_SHARE = 0.75
"""Largest share of the node's available memory for one snapshot: out of memory, the kernel may kill any process."""

_ROOM_BYTES = 2**20
"""Memory is made a multiple of this: the length of a state's description differs by a few bytes from one snapshot to
the next, and ranks keep their mappings for as long as the memory stays.
"""

_TIMEOUT_S = 60.0
"""Longest wait for a client to take a piece of a snapshot."""


def run_snapshot_server(address: wire.SnapshotServerAddress, run_dir: Path, name: str, _: Connection) -> None:
    """The main function of a snapshot server's process. It ends with its supervisor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log_to_file(run_dir, name)
    SnapshotServer(address).answer_ranks()


def available_bytes() -> int:
    """Memory of the machine that is available without taking any from other processes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


class _Memory:
    """Shared memory of one snapshot, mapped here. Raises `OSError` if the node has too little left."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes > (left := available_bytes()) * _SHARE:
            raise OSError(errno.ENOMEM, f"more than {_SHARE:.0%} of the {left} that the node has left")
        self.room_bytes = -(-num_bytes // _ROOM_BYTES) * _ROOM_BYTES
        self.fd = os.memfd_create("spare-snapshot")
        try:
            # Now, not page by page while the rank copies.
            os.posix_fallocate(self.fd, 0, self.room_bytes)
            self.content = mmap.mmap(self.fd, self.room_bytes)
        except OSError:
            os.close(self.fd)
            raise
        self.num_bytes = num_bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether a snapshot of this size has room, and leaves little of it."""
        return num_bytes <= self.room_bytes <= num_bytes + 2 * _ROOM_BYTES

    def sha256(self) -> str:
        return hashlib.sha256(memoryview(self.content)[: self.num_bytes]).hexdigest()

    def is_still(self, sha256: str) -> bool:
        """Whether its bytes are still those that were copied."""
        try:
            return self.sha256() == sha256
        except ValueError:  # it was closed meanwhile
            return False

    def close(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # it is being read, and freed afterwards
            self.content.close()


class SnapshotServer:
    """The snapshots of a node, by part and attempt; a `piece_server.Source`."""

    def __init__(self, address: wire.SnapshotServerAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._held: dict[wire.Part, dict[int, tuple[_Memory, str]]] = {}  # with their SHA-256
        self._idle: dict[wire.Part, _Memory] = {}  # spare memory of parts that are held, for their next snapshots
        self._server: PieceServer | None = None

    def answer_ranks(self) -> None:
        """Answers requests of ranks until the process ends."""
        with Listener(self._address.name, "AF_UNIX", backlog=_BACKLOG, authkey=self._address.key) as listener:
            while True:
                with contextlib.suppress(AuthenticationError, EOFError, OSError):  # a wrong key, or the rank is gone
                    connection = listener.accept()
                    try:
                        threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
                    except RuntimeError:  # there is no memory for a thread now; what is held must not be lost for that
                        connection.close()

    def _answer(self, connection: Connection) -> None:
        with connection, contextlib.suppress(EOFError, OSError):  # the rank is gone
            match connection.recv():
                case wire.CopyWanted() as wanted:
                    self._store(connection, wanted)
                case wire.PassOver(position=position, attempt=attempt, kept=kept):
                    self._free_earlier(position, attempt, kept)
                    connection.send("")
                case wire.MemoryWanted(part=part, attempt=attempt):
                    self._send_memory(connection, part, attempt)
                case wire.HeldWanted(position=position, host=host):
                    connection.send(self._list_intact(position, host))

    def _store(self, connection: Connection, wanted: wire.CopyWanted) -> None:
        self._free_earlier(wanted.position, wanted.attempt, wanted.kept)
        memories: dict[wire.Part, _Memory] = {}
        try:
            for part, num_bytes in wanted.num_bytes.items():
                memories[part] = self._memory(part, num_bytes)
        except OSError as error:
            self._make_idle(memories)
            connection.send(f"its snapshot server has no {sum(wanted.num_bytes.values())} bytes: {error}")
            return
        try:
            connection.send("")
            for memory in memories.values():
                send_handle(connection, memory.fd, os.getpid())
            is_whole = connection.recv() == wire.COPIED
            digests = [memory.sha256() if is_whole else "" for memory in memories.values()]
        except (EOFError, OSError):
            self._make_idle(memories)
            raise
        with self._lock:
            for (part, memory), sha256 in zip(memories.items(), digests, strict=True):
                self._held.setdefault(part, {})[wanted.attempt] = (memory, sha256)
        connection.send(digests)

    def _send_memory(self, connection: Connection, part: wire.Part, attempt: int) -> None:
        with self._lock:
            memory, _ = self._held.get(part, {}).get(attempt, (None, ""))
            if memory is not None:
                connection.send("")
                send_handle(connection, memory.fd, os.getpid())
                return
        connection.send(f"its snapshot server does not hold attempt {attempt} of rank {part.name}")

    def _memory(self, part: wire.Part, num_bytes: int) -> _Memory:
        with self._lock:
            memory = self._idle.pop(part, None)
        if memory is not None and memory.fits(num_bytes):
            memory.num_bytes = num_bytes
            return memory
        if memory is not None:
            memory.close()
        return _Memory(num_bytes)

    def _make_idle(self, memories: dict[wire.Part, _Memory]) -> None:
        """Keeps memory for the parts' next snapshots."""
        with self._lock:
            former = [self._idle.pop(part) for part in memories if part in self._idle]
            self._idle.update(memories)
        for memory in former:
            memory.close()

    def _free_earlier(self, position: int, attempt: int, kept: Collection[int]) -> None:
        """Frees snapshots of the position before an attempt, except those `kept`; a part that is still held here keeps
        one memory for its next snapshot.
        """
        freed: list[_Memory] = []
        with self._lock:
            for part in [part for part in {**self._held, **self._idle} if part.position == position]:
                held = self._held.pop(part, {})
                dropped = [held.pop(other)[0] for other in list(held) if other < attempt and other not in kept]
                if held:
                    self._held[part] = held
                    if dropped and part not in self._idle:
                        self._idle[part] = dropped.pop()
                elif part in self._idle:
                    dropped.append(self._idle.pop(part))
                freed += dropped
        for memory in freed:
            memory.close()

    def _list_intact(self, position: int, host: str) -> wire.HeldSnapshots:
        """The position's intact snapshots, all of which are read in full."""
        with self._lock:
            held = {part: dict(kept) for part, kept in self._held.items() if part.position == position}
            if self._server is None:
                self._server = PieceServer(host, self, _TIMEOUT_S)
                self._server.start()
        whole: dict[wire.Part, list[tuple[int, str]]] = {}
        damaged: set[int] = set()
        for part, kept in held.items():
            still = {attempt for attempt, (memory, sha256) in kept.items() if memory.is_still(sha256)}
            whole[part] = [(attempt, kept[attempt][1]) for attempt in sorted(still)]
            damaged |= self._drop(part, set(kept) - still)
        return wire.HeldSnapshots(
            held=tuple(Held(attempt, position, sha256) for attempt, sha256 in whole.pop(wire.Part(position), ())),
            partitions=tuple(
                HeldPartition(attempt, part.partition, sha256)
                for part, kept in whole.items()
                for attempt, sha256 in kept
                if part.partition is not None
            ),
            damaged=tuple(sorted(damaged)),
            server=str(self._server.address),
        )

    def _drop(self, part: wire.Part, attempts: set[int]) -> set[int]:
        """Frees damaged snapshots; returns those that were still there."""
        with self._lock:
            present = self._held.get(part, {})  # memory freed meanwhile may have been written over
            dropped = {attempt: present.pop(attempt)[0] for attempt in attempts if attempt in present}
        for memory in dropped.values():
            memory.close()
        return set(dropped)

    def read(self, name: str, step: int, piece: Piece) -> bytes:
        with self._lock:
            found = [kept[step][0] for part, kept in self._held.items() if part.name == name and step in kept]
            if not found or piece.stop > found[0].num_bytes:
                raise NotOffered(f"attempt {step} of {name}: {piece}")
            return found[0].content[piece.start : piece.stop]


class NodeSnapshotServer:
    """A node's snapshot server process. A restarted one holds nothing and has the same address."""

    def __init__(self, spec: NodeSpec, context: BaseContext) -> None:
        self._spec = spec
        self._context = context
        self._child: Child | None = None
        self._failure = ""
        # An abstract socket name is free again when the process has ended, however it did.
        self.address = wire.SnapshotServerAddress(
            name=f"\0spare-snapshots-{secrets.token_hex(16)}", key=secrets.token_bytes(32)
        )

    def ensure_running(self) -> None:
        """Starts the process unless it is alive."""
        if self._child is not None and self._child.process.is_alive():
            return
        self.stop()
        name = f"keeper-{self._spec.node}"
        try:
            self._child = start_child(self._context, name, run_snapshot_server, self.address, self._spec.run_dir, name)
        except OSError as error:  # such as a limit on processes: the next call tries again
            if str(error) != self._failure:
                say(f"warning: no process for snapshots can be started: {error}")
            self._failure = str(error)

    def stop(self) -> None:
        if self._child is not None:
            end_child(self._child)
            self._child = None
