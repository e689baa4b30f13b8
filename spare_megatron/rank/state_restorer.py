"""Brings the state to a rank that takes part again: copied from a donor, or loaded after a wipe-out."""

from spare_megatron.core.controller.comparison import NO_DIGEST
from spare_megatron.core.log.actions import AdmitGroups, LoadCheckpoint
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.process.reports import GroupRejoined, GroupRestarted
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_transfer import StateTransfer, confirm


class StateRestorer:
    """Carries out AdmitGroups and LoadCheckpoint; a rejoining group waits `join_timeout_s` at most for confirmation."""

    def __init__(
        self, ctx: RankContext, *, transfer: StateTransfer, loader: RestartLoader, digests: StateDigests
    ) -> None:
        self._ctx = ctx
        self._transfer = transfer
        self._loader = loader
        self._digests = digests

    def admit(self, action: AdmitGroups) -> None:
        """Admits groups, of which this may be one; the next vote compares all.

        Collective over: all ranks of the group. Raises `JoinFailed` if this group is admitted and cannot get the state.
        """
        agreement, progress, digests = self._ctx.agreement, self._ctx.progress, self._digests
        with self._ctx.probe.during(Operation.JOIN):
            donor = self._transfer.run(action)
        if progress.lacks_params:
            agreement.publish_digest(progress.head - 1, NO_DIGEST)
            return
        digests.compute()
        digests.compute_rest(copied_from=None if donor is None else donor.group)
        if donor is not None:
            with self._ctx.probe.during(Operation.JOIN):
                confirm(self._ctx, digests.value.params, action)
            self._ctx.send(GroupRejoined(member=agreement.member, step=action.step))
        else:
            agreement.publish_digest(progress.head - 1, digests.value.params)
        # Only now: a group whose state was refused does not take part, and its digest must not be journaled.
        digests.write(action.step)
        progress.num_steps = action.step

    def restart(self, action: LoadCheckpoint) -> None:
        """Loads state after a wipe-out; the first vote compares it.

        Collective over: all ranks of the group. Raises `JoinFailed` if the state cannot be loaded.
        """
        member, progress = self._ctx.member, self._ctx.progress
        self._loader.load(action, member, progress.head)
        progress.step, progress.num_steps = None, action.step
        self._digests.check(action.step)
        record = self._loader.record(member, action)
        self._ctx.write_if_leader(record)
        rejected = tuple(record.rejected)
        self._ctx.send(GroupRestarted(member=member, step=action.step, source=record.loaded_from, rejected=rejected))
