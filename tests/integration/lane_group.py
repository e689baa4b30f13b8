"""What ranks of a group with lanes are asked to do for tests of the optimizer state that lanes divide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from zlib import crc32

import torch
import torch.distributed as dist

from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.pieces import Piece
from spare_megatron.mcore.gradients.flat_gradients import (
    FlatSpace,
    ScatterRange,
    flat_parameters,
    scatter_ranges,
    segments,
    sum_inside_group,
)
from spare_megatron.mcore.gradients.host_copies import HostCopies
from spare_megatron.mcore.group_checkpoint import AnyOptimizer, GroupState, load_checkpoint
from spare_megatron.mcore.model import cpu
from spare_megatron.mcore.model.model import Chunk, build_chunks
from spare_megatron.mcore.model.process_groups import GroupCollection, build_process_groups
from spare_megatron.mcore.model.transformer import transformer_config
from spare_megatron.mcore.optimizer.divided_optimizer import DividedOptimizer
from spare_megatron.mcore.optimizer.optimizer import Optimizer
from spare_megatron.mcore.optimizer.parameters import named_parameters
from spare_megatron.mcore.state import IncomingState, outgoing_state
from tests.integration.mcore_group import CPU

STRIP = 1000
"""Elements of a strip: several ranges, of which the last is divided unevenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A rank's model with one of the two optimizers."""

    chunks: Sequence[Chunk]
    groups: GroupCollection
    optimizer: AnyOptimizer


def both_sides(config: RunConfig) -> tuple[Side, Side]:
    """This rank with the state that lanes divide, and with the whole of it as without other lanes."""
    cpu.install()
    groups = build_process_groups(config.parallel, CPU, timedelta(seconds=60))
    return divided(config, groups), whole(config, groups)


def divided(config: RunConfig, groups: GroupCollection, strip_elements: int = STRIP) -> Side:
    chunks = build_chunks(config, transformer_config(config, CPU), groups, CPU)
    ranges = tuple(ranges_of(chunks, groups, strip_elements))
    space = FlatSpace(segments=(), ranges=ranges, lanes=(groups.lanes,) * len(ranges), own_segments=())
    optimizer = DividedOptimizer(config, groups, [(chunks, space)])
    return Side(chunks=chunks, groups=groups, optimizer=optimizer)


def whole(config: RunConfig, groups: GroupCollection) -> Side:
    chunks = build_chunks(config, transformer_config(config, CPU), groups, CPU)
    return Side(chunks=chunks, groups=groups, optimizer=Optimizer(config, chunks, groups))


def ranges_of(chunks: Sequence[Chunk], groups: GroupCollection, strip_elements: int) -> Sequence[ScatterRange]:
    lane, num_lanes = groups.lanes.rank(), groups.lanes.size()
    shared = [ScatterRange(start=one.start, stop=one.stop, lane=lane, num_lanes=num_lanes) for one in segments(chunks)]
    return scatter_ranges(shared, strip_elements)


def set_gradients(side: Side, step: int) -> None:
    """Gradients of this step, the same in all lanes; with divided state nothing but NaN outside the own strips."""
    for chunk in side.chunks:
        for named in named_parameters([chunk]):
            seed = crc32(f"{step} {named.name} {chunk.stage} {side.groups.tp.rank()}".encode())
            random = torch.Generator().manual_seed(seed)
            named.main_grad.copy_(torch.randn(named.main_grad.shape, generator=random) * 10.0 ** (step % 3 - 2))
    if isinstance(side.optimizer, DividedOptimizer):
        own = [range(*strip) for strip in side.optimizer.strips(side.chunks)]
        for flat in flat_parameters(side.chunks):
            is_own = torch.zeros(len(flat), dtype=torch.bool)
            for strip in own:
                is_own[max(0, strip.start - flat.start) : max(0, strip.stop - flat.start)] = True
            flat.gradients.masked_fill_(~is_own, math.nan)


def update(side: Side, step: int) -> tuple[float, float]:
    set_gradients(side, step)
    if isinstance(side.optimizer, DividedOptimizer):
        side.optimizer.gather_gradients()
    sum_inside_group(side.chunks, side.groups)
    return side.optimizer.step()


def update_both_ways(config: RunConfig, num_steps: int) -> list[tuple[tuple[float, float], tuple[float, float], float]]:
    """Of each step what both updates reported, and the largest difference between a parameter of both."""
    ours, theirs = both_sides(config)
    found = []
    for step in range(num_steps):
        reported = update(ours, step), update(theirs, step)
        one, other = (torch.cat([values.flatten().float() for values in _parameters(side)]) for side in (ours, theirs))
        found.append((*reported, float((one - other).abs().max())))
    return found


def _parameters(side: Side) -> list[torch.Tensor]:
    return [named.parameter.detach() for named in named_parameters(side.chunks)]


def carry_over(config: RunConfig, folder: Path, num_steps: int) -> dict[str, bool]:
    """Whether parameters are the same two updates later, by every way in which another rank or run takes the state."""
    ours, theirs = both_sides(config)
    for step in range(num_steps):
        update(ours, step)
        update(theirs, step)
    groups = ours.groups
    of_lanes, of_whole = _saved(ours, folder / "lanes"), _saved(theirs, folder / "whole")
    others = {
        "rejoin": _handed_over(ours, divided(config, groups)),
        "checkpoint": _loaded(of_lanes, divided(config, groups)),
        "other strips": _loaded(of_lanes, divided(config, groups, strip_elements=777)),
        "to whole state": _loaded(of_lanes, whole(config, groups)),
        "from whole state": _loaded(of_whole, divided(config, groups)),
    }
    for side in (ours, *others.values()):
        for step in range(num_steps, num_steps + 2):
            update(side, step)
    expected = _parameters(ours)
    return {name: all(map(torch.equal, expected, _parameters(side))) for name, side in others.items()}


def _handed_over(donor: Side, newcomer: Side) -> Side:
    outgoing = outgoing_state(donor.chunks, donor.optimizer)
    incoming = IncomingState(outgoing.description, newcomer.chunks, newcomer.optimizer)
    everything = Piece(0, outgoing.tensors.num_bytes)
    with incoming.tensors.writing() as writer:
        writer.room(everything.size)[:] = outgoing.tensors.read(everything)
        writer.write(everything)
    incoming.install()
    return newcomer


def _saved(side: Side, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    state = GroupState(side.chunks, side.optimizer, side.groups, HostCopies(CPU))
    state.copy()
    state.write(folder, dist.group.WORLD, lambda: None)
    return folder


def _loaded(folder: Path, side: Side) -> Side:
    dist.barrier()
    load_checkpoint(folder, side.chunks, side.optimizer, side.groups, lambda: None)
    return side
