"""The training loop: the controller decides, the executors carry out its actions."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import (
    Action,
    AdmitGroups,
    AppendEntry,
    AttemptEvaluation,
    AttemptFinish,
    AttemptReduce,
    AwaitHosts,
    BuildCommunicator,
    ChangePaces,
    ComputeAudits,
    ComputePatch,
    ComputeStep,
    DrainGroups,
    GatherParams,
    LoadCheckpoint,
    ReadEntry,
    ReadVotes,
    RefuseCheckpoint,
    ReportEvaluation,
    SaveCheckpoint,
    SaveDispute,
    StartRepairs,
    StopWipeOut,
    TakeSnapshot,
    UpdateModel,
)
from spare_megatron.core.log.events import EndRequested, Event, RunStarted
from spare_megatron.rank.evaluation import Evaluation
from spare_megatron.rank.group_audits import GroupAudits
from spare_megatron.rank.group_log import GroupLog
from spare_megatron.rank.group_saves import GroupSaves
from spare_megatron.rank.reduction import Reduction
from spare_megatron.rank.state_restorer import StateRestorer
from spare_megatron.rank.step_executor import StepExecutor
from spare_megatron.stacking.layout import Member
from spare_megatron.state.stacked.stacked_state import StackedState
from spare_megatron.voting.log_follower import Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Executors:
    """The objects that carry out the controller's actions on one rank; `stacked` only with stacked optimizer state."""

    steps: StepExecutor
    audits: GroupAudits
    evaluation: Evaluation
    reduction: Reduction
    log: GroupLog
    restorer: StateRestorer
    saves: GroupSaves
    stacked: StackedState | None


def start(controller: Controller) -> deque[Action]:
    return deque(controller.handle(RunStarted(), now_s=time.monotonic()))


def train(
    member: Member,
    controller: Controller,
    executors: Executors,
    actions: deque[Action],
    is_end_asked: Callable[[], bool],
) -> Stop | DrainGroups:
    """Executes actions until the controller stops the run, or `member` leaves it. Returns the action that says so.

    `actions` are the first ones. Once `is_end_asked` returns true, the run ends with the step under way.
    """
    while True:
        if is_end_asked():
            controller.handle(EndRequested(), now_s=time.monotonic())
        action = actions.popleft()
        if isinstance(action, Stop):
            executors.steps.stop(action.step, is_final=not isinstance(action, StopWipeOut) or action.is_final)
            return action
        if isinstance(action, DrainGroups) and member in action.members:
            executors.steps.stop(action.step, is_final=False)
            return action
        for event in _execute(action, controller, executors):
            actions.extendleft(reversed(controller.handle(event, now_s=time.monotonic())))


def _execute(action: Action, controller: Controller, executors: Executors) -> list[Event]:
    """Returns the events that the action causes. The cases are in the order of a step."""
    match action:
        case ComputeStep():
            executors.steps.compute_step(action, len(controller.members))
        case BuildCommunicator():
            executors.reduction.build_communicator(action)
        case AttemptReduce():
            return executors.reduction.attempt(action)
        case ReadVotes():
            return executors.log.read_votes(action)
        case AppendEntry():
            executors.log.append_entry(action)
        case ReadEntry(index=index):
            return executors.log.read_entry(index)
        case AwaitHosts():
            return executors.log.await_hosts(action)
        case ComputePatch():
            executors.steps.compute_patch(action)
        case ChangePaces():
            executors.log.change_paces(action)
        case ComputeAudits():
            executors.audits.compute(action)
        case DrainGroups():
            pass  # of other groups
        case AdmitGroups():
            executors.restorer.admit(action)
        case LoadCheckpoint():
            executors.restorer.restart(action)
        case UpdateModel():
            executors.steps.update_model(action)
        case SaveCheckpoint():
            executors.saves.save(action)
        case RefuseCheckpoint():
            executors.saves.refuse(action)
        case SaveDispute():
            executors.saves.save_dispute(action)
        case TakeSnapshot():
            executors.saves.take_snapshot(action)
        case GatherParams() if executors.stacked is not None:
            executors.stacked.gather_params(action)
        case StartRepairs() if executors.stacked is not None:
            executors.stacked.start_repairs(action)
        case AttemptEvaluation():
            return executors.evaluation.attempt(action)
        case ReportEvaluation():
            executors.evaluation.report(action)
        case AttemptFinish():
            return executors.log.attempt_finish(action)
        case _:
            raise AssertionError(f"this rank cannot execute {action}")
    return []
