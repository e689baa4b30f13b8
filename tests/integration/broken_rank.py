"""Ranks with a fault of the program: what runs in the ranks' processes instead of `run_rank`."""

import os
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from spare_megatron.core.log.actions import UpdateModel
from spare_megatron.mcore import trainer
from spare_megatron.mcore.model import program
from spare_megatron.mcore.model.pipeline import Item, Pipeline
from spare_megatron.mcore.model.training_samples import Corpus
from spare_megatron.process.reports import ExitCode, RankRaised
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import assembly, rank
from spare_megatron.rank.step_executor import StepExecutor
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


class _Unconnected(StepExecutor):
    """Loses its connection to the control store in step 1."""

    def compute_step(self, action: Any, num_alive: int) -> None:
        super().compute_step(action, num_alive)
        if action.plan.step == 1:
            raise StoreLost("the control store does not answer")


class _Diverging(StepExecutor):
    """Has a parameter changed behind its back before the update of step 1, as a bit flip does."""

    def update_model(self, action: UpdateModel) -> None:
        if action.step == 1:
            named = next(iter(self._ctx.trainer.parameters_named()))
            named.parameter.data.view(-1)[0] += 1.0
        super().update_model(action)


class _Outlived(StepExecutor):
    """Rank 1 raises in step 1 and takes its time to end, so that the end of rank 0, which lost it, is seen first."""

    def __init__(self, ctx: RankContext, **parts: Any) -> None:
        super().__init__(ctx, **parts)
        self._has_raised = ctx.spec.run_dir / "has-raised"

    def compute_step(self, action: Any, num_alive: int) -> None:
        super().compute_step(action, num_alive)
        if action.plan.step != 1:
            return
        if self._ctx.agreement.is_leader:
            while not self._has_raised.exists():
                time.sleep(0.01)
            os._exit(ExitCode.GROUP_BROKEN)
        self._ctx.send(RankRaised(group=GroupId(BROKEN_GROUP), rank=1, traceback="Traceback\nValueError: of rank 1"))
        self._has_raised.touch()
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
            assembly.StepExecutor = _Outlived
        else:
            assembly.StepExecutor = _Unconnected if fault == "unconnected" else _Diverging
    rank.run_rank(spec, reports)


forgetful = partial(run_broken_rank, "forgetful")
unreadable = partial(run_broken_rank, "unreadable")
unconnected = partial(run_broken_rank, "unconnected")
diverging = partial(run_broken_rank, "diverging")
elsewhere = partial(run_broken_rank, "elsewhere")
outlived = partial(run_broken_rank, "outlived")
