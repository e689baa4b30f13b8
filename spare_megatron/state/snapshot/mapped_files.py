"""A rank's mappings of the memory files of its node's snapshot server. It keeps them from one snapshot to the next and,
on a GPU, registers them with CUDA once, so that the device copies into them without a buffer between.
"""

import logging
import mmap
import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from spare_megatron.devices import gpu
from spare_megatron.process.snapshot_wire import Part

_log = logging.getLogger(__name__)

RANGE_BYTES = 256 * 2**20
"""Registered at a time: meanwhile the driver may hold up what other threads ask of CUDA."""

_FILES_OF_A_PART = 2
"""The server uses two in turn, unless a snapshot outgrows one or the server is another one."""


@dataclass(slots=True, eq=False)
class MappedFile:
    """A mapped file; `ranges` are addresses and sizes of what is registered: all of it, or nothing."""

    memory: mmap.mmap
    inode: tuple[int, int]
    ranges: Sequence[tuple[int, int]] = field(default=())

    @property
    def range_bytes(self) -> int | None:
        """Size of the registered ranges, which no copy may cross; None: it is not registered."""
        return RANGE_BYTES if self.ranges else None


class MappedFiles:
    """Mappings by part. `runtime`: for `gpu.register`; None on a CPU. Only one thread at a time may use it."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._files: dict[Part, list[MappedFile]] = {}  # the one used last at the end
        # An error of CUDA stays with the thread that met it, where the next launch of a kernel would raise it.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self.failure = ""
        """Why CUDA has refused to register a file; then no further one is tried."""
        self.last_register_s = 0.0
        """What the last `register` took."""

    @property
    def registered_bytes(self) -> int:
        return sum(size for files in self._files.values() for file in files for _, size in file.ranges)

    def map(self, part: Part, fd: int) -> MappedFile:
        """The mapping of a file of this part. A mapped file keeps its inode, so no other file is taken for it."""
        found = os.fstat(fd)
        inode = (found.st_dev, found.st_ino)
        files = self._files.setdefault(part, [])
        known = next((file for file in files if file.inode == inode), None)
        if known is not None:
            files.remove(known)
        files.append(known or MappedFile(mmap.mmap(fd, found.st_size), inode))
        self._drop(files, len(files) - _FILES_OF_A_PART)
        return files[-1]

    def keep(self, parts: Collection[Part]) -> None:
        """Gives up the mappings of all other parts."""
        for part in [part for part in self._files if part not in parts]:
            files = self._files.pop(part)
            self._drop(files, len(files))

    def register(self) -> None:
        """Registers the files that are not yet, while the device computes; nothing once CUDA has refused one."""
        began_s = time.monotonic()
        if self._runtime is not None:
            for file in [file for files in self._files.values() for file in files if not file.ranges]:
                if not self.failure:
                    self._thread.submit(self._register, file).result()
        self.last_register_s = time.monotonic() - began_s

    def _register(self, file: MappedFile) -> None:
        start, size = torch.frombuffer(file.memory, dtype=torch.uint8).data_ptr(), len(file.memory)
        ranges = [(start + at, min(RANGE_BYTES, size - at)) for at in range(0, size, RANGE_BYTES)]
        self.failure = gpu.register(self._runtime, ranges)
        if self.failure:
            _log.warning("snapshots go through buffers: %s", self.failure)
        else:
            file.ranges = ranges

    def _drop(self, files: list[MappedFile], number: int) -> None:
        """Gives up the first `number` of these files; their memory is unmapped with the last reference to it."""
        for _ in range(number):
            self._thread.submit(gpu.unregister, self._runtime, files.pop(0).ranges).result()
