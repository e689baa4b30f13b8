"""The history of a long run, made up in a moment: nothing is simulated."""

import dataclasses

import numpy as np

from spare_megatron.journal.lines import Line
from spare_megatron.journal.records import RunRecord
from spare_megatron.journal.standing import Standing
from spare_megatron.report.history import History, Loss, Steps, history_of

HIGHEST_LOSS = 99.0


def long_history(num_steps: int, num_groups: int) -> History:
    """A run that loses group 0 in every tenth step and has it back in the next one. Its loss has one peak."""
    run = RunRecord(
        name="long",
        num_groups=num_groups,
        ranks_per_group=1,
        redundancy=2,
        microbatches_per_shard=4,
        num_steps=num_steps,
        placement="golomb",
        granularity="microbatch",
        reduce_mode="fast",
        faults=[],
    )
    standing = Standing()
    standing.take(Line(source="driver", at_s=0.0, record=run))
    rng = np.random.default_rng(1)
    loss = rng.normal(size=num_steps)
    loss[num_steps // 3] = HIGHEST_LOSS
    everybody, hit = frozenset(range(num_groups)), frozenset({0})
    lost = [hit if index % 10 == 0 else frozenset() for index in range(num_steps)]
    steps = Steps(
        step=np.arange(num_steps),
        ended_s=np.cumsum(rng.random(num_steps)),
        loss=loss,
        grad_norm=loss,
        is_undone=np.zeros(num_steps, np.bool_),
        members=[everybody - gone if gone else everybody for gone in lost],
        lost=lost,
        step_s=np.broadcast_to(rng.random((num_steps, 1)).astype(np.float32), (num_steps, num_groups)),
        load=np.broadcast_to(rng.integers(1, 9, (num_steps, 1)).astype(np.float32), (num_steps, num_groups)),
    )
    losses = [
        Loss(found_s=float(index), group=0, rank=0, cause="killed", pending="", is_given_up=False)
        for index in range(0, num_steps, 10)
    ]
    return dataclasses.replace(history_of(standing, "valid", now_s=0.0), steps=steps, losses=losses)
