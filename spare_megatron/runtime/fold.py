"""The controller of a run, and what it makes of a whole log."""

from spare_megatron.config.schema import RunConfig
from spare_megatron.control.decision_log import DecisionLog
from spare_megatron.core.controller import Controller, ControllerSetup
from spare_megatron.core.messages import EntryRead, FinishRun, RunStarted, StopHalted, StopWipeOut, decode_entry
from spare_megatron.core.placement import make_placement

Stop = FinishRun | StopWipeOut | StopHalted


def controller_setup(config: RunConfig) -> ControllerSetup:
    """What is fixed for the run."""
    spare = config.spare
    return ControllerSetup(
        placement=make_placement(spare.placement, config.layout.num_groups, spare.redundancy, spare.groups_per_domain),
        microbatches_per_shard=spare.microbatches_per_shard,
        num_steps=config.train.steps,
        granularity=spare.granularity,
    )


def stop_in(log: DecisionLog, setup: ControllerSetup, timeout_s: float) -> Stop | None:
    """How the log ends a run, for when no group is left that could have read it; None if it does not."""
    controller = Controller(setup)
    controller.handle(RunStarted(), now_s=0.0)
    while log.has(controller.head):
        entry = decode_entry(log.wait(controller.head, timeout_s))
        for action in controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0):
            if isinstance(action, Stop):
                return action
    return None
