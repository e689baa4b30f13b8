"""The gradients of one rank in the parts that go to different groups."""

from collections import Counter

import numpy as np
import torch

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.gradients.flat_gradients import flat_parameters, needed_everywhere
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import CPU, agreed_loss, all_work
from tests.integration.stacked_groups import stacked


def norms_both_ways(config: RunConfig) -> tuple[float, float, dict[str, float], dict[str, float], int]:
    """The norm of one step's gradients by the squares of parts, that of all of them, what this rank adds to the norms
    of the parts of the model, both ways, and how many parts there are.
    """
    trainer = GroupTrainer(config, CPU)
    assert_every_element_is_in_the_part_of_its_partition(trainer)
    trainer.begin_step(0)
    trainer.compute(all_work(config))
    sums, parts = trainer.slabs[0].gradients, trainer.gradient_parts()
    squares: Counter[str] = Counter()
    for bucket, of_bucket in enumerate(parts):
        staged = sums.stage(bucket, sums.new_staging())
        for part in of_bucket:
            for place, name in part.counted:
                squares[name] += float(sums.squares(staged[place]))
        sums.on_summed(bucket, staged)
    result = trainer.update(agreed_loss(trainer), squares)
    of_model = [result.figures, trainer._figures(None, 1.0)]
    norms = [{key: value for key, [value] in one.items() if "grad_norm/" in key} for one in of_model if one]
    return result.grad_norm, stacked(trainer).step()[0], *norms, sum(map(len, parts))


def assert_every_element_is_in_the_part_of_its_partition(trainer: GroupTrainer) -> None:
    no_group, all_groups = -1, -2
    flat = list(flat_parameters(trainer.chunks))
    everywhere = needed_everywhere(trainer.chunks, trainer.process_groups)
    expected = np.full(trainer.slabs[0].gradients.buckets[-1].stop, no_group)
    partitions = stacked(trainer).partitions
    starts = {item.parameter: item.start for item in flat}
    for number in partitions.numbers:
        for fragment in partitions.fragments(number, slice(0, partitions.length(number))):
            start = starts[fragment.parameter]
            owner = all_groups if fragment.parameter in everywhere else number
            expected[start + fragment.start : start + fragment.stop] = owner
    found = np.full_like(expected, no_group)
    for bucket, parts in zip(trainer.slabs[0].gradients.buckets, trainer.gradient_parts(), strict=True):
        for part in parts:
            place = found[bucket.start : bucket.stop][part.place]
            assert (place == no_group).all()
            assert part.place.stop - part.place.start == len(place) > 0
            place[:] = all_groups if part.number is None else part.number
            assert all(part.place.start <= one.start < one.stop <= part.place.stop for one, _ in part.counted)
    assert np.array_equal(found, expected)
    assert torch.distributed.get_world_size() > 1
    assert (found == all_groups).any(), "tied embeddings, or what tensor-parallel ranks share"
