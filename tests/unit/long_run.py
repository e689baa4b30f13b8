"""The history of a long run, made up in a moment: nothing is simulated."""

import dataclasses

import numpy as np

from spare_megatron.journal.files import Line
from spare_megatron.journal.records import CheckpointRecord, LossRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.tools.report.history import CommittedSteps, History
from tests.unit.measured_run import valid_history

HIGHEST_LOSS = 99.0


def long_history(num_steps: int, num_groups: int) -> History:
    """A run that loses group 0 in every tenth step and has it back in the next one.

    Its loss has one peak. It is saved every ten steps.
    """
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
        tokens_per_step=4096,
        flops_per_step=1e15,
        peak_tflops=989.0,
    )
    run_state = RunState()
    run_state.add_line(Line(source="driver", at_s=0.0, record=run))
    rng = np.random.default_rng(1)
    loss = rng.normal(size=num_steps)
    loss[num_steps // 3] = HIGHEST_LOSS
    all_groups, hit = frozenset(range(num_groups)), frozenset({0})
    lost = [hit if index % 10 == 0 else frozenset() for index in range(num_steps)]
    steps = CommittedSteps(
        step=np.arange(num_steps),
        ended_s=np.cumsum(rng.random(num_steps)),
        loss=loss,
        grad_norm=loss,
        learning_rate=np.linspace(1e-3, 1e-5, num_steps),
        is_undone=np.zeros(num_steps, np.bool_),
        members=[all_groups - gone if gone else all_groups for gone in lost],
        num_ranks=np.full(num_steps, float(num_groups)),
        lost=lost,
        step_s=np.broadcast_to(rng.random((num_steps, 1)).astype(np.float32), (num_steps, num_groups)),
        load=np.broadcast_to(rng.integers(1, 9, (num_steps, 1)).astype(np.float32), (num_steps, num_groups)),
    )
    losses = [
        (float(index), LossRecord(group=0, rank=0, cause="killed", entry_index=index))
        for index in range(0, num_steps, 10)
    ]
    saved = [
        CheckpointRecord(group=0, step=step, outcome="saved", reason="", num_bytes=1, stall_s=0.1, write_s=1.0)
        for step in range(10, num_steps + 1, 10)
    ]
    checkpoints = [(float(steps.ended_s[record.step - 1]), record) for record in saved]
    history = valid_history(run_state)
    return dataclasses.replace(history, steps=steps, losses=losses, checkpoints=checkpoints)
