"""Saves and snapshots of one rank: starts them, has updates wait for their copies, journals how they end."""

import sys
from dataclasses import asdict, dataclass, replace

from spare_megatron.core.log.actions import RefuseCheckpoint, SaveCheckpoint, SaveDispute, TakeSnapshot
from spare_megatron.core.log.entries import SaveEnd
from spare_megatron.formats.output import real_paths
from spare_megatron.journal.records import CadenceRecord, DisputeRecord
from spare_megatron.state.checkpoint.checkpoint_folder import manifest_of
from spare_megatron.state.checkpoint.emergency_checkpoint import SavedRank, describe, emergency_checkpoint_path, file_of
from spare_megatron.state.checkpoint.saver import Saver
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.snapshot.snapshotter import Snapshotter
from spare_megatron.state.transfer.state_digests import StateDigests


@dataclass(frozen=True, slots=True)
class GroupSaves:
    """Carries out SaveCheckpoint, RefuseCheckpoint, SaveDispute and TakeSnapshot on one rank, if configured."""

    ctx: RankContext
    saver: Saver
    dispute_saver: Saver | None
    snapshotter: Snapshotter | None
    digests: StateDigests

    def save(self, action: SaveCheckpoint) -> None:
        """Starts a checkpoint, if this group has a part in it. Collective over: all ranks of the group."""
        member = self.ctx.member
        self.digests.check_saved(action.step)
        if action.cadence is not None and action.member == member:
            record = CadenceRecord(group=member.group, step=action.step, **asdict(action.cadence))
            self.ctx.write_if_leader(record)
        self.saver.save(action)

    def refuse(self, action: RefuseCheckpoint) -> None:
        self.saver.refuse(action)

    def save_dispute(self, action: SaveDispute) -> None:
        """Has the state before the step compared, and saves its parameters in turn. Collective over: all ranks of the
        group.
        """
        assert self.dispute_saver is not None, "only a run with audits has disputes"
        if self.ctx.progress.lacks_params:
            self.digests.is_wanted = True
            return
        # Earlier digests may be from before the fault.
        self.digests.check(action.step)
        if action.member == self.ctx.member:
            self.dispute_saver.save_weights(action)

    def take_snapshot(self, action: TakeSnapshot) -> None:
        """Starts a snapshot, if this rank is to keep one and once it has all parameters."""
        assert self.snapshotter is not None, "only a run that takes snapshots asks for one"
        self.snapshotter.start_copy(action)

    def resume_postponed(self, step: int) -> None:
        """Starts what waited for the parameters: the group has all of them after `step` committed steps."""
        self.saver.start_postponed(step)
        if self.snapshotter is not None:
            self.snapshotter.start_postponed()

    def await_copies(self, step: int) -> None:
        """Waits until the update that makes `step` committed steps may change the state."""
        self.saver.await_copy()
        if self.snapshotter is not None:
            self.snapshotter.await_copy(step)

    def settle(self) -> None:
        """Waits until no copy of the state is made any more."""
        self.await_copies(sys.maxsize)

    def finish(self) -> None:
        """Waits until nothing is written or copied any more, within the time limits of both. Saves alone what cannot be
        saved otherwise because the store is lost.
        """
        if self.snapshotter is not None:
            self.snapshotter.finish()
        unsaved = self.saver.finish()
        if unsaved is not None and self.ctx.member.group not in self.ctx.controller.stages:
            save_alone(self.ctx, replace(unsaved, member=self.ctx.member))
        if self.dispute_saver is not None:
            self.dispute_saver.finish()

    def report_finished(self) -> None:
        """Journals and reports the saves and snapshots that have ended since the last call."""
        for snapshot in self.snapshotter.take_finished() if self.snapshotter is not None else ():
            self.ctx.journal.write(snapshot)  # every holder: no other group may keep this rank position
        disputes = [] if self.dispute_saver is None else self.dispute_saver.take_finished()
        for record in (*disputes, *self.saver.take_finished()):
            self.ctx.write_if_leader(record)
            if isinstance(record, DisputeRecord):
                continue
            if self.ctx.agreement.is_leader:
                self.ctx.send(record)
            self.ctx.progress.save_ends.append(SaveEnd(record.step, record.outcome == "saved", record.stall_s))


def save_alone(ctx: RankContext, action: SaveCheckpoint) -> None:
    """Saves this rank's part of an emergency checkpoint, alone."""
    spec, trainer = ctx.spec, ctx.trainer
    path = emergency_checkpoint_path(spec.config.checkpoint, spec.run_dir, action.step)
    num_bytes, sha256 = trainer.save_state(file_of(path, spec.group, spec.rank))
    rest = ctx.optimizer_state.digest_of_rest() or {}
    saved = SavedRank(
        run_dir=real_paths(str(spec.run_dir.absolute())),
        group=spec.group,
        rank=spec.rank,
        num_ranks=spec.num_ranks,
        num_bytes=num_bytes,
        sha256=sha256,
        params_sha256=" ".join(one for _, one in sorted(trainer.by_position(trainer.params_sha256).items())),
        slices=ctx.optimizer_state.digests_by_name(),
        manifest=asdict(manifest_of(spec.config, action, ctx.controller.head, {})),
        rest=" ".join(digest.hexdigest() for _, digest in sorted(rest.items())),
    )
    describe(path, saved)
