"""Distributed checkpoints of a group, with stacked optimizer state in the format of replicated state.

A state partition is a range of the flat parameter space, a checkpoint entry a box of a tensor, so each fragment is cut
into boxes. A reader needs no knowledge of partitions: it asks for boxes and gets whatever overlaps them.
"""

import copy
import hashlib
import io
import math
import os
import pickle
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge, nested_values
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
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from spare_megatron.formats.codec import encode
from spare_megatron.mcore.gradients.flat_gradients import is_divided_expert
from spare_megatron.mcore.gradients.host_copies import HostCopies
from spare_megatron.mcore.gradients.partitions import OWN
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.process_groups import GroupCollection
from spare_megatron.mcore.optimizer.divided_optimizer import DividedOptimizer
from spare_megatron.mcore.optimizer.fragment_adam import FragmentAdam
from spare_megatron.mcore.optimizer.optimizer import Optimizer
from spare_megatron.mcore.optimizer.stacked_optimizer import StackedOptimizer
from spare_megatron.stacking.layout import PartitionId

AnyOptimizer = Optimizer | StackedOptimizer | DividedOptimizer

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


_MOMENTS = ("exp_avg", "exp_avg_sq")

MAIN = "fp32_param"

_MAIN_KEY = f"optimizer.state.{MAIN}."


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up a range of a flat tensor, in order, as few as possible.

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


class ShardedPartitions:
    """Maps a rank's state partitions, which no other lane has, to boxes of the whole model's tensors."""

    def __init__(self, chunks: Sequence[Chunk], optimizer: FragmentAdam, groups: GroupCollection) -> None:
        model = model_state(chunks, groups.dp_cp)
        self._optimizer = optimizer
        self._kinds = (MAIN, *_MOMENTS) if optimizer.has_main else _MOMENTS
        parameters = optimizer.parameters
        by_index = get_param_id_to_sharded_param_map(model, parameters)
        self._homes = {parameter: list(_homes(parameter, by_index[i])) for i, parameter in enumerate(parameters)}
        for parameter in filter(is_divided_expert, parameters):  # they alone say which lanes have the same parameters
            for _, home in self._homes[parameter]:
                *others, replica = home.replica_id
                home.replica_id = (*others, replica % groups.cp.size())

    def parts(self, number: PartitionId, state: Tensor) -> Iterator[ShardedTensor]:
        """The checkpoint entries of a partition's state (as in `FragmentAdam.whole_partitions`), as views of it."""
        partitions = self._optimizer.partitions
        for fragment in partitions.fragments(number, slice(0, partitions.length(number))):
            for first, home in self._homes[fragment.parameter]:
                start, stop = max(fragment.start, first), min(fragment.stop, first + home.data.numel())
                place = fragment.offset + start - fragment.start
                for offsets, sizes in boxes(home.local_shape, start - first, stop - first) if start < stop else ():
                    yield from self._box(home, offsets, sizes, state[:, place : place + math.prod(sizes)])
                    place += math.prod(sizes)

    def _box(
        self, home: ShardedTensor, offsets: Collection[int], sizes: Collection[int], state: Tensor
    ) -> Iterator[ShardedTensor]:
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
    tensors = nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    for tensor in tensors:
        assert tensor.data.is_contiguous(), f"{tensor.key} is stored as no range of its parameter"
        yield (tensor.data.data_ptr() - parameter.data_ptr()) // parameter.element_size(), tensor


METADATA_FNAME = ".metadata"
"""Describes the tensors and the files that hold them."""

Written = Mapping[str, tuple[int, str]]
"""Size in bytes and SHA-256 of each file, by name."""


FORMAT = CheckpointingConfig("torch_dist", 1)

_Parts = dict[str, list[ShardedBase]]
"""Entries by name; a part of a tensor has the tensor's name."""


class IncompletePartitions(Exception):
    """Some written tensors are incomplete."""


