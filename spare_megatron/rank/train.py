"""The training loop: the controller decides, the executor carries out its actions."""

import time
from collections import deque
from collections.abc import Callable

from spare_megatron.core.actions import (
    Action,
    AdmitGroups,
    AppendEntry,
    AttemptFinish,
    AttemptReduce,
    BuildCommunicator,
    ComputePatch,
    ComputeStep,
    GatherParams,
    LoadCheckpoint,
    ReadEntry,
    ReadVotes,
    RefuseCheckpoint,
    SaveCheckpoint,
    StartRepairs,
    TakeSnapshot,
    UpdateModel,
)
from spare_megatron.core.controller import Controller
from spare_megatron.core.events import EndRequested, Event, RunStarted
from spare_megatron.rank.executor import GroupExecutor
from spare_megatron.voting.log_follower import Stop


def start(controller: Controller) -> deque[Action]:
    return deque(controller.handle(RunStarted(), now_s=time.monotonic()))


def train(
    controller: Controller, executor: GroupExecutor, actions: deque[Action], is_end_asked: Callable[[], bool]
) -> Stop:
    """Executes actions until the controller stops the run. Returns the stop action, which says why.

    `actions` are the first ones. Once `is_end_asked` returns true, the run ends with the step under way.
    """
    while True:
        if is_end_asked():
            controller.handle(EndRequested(), now_s=time.monotonic())
        action = actions.popleft()
        if isinstance(action, Stop):
            executor.stop(action.step)
            return action
        for event in _execute(action, controller, executor):
            actions.extendleft(reversed(controller.handle(event, now_s=time.monotonic())))


def _execute(action: Action, controller: Controller, executor: GroupExecutor) -> list[Event]:
    """Returns the events that the action causes. The cases are in the order of a step."""
    match action:
        case ComputeStep():
            executor.compute_step(action, len(controller.members))
        case BuildCommunicator(key=key, members=members):
            executor.build_communicator(key, members)
        case AttemptReduce():
            return executor.attempt_reduce(action)
        case ReadVotes():
            return executor.read_votes(action)
        case AppendEntry(index=index, entry=entry):
            executor.append_entry(index, entry)
        case ReadEntry(index=index):
            return executor.read_entry(index)
        case ComputePatch():
            executor.compute_patch(action)
        case AdmitGroups():
            executor.admit(action, controller.head)
        case LoadCheckpoint():
            executor.restart(action, controller.head)
        case UpdateModel(step=step, attempt=attempt, proven=proven):
            executor.copies_proven(proven)
            executor.update_model(step, attempt)
        case SaveCheckpoint():
            executor.save_checkpoint(action)
        case RefuseCheckpoint():
            executor.saves.refuse(action)
        case TakeSnapshot():
            executor.take_snapshot(action)
        case GatherParams():
            executor.gather_params(action)
        case StartRepairs():
            executor.start_repairs(action)
        case AttemptFinish():
            return executor.attempt_finish(action)
        case _:
            raise AssertionError(f"nothing in a run asks for {action} yet")
    return []
