"""The state of slices as parts of a distributed checkpoint, by the names and places that replicated state has there.

A slice is a range of the flat parameter space, a part of a distributed checkpoint is a box of a tensor. So each
fragment is cut into boxes: the end of a row, whole rows, the beginning of a row, and so for every dimension. Whoever
reads the checkpoint need not know of slices: it asks for the boxes that it needs, and finds what these overlap with.
"""

import copy
import hashlib
import io
import json
import math
import os
import pickle
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    flatten_state_dict,
    mcore_to_pyt_state_dict,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from spare_megatron.mcore.host_copies import HostCopies
from spare_megatron.mcore.model import Chunk
from spare_megatron.mcore.optimizer import Optimizer
from spare_megatron.mcore.stacked_optimizer import StackedOptimizer
from spare_megatron.stacking.layout import SliceId

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


_MOMENTS = ("exp_avg", "exp_avg_sq")

_MAIN = "fp32_param"


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that a range of a flat tensor consists of, in its order, as few as there can be.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    while start < stop:
        first, within = divmod(start, row)
        num_rows = (stop - start) // row
        if within or not num_rows:
            end = min(stop, (first + 1) * row)
            for offsets, sizes in boxes(shape[1:], within, end - first * row):
                yield (first, *offsets), (1, *sizes)
        else:
            end = start + num_rows * row
            yield (first, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
        start = end


class ShardedSlices:
    """Where in the whole model the slices of a rank are.

    Args:
        model: The sharded state of the rank's chunks, with the parameters themselves.
        optimizer: The rank's slices.
    """

    def __init__(self, model: dict[str, Any], optimizer: StackedOptimizer) -> None:
        self._optimizer = optimizer
        self._kinds = (_MAIN, *_MOMENTS) if optimizer.has_main else _MOMENTS
        parameters = optimizer.parameters
        by_index = get_param_id_to_sharded_param_map(model, parameters)
        self._homes = {parameter: list(_homes(parameter, by_index[i])) for i, parameter in enumerate(parameters)}

    def parts(self, number: SliceId, state: Tensor) -> Iterator[ShardedTensor]:
        """The state of a slice, as `StackedOptimizer.whole_slices` has it. The parts are views of it."""
        slices = self._optimizer.slices
        for fragment in slices.fragments(number, slice(0, slices.length(number))):
            for first, home in self._homes[fragment.parameter]:
                start, stop = max(fragment.start, first), min(fragment.stop, first + home.data.numel())
                place = fragment.offset + start - fragment.start
                for offsets, sizes in boxes(home.local_shape, start - first, stop - first) if start < stop else ():
                    yield from self._box(home, offsets, sizes, state[:, place : place + math.prod(sizes)])
                    place += math.prod(sizes)

    def _box(
        self, home: ShardedTensor, offsets: Collection[int], sizes: Collection[int], state: Tensor
    ) -> Iterator[ShardedTensor]:
        """The kinds of numbers that there are of a box of a parameter."""
        num_prepended = home.prepend_axis_num
        origin = home.global_offset
        shape = (*(1 for _ in range(num_prepended)), *sizes)
        offset = (*origin[:num_prepended], *map(sum, zip(origin[num_prepended:], offsets, strict=True)))
        for kind, values in zip(self._kinds, state, strict=True):
            yield ShardedTensor(
                key=f"optimizer.state.{kind}.{home.key}",
                data=values.view(shape),
                dtype=values.dtype,
                local_shape=shape,
                global_shape=home.global_shape,
                global_offset=offset,
                axis_fragmentations=None,  # no regular grid
                replica_id=home.replica_id,
                allow_shape_mismatch=home.allow_shape_mismatch,
            )


def _homes(
    parameter: torch.nn.Parameter, sharded: ShardedTensor | ShardedTensorFactory
) -> Iterator[tuple[int, ShardedTensor]]:
    """The tensors that a parameter is stored as, each with the place in the flat parameter where it begins."""
    tensors = nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    for tensor in tensors:
        assert tensor.data.is_contiguous(), f"{tensor.key} is stored as no range of its parameter"
        yield (tensor.data.data_ptr() - parameter.data_ptr()) // parameter.element_size(), tensor


METADATA_FNAME = ".metadata"
"""What describes the tensors, and where they are."""

Written = Mapping[str, tuple[int, str]]
"""Of files, by name, the bytes and their SHA-256."""


_FORMAT = CheckpointingConfig("torch_dist", 1)

_Parts = dict[str, list[ShardedBase]]
"""By their names; a part of a tensor has the name of the tensor."""


class IncompleteSlices(Exception):
    """Something is missing in what was written of slices."""


class GroupState:
    """What one rank contributes to a checkpoint: its parts of the parameters and all else, and whole slices."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        optimizer: Optimizer | StackedOptimizer,
        groups: ProcessGroupCollection,
        copies: HostCopies,
        slices: Collection[SliceId] = (),
        *,
        has_rest: bool = True,
    ) -> None:
        """Refers to the live tensors: valid until the next update unless `copy` comes before it.

        Args:
            chunks: The rank's part of the model.
            optimizer: Its optimizer.
            groups: The process groups inside the group.
            copies: Makes copies from where the tensors are.
            slices: The slices whose state it contributes, of those whose whole state is here.
            has_rest: Whether it contributes all but slices, too.
        """
        model = _model_state(chunks, groups)
        self._slices: dict[SliceId, _Parts] = {}
        if isinstance(optimizer, StackedOptimizer):
            sharded, states = ShardedSlices(model, optimizer), optimizer.whole_slices()
            for number in slices:
                has_any = optimizer.slices.length(number) > 0
                self._slices[number] = _by_key(sharded.parts(number, states[number]) if has_any else ())
        self._rest: _Parts = {}
        self._common: dict[str, Any] = {}
        if has_rest:
            state = {"model": model, "optimizer": _optimizer_state(model, optimizer, is_loading=False)}
            rest, common = save_preprocess(state, validate_access_integrity=False)
            self._common = copy.deepcopy(common)
            self._rest = _by_key(flatten_state_dict(rest)[0].values())
        self._is_copied = False
        self._copies = copies
        self._as_of = copies.now()

    def _tensors(self) -> Iterator[ShardedTensor]:
        for parts in (self._rest, *self._slices.values()):
            yield from (part for row in parts.values() for part in row if isinstance(part, ShardedTensor))

    def copy(self) -> None:
        """Copies the tensors to host memory: from here on updates do not change them. Once is enough."""
        if self._is_copied:
            return
        self._is_copied = True
        live = [(part, part.data.detach()) for part in self._tensors()]
        for part, tensor in live:
            part.data = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._copies.copy(((tensor, part.data) for part, tensor in live), self._as_of)

    def write(
        self,
        folder: Path,
        ranks: dist.ProcessGroup,
        on_write: Callable[[], None],
        slices: Collection[SliceId] | None = None,
    ) -> Written:
        """Writes the copied tensors below a folder, and on the first rank what describes them.

        Collective over: ranks. Any thread may call it if nobody else uses them meanwhile.

        Args:
            folder: Where to; it exists and is empty.
            ranks: The group's ranks, with gloo.
            on_write: Called when the first bytes of this rank are on their way.
            slices: Only these slices; None writes all but slices.

        Returns:
            The files that this rank has written. They are on the disk, their names perhaps not.

        Raises:
            OSError: This rank could not write.
            CheckpointException: Another rank could not write.
        """
        files = _HashingFiles(on_write)
        parts: _Parts = dict(self._rest) if slices is None else {}
        for number in slices or ():
            for key, row in self._slices[number].items():
                parts[key] = [*parts.get(key, ()), *row]
        writer = torch_checkpoint.FileSystemWriter(folder, sync_files=False)  # the files do so when they are closed
        writer.fs = files
        planner = MCoreSavePlanner if slices is None else _SlicesPlanner
        try:
            torch_checkpoint.save(
                mcore_to_pyt_state_dict(parts),
                storage_writer=writer,
                planner=planner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=ranks,
            )
        except CheckpointException as error:
            # A full disk makes torch complain of its archive, which hides why.
            raise files.error or error from None
        if ranks.rank() == 0 and slices is None:
            with files.create_stream(folder / COMMON_STATE_FNAME, "wb") as file:
                torch.save(self._common, file)
            with files.create_stream(folder / CONFIG_FNAME, "wb") as file:
                file.write(json.dumps(asdict(_FORMAT)).encode())
        return files.written


def join_slices(folder: Path, names: Iterable[str]) -> Written:
    """Makes a checkpoint of one that has all but slices, and of folders below it that have slices.

    Args:
        folder: What `GroupState.write` has written without slices.
        names: The folders with slices. What two of them have is read from the first.

    Returns:
        The file that describes everything. Those that described parts are gone.

    Raises:
        IncompleteSlices: Some tensor is there only in part.
    """
    whole = torch_checkpoint.FileSystemReader(folder).read_metadata()
    tensors, places = whole.state_dict_metadata, whole.storage_data
    for name in names:
        part = torch_checkpoint.FileSystemReader(folder / name).read_metadata()
        for key, tensor in part.state_dict_metadata.items():
            known = tensors.setdefault(key, replace(tensor, chunks=[]))
            for chunk in tensor.chunks:
                index = MetadataIndex(key, chunk.offsets)
                if index not in places:
                    place = part.storage_data[index]
                    places[index] = replace(place, relative_path=f"{name}/{place.relative_path}")
                    known.chunks.append(chunk)
        (folder / name / METADATA_FNAME).unlink()
    for key, tensor in tensors.items():
        if isinstance(tensor, torch_checkpoint.TensorStorageMetadata):
            num_here = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if num_here != math.prod(tensor.size):
                raise IncompleteSlices(f"{key}: {num_here} of {math.prod(tensor.size)} elements are there")
    files = _HashingFiles(lambda: None)
    with files.create_stream(folder / METADATA_FNAME, "wb") as file:
        pickle.dump(whole, file)
    return files.written


def load_checkpoint(
    folder: Path,
    chunks: Sequence[Chunk],
    optimizer: Optimizer | StackedOptimizer,
    groups: ProcessGroupCollection,
    on_read: Callable[[], None],
    slices: Collection[SliceId] = (),
) -> None:
    """Takes the state over from a checkpoint, whatever layout wrote it, with slices or without.

    Collective over: all ranks of the group.

    Args:
        folder: The checkpoint.
        chunks: The rank's part of the model.
        optimizer: Its optimizer.
        groups: The process groups inside the group.
        on_read: Called when all tensors are read, and not all are in their places.
        slices: Where the optimizer's state is stacked, the slices to hold from here on; else there are none.

    Raises:
        CheckpointingException: The checkpoint lacks what this model needs. The state is undefined then.
    """
    model = _model_state(chunks, groups)
    if isinstance(optimizer, StackedOptimizer):
        sharded = ShardedSlices(model, optimizer)
        states = {number: optimizer.empty_state(number) for number in slices}
        parts = {str(number): list(sharded.parts(number, state)) for number, state in states.items()}
        # What nobody here asks for is not missing.
        asked = {"model": model, "slices": parts}
        state = dist_checkpointing.load(asked, str(folder), validate_access_integrity=False)
        on_read()
        optimizer.restore(state["optimizer"], states)  # filled in place
    else:
        asked = {"model": model, "optimizer": _optimizer_state(model, optimizer, is_loading=True)}
        state = dist_checkpointing.load(asked, str(folder))
        on_read()
        optimizer.load_state_dict(state["optimizer"])
    for number, chunk in enumerate(chunks):
        chunk.module.module.load_state_dict(state["model"][str(number)])


def _model_state(chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> dict[str, Any]:
    """The live parameters with their places in the whole model."""
    return {
        str(number): chunk.module.module.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        for number, chunk in enumerate(chunks)
    }


def _optimizer_state(
    model: dict[str, Any], optimizer: Optimizer | StackedOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    """The same of the optimizer's state but for slices, and what is the same on all ranks."""
    if isinstance(optimizer, StackedOptimizer):
        return optimizer.common_state()
    return optimizer.sharded_state(model, is_loading=is_loading)


def _by_key(parts: Iterable[ShardedBase]) -> _Parts:
    """Those of the parts that this rank writes, by their names."""
    found: _Parts = {}
    for part in parts:
        if is_main_replica(part.replica_id):
            key = part.unique_key if isinstance(part, ShardedObject) else part.key
            found.setdefault(key, []).append(part)
    return found


class _SlicesPlanner(MCoreSavePlanner):
    """Plans what is only a part of its tensors, which the planner of whole checkpoints takes for an error."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], torch_checkpoint.Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


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
            file = HashingWriter(path, self._on_write)
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


class HashingWriter(io.BufferedWriter):
    """A file for writing from its beginning to its end, which is on the disk when it is closed.

    Args:
        path: The file.
        on_write: Called when the first bytes are on their way.

    Attributes:
        num_bytes: Written so far.
        digest: The SHA-256 of these.
    """

    def __init__(self, path: str | os.PathLike[str], on_write: Callable[[], None] = lambda: None) -> None:
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
