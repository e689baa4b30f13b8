"""Weights of checkpoints without optimizer and process groups: reads boxes of them, and writes weights alone, a few
tensors of one layer at a time. Tensors of layers are stacked along a first dimension, in every layout.
"""

import io
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from spare_megatron.config.model.model_tensors import ModelTensor
from spare_megatron.mcore.group_checkpoint import MAIN, METADATA_FNAME, HashingFiles, Written, model_state, write_common
from spare_megatron.mcore.inert_pickle import named_damage, read_metadata, read_pickled
from spare_megatron.mcore.model.model import Chunk


class StoredWeights:
    """Reads the weights in a checkpoint of any layout; raises ValueError for tensors or parts that it lacks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = torch_checkpoint.FileSystemReader(folder)
        metadata = read_metadata(folder / METADATA_FNAME)
        with named_damage(folder / METADATA_FNAME):
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata
        self._tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self._objects = frozenset(entries.keys() - self._tensors)

    def names(self) -> frozenset[str]:
        """Keys of all tensors, those of an optimizer too."""
        return frozenset(self._tensors)

    def objects(self) -> frozenset[str]:
        """Keys of everything that is not a tensor."""
        return self._objects

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Type of the stored parameter; its fp32 copy, if stored, is found by `read`."""
        return self._tensor(key).properties.dtype

    def read_tensor(self, tensor: ModelTensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the whole model, as this checkpoint's writers name them."""
        values = torch.empty(tensor.shape, dtype=dtype)
        origin = [0 for _ in tensor.shape]
        if tensor.layer is None:
            self.read(tensor.key, origin, values)
        else:
            self.read(tensor.key, [tensor.layer, *origin], values[None])
        return values

    def read(self, key: str, offsets: Sequence[int], into: Tensor) -> None:
        """Fills `into` with the box of its size at `offsets`; an fp32 one from the optimizer's fp32 copy if stored."""
        main = f"optimizer.state.{MAIN}.{key}"
        name = main if into.dtype is torch.float32 and main in self._tensors else key
        box = ChunkStorageMetadata(torch.Size(offsets), into.size())
        items = create_read_items_for_chunk_list(name, self._tensor(name), [box])
        num_here = sum(math.prod(item.lengths) for item in items)
        if num_here != into.numel():
            raise ValueError(f"{self._folder}: {num_here} of {into.numel()} elements of {name} are there")
        with named_damage(f"{self._folder}: {name}"):
            self._reader.read_data(LoadPlan(items), _BoxPlanner(into))

    def read_object(self, key: str) -> Any:
        """The object under one of `objects`, read without running code. Raises ValueError if it cannot be read."""
        start, index = torch.Size([0]), MetadataIndex(key)
        item = ReadItem(LoadItemType.BYTE_IO, index, start, index, start, start)
        planner = _ObjectPlanner()
        with named_damage(f"{self._folder}: {key}"):
            self._reader.read_data(LoadPlan([item]), planner)
            return read_pickled(planner.content)[0]  # a list of the objects under a key

    def _tensor(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise ValueError(f"{self._folder} has no tensor {key}")
        return self._tensors[key]


class _BoxPlanner(DefaultLoadPlanner):
    def __init__(self, into: Tensor) -> None:
        super().__init__()
        self._into = into

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return narrow_tensor_by_index(self._into, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _ObjectPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002  (it is the only one)
        self.content = value


def load_weights(folder: Path, chunks: Sequence[Chunk], groups: ProcessGroupCollection) -> None:
    """Fills the parameters, before the optimizer copies them; rows beyond the stored vocabulary become zero. Raises
    ValueError if a tensor is missing or has another shape.
    """
    stored = StoredWeights(folder)
    with torch.no_grad():
        for part in _parts_of(model_state(chunks, groups.dp_cp)):
            shape = stored.shape(part.key)
            is_padded = part.allow_shape_mismatch
            if shape[is_padded:] != tuple(part.global_shape)[is_padded:]:
                raise ValueError(f"{folder}: {part.key} is of {shape}, and the model's of {tuple(part.global_shape)}")
            into = part.data[(None,) * part.prepend_axis_num]
            if is_padded:
                num_rows = min(max(0, shape[0] - part.global_offset[0]), len(into))
                into[num_rows:] = 0
                into = into[:num_rows]
            values = torch.empty(into.shape, dtype=into.dtype)
            stored.read(part.key, part.global_offset, values)
            into.copy_(values)


def _parts_of(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensorFactory):
            yield from nested_values(entry.build())
        elif isinstance(entry, ShardedTensor):
            yield entry


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPart:
    """A box of a tensor of `shape`, which is read when it is written."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def stacked_part(tensor: ModelTensor, num_layers: int, dtype: torch.dtype, read: Callable[[], Tensor]) -> WeightsPart:
    """The part that a tensor has in a checkpoint, whose tensors of layers are stacked."""
    origin = tuple(0 for _ in tensor.shape)
    if tensor.layer is None:
        return WeightsPart(
            key=tensor.key, shape=tensor.shape, offsets=origin, sizes=tensor.shape, dtype=dtype, read=read
        )
    return WeightsPart(
        key=tensor.key,
        shape=(num_layers, *tensor.shape),
        offsets=(tensor.layer, *origin),
        sizes=(1, *tensor.shape),
        dtype=dtype,
        read=lambda: read()[None],
    )


def write_weights(
    folder: Path,
    parts: Collection[WeightsPart],
    objects: Mapping[str, object] = MappingProxyType({}),
    common: Mapping[str, object] = MappingProxyType({}),
) -> Written:
    """Writes weights into an empty folder, one part after another. `objects`: Megatron's sharded objects by unique key;
    `common`: what is stored beside all tensors. Raises what reading a part raises, and OSError.
    """
    files = HashingFiles(lambda: None)
    writer = torch_checkpoint.FileSystemWriter(folder, sync_files=False)
    writer.fs = files
    try:
        with warnings.catch_warnings(action="ignore"):  # that this is a single process
            torch_checkpoint.save({}, storage_writer=writer, planner=_PartsPlanner(parts, objects), no_dist=True)
    except CheckpointException as error:  # hides the cause: a part that cannot be read, a full disk, an interrupt
        [(cause, _)] = error.failures.values()
        raise files.error or cause from None
    write_common(files, folder, common)
    return files.written


class _PartsPlanner(DefaultSavePlanner):
    """Plans boxes whose values are read when their turn comes, and objects."""

    def __init__(self, parts: Iterable[WeightsPart], objects: Mapping[str, object]) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = {MetadataIndex(part.key, part.offsets): part for part in parts}
        self._objects = {MetadataIndex(key): value for key, value in objects.items()}

    def create_local_plan(self) -> SavePlan:
        objects = [WriteItem(index=index, type=WriteItemType.BYTE_IO) for index in self._objects]
        self.plan = SavePlan([*objects, *(_write_item(index, part) for index, part in self._parts.items())])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self._parts[write_item.index].read()
        data = io.BytesIO()
        torch.save([self._objects[write_item.index]], data)  # a list of the objects that are stored under a key
        return data


def _write_item(index: MetadataIndex, part: WeightsPart) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)),
            properties=TensorProperties(dtype=part.dtype),
            size=torch.Size(part.shape),
        ),
    )
