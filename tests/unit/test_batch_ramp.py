"""A global batch that grows: sizes of steps, what the controller deals, terms, sizes and figures."""

from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.terms import differences, sequences_before, terms_of
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import ComputeStep
from spare_megatron.core.log.entries import Commit, Entry, Fence, Restart
from spare_megatron.core.log.events import EntryRead, RunStarted
from spare_megatron.journal.files import Journal
from spare_megatron.journal.lines import Line
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.batch_ramp import BatchRamp
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.tools.simulate.calibrate import calibrate
from spare_megatron.voting.log_follower import controller_setup

SIZES = [1, 1, 2, 2, 3, 3, 3, 3]
"""Microbatches of a shard in the steps of `CONFIG`."""


def configured(*overrides: str) -> RunConfig:
    ramp = ["ramp_start=1", "ramp_steps=4", "microbatches_per_shard=3"]
    return load_run_config(None, [*(f"spare.{setting}" for setting in ramp), "train.steps=8", *overrides]).config


CONFIG = configured()


@given(start=st.integers(1, 5), increment=st.integers(1, 4), increases=st.integers(0, 6), steps=st.integers(0, 30))
def test_increases_are_equally_far_apart_and_sums_are_those_of_the_steps(
    start: int, increment: int, increases: int, steps: int
) -> None:
    ramp = BatchRamp(largest=start + increment * increases, start=start, increment=increment, steps=steps)
    sizes = [ramp.at(step) for step in range(40)]
    assert [ramp.before(step) for step in range(41)] == [0, *accumulate(sizes)]
    first = [Fraction(k * steps, increases) for k in range(1, increases + 1)]
    assert sizes == [start + increment * sum(step >= when for when in first) for step in range(40)]


def test_a_constant_batch_is_a_ramp_without_steps() -> None:
    assert RunConfig().spare.ramp == BatchRamp.constant(4)
    assert [BatchRamp.constant(4).at(step) for step in (0, 1, 10**9)] == [4, 4, 4]
    assert BatchRamp.constant(4).before(10**9) == 4 * 10**9


@pytest.mark.parametrize("granularity", ["microbatch", "stack"])
def test_every_step_deals_its_own_batch_also_after_losses_and_restarts(granularity: str) -> None:
    controller = Controller(
        controller_setup(configured(f"spare.granularity={granularity}", "checkpoint.max_restarts=1"))
    )
    controller.handle(RunStarted(), now_s=0.0)
    entries: list[Entry] = [Commit(step=step, attempt=step) for step in range(3)]
    fences = [Fence(group=GroupId(group), incarnation=0, reason="") for group in range(4)]
    back = tuple(Member(GroupId(group), 1) for group in range(4))
    entries += [fences[2], Commit(step=3, attempt=3), *fences[:2], fences[3], Restart(step=1, members=back)]
    entries += [Commit(step=step, attempt=4 + step) for step in range(1, 7)]
    found = []
    for entry in entries:
        for action in controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0):
            if isinstance(action, ComputeStep):
                owners = action.plan.work.owners
                assert (owners >= 0).all()
                assert set(np.unique(owners).tolist()) == {int(group) for group in controller.members}
                found.append((action.plan.step, owners.shape))
    assert found == [(step, (4, SIZES[step])) for step in (1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7)]


def test_sizes_count_the_sequences_of_the_ramp() -> None:
    sizes = run_sizes(CONFIG)
    assert (sizes.sequences_per_step, sizes.tokens_per_step) == (4 * 3 * 2, 4 * 3 * 2 * 64)
    assert sizes.tokens == 4 * sum(SIZES) * 2 * 64
    assert differences(terms_of(CONFIG), configured("spare.ramp_steps=5")) == []


def run_record(config: RunConfig) -> RunRecord:
    return RunRecord(**terms_of_run(config), faults=[])


def test_figures_of_a_run_are_those_of_each_steps_batch() -> None:
    run = run_record(CONFIG)
    assert [run.microbatches_of_a_shard(step) for step in range(8)] == SIZES
    assert [sequences_before(CONFIG, step) for step in range(9)] == [0, *accumulate(4 * 2 * size for size in SIZES)]
    assert [run.size_of_step(step) for step in (0, 2, 7)] == [1 / 3, 2 / 3, 1.0]
    constant = run_record(RunConfig())
    assert constant.size_of_step(5) == 1.0


def test_costs_are_not_measured_by_a_run_whose_batch_grows() -> None:
    journal = Journal(lines=(Line(source="driver", at_s=0.0, record=run_record(CONFIG)),))
    with pytest.raises(ValueError, match="grew from 1 to 3 microbatches per shard, and the simulator has one batch"):
        calibrate(journal)