class GroupState:
    """One rank's contribution to a checkpoint: parameters and all other state, and whole state partitions."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        optimizer: AnyOptimizer | None,
        groups: GroupCollection,
        copies: HostCopies,
        partitions: Collection[PartitionId] = (),
        *,
        has_rest: bool = True,
    ) -> None:
        """Refers to the live tensors until `copy`, so it is valid until the next update. Contributes these
        `partitions`, each whole here, and with `has_rest` everything else; without an optimizer the parameters alone.
        """
        model = model_state(chunks, groups.lanes_and_cp)
        self._partitions: dict[PartitionId, _Parts] = {}
        if isinstance(optimizer, FragmentAdam):
            sharded = ShardedPartitions(chunks, optimizer, groups)
            states = optimizer.whole_partitions()
            for number in (OWN,) if isinstance(optimizer, DividedOptimizer) else partitions:
                has_any = optimizer.partitions.length(number) > 0
                self._partitions[number] = _by_key(sharded.parts(number, states[number]) if has_any else ())
        self._rest: _Parts = {}
        self._common: dict[str, Any] = {}
        if has_rest:
            state = {"model": model}
            if optimizer is not None:
                state["optimizer"] = _optimizer_state(model, optimizer, is_loading=False)
            rest, common = save_preprocess(state, validate_access_integrity=False)
            self._common = copy.deepcopy(common)
            self._rest = _by_key(flatten_state_dict(rest)[0].values())
        if isinstance(optimizer, DividedOptimizer):
            self._rest |= self._partitions.pop(OWN)
        self._is_copied = False
        self._copies = copies
        self._as_of = copies.now()

    def _tensors(self) -> Iterator[ShardedTensor]:
        for parts in (self._rest, *self._partitions.values()):
            yield from (part for row in parts.values() for part in row if isinstance(part, ShardedTensor))

    def copy(self) -> None:
        """Copies the tensors to host memory, so that updates no longer change them. Further calls do nothing."""
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
        partitions: Collection[PartitionId] | None = None,
    ) -> Written:
        """Writes copied partitions, or all else if None, into an empty folder, synced; the first rank adds metadata.
        Collective over: ranks (gloo), from any thread. OSError: this rank could not write; CheckpointException: another
        one.
        """
        files = HashingFiles(on_write)
        parts: _Parts = dict(self._rest) if partitions is None else {}
        for number in partitions or ():
            for key, row in self._partitions[number].items():
                parts[key] = [*parts.get(key, ()), *row]
        writer = _PortableWriter(folder, sync_files=False)  # `HashingFiles` syncs on close
        writer.fs = files
        planner = MCoreSavePlanner if partitions is None else _PartitionsPlanner
        try:
            torch_checkpoint.save(
                mcore_to_pyt_state_dict(parts),
                storage_writer=writer,
                planner=planner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=ranks,
            )
        except CheckpointException as error:
            # On a full disk torch reports a corrupt archive, which hides the cause.
            raise files.error or error from None
        if ranks.rank() == 0 and partitions is None:
            write_common(files, folder, self._common)
        return files.written


def join_partitions(folder: Path, names: Iterable[str]) -> Written:
    """Joins a checkpoint without partitions and those in its subfolders `names`; returns the new metadata file. The
    first subfolder that contains a box counts. Raises IncompletePartitions if a tensor is incomplete.
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
                raise IncompletePartitions(f"{key}: {num_here} of {math.prod(tensor.size)} elements are there")
    files = HashingFiles(lambda: None)
    with files.create_stream(folder / METADATA_FNAME, "wb") as file:
        pickle.dump(whole, file)
    return files.written


def load_checkpoint(
    folder: Path,
    chunks: Sequence[Chunk],
    optimizer: AnyOptimizer,
    groups: GroupCollection,
    on_read: Callable[[], None],
    partitions: Collection[PartitionId] = (),
) -> None:
    """Loads a checkpoint of any layout; stacked `partitions` are held afterwards. Collective over: all ranks of the
    group. Raises CheckpointingException if it lacks what this model needs; the state is undefined then.
    """
    model = model_state(chunks, groups.lanes_and_cp)
    if isinstance(optimizer, FragmentAdam):
        sharded = ShardedPartitions(chunks, optimizer, groups)
        numbers = (OWN,) if isinstance(optimizer, DividedOptimizer) else partitions
        states = {number: optimizer.empty_state(number) for number in numbers}
        parts = {str(number): list(sharded.parts(number, state)) for number, state in states.items()}
        # This rank asks only for its own partitions, so access to the others must not be required.
        state = _load({"model": model, "slices": parts}, folder, chunks, is_whole=False)
        on_read()
        optimizer.restore(state["optimizer"], states)  # filled in place
    else:
        own = _optimizer_state(model, optimizer, is_loading=True)
        # Megatron's part by itself: it is merged with what was saved in its place, of other groups of parameters.
        asked = {"model": model, "megatron": own.pop("megatron"), "optimizer": own}
        state = _load(asked, folder, chunks, is_whole=True)
        on_read()
        optimizer.load_state_dict(state["optimizer"] | {"megatron": state["megatron"]})
    for number, chunk in enumerate(chunks):
        chunk.module.module.load_state_dict(state["model"][str(number)])


