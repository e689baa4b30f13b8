"""Ranks with a fault of the program: what runs in the ranks' processes instead of `run_rank`."""

import os
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from spare_megatron.core.log.actions import ComputeStep, UpdateModel
from spare_megatron.mcore import trainer
from spare_megatron.mcore.model import program
from spare_megatron.mcore.model.pipeline import Item, Pipeline
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.process.reports import ExitCode, RankRaised
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import rank, train_step
from spare_megatron.rank.train_step import Components, compute_step, update_model
from spare_megatron.stacking.layout import GroupId
from spare_megatron.state.rank_context import RankContext
from spare_megatron.store.interface import StoreLost

BROKEN_GROUP = 1


class _Forgetful(Pipeline):
    """Leaves the last microbatch out."""

    def run(self, items: Sequence[Item], *rest: Any, **named: Any) -> None:
        super().run(items[:-1], *rest, **named)


class _Unreadable(Corpus):
    """Has one microbatch that no group can read."""

    def microbatch(self, step: int, number: int) -> dict[str, Any]:
        if (step, number) == (1, BROKEN_GROUP * self._ramp.at(step)):
            raise ValueError("sample 42 of the corpus is damaged")
        return super().microbatch(step, number)


class _Elsewhere(Corpus):
    """Reads other data."""

    def microbatch(self, step: int, number: int) -> dict[str, Any]:
        return super().microbatch(step + 1, number)


def _compute_unconnected(ctx: RankContext, parts: Components, action: ComputeStep) -> None:
    """Loses its connection to the control store in step 1."""
    compute_step(ctx, parts, action)
    if action.plan.step == 1:
        raise StoreLost("the control store does not answer")


def _update_diverging(ctx: RankContext, parts: Components, action: UpdateModel) -> None:
    """Has a parameter changed behind its back before the update of step 1, as a bit flip does."""
    if action.step == 1:
        named = next(iter(ctx.trainer.parameters_named()))
        named.parameter.data.view(-1)[0] += 1.0
    update_model(ctx, parts, action)


def _compute_outlived(ctx: RankContext, parts: Components, action: ComputeStep) -> None:
    """Rank 1 raises in step 1 and takes its time to end, so that the end of rank 0, which lost it, is seen first."""
    compute_step(ctx, parts, action)
    if action.plan.step != 1:
        return
    has_raised = ctx.spec.run_dir / "has-raised"
    if ctx.agreement.is_leader:
        while not has_raised.exists():
            time.sleep(0.01)
        os._exit(ExitCode.GROUP_BROKEN)
    ctx.send(RankRaised(group=GroupId(BROKEN_GROUP), rank=1, traceback="Traceback\nValueError: of rank 1"))
    has_raised.touch()
    time.sleep(60.0)


def run_broken_rank(fault: str, spec: RankSpec, reports: Connection) -> None:
    """Runs a rank with a fault. Give `partial(run_broken_rank, fault)` to `start_run`."""
    if fault == "unreadable":
        program.Corpus = _Unreadable
    elif spec.group == GroupId(BROKEN_GROUP):
        if fault == "forgetful":
            trainer.Pipeline = _Forgetful
        elif fault == "elsewhere":
            program.Corpus = _Elsewhere
        elif fault == "outlived":
            train_step.compute_step = _compute_outlived
        elif fault == "unconnected":
            train_step.compute_step = _compute_unconnected
        else:
            train_step.update_model = _update_diverging
    rank.run_rank(spec, reports)


forgetful = partial(run_broken_rank, "forgetful")
unreadable = partial(run_broken_rank, "unreadable")
unconnected = partial(run_broken_rank, "unconnected")
diverging = partial(run_broken_rank, "diverging")
elsewhere = partial(run_broken_rank, "elsewhere")
outlived = partial(run_broken_rank, "outlived")
