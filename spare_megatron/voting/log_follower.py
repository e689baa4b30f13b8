"""Builds the controller's setup from a configuration, and follows the log of a run from outside."""

from collections.abc import Callable
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.audits_and_evaluations import audit_policy, units_per_shard
from spare_megatron.config.training.terms import step_of
from spare_megatron.core.controller.controller import Controller, ControllerSetup
from spare_megatron.core.controller.restart import RestartLimits
from spare_megatron.core.log.actions import AwaitHosts, FinishRun, StopHalted, StopWipeOut
from spare_megatron.core.log.entries import Restart, Resume, decode_entry
from spare_megatron.core.log.events import EntryRead, RunStarted
from spare_megatron.core.log.loss_sums import EvaluationPolicy
from spare_megatron.core.saves.checkpoint_policy import SavePolicy
from spare_megatron.core.saves.snapshot_policy import SnapshotPolicy
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.state_partitions import PartitionSetup
from spare_megatron.store.decision_log import DecisionLog

Stop = FinishRun | StopWipeOut | StopHalted


def controller_setup(config: RunConfig) -> ControllerSetup:
    spare, checkpoint, num_groups = config.spare, config.checkpoint, config.layout.num_groups
    partitions = None
    if config.optimizer.sharding == "stacked":
        partitions = PartitionSetup(
            num_groups=num_groups, redundancy=config.optimizer.redundancy, groups_per_domain=spare.groups_per_domain
        )
    return ControllerSetup(
        placement=config.placement,
        microbatches_per_shard=config.unit_ramp.largest,
        ramp=config.unit_ramp,
        rounds=config.rounds if spare.deal_by_pace else None,
        num_stages=config.layout.pipeline_parallel,
        slabs=config.slabs,
        num_steps=config.train.steps,
        granularity=spare.granularity,
        last_resort=config.data.access == "shared",
        restarts=RestartLimits(max_restarts=config.checkpoint.max_restarts, wait_s=checkpoint.restart_wait_s),
        pause_s=checkpoint.restart_wait_s if spare.rejoins or checkpoint.max_restarts else None,
        saves=SavePolicy(
            interval_s=checkpoint.interval_s,
            interval_steps=checkpoint.interval_steps,
            group_life_s=checkpoint.group_life_s if checkpoint.cadence == "optimal" else None,
            group_absence_s=checkpoint.group_absence_s,
            saves_last=checkpoint.is_wanted,
        ),
        first_step=step_of(Path(checkpoint.load)) if checkpoint.load else 0,
        partitions=partitions,
        snapshots=_snapshots(config),
        evaluation=_evaluation(config),
        audits=audit_policy(config),
    )


def _snapshots(config: RunConfig) -> SnapshotPolicy | None:
    if not config.snapshot.every_steps:
        return None
    return SnapshotPolicy(
        every_steps=config.snapshot.every_steps,
        redundancy=config.snapshot.redundancy,
        layout=config.parallel,
        groups_per_domain=config.spare.groups_per_domain,
        num_partitions=config.layout.num_groups if config.optimizer.sharding == "stacked" else 0,
    )


def _evaluation(config: RunConfig) -> EvaluationPolicy | None:
    if not config.eval.every_steps:
        return None
    return EvaluationPolicy(every_steps=config.eval.every_steps, microbatches_per_shard=units_per_shard(config))


class LogFollower:
    """Folds the log of a run in a process that does not take part in it."""

    def __init__(self, log: DecisionLog, setup: ControllerSetup) -> None:
        self._log = log
        self._controller = Controller(setup)
        self._controller.handle(RunStarted(), now_s=0.0)
        self._stop: Stop | AwaitHosts | None = None

    @property
    def members(self) -> frozenset[GroupId]:
        return frozenset(self._controller.members)

    def stop(self, on_entry: Callable[[], None] = lambda: None) -> Stop | AwaitHosts | None:
        """The action that ends or pauses the run, as far as the log is written. `on_entry`: called after each entry."""
        controller = self._controller
        while texts := self._log.read(controller.head):
            for text in texts:
                entry = decode_entry(text)
                actions = controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)
                if isinstance(entry, Restart | Resume):
                    self._stop = None
                stops = [action for action in actions if isinstance(action, Stop | AwaitHosts)]
                self._stop = stops[0] if stops else self._stop
                on_entry()
                if isinstance(self._stop, FinishRun | StopHalted):
                    return self._stop
        return self._stop


def why_wiped_out(stop: StopWipeOut) -> str:
    """What has no surviving host, and why training does not start again, for people."""
    reason = f"no surviving group hosts shards {[int(shard) for shard in stop.shards]}"
    if stop.partitions:
        reason = f"no surviving group holds partitions {[int(one) for one in stop.partitions]} of the optimizer state"
        reason += f": {stop.cause}" if stop.cause else ""
    return f"{reason}; {stop.reason}" if stop.reason else reason
