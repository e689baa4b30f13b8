"""The outer step that joins sites: what a rank holds for it, what it sends, and the arithmetic of its result.

With start x0 and momentum v of a round, values x_s and weights w_s of its sites, rate a and momentum factor b, in fp64
in the order of site numbers (DiLoCo, arXiv 2311.08105, with Nesterov's momentum):

    mean = sum(w_s x_s) / sum(w_s);  v' = b v + (x0 - mean);  x' = (1 - a) x0 + a mean - a b v'

x' = mean if a = 1 and b = 0, so that one site alone goes on with its own bits. With 8 or 4 bits x_s is x0 plus the
difference as its sender has rounded it, at all sites. Blocks begin anew with each parameter: copies of one parameter on
several ranks are rounded alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from torch import Tensor

from spare_megatron.core.outer.entries import Revision, SiteId
from spare_megatron.mcore.gradients.digests import TensorsDigest
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.optimizer.parameters import named_parameters, optimized

BLOCK = 256
"""Numbers with one scale."""
_PIECE = BLOCK << 14
"""Numbers that are computed at a time: fp64 copies of a whole parameter may find no room."""


def exchanged_bytes(sizes: Sequence[int], bits: int) -> int:
    """Bytes of a message with the differences of parameters of these sizes.

    >>> exchanged_bytes([256, 1], 8), exchanged_bytes([256, 1], 4), exchanged_bytes([256, 1], 32)
    (265, 137, 1028)
    """
    if bits == 32:
        return 4 * sum(sizes)
    return sum(4 * -(-size // BLOCK) + -(-size * bits // 8) for size in sizes)


def rounded(difference: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales of the blocks of a flat fp32 difference, and its numbers in units of them: int8, or two in a byte."""
    largest = 2 ** (bits - 1) - 1
    blocks = torch.nn.functional.pad(difference, (0, -len(difference) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) / largest
    units = torch.where(scales > 0, scales, torch.ones_like(scales))  # a difference may be too small for a scale
    numbers = (blocks / units[:, None]).round().clamp(-largest, largest).to(torch.int8)
    numbers = (numbers * (scales > 0)[:, None]).view(-1)[: len(difference)]
    if bits == 8:
        return scales, numbers.view(torch.uint8)
    pairs = torch.nn.functional.pad(numbers + 8, (0, len(numbers) % 2)).to(torch.uint8).view(-1, 2)
    return scales, pairs[:, 0] | (pairs[:, 1] << 4)


class SiteValues:
    """The values of a site's parameters, as they are sent: themselves, or scales of all, then differences of all."""

    def __init__(self, content: Tensor, sizes: Sequence[int], bits: int) -> None:
        """`content`: bytes. Raises ValueError if they are not of so many numbers."""
        if content.numel() != exchanged_bytes(sizes, bits):
            raise ValueError(f"{content.numel()} bytes of differences, not {exchanged_bytes(sizes, bits)}")
        self._bits = bits
        self._values, self._scales = content, content
        num_scales = 4 * sum(-(-size // BLOCK) for size in sizes)
        if bits != 32:
            self._scales, self._values = content[:num_scales].view(torch.float32), content[num_scales:]
        self._places: list[tuple[int, int]] = []  # first byte and first scale of each parameter
        first = scale = 0
        for size in sizes:
            self._places.append((first, scale))
            first, scale = first + -(-size * bits // 8), scale + -(-size // BLOCK)

    def values(self, index: int, start: Tensor, at: int) -> Tensor:
        """In fp64, from the number `at` of a parameter on; `start`: of these numbers. `at` is a multiple of BLOCK."""
        first, scale = self._places[index]
        first += at * self._bits // 8
        some = self._values[first : first + -(-len(start) * self._bits // 8)]
        if self._bits == 32:
            return some.view(torch.float32).double()
        numbers = some.view(torch.int8)
        if self._bits == 4:
            numbers = torch.stack([some & 15, some >> 4], dim=1).view(-1)[: len(start)].to(torch.int8) - 8
        scales = self._scales[scale + at // BLOCK :][: -(-len(start) // BLOCK)].double()
        return start.double() + numbers.double() * scales.repeat_interleave(BLOCK)[: len(start)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterRule:
    """Rate and momentum factor of the outer step."""

    learning_rate: float
    momentum: float

    def apply(self, start: Tensor, velocity: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """New values and momentum, in fp32; `mean` is in fp64."""
        rate, factor = self.learning_rate, self.momentum
        first = start.double()
        new = (velocity.double() * factor + (first - mean)).float()
        if rate == 1.0 and factor == 0.0:
            return mean.float(), new
        return (first * (1.0 - rate) + mean * rate - new.double() * (rate * factor)).float(), new


class OuterState:
    """Start of the round and momentum of each parameter of a rank, in fp32 in host memory."""

    def __init__(self, chunks: Sequence[Chunk], on_progress: Callable[[], None] = lambda: None) -> None:
        """`on_progress`: called for each parameter while all are computed."""
        self._parameters = [one.parameter for one in named_parameters(chunks)]
        self._on_progress = on_progress
        self.start: dict[torch.nn.Parameter, Tensor] = {}
        self.momentum: dict[torch.nn.Parameter, Tensor] = {}
        self.revision = Revision(0, "")
        """The digest is of all ranks of the group; empty until they have combined theirs."""
        self.weight = 0
        """Microbatches that all groups have computed since `start`."""
        self.num_steps = 0
        """Steps since then, or since a round did not come about."""
        self.begin()

    def begin(self) -> None:
        """The present parameters are the start of the first round."""
        self.revision, self.weight, self.num_steps = Revision(0, ""), 0, 0
        for parameter in self._parameters:
            self.start[parameter] = _flat(parameter).clone()
            self.momentum[parameter] = torch.zeros_like(self.start[parameter])

    def count(self, num_microbatches: int) -> None:
        """Counts a committed step."""
        self.weight += num_microbatches
        self.num_steps += 1

    def sizes(self, chunks: Sequence[Chunk]) -> list[int]:
        return [len(self.start[one.parameter]) for one in named_parameters(chunks)]

    def message(self, chunks: Sequence[Chunk], bits: int) -> Tensor:
        """The bytes of a `SiteValues` with the parameters as they are now."""
        if bits == 32:
            return torch.cat([_flat(one.parameter) for one in named_parameters(chunks)]).view(torch.uint8)
        parts = []
        for one in named_parameters(chunks):
            parts.append(rounded(_flat(one.parameter) - self.start[one.parameter], bits))
            self._on_progress()
        scales = torch.cat([scales for scales, _ in parts]).view(torch.uint8)
        return torch.cat([scales, *(numbers for _, numbers in parts)])

    def result(
        self,
        chunks: Sequence[Chunk],
        messages: Mapping[SiteId, SiteValues],
        weights: Mapping[SiteId, int],
        rule: OuterRule,
    ) -> Tensor:
        """New values of all parameters, then their momentum, of the sites that `weights` names: fp32, flat."""
        sizes = self.sizes(chunks)
        values, momentum = torch.empty(2 * sum(sizes)).chunk(2)
        total, place = float(sum(weights.values())), 0
        for index, one in enumerate(named_parameters(chunks)):
            for at in range(0, sizes[index], _PIECE):
                start = self.start[one.parameter][at : at + _PIECE]
                velocity = self.momentum[one.parameter][at : at + _PIECE]
                terms = (messages[site].values(index, start, at) * float(weights[site]) for site in sorted(weights))
                added = next(terms)  # not to 0, which loses the sign of -0
                for term in terms:
                    added += term
                here = slice(place, place + len(start))
                values[here], momentum[here] = rule.apply(start, velocity, added / total)
                place += len(start)
                self._on_progress()
        return torch.cat([values, momentum])

    def content(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Start and momentum of all parameters, in the order of a `result`; in place."""
        parameters = [one.parameter for one in named_parameters(chunks)]
        return [*(self.start[one] for one in parameters), *(self.momentum[one] for one in parameters)]

    def digest(self, chunks: Sequence[Chunk], result: Tensor | None = None) -> TensorsDigest:
        """Of a result, or of what is held."""
        held = self.content(chunks)
        tensors = held if result is None else result.split([len(one) for one in held])
        return TensorsDigest((str(number), one) for number, one in enumerate(tensors))

    @torch.no_grad()
    def apply(self, chunks: Sequence[Chunk], result: Tensor) -> None:
        """Goes on with a result: parameters, start and momentum."""
        held = self.content(chunks)
        for place, one in zip(held, result.split([len(one) for one in held]), strict=True):
            place.copy_(one)
        for one in named_parameters(chunks):
            updated = optimized(one.parameter)
            updated.copy_(self.start[one.parameter].view(updated.shape))
            if updated is not one.parameter:
                one.parameter.copy_(updated)

    # ---------------------------------------------------------------------------------- in states and checkpoints

    def part(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        return {
            "tensors": dict(enumerate(self.content(chunks))),
            "revision": list(self.revision),
            "weight": self.weight,
            "num_steps": self.num_steps,
        }

    def load_part(self, chunks: Sequence[Chunk], part: Mapping[str, Any]) -> None:
        for number, place in enumerate(self.content(chunks)):
            place.copy_(part["tensors"][number].view(-1))
        self.revision = Revision(*part["revision"])
        self.weight, self.num_steps = part["weight"], part["num_steps"]

    def sharded_part(self, chunks: Sequence[Chunk], model: dict[str, Any]) -> dict[str, Any]:
        """As `part`, each tensor with its place in the whole model, whose `model` is that of Megatron's parameters."""
        parameters = [one.parameter for one in named_parameters(chunks)]
        part, homes = self.part(chunks), get_param_id_to_sharded_param_map(model, parameters)
        for number, one in part["tensors"].items():
            index = number % len(parameters)
            kind = "outer.start" if index == number else "outer.momentum"
            home = one.view(parameters[index].shape)
            part["tensors"][number] = make_sharded_optimizer_tensor(homes[index], home, kind)
        return part

    def named(self, chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
        """What is equal in all groups, for digests of state."""
        yield from ((f"outer {number}", one) for number, one in enumerate(self.content(chunks)))


def _flat(parameter: torch.nn.Parameter) -> Tensor:
    return optimized(parameter).detach().reshape(-1).to("cpu", torch.float32)
