"""A group's state as a distributed checkpoint: megatron-core's torch_dist format, which loads at any layout.

Every group is a whole model of its own, so one group writes a checkpoint and each of its ranks writes its part once.
Tensors are addressed by their names and places in the whole model, which is why another tensor- or pipeline-parallel
size can read them.
"""

import copy
import hashlib
import io
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    flatten_state_dict,
    mcore_to_pyt_state_dict,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from spare_megatron.mcore.model import Chunk
from spare_megatron.mcore.optimizer import Optimizer

_FORMAT = CheckpointingConfig("torch_dist", 1)


class GroupState:
    """What one rank contributes to a checkpoint of its group: its parts of parameters and optimizer state.

    Attributes:
        num_bytes: Of this rank's tensors.
    """

    def __init__(self, chunks: Sequence[Chunk], optimizer: Optimizer, groups: ProcessGroupCollection) -> None:
        """Refers to the live tensors: valid until the next update unless `copy` comes before it."""
        sharded, common = save_preprocess(
            _sharded_state(chunks, optimizer, groups, is_loading=False), validate_access_integrity=False
        )
        self._common: dict[str, Any] = copy.deepcopy(common)
        self._parts: dict[str, list[ShardedBase]] = {}
        for part in flatten_state_dict(sharded)[0].values():
            if is_main_replica(part.replica_id):
                key = part.unique_key if isinstance(part, ShardedObject) else part.key
                self._parts.setdefault(key, []).append(part)
        device = chunks[0].module.buffers[0].grad_data.device
        # Copies wait for what has been asked of the device so far, and for nothing that is asked of it later.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self.num_bytes = sum(part.data.nbytes for part in self._tensors())

    def _tensors(self) -> Iterator[ShardedTensor]:
        return (part for parts in self._parts.values() for part in parts if isinstance(part, ShardedTensor))

    def copy(self) -> None:
        """Copies the tensors to host memory: from here on updates do not change them."""
        with torch.no_grad():
            if self._stream is None:
                for part in self._tensors():
                    part.data = part.data.detach().clone()
                return
            with torch.cuda.stream(self._stream):
                for part in self._tensors():
                    host = torch.empty(part.data.shape, dtype=part.data.dtype, pin_memory=True)
                    part.data = host.copy_(part.data.detach(), non_blocking=True)
            self._stream.synchronize()

    def write(
        self, folder: Path, ranks: dist.ProcessGroup, on_write: Callable[[], None]
    ) -> Mapping[str, tuple[int, str]]:
        """Writes the copied tensors below a folder, and on the first rank what describes them all.

        Collective over: ranks. Any thread may call it if nobody else uses them meanwhile.

        Args:
            folder: Where to; it exists and is empty.
            ranks: The group's ranks, with gloo.
            on_write: Called when the first bytes of this rank are on their way.

        Returns:
            Of the files that this rank has written, by name, the bytes and their SHA-256. The files are on the disk,
            their names perhaps not.

        Raises:
            OSError: This rank could not write.
            CheckpointException: Another rank could not write.
        """
        files = _HashingFiles(on_write)
        writer = torch_checkpoint.FileSystemWriter(folder, sync_files=False)  # the files do so when they are closed
        writer.fs = files
        try:
            torch_checkpoint.save(
                mcore_to_pyt_state_dict(dict(self._parts)),
                storage_writer=writer,
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=ranks,
            )
        except CheckpointException as error:
            # A full disk makes torch complain of its archive, which hides why.
            raise files.error or error from None
        if ranks.rank() == 0:
            with files.create_stream(folder / COMMON_STATE_FNAME, "wb") as file:
                torch.save(self._common, file)
            with files.create_stream(folder / CONFIG_FNAME, "wb") as file:
                file.write(json.dumps(asdict(_FORMAT)).encode())
        return files.written


def load_checkpoint(
    folder: Path, chunks: Sequence[Chunk], optimizer: Optimizer, groups: ProcessGroupCollection
) -> None:
    """Takes the whole state over from a checkpoint, whatever layout wrote it.

    Collective over: all ranks of the group.

    Raises:
        CheckpointingException: The checkpoint lacks what this model needs. The state is undefined then.
    """
    state = dist_checkpointing.load(_sharded_state(chunks, optimizer, groups, is_loading=True), str(folder))
    for number, chunk in enumerate(chunks):
        chunk.module.module.load_state_dict(state["model"][str(number)])
    optimizer.load_state_dict(state["optimizer"])


def _sharded_state(
    chunks: Sequence[Chunk], optimizer: Optimizer, groups: ProcessGroupCollection, *, is_loading: bool
) -> dict[str, Any]:
    """The live tensors with their places in the whole model, and what is the same on all ranks."""
    model = {
        str(number): chunk.module.module.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        for number, chunk in enumerate(chunks)
    }
    return {"model": model, "optimizer": optimizer.sharded_state(model, is_loading=is_loading)}


class _HashingFiles(torch_checkpoint.filesystem.FileSystem):
    """Files whose SHA-256 is taken from what is written to them, and which are on the disk when they are closed.

    Attributes:
        written: Bytes and SHA-256 of each file, by name.
        error: Why one could not be written, the first that was so.
    """

    def __init__(self, on_write: Callable[[], None]) -> None:
        self.written: dict[str, tuple[int, str]] = {}
        self.error: OSError | None = None
        self._on_write = on_write

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", f"nothing is read while a checkpoint is written, but {path} is opened as {mode}"
        try:
            file = _HashingWriter(path, self._on_write)
            with file:
                yield file
        except Exception as error:
            self.error = self.error or _cause(error)
            raise
        self.written[Path(path).name] = (file.num_bytes, file.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


def _cause(error: BaseException | None) -> OSError | None:
    """What the operating system said, behind all that was made of it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


class _HashingWriter(io.BufferedWriter):
    """A file for writing from its beginning to its end."""

    def __init__(self, path: str | os.PathLike[str], on_write: Callable[[], None]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self._on_write = on_write

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        num_bytes = super().write(data)
        if not self.num_bytes:
            self._on_write()
        self.num_bytes += num_bytes
        return num_bytes

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        super().close()
