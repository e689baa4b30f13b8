"""Stacked optimizer state (each partition on a few groups) on one rank: gathers all parameters, repairs partitions."""

from collections.abc import Callable

from spare_megatron.core.log.actions import GatherParams, StartRepairs
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.stacked.params_gather import ParamsGather
from spare_megatron.state.stacked.partition_copier import GroupRepairs
from spare_megatron.state.transfer.state_digests import StateDigests


class StackedState:
    """Carries out GatherParams and StartRepairs."""

    def __init__(
        self,
        ctx: RankContext,
        *,
        gather: ParamsGather,
        repairs: GroupRepairs,
        resume_snapshot: Callable[[int], None],
        digests: StateDigests,
    ) -> None:
        self._ctx = ctx
        self._gather = gather
        self.restored = repairs.restored
        self._repairs = repairs
        self._resume_snapshot = resume_snapshot
        self._digests = digests

    def gather_params(self, action: GatherParams) -> None:
        """Gathers all parameters from their owners. After a broken gather the group lacks parameters."""
        progress = self._ctx.progress
        if action.is_anew:
            progress.lacks_params = True
            self._digests.is_wanted = True
        lacked = progress.lacks_params
        try:
            self._gather.run(action)
        finally:  # even if the store is lost: a gather that is complete can still be saved
            if lacked and not progress.lacks_params:
                progress.num_steps = action.step
                self._digests.compare_if_due(action.step)
                self._resume_snapshot(action.step)

    def start_repairs(self, action: StartRepairs) -> None:
        """Starts the copies that the group is to make; the digests follow the new hosts."""
        self._digests.set_hosted(action)
        self._repairs.start(action)
