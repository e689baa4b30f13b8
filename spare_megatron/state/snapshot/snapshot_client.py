"""A rank's requests to the snapshot server of its node."""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle
from typing import Any, TypeVar

from spare_megatron.process import snapshot_wire as wire
from spare_megatron.state.snapshot.mapped_files import MappedFile, MappedFiles

T = TypeVar("T")


class SnapshotServerGone(Exception):
    """The snapshot server is not running, was lost before it answered, or has too little memory."""


class SnapshotClient:
    """The requests of one rank position, without time limit. All raise `SnapshotServerGone`. `runtime`, on a GPU: what
    the memory of copies is registered with. Only one thread at a time may copy or pass over.
    """

    def __init__(self, address: wire.SnapshotServerAddress, position: int, runtime: Any = None) -> None:
        self._address = address
        self._position = position
        self.mapped = MappedFiles(runtime)

    def copy(
        self,
        attempt: int,
        kept: tuple[int, ...],
        num_bytes: Mapping[wire.PartKey, int],
        write: Callable[[Sequence[MappedFile]], None],
    ) -> list[str]:
        """Stores a snapshot and keeps these earlier ones. `num_bytes`: of each state partition, and under None of all
        other state; `write` fills a file for each, which has some room more. Returns the SHA-256 of each, as the
        server has read it; meanwhile new files are registered.
        """
        parts = {wire.Part(self._position, number): size for number, size in num_bytes.items()}
        self.mapped.keep(parts)
        try:
            with self._connected() as connection:
                connection.send(wire.CopyWanted(position=self._position, attempt=attempt, kept=kept, num_bytes=parts))
                _expect_memory(connection)
                write([_with_descriptor(connection, partial(self.mapped.map, part)) for part in parts])
                connection.send(wire.COPIED)
                self.mapped.register()
                return [str(sha256) for sha256 in connection.recv()]
        except SnapshotServerGone:  # the next server has other files, and may need their memory
            self.close()
            raise

    def pass_over(self, attempt: int, kept: tuple[int, ...]) -> None:
        """Frees the position's earlier snapshots but those `kept`: other nodes store this one."""
        self.close()
        with self._connected() as connection:
            connection.send(wire.PassOver(position=self._position, attempt=attempt, kept=kept))
            connection.recv()

    def close(self) -> None:
        """Gives up all mappings of earlier copies; further ones are made when they are needed."""
        self.mapped.keep(())

    def memory(self, attempt: int, number: wire.PartKey) -> mmap.mmap:
        """A snapshot's memory, to be read: of a state partition or, for None, of all other state."""
        with self._connected() as connection:
            connection.send(wire.MemoryWanted(part=wire.Part(self._position, number), attempt=attempt))
            _expect_memory(connection)
            return _with_descriptor(connection, lambda fd: mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))

    def list_intact(self, host: str) -> wire.HeldSnapshots:
        """The intact snapshots of the position; from this call on other nodes can read them at this IP address."""
        with self._connected() as connection:
            connection.send(wire.HeldWanted(position=self._position, host=host))
            answer: wire.HeldSnapshots = connection.recv()
            return answer

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        try:
            with Client(self._address.name, "AF_UNIX", authkey=self._address.key) as connection:
                yield connection
        except (AuthenticationError, EOFError, OSError) as error:
            raise SnapshotServerGone(f"the node's snapshot server is gone: {type(error).__name__}: {error}") from error


def _expect_memory(connection: Connection) -> None:
    refusal = str(connection.recv())
    if refusal:
        raise SnapshotServerGone(refusal)


def _with_descriptor(connection: Connection, map_file: Callable[[int], T]) -> T:
    """The mapping of a descriptor that the server sends."""
    fd = recv_handle(connection)
    try:
        return map_file(fd)
    finally:
        os.close(fd)
