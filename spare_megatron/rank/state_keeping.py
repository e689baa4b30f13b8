"""Checkpoints and snapshots of one rank: starts them, has updates wait for their copies, journals how they end."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from spare_megatron.core.actions import RefuseCheckpoint, SaveCheckpoint, TakeSnapshot
from spare_megatron.core.entries import SaveEnd
from spare_megatron.journal.files import JournalWriter
from spare_megatron.journal.records import CadenceRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.process.reports import SaveReported
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank.restart_loader import RestartLoader
from spare_megatron.stacking.layout import GroupId
from spare_megatron.state.checkpoint.checkpoint_folder import folder_of, manifest_of
from spare_megatron.state.checkpoint.emergency_checkpoint import SavedRank, describe, emergency_checkpoint_path, file_of
from spare_megatron.state.checkpoint.saver import Saver
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient
from spare_megatron.state.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.state.snapshot.snapshotter import Snapshotter
from spare_megatron.store.interface import ControlStore
from spare_megatron.store.open_store import open_store
from spare_megatron.voting.agreement import GroupAgreement


class GroupSaves:
    """One rank's part in its group's checkpoints (`saver`) and snapshots (`snapshotter`); None takes none.

    `report` sends a save that has ended to the supervisor, `ended` adds it to the group's next vote.
    """

    def __init__(
        self,
        *,
        saver: Saver | None,
        snapshotter: Snapshotter | None,
        agreement: GroupAgreement,
        journal: JournalWriter,
        report: Callable[[SaveReported], None],
        ended: Callable[[SaveEnd], None],
    ) -> None:
        self._saver = saver
        self._snapshotter = snapshotter
        self._agreement = agreement
        self._journal = journal
        self._report = report
        self._ended = ended

    def save(self, action: SaveCheckpoint, head: int, *, has_params: bool) -> None:
        """Starts a checkpoint of the present state if this group has a part in it. Arguments as in `Saver.save`.

        Collective over: all ranks of the group.
        """
        assert self._saver is not None, "only a run that takes checkpoints asks for one"
        member = self._agreement.member
        if action.cadence is not None and action.member == member and self._agreement.is_leader:
            self._journal.write(CadenceRecord(group=member.group, step=action.step, **asdict(action.cadence)))
        self._saver.save(action, head, has_params=has_params)

    def go_on(self, step: int) -> None:
        """Starts what waited for the parameters: the group has all of them after `step` committed steps."""
        if self._saver is not None:
            self._saver.start_postponed(step)
        if self._snapshotter is not None:
            self._snapshotter.start_postponed()

    def refuse(self, action: RefuseCheckpoint) -> None:
        assert self._saver is not None, "only a run that takes checkpoints refuses one"
        self._saver.refuse(action)

    def take_snapshot(self, action: TakeSnapshot, *, has_params: bool) -> None:
        """Starts a snapshot, if this rank is to keep one and once it has all parameters."""
        assert self._snapshotter is not None, "only a run that takes snapshots asks for one"
        self._snapshotter.start_copy(action, has_params=has_params)

    def await_copies(self, step: int) -> None:
        """Waits until the update that makes `step` committed steps may change the state."""
        if self._saver is not None:
            self._saver.await_copy()
        if self._snapshotter is not None:
            self._snapshotter.await_copy(step)

    def finish(self) -> None:
        """Waits until nothing is written or copied any more, within the time limits of both."""
        if self._snapshotter is not None:
            self._snapshotter.finish()
        if self._saver is not None:
            self._saver.finish()

    def tell(self) -> None:
        """Journals and reports the saves and snapshots that have ended since the last call."""
        for snapshot in self._snapshotter.take_finished() if self._snapshotter is not None else ():
            self._journal.write(snapshot)  # every holder: no other group may keep this rank position
        for record in self._saver.take_finished() if self._saver is not None else ():
            if self._agreement.is_leader:
                self._journal.write(record)
                self._report(SaveReported(record=record))
            self._ended(SaveEnd(record.step, record.outcome == "saved", record.stall_s))


class StateKeeping:
    """Builds the parts with which a rank saves and loads its state, as the run's configuration asks for."""

    def __init__(self, *, spec: RankSpec, trainer: GroupTrainer, agreement: GroupAgreement, probe: RankProbe) -> None:
        self._spec = spec
        self._trainer = trainer
        self._agreement = agreement
        self._probe = probe
        self._snapshot_server = (
            None if spec.snapshot_server is None else SnapshotClient(spec.snapshot_server, spec.rank)
        )

    def saves(
        self, journal: JournalWriter, report: Callable[[SaveReported], None], ended: Callable[[SaveEnd], None]
    ) -> GroupSaves:
        """Checkpoints and snapshots, with the arguments of `GroupSaves`. Collective over: all ranks of the group."""
        return GroupSaves(
            saver=self._saver() if self._spec.config.checkpoint.is_wanted else None,
            snapshotter=None if self._snapshot_server is None else self._snapshotter(self._snapshot_server),
            agreement=self._agreement,
            journal=journal,
            report=report,
            ended=ended,
        )

    def start_over(self, store: ControlStore) -> RestartLoader:
        return RestartLoader(
            config=self._spec.config,
            run_dir=self._spec.run_dir,
            rank=self._spec.rank,
            trainer=self._trainer,
            wiped_out_at_s=self._spec.wiped_out_at_s,
            snapshots=None if self._snapshot_server is None else self._loader(self._snapshot_server, store),
            probe=self._probe,
        )

    def save_alone(self, action: SaveCheckpoint) -> None:
        """Saves this rank's part of an emergency checkpoint, without the other ranks.

        `action` describes the state as a checkpoint of this group.
        """
        spec, trainer = self._spec, self._trainer
        path = emergency_checkpoint_path(spec.config, spec.run_dir, action.step)
        num_bytes, sha256 = trainer.save_state(file_of(path, spec.group, spec.rank))
        optimizer = trainer.stacked
        saved = SavedRank(
            run_dir=str(spec.run_dir.absolute()),
            group=spec.group,
            rank=spec.rank,
            num_ranks=spec.config.parallel.ranks_per_group,
            num_bytes=num_bytes,
            sha256=sha256,
            params_sha256=trainer.params_sha256(),
            slices={} if optimizer is None else {str(one): optimizer.state_sha256(one) for one in optimizer.hosted},
            manifest=asdict(manifest_of(spec.config, action, self._agreement.head, {})),
        )
        describe(path, saved)

    def _saver(self) -> Saver:
        config = self._spec.config
        return Saver(
            config=config,
            folder=folder_of(config, self._spec.run_dir),
            trainer=self._trainer,
            agreement=self._agreement,
            ranks=dist.new_group(backend="gloo", timeout=timedelta(seconds=config.checkpoint.timeout_s)),
            connect=lambda: open_store(self._spec.store),
            probe=self._probe,
        )

    def _snapshotter(self, snapshot_server: SnapshotClient) -> Snapshotter:
        return Snapshotter(
            member=self._spec.member,
            position=self._spec.rank,
            trainer=self._trainer,
            snapshot_server=snapshot_server,
            probe=self._probe,
        )

    def _loader(self, snapshot_server: SnapshotClient, store: ControlStore) -> SnapshotLoader:
        config = self._spec.config
        return SnapshotLoader(
            member=self._spec.member,
            position=self._spec.rank,
            trainer=self._trainer,
            snapshot_server=snapshot_server,
            agreement=self._agreement,
            store=store,
            groups=[GroupId(group) for group in range(config.layout.num_groups)],
            timeout_s=config.reduce.timeout_s,
            progress=self._probe.progress,
        )
