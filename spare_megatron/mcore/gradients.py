"""The sums of one step over the microbatches that this group computed: gradients, loss, and how many.

They stay sums over tokens, unscaled, until the step is committed. A flat buffer carries them to the cross-group
reduction, so that they survive an attempt that fails; its last two elements are the number of microbatches and
the loss, for a group that reduced and then died has no other way to tell them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model import Chunk

_NUM_EXTRAS = 2
_COUNT, _LOSS = -2, -1

_PIECE = 1 << 20
"""Elements that are converted at a time."""

_LARGEST_PER_TOKEN_BITS = 12
"""Fixed point holds mean gradients per token of a microbatch up to 2^12 in every element, and such a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a buffer tells beside the gradients.

    Attributes:
        num_microbatches: Microbatches summed in it.
        loss_sum: Their cross entropy, summed over tokens; 0 except on the last stage.
    """

    num_microbatches: int
    loss_sum: float


class GradientSums(Protocol):
    """The local sums of one step."""

    def reset(self) -> None:
        """Start a step from zero."""

    def add_loss(self, loss: Tensor) -> None:
        """Add the cross entropy of a microbatch, summed over its tokens."""

    def add_count(self, num_microbatches: int) -> None:
        """Note microbatches that have been back-propagated."""

    def new_buffer(self) -> Tensor:
        """A flat tensor, uninitialized, for all gradients and the extras."""

    def pack_into(self, buffer: Tensor) -> None:
        """Copy the local sums into a buffer; they stay as they are."""

    def norm_of(self, buffer: Tensor) -> float:
        """L2 norm of the local gradient sums, just packed into this buffer. Waits for the device.

        Not finite where an element or the loss is not, or does not fit the buffer's numbers.
        """

    def read_totals(self, buffer: Tensor) -> Totals:
        """What the buffer tells beside the gradients."""

    def unpack(self, buffer: Tensor, factor: float = 1.0) -> Totals:
        """Write the buffer's gradients, times a factor, over `main_grad` of every parameter."""

    def local_totals(self) -> Totals:
        """What has been computed here since `reset`. Waits for the device."""

    def local_sums(self) -> Sequence[Tensor]:
        """The local gradient sums themselves, flat. Whoever changes them changes what is packed."""

    def poison(self) -> None:
        """Add a gradient that is not a number."""


def make_gradient_sums(config: RunConfig, chunks: Sequence[Chunk], device: torch.device) -> GradientSums:
    """The kind of sums that `reduce.mode` asks for."""
    if config.reduce.mode == "fast":
        return FloatSums(chunks, device)
    num_tokens = config.train.micro_batch_size * config.model.seq_length
    num_microbatches = config.layout.num_groups * config.spare.microbatches_per_shard
    return FixedPointSums(chunks, device, fixed_point(num_tokens, num_microbatches))


