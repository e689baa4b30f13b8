"""The state of a rank for a group that rejoins, a copy or a file: a description and the tensors' bytes, in place."""

import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from spare_megatron.formats.codec import decode, encode
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.gradients.host_copies import HostCopies, TensorBytes
from spare_megatron.mcore.group_checkpoint import AnyOptimizer, HashingWriter
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.optimizer.divided_optimizer import DividedOptimizer
from spare_megatron.mcore.optimizer.optimizer import Optimizer
from spare_megatron.mcore.optimizer.parameters import named_parameters, optimized
from spare_megatron.mcore.optimizer.stacked_optimizer import StackedOptimizer
from spare_megatron.stacking.layout import PartitionId


class ForeignState(Exception):
    """The state belongs to a rank of another model, or to other strips of it."""


_OTHER_PARAMETERS = "the parameters there have other names, shapes or formats"
_OTHER_STRIPS = "the lanes there divide the optimizer state otherwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingState:
    """State to read until the next update: bytes of its tensors, and JSON of all else (empty for a state partition)."""

    description: bytes
    tensors: TensorBytes


class StateCopy:
    """A rank's state to be copied to host memory by another thread, before the next update: the length of the
    description (8 bytes, big-endian), the description and the tensors.
    """

    def __init__(self, state: OutgoingState, copies: HostCopies) -> None:
        self._head = len(state.description).to_bytes(8) + state.description
        self._tensors = state.tensors
        self._copies = copies
        self._as_of = copies.now()
        self.num_bytes = len(self._head) + self._tensors.num_bytes

    def write(self, memory: mmap.mmap, range_bytes: int | None = None) -> None:
        """Fills the first `num_bytes` of `memory`: directly if CUDA has registered it in ranges of `range_bytes`."""
        out = torch.frombuffer(memory, dtype=torch.uint8)
        start = len(self._head)
        head = (torch.frombuffer(bytearray(self._head), dtype=torch.uint8), out[:start])
        self._copies.copy(chain([head], self._tensors.beside(out[start:])), self._as_of, range_bytes)


class IncomingState:
    """Receives the state of another group's rank. Raises ForeignState if its `description` is of another model."""

    def __init__(self, description: bytes, chunks: Sequence[Chunk], optimizer: AnyOptimizer) -> None:
        state = decode(description, dict)
        if state["model"] != _shapes(chunks):
            raise ForeignState(_OTHER_PARAMETERS)
        if state.get("strips") != _strips(optimizer, chunks):
            raise ForeignState(_OTHER_STRIPS)
        self._chunks, self._optimizer = chunks, optimizer
        places = [tensor for chunk in chunks for tensor in _tensors(chunk).values()]
        device = places[0].device
        self._content = _decoded(state["optimizer"], device, places)
        self.tensors = TensorBytes(places)
        """Where the bytes belong. The model is unusable until all of them have arrived."""

    def install(self) -> None:
        """Installs the optimizer state, once all bytes have arrived."""
        self._optimizer.load_part(self._chunks, self._content)


def outgoing_state(chunks: Sequence[Chunk], optimizer: AnyOptimizer) -> OutgoingState:
    """Present parameters, buffers, optimizer state (unless stacked: copied separately) and schedule position."""
    tensors = [tensor for chunk in chunks for tensor in _tensors(chunk).values()]
    state = {
        "model": _shapes(chunks),
        "optimizer": _encoded(optimizer.part(chunks), tensors),
        "strips": _strips(optimizer, chunks),
    }
    return OutgoingState(description=encode(state).encode(), tensors=TensorBytes(tensors))


def partition_state(optimizer: StackedOptimizer, number: PartitionId) -> OutgoingState:
    assert number in optimizer.hosted, f"partition {number} is not here whole"
    state = optimizer.whole_partitions().get(number)
    return OutgoingState(description=b"", tensors=TensorBytes([] if state is None else [state]))  # None if empty


