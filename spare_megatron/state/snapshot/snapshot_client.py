"""A rank's requests to the snapshot server of its node."""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle
from typing import TypeVar

from spare_megatron.process.snapshot_wire import (
    COPIED,
    CopyWanted,
    HeldSnapshots,
    HeldWanted,
    MemoryWanted,
    Part,
    PassOver,
    SnapshotServerAddress,
)
from spare_megatron.stacking.layout import PartitionId

T = TypeVar("T")


class SnapshotServerGone(Exception):
    """The snapshot server is not running, was lost before it answered, or has too little memory."""


class SnapshotClient:
    """The requests of one rank position. All raise `SnapshotServerGone`.

    They wait without limit for a server that runs and does not answer.
    """

    def __init__(self, address: SnapshotServerAddress, position: int) -> None:
        self._address = address
        self._position = position

    def copy(
        self,
        attempt: int,
        previous: int,
        num_bytes: Mapping[PartitionId | None, int],
        write: Callable[[Sequence[mmap.mmap]], None],
    ) -> list[str]:
        """Has a snapshot kept, and of all earlier ones of the position only the previous one.

        `num_bytes` has the size of each state partition to be kept, and under None that of all other state; `write`
        fills one memory of that size for each. Returns the SHA-256 of each, as the server has read it.
        """
        parts = {Part(self._position, number): size for number, size in num_bytes.items()}
        wanted = CopyWanted(position=self._position, attempt=attempt, previous=previous, num_bytes=parts)

        def converse(connection: Connection) -> list[str]:
            connection.send(wanted)
            _expect_memory(connection)
            write([_receive_memory(connection, mmap.PROT_READ | mmap.PROT_WRITE) for _ in parts])
            connection.send(COPIED)
            return [str(sha256) for sha256 in connection.recv()]

        return self._converse(converse)

    def pass_over(self, attempt: int, previous: int) -> None:
        """Other ranks have a snapshot kept: frees all earlier ones of the position but the previous one."""

        def converse(connection: Connection) -> None:
            connection.send(PassOver(position=self._position, attempt=attempt, previous=previous))
            connection.recv()

        self._converse(converse)

    def memory(self, attempt: int, number: PartitionId | None) -> mmap.mmap:
        """A snapshot's memory, to be read: of a state partition or, for None, of all other state."""

        def converse(connection: Connection) -> mmap.mmap:
            connection.send(MemoryWanted(part=Part(self._position, number), attempt=attempt))
            _expect_memory(connection)
            return _receive_memory(connection, mmap.PROT_READ)

        return self._converse(converse)

    def held(self, host: str) -> HeldSnapshots:
        """The intact snapshots of the position, which are served on this IP address from now on."""

        def converse(connection: Connection) -> HeldSnapshots:
            connection.send(HeldWanted(position=self._position, host=host))
            told: HeldSnapshots = connection.recv()
            return told

        return self._converse(converse)

    def _converse(self, converse: Callable[[Connection], T]) -> T:
        try:
            with Client(self._address.name, "AF_UNIX", authkey=self._address.key) as connection:
                return converse(connection)
        except (AuthenticationError, EOFError, OSError) as error:
            raise SnapshotServerGone(f"the node's snapshot server is gone: {type(error).__name__}: {error}") from error


def _expect_memory(connection: Connection) -> None:
    refusal = str(connection.recv())
    if refusal:
        raise SnapshotServerGone(refusal)


def _receive_memory(connection: Connection, protection: int) -> mmap.mmap:
    fd = recv_handle(connection)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, prot=protection)
    finally:
        os.close(fd)
