"""Brings the state to a rank that takes part again: copied from a donor, or loaded after a wipe-out."""

from spare_megatron.core.controller.comparison import NO_DIGEST
from spare_megatron.core.log.actions import AdmitGroups, LoadCheckpoint
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.process.reports import GroupRejoined, GroupRestarted
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_transfer import StateTransfer, confirm


def admit(ctx: RankContext, transfer: StateTransfer, digests: StateDigests, action: AdmitGroups) -> None:
    """Admits groups, of which this may be one; the next vote compares all.

    Collective over: all ranks of the group. Raises `JoinFailed` if this group is admitted and cannot get the state.
    """
    progress = ctx.progress
    with ctx.probe.during(Operation.JOIN):
        donor = transfer.run(action)
    if progress.lacks_params:
        ctx.agreement.publish_digest(progress.head - 1, NO_DIGEST)
        return
    digests.compute()
    digests.compute_rest(copied_from=None if donor is None else donor.group)
    if donor is not None:
        with ctx.probe.during(Operation.JOIN):
            confirm(ctx, digests.value.params, action)
        ctx.send(GroupRejoined(member=ctx.member, step=action.step))
    else:
        ctx.agreement.publish_digest(progress.head - 1, digests.value.params)
    # Only now: a group whose state was refused does not take part, and its digest must not be journaled.
    digests.write(action.step)
    progress.num_steps = action.step


def restart(ctx: RankContext, loader: RestartLoader, digests: StateDigests, action: LoadCheckpoint) -> None:
    """Loads state after a wipe-out; the first vote compares it.

    Collective over: all ranks of the group. Raises `JoinFailed` if the state cannot be loaded.
    """
    loader.load(action, ctx.member, ctx.progress.head)
    ctx.progress.step, ctx.progress.num_steps = None, action.step
    digests.check(action.step)
    record = loader.record(ctx.member, action)
    ctx.write_if_leader(record)
    rejected = tuple(record.rejected)
    ctx.send(GroupRestarted(member=ctx.member, step=action.step, source=record.loaded_from, rejected=rejected))