def rest_of_state(chunks: Sequence[Chunk], optimizer: Optimizer | DividedOptimizer) -> TensorsDigest:
    """Digest of optimizer state and, in bf16 models, bf16 parameters: bitwise equal in all groups, unlike model
    buffers.
    """
    if isinstance(optimizer, DividedOptimizer):
        return optimizer.digest(chunks)
    tensors: list[tuple[str, torch.Tensor]] = []
    for named in named_parameters(chunks):
        updated = optimized(named.parameter)
        if updated is not named.parameter:
            tensors.append((named.name, named.parameter))
        for key, value in sorted(optimizer.state_of(updated).items()):
            tensors.append((f"{key} of {named.name}", torch.as_tensor(value)))
    if optimizer.outer is not None:
        tensors += optimizer.outer.named(chunks)
    return TensorsDigest(tensors, head=repr(optimizer.update_counts()))


def save_state(path: Path, chunks: Sequence[Chunk], optimizer: AnyOptimizer) -> tuple[int, str]:
    """Writes the rank's state, with the partitions that are whole here. Returns the file's bytes and SHA-256."""
    state: dict[str, Any] = {
        "chunks": [_tensors(chunk) for chunk in chunks],
        "optimizer": optimizer.state_dict(),
        "strips": _strips(optimizer, chunks),
    }
    if isinstance(optimizer, StackedOptimizer):
        state["slices"] = optimizer.whole_partitions()
    with HashingWriter(path) as file:
        torch.save(state, file)
    return file.num_bytes, file.digest.hexdigest()


def load_state(
    paths: Sequence[Path],
    chunks: Sequence[Chunk],
    optimizer: AnyOptimizer,
    partitions: Collection[PartitionId] = (),
) -> None:
    """Loads files that `save_state` wrote for this position into a new rank. Raises ForeignState for another model.
    With stacked state the files together have all partitions, and `partitions` are held.
    """
    is_stacked = isinstance(optimizer, StackedOptimizer)
    # Memory-mapped if stacked, since a rank needs only parts of the files; otherwise the loaded tensors are used.
    states = [torch.load(path, map_location="cpu", mmap=is_stacked, weights_only=True) for path in paths]
    if states[0].get("strips") != _strips(optimizer, chunks):
        raise ForeignState(_OTHER_STRIPS)
    for chunk, saved in zip(chunks, states[0]["chunks"], strict=True):
        tensors = _tensors(chunk)
        if {name: _form(one) for name, one in tensors.items()} != {name: _form(one) for name, one in saved.items()}:
            raise ForeignState(_OTHER_PARAMETERS)
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    if not isinstance(optimizer, StackedOptimizer):
        optimizer.load_state_dict(states[0]["optimizer"])
        return
    found: dict[int, torch.Tensor] = {number: one for state in states for number, one in state["slices"].items()}
    hosted = {number: optimizer.empty_state(number) for number in partitions}
    for number, place in hosted.items():
        if place.numel():
            place.copy_(found[int(number)])
    optimizer.restore(states[0]["optimizer"], hosted)


def _tensors(chunk: Chunk) -> dict[str, torch.Tensor]:
    module = chunk.module.module
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _shapes(chunks: Sequence[Chunk]) -> list[list[list[Any]]]:
    return [[[name, *_form(tensor)] for name, tensor in _tensors(chunk).items()] for chunk in chunks]


def _strips(optimizer: AnyOptimizer, chunks: Sequence[Chunk]) -> list[list[int]] | None:
    """The own strips whose state a rank has; None unless lanes divide it."""
    return optimizer.strips(chunks) if isinstance(optimizer, DividedOptimizer) else None


def _form(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _encoded(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value in JSON form, which lacks tuples and integer keys; its tensors are appended to the list."""
    match value:
        case torch.Tensor():
            tensors.append(value)
            return {"tensor": [*_form(value), value.device.type]}
        case dict():
            return {"dict": [[key, _encoded(item, tensors)] for key, item in value.items()]}
        case list() | tuple():
            return {type(value).__name__: [_encoded(item, tensors) for item in value]}
    return value


def _decoded(value: Any, device: torch.device, places: list[torch.Tensor]) -> Any:
    """Inverts `_encoded`; allocates the tensors and appends them to the list in the same order."""
    match value:
        case {"tensor": [dtype, shape, kind]}:
            on = device if kind == device.type else torch.device(kind)
            places.append(torch.empty(shape, dtype=getattr(torch, dtype), device=on))
            return places[-1]
        case {"dict": items}:
            return {key: _decoded(item, device, places) for key, item in items}
        case {"list": items}:
            return [_decoded(item, device, places) for item in items]
        case {"tuple": items}:
            return tuple(_decoded(item, device, places) for item in items)
    return value
