"""Tasks of the ranks of groups whose pipelines have other lengths than those of other groups."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.gradients.gradients import Totals
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.stacking.plans import Microbatch
from spare_megatron.stacking.slabs import Slabs
from tests.integration.mcore_group import CPU, sums_of


def compute_in_slabs(
    config: RunConfig, slabs: Slabs, *calls: Sequence[Microbatch]
) -> tuple[list[int], tuple[Totals, dict[str, Any]]]:
    """The numbers of this rank's chunks, and as `mcore_group.compute_sums`."""
    trainer = GroupTrainer(config, CPU, slabs=slabs)
    return [chunk.stage for chunk in trainer.chunks], sums_of(trainer, calls)


def digests_of_gradients(
    _config: RunConfig, slabs: Slabs, variants: Mapping[str, RunConfig], *calls: Sequence[Microbatch]
) -> dict[str, dict[str, str]]:
    """For each variant the SHA-256 of every parameter's gradient that is not zero."""
    found = {}
    for variant, config in variants.items():
        _, (_, parameters) = compute_in_slabs(config, slabs, *calls)
        gradients = {name: gradient for name, (_, gradient, _) in parameters.items() if gradient.any()}
        found[variant] = {name: hashlib.sha256(one.tobytes()).hexdigest() for name, one in gradients.items()}
    return found
