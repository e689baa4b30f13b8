"""Saves and snapshots of one rank: starts them, has updates wait for their copies, journals how they end."""

from dataclasses import asdict

from spare_megatron.core.log.actions import RefuseCheckpoint, SaveCheckpoint, SaveDispute, TakeSnapshot
from spare_megatron.core.log.entries import SaveEnd
from spare_megatron.formats.output import real_paths
from spare_megatron.journal.records import CadenceRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank.rank_reports import RankReports
from spare_megatron.state.checkpoint.checkpoint_folder import manifest_of
from spare_megatron.state.checkpoint.dispute_saver import DisputeSaver
from spare_megatron.state.checkpoint.emergency_checkpoint import SavedRank, describe, emergency_checkpoint_path, file_of
from spare_megatron.state.checkpoint.saver import Saver
from spare_megatron.state.rank_progress import RankProgress
from spare_megatron.state.snapshot.snapshotter import Snapshotter
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.voting.agreement import GroupAgreement


class GroupSaves:
    """Carries out SaveCheckpoint, RefuseCheckpoint, SaveDispute and TakeSnapshot on one rank, if configured. It decides
    nothing.
    """

    def __init__(
        self,
        *,
        saver: Saver,
        dispute_saver: DisputeSaver | None,
        snapshotter: Snapshotter | None,
        agreement: GroupAgreement,
        digests: StateDigests,
        reports: RankReports,
        progress: RankProgress,
    ) -> None:
        self._saver = saver
        self._dispute_saver = dispute_saver
        self._snapshotter = snapshotter
        self._agreement = agreement
        self._digests = digests
        self._reports = reports
        self._progress = progress

    def save(self, action: SaveCheckpoint) -> None:
        """Starts a checkpoint of the present state, if this group has a part in it, and has the state compared.

        Collective over: all ranks of the group.
        """
        progress, member, has_params = self._progress, self._agreement.member, not self._progress.lacks_params
        self._digests.check_saved(action.step, progress.num_restarts, has_params=has_params)
        if action.cadence is not None and action.member == member:
            record = CadenceRecord(group=member.group, step=action.step, **asdict(action.cadence))
            self._reports.write_if_leader(record)
        self._saver.save(action, progress.head, has_params=has_params)

    def refuse(self, action: RefuseCheckpoint) -> None:
        self._saver.refuse(action)

    def save_dispute(self, action: SaveDispute) -> None:
        """Has the state before the step compared, and its parameters saved if it is this group's turn.

        Collective over: all ranks of the group.
        """
        assert self._dispute_saver is not None, "only a run with audits has disputes"
        if self._progress.lacks_params:
            self._digests.is_wanted = True
            return
        self._digests.check(action.step, self._progress.num_restarts)  # earlier digests may be from before the fault
        if action.member == self._agreement.member:
            self._dispute_saver.save(action, self._progress.head)

    def take_snapshot(self, action: TakeSnapshot) -> None:
        """Starts a snapshot, if this rank is to keep one and once it has all parameters."""
        assert self._snapshotter is not None, "only a run that takes snapshots asks for one"
        self._snapshotter.start_copy(action, has_params=not self._progress.lacks_params)

    def resume_postponed(self, step: int) -> None:
        """Starts what waited for the parameters: the group has all of them after `step` committed steps."""
        self._saver.start_postponed(step)
        if self._snapshotter is not None:
            self._snapshotter.start_postponed()

    def await_copies(self, step: int) -> None:
        """Waits until the update that makes `step` committed steps may change the state."""
        self._saver.await_copy()
        if self._snapshotter is not None:
            self._snapshotter.await_copy(step)

    def finish(self) -> None:
        """Waits until nothing is written or copied any more, within the time limits of both."""
        if self._snapshotter is not None:
            self._snapshotter.finish()
        self._saver.finish()
        if self._dispute_saver is not None:
            self._dispute_saver.finish()

    def report_finished(self) -> None:
        """Journals and reports the saves and snapshots that have ended since the last call."""
        for snapshot in self._snapshotter.take_finished() if self._snapshotter is not None else ():
            self._reports.journal.write(snapshot)  # every holder: no other group may keep this rank position
        for dispute in self._dispute_saver.take_finished() if self._dispute_saver is not None else ():
            self._reports.write_if_leader(dispute)
        for record in self._saver.take_finished():
            self._reports.write_if_leader(record)
            if self._agreement.is_leader:
                self._reports.send(record)
            self._progress.save_ends.append(SaveEnd(record.step, record.outcome == "saved", record.stall_s))


def save_alone(spec: RankSpec, trainer: GroupTrainer, action: SaveCheckpoint, head: int) -> None:
    """Saves this rank's part of an emergency checkpoint, alone; `head` counts the log entries folded so far."""
    path = emergency_checkpoint_path(spec.config.checkpoint, spec.run_dir, action.step)
    num_bytes, sha256 = trainer.save_state(file_of(path, spec.group, spec.rank))
    optimizer = trainer.stacked
    saved = SavedRank(
        run_dir=real_paths(str(spec.run_dir.absolute())),
        group=spec.group,
        rank=spec.rank,
        num_ranks=spec.config.parallel.ranks_per_group,
        num_bytes=num_bytes,
        sha256=sha256,
        params_sha256=trainer.params_sha256(),
        slices={}
        if optimizer is None
        else {str(one): optimizer.state_digest(one).hexdigest() for one in optimizer.hosted},
        manifest=asdict(manifest_of(spec.config, action, head, {})),
    )
    describe(path, saved)