def _load(asked: dict[str, Any], folder: Path, chunks: Sequence[Chunk], *, is_whole: bool) -> dict[str, Any]:
    """Loads from a checkpoint of either precision: the main parameters of a bf16 model are the parameters of an fp32
    one, and the other way round. `is_whole`: the ranks together ask for all of each tensor.
    """
    stored = torch_checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    if not any(key.startswith("outer.") for key in stored):
        asked.get("optimizer", {}).pop("outer", None)
    load = partial(dist_checkpointing.load, checkpoint_dir=str(folder), validate_access_integrity=is_whole)
    has_main_there = any(key.startswith(_MAIN_KEY) for key in stored)
    if has_main_there is (next(chunks[0].module.parameters()).dtype is torch.bfloat16):
        return load(asked)
    if has_main_there:
        for one in nested_values(asked):
            if f"{_MAIN_KEY}{getattr(one, 'key', '')}" in stored:
                one.key = f"{_MAIN_KEY}{one.key}"
        return load(asked)
    main, others = extract_matching_values(asked, lambda one: getattr(one, "key", "").startswith(_MAIN_KEY))
    for one in nested_values(main):
        one.key = one.key.removeprefix(_MAIN_KEY)
    state = load(others)
    found = load({"main": main})["main"]  # apart: two tensors of a rank cannot have one key
    return merge(state, {key: found[key] for key in found if key == "megatron"})  # partitions are filled in place


def model_state(chunks: Sequence[Chunk], replicas: dist.ProcessGroup) -> dict[str, Any]:
    """The live parameters with their places in the whole model; all of `replicas` have the same."""
    return {
        str(number): chunk.module.module.sharded_state_dict(metadata={"dp_cp_group": replicas})
        for number, chunk in enumerate(chunks)
    }


def _optimizer_state(model: dict[str, Any], optimizer: AnyOptimizer, *, is_loading: bool) -> dict[str, Any]:
    """The optimizer's state with its places in the whole model; if in partitions, only what all ranks share."""
    if isinstance(optimizer, FragmentAdam):
        return optimizer.common_state()
    return optimizer.sharded_state(model, is_loading=is_loading)


def _by_key(parts: Iterable[ShardedBase]) -> _Parts:
    found: _Parts = {}
    for part in parts:
        if is_main_replica(part.replica_id):
            key = part.unique_key if isinstance(part, ShardedObject) else part.key
            found.setdefault(key, []).append(part)
    return found


class _PartitionsPlanner(MCoreSavePlanner):
    """Accepts incomplete tensors, which the planner of whole checkpoints rejects."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], torch_checkpoint.Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


class _PortableWriter(torch_checkpoint.FileSystemWriter):
    """Pickles the folder as text: a path of Python 3.13 is of a module that earlier versions do not have."""

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)


class HashingFiles(torch_checkpoint.filesystem.FileSystem):
    """Files that are hashed while written (`written`: size and SHA-256 by name) and synced; `error` is the first
    OSError.
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
    """The operating system's error behind a chain of exceptions."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def write_common(files: HashingFiles, folder: Path, common: Mapping[str, object]) -> None:
    """Writes what is stored beside all tensors, and the format."""
    with files.create_stream(folder / COMMON_STATE_FNAME, "wb") as file:
        torch.save(dict(common), file)
    with files.create_stream(folder / CONFIG_FNAME, "wb") as file:
        file.write(encode(FORMAT).encode())


class HashingWriter(io.BufferedWriter):
    """A file that is written sequentially, hashed, and synced to disk when closed; `on_write`: at its first bytes."""

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
