"""What the ranks of a group are asked to do with audited microbatches. Tasks run in the ranks."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.audits.audits import Boundary
from spare_megatron.mcore.trainer import GroupTrainer, OnSlabReady
from spare_megatron.stacking.plans import Microbatch, Numbered
from tests.integration.mcore_group import CPU, staged, work_of

OWN, OTHERS = work_of((0, 0), (0, 1), (0, 2)), work_of((1, 0), (1, 1), (1, 2))
STEP = 3

Found = dict[Microbatch, list[Boundary]]


def computed_on_both_sides(config: RunConfig) -> tuple[bool, bool, Found, Found, Found, list[Numbered]]:
    """One after the other: a step without audits, the same step with one, and the one of the group that is audited.

    Returns whether the first two have the same sums bitwise, whether all buckets became ready in the second, digests of
    both and of the audited microbatches computed again for a dispute, and the microbatches whose losses that found.
    """
    trainer = GroupTrainer(config, CPU)
    plain = _sums(trainer, OWN)
    ready: list[int] = []
    with_audit = _sums(trainer, OWN, [OWN[1]], [OTHERS[2]], lambda _, num_ready: ready.append(num_ready))
    here = _boundaries(trainer, [OWN[1], OTHERS[2]])
    sums = _sums(trainer, OTHERS, [OTHERS[2]], [OWN[1]])
    there = _boundaries(trainer, [OWN[1], OTHERS[2]])
    trainer.audit([OWN[1], OTHERS[2]])  # in the same step, and with lanes each on another one
    is_kept = np.array_equal(sums, staged(trainer).numpy())
    again = _boundaries(trainer, [OWN[1], OTHERS[2]])
    is_ready = ready[-1] == len(trainer.slabs[0].gradients.buckets)
    is_unchanged = is_kept and np.array_equal(plain, with_audit)
    return is_unchanged, is_ready, here, there, again, [*trainer.audited_losses()]


def spoiled(
    config: RunConfig, rank: int, spoil: Callable[[GroupTrainer], None]
) -> tuple[list[Boundary], list[Boundary]]:
    """Digests of one microbatch, before and after a rank has been spoiled."""
    trainer = GroupTrainer(config, CPU)
    _sums(trainer, OWN, [OWN[0]])
    before = trainer.passes.boundaries(OWN[0])
    if torch.distributed.get_rank() == rank:
        spoil(trainer)
    _sums(trainer, OWN, [OWN[0]])
    return before, trainer.passes.boundaries(OWN[0])


def _sums(
    trainer: GroupTrainer,
    work: Sequence[Microbatch],
    audited: Collection[Microbatch] = (),
    audits: Sequence[Microbatch] = (),
    on_ready: OnSlabReady | None = None,
) -> np.ndarray:
    trainer.begin_step(STEP)
    trainer.compute(work, on_ready, audited=audited, audits=audits)
    return staged(trainer).numpy().copy()


def _boundaries(trainer: GroupTrainer, microbatches: Sequence[Microbatch]) -> Found:
    return {one: trainer.passes.boundaries(one) for one in microbatches}