class FloatSums:
    """Sums in fp32, where Megatron's buffers accumulate them."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._chunks = chunks
        self._segments = list(_segments(chunks))
        self._size = _size(self._segments)
        self._device = device
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._count = 0

    def reset(self) -> None:
        for chunk in self._chunks:
            chunk.module.zero_grad_buffer()
        self._loss.zero_()
        self._count = 0

    def add_loss(self, loss: Tensor) -> None:
        self._loss += loss

    def add_count(self, num_microbatches: int) -> None:
        self._count += num_microbatches

    def new_buffer(self) -> Tensor:
        return torch.empty(self._size + _NUM_EXTRAS, dtype=torch.float32, device=self._device)

    def pack_into(self, buffer: Tensor) -> None:
        for gradients, start, end in self._segments:
            buffer[start:end].copy_(gradients)
        # Whole numbers are exact in fp32 up to 2^24 microbatches.
        buffer[_COUNT] = self._count
        buffer[_LOSS] = self._loss

    def norm_of(self, buffer: Tensor) -> float:
        # One pass without a copy, at the speed of memory. A norm beyond fp32 counts as not finite.
        norm, loss = torch.stack([torch.linalg.vector_norm(buffer[:-_NUM_EXTRAS]), buffer[_LOSS]]).tolist()
        return norm if math.isfinite(loss) else math.inf

    def read_totals(self, buffer: Tensor) -> Totals:
        count, loss = buffer[-_NUM_EXTRAS:].tolist()
        return Totals(num_microbatches=round(count), loss_sum=loss)

    def unpack(self, buffer: Tensor, factor: float = 1.0) -> Totals:
        for gradients, start, end in self._segments:
            torch.mul(buffer[start:end], factor, out=gradients)
        return self.read_totals(buffer)

    def local_totals(self) -> Totals:
        return Totals(num_microbatches=self._count, loss_sum=float(self._loss))

    def local_sums(self) -> Sequence[Tensor]:
        return [gradients for gradients, _, _ in self._segments]

    def poison(self) -> None:
        self.local_sums()[0][0] += math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPoint:
    """How values become whole numbers.

    Attributes:
        scale: What a value is multiplied by before it is rounded.
        largest: The largest product that may be summed.
    """

    scale: float
    largest: float


def fixed_point(num_tokens: int, num_microbatches: int) -> FixedPoint:
    """The finest fixed point in which the sum over a global batch cannot overflow.

    With T the tokens of a microbatch and B the microbatches of a global batch, each rounded up to a power of two,
    a microbatch may reach T x 2^12 in an element, and B of those must stay within 2^62 after scaling:
    scale = 2^62 / (B x T x 2^12). All are powers of two, so that scaling is exact and only the rounding is not.

    >>> fixed_point(128, 16).scale == 2.0**39
    True
    """
    tokens_power = 2.0 ** math.ceil(math.log2(num_tokens))
    largest = 2.0**62 / 2.0 ** math.ceil(math.log2(num_microbatches))
    return FixedPoint(scale=largest / (tokens_power * 2.0**_LARGEST_PER_TOKEN_BITS), largest=largest)


class FixedPointSums:
    """Sums of whole numbers: each microbatch's gradient times a power of two, rounded to int64.

    Integer addition does not depend on its order, so the sums, here and over groups, are the same bits whoever
    computed which microbatch when. The gradient of a microbatch is caught before Megatron adds it to its buffer.
    """

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, fixed: FixedPoint) -> None:
        self._chunks = chunks
        self._segments = list(_segments(chunks))
        self._fixed = fixed
        self._sums = torch.zeros(_size(self._segments) + _NUM_EXTRAS, dtype=torch.int64, device=device)
        # Of single microbatches. Kept on the device, so that looking for an overflow waits for it once per attempt.
        self._largest = torch.zeros((), dtype=torch.float32, device=device)
        for parameter, start, end in _parameters(chunks):
            self._watch(parameter, self._sums[start:end].view(parameter.shape))

    def reset(self) -> None:
        for chunk in self._chunks:
            chunk.module.zero_grad_buffer()
        self._sums.zero_()
        self._largest.zero_()

    def add_loss(self, loss: Tensor) -> None:
        self._add(self._sums[_LOSS], loss)

    def add_count(self, num_microbatches: int) -> None:
        self._sums[_COUNT] += num_microbatches

    def new_buffer(self) -> Tensor:
        return torch.empty_like(self._sums)

    def pack_into(self, buffer: Tensor) -> None:
        buffer.copy_(self._sums)

    def norm_of(self, buffer: Tensor) -> float:
        if not float(self._largest) <= self._fixed.largest:  # in this form it catches NaN too
            return math.inf
        # Whole numbers have no norm in torch; piece by piece, floats of them stay in the cache.
        pieces = buffer[:-_NUM_EXTRAS].split(_PIECE)
        squares = [torch.linalg.vector_norm(piece.float()).double() ** 2 for piece in pieces]
        return math.sqrt(torch.stack(squares).sum().item()) / self._fixed.scale

    def read_totals(self, buffer: Tensor) -> Totals:
        count, loss = buffer[-_NUM_EXTRAS:].tolist()
        return Totals(num_microbatches=count, loss_sum=loss / self._fixed.scale)

    def unpack(self, buffer: Tensor, factor: float = 1.0) -> Totals:
        for gradients, start, end in self._segments:
            gradients.copy_(buffer[start:end]).mul_(factor / self._fixed.scale)
        return self.read_totals(buffer)

    def local_totals(self) -> Totals:
        return self.read_totals(self._sums)

    def local_sums(self) -> Sequence[Tensor]:
        return [self._sums[:-_NUM_EXTRAS]]

    def poison(self) -> None:
        self._add(self._sums[:1], torch.full((1,), math.nan, device=self._sums.device))

    def _watch(self, parameter: torch.nn.Parameter, sums: Tensor) -> None:
        # A hook on a leaf runs once per backward pass, with the sum over all uses of the parameter.
        parameter.register_hook(lambda gradient: self._add(sums, gradient))

    def _add(self, sums: Tensor, values: Tensor) -> None:
        scaled = values.detach().float() * self._fixed.scale
        # One pass for both ends, both of which keep a NaN; the largest norm would take twenty times as long.
        lowest, highest = torch.aminmax(scaled)
        torch.maximum(self._largest, torch.maximum(-lowest, highest), out=self._largest)
        sums += scaled.round_().to(torch.int64)


def _segments(chunks: Sequence[Chunk]) -> Iterator[tuple[Tensor, int, int]]:
    """Each of Megatron's gradient buffers, with its place in the flat buffer."""
    end = 0
    for chunk in chunks:
        for buffer in chunk.module.buffers:
            start, end = end, end + buffer.grad_data.numel()
            yield buffer.grad_data, start, end


def _parameters(chunks: Sequence[Chunk]) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Each parameter, with the place of its gradient in the flat buffer."""
    offset = 0
    for chunk in chunks:
        for buffer in chunk.module.buffers:
            for parameter, (start, end, _) in buffer.param_index_map.items():
                yield parameter, offset + start, offset + end
            offset += buffer.grad_data.numel()


def _size(segments: Sequence[tuple[Tensor, int, int]]) -> int:
    return sum(end - start for _, start, end in segments)
