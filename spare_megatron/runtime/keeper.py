"""The keeper of a node: a process that holds snapshots of its ranks' states, and outlives these.

It gives a rank shared memory to copy its state to, and holds what comes to be whole. Memory is the kernel's, without
a name: it is gone with the last process that has it.
"""

import contextlib
import errno
import hashlib
import mmap
import os
import signal
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from multiprocessing.reduction import send_handle
from pathlib import Path

from spare_megatron.core.pieces import Piece
from spare_megatron.core.snapshots import Held
from spare_megatron.runtime.keeper_wire import (
    COPIED,
    CopyWanted,
    HeldTold,
    HeldWanted,
    KeeperAddress,
    MemoryWanted,
    PassOver,
)
from spare_megatron.runtime.piece_server import PieceServer
from spare_megatron.runtime.piece_wire import NotOffered
from spare_megatron.runtime.processes import die_with, log_to_file

_BACKLOG = 64
_SHARE = 0.75
"""Of the memory that is left, a snapshot may take so much: where the kernel runs out of it, it kills whom it likes."""
_TIMEOUT_S = 60.0
"""Longest wait for whoever fetches a snapshot to take a piece of it."""


def keep(address: KeeperAddress, run_dir: Path, name: str, supervisor_pid: int, _: Connection) -> None:
    """The main function of a keeper's process. It ends with its supervisor."""
    die_with(supervisor_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log_to_file(run_dir, name)
    Keeper(address).serve()


def available_bytes() -> int:
    """Memory of the machine that may be had without taking any from others."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


class _Memory:
    """Shared memory of one snapshot, mapped here.

    Raises:
        OSError: There is not as much.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes > (left := available_bytes()) * _SHARE:
            raise OSError(errno.ENOMEM, f"more than {_SHARE:.0%} of the {left} that the node has left")
        self.fd = os.memfd_create("spare-snapshot")
        try:
            # Now, and not page by page in the rank.
            os.posix_fallocate(self.fd, 0, num_bytes)
            self.content = mmap.mmap(self.fd, num_bytes)
        except OSError:
            os.close(self.fd)
            raise
        self.num_bytes = num_bytes

    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def is_still(self, sha256: str) -> bool:
        """Whether its bytes are those that were copied."""
        try:
            return self.sha256() == sha256
        except ValueError:  # it was closed meanwhile
            return False

    def close(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # who reads it now lets it go afterwards
            self.content.close()


class Keeper:
    """What it holds, by position and attempt; a `piece_server.Source`."""

    def __init__(self, address: KeeperAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._held: dict[int, dict[int, tuple[_Memory, str]]] = {}  # with their SHA-256
        self._idle: dict[int, _Memory] = {}  # one of a position, for its next snapshot
        self._server: PieceServer | None = None

    def serve(self) -> None:
        """Answers ranks for as long as the process lives."""
        with Listener(self._address.name, "AF_UNIX", backlog=_BACKLOG, authkey=self._address.key) as listener:
            while True:
                with contextlib.suppress(AuthenticationError, EOFError, OSError):  # a stranger, or it has left
                    connection = listener.accept()
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, contextlib.suppress(EOFError, OSError):  # the rank is gone
            match connection.recv():
                case CopyWanted() as wanted:
                    self._take(connection, wanted)
                case PassOver(position=position, attempt=attempt, previous=previous):
                    for memory in self._let_go(position, attempt, previous):
                        memory.close()
                    if not self._held.get(position):
                        self._give_back(position, None)
                    connection.send("")
                case MemoryWanted(position=position, attempt=attempt):
                    self._give(connection, position, attempt)
                case HeldWanted(position=position, host=host):
                    connection.send(self._tell(position, host))

    def _take(self, connection: Connection, wanted: CopyWanted) -> None:
        for memory in self._let_go(wanted.position, wanted.attempt, wanted.previous):
            self._give_back(wanted.position, memory)
        try:
            memory = self._memory(wanted.position, wanted.num_bytes)
        except OSError as error:
            connection.send(f"its keeper has no {wanted.num_bytes} bytes: {error}")
            return
        try:
            connection.send("")
            send_handle(connection, memory.fd, os.getpid())
            is_whole = connection.recv() == COPIED
            sha256 = memory.sha256() if is_whole else ""
        except (EOFError, OSError):
            self._give_back(wanted.position, memory)
            raise
        with self._lock:
            self._held.setdefault(wanted.position, {})[wanted.attempt] = (memory, sha256)
        connection.send(sha256)

    def _give(self, connection: Connection, position: int, attempt: int) -> None:
        with self._lock:
            memory, _ = self._held.get(position, {}).get(attempt, (None, ""))
            if memory is not None:
                connection.send("")
                send_handle(connection, memory.fd, os.getpid())
                return
        connection.send(f"its keeper does not hold attempt {attempt} of rank {position}")

    def _memory(self, position: int, num_bytes: int) -> _Memory:
        with self._lock:
            memory = self._idle.pop(position, None)
        if memory is not None and memory.num_bytes == num_bytes:
            return memory
        if memory is not None:
            memory.close()
        return _Memory(num_bytes)

    def _give_back(self, position: int, memory: _Memory | None) -> None:
        """Memory for the position's next snapshot; None: there will be none here."""
        with self._lock:
            idle = self._idle.pop(position, None)
            if memory is not None:
                self._idle[position] = memory
        if idle is not None:
            idle.close()

    def _let_go(self, position: int, attempt: int, previous: int) -> list[_Memory]:
        """Memory of what is earlier than an attempt, but for one; later ones may be others' on this node."""
        with self._lock:
            held = self._held.get(position, {})
            return [held.pop(other)[0] for other in list(held) if other < attempt and other != previous]

    def _tell(self, position: int, host: str) -> HeldTold:
        """What of the position is as it was, read from the first to the last byte."""
        with self._lock:
            held = dict(self._held.get(position, {}))
            if self._server is None:
                self._server = PieceServer(host, self, _TIMEOUT_S)
                self._server.start()
        whole = {attempt for attempt, (memory, sha256) in held.items() if memory.is_still(sha256)}
        with self._lock:
            present = self._held.get(position, {})  # what went meanwhile may have been written over
            damaged = {attempt: present.pop(attempt)[0] for attempt in set(held) - whole if attempt in present}
        for memory in damaged.values():
            memory.close()
        return HeldTold(
            held=tuple(Held(attempt, position, held[attempt][1]) for attempt in sorted(whole)),
            damaged=tuple(sorted(damaged)),
            server=str(self._server.address),
        )

    def read(self, name: str, step: int, piece: Piece) -> bytes:
        with self._lock:
            memory, _ = self._held.get(int(name), {}).get(step, (None, ""))
            if memory is None or piece.stop > memory.num_bytes:
                raise NotOffered(f"attempt {step} of position {name}: {piece}")
            return memory.content[piece.start : piece.stop]
