"""How a rank's state outlives it: what keeps it, and what gets it back after a wipe-out."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from spare_megatron.control.open_store import open_store
from spare_megatron.control.store import ControlStore
from spare_megatron.core.saves import SaveCheckpoint, SaveEnd
from spare_megatron.core.topology import GroupId
from spare_megatron.journal.files import JournalWriter
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.checkpoint.checkpoints import folder_of, manifest_of
from spare_megatron.runtime.checkpoint.last_state import SavedRank, describe, file_of, last_state_path
from spare_megatron.runtime.process.probe import RankProbe
from spare_megatron.runtime.process.reports import CheckpointTold
from spare_megatron.runtime.process.spec import RankSpec
from spare_megatron.runtime.rank.group_saves import GroupSaves
from spare_megatron.runtime.rank.start_over import StartOver
from spare_megatron.runtime.snapshot.keeper_client import KeeperClient
from spare_megatron.runtime.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.runtime.snapshot.snapshots import Snapshotter
from spare_megatron.runtime.state.saver import Saver
from spare_megatron.runtime.vote.agreement import GroupAgreement


class StateKeeping:
    """Puts together what a run like this one needs of it.

    Args:
        spec: The rank.
        trainer: Its part of the model.
        agreement: Its group's voice.
        probe: Told of what is done.
    """

    def __init__(self, *, spec: RankSpec, trainer: GroupTrainer, agreement: GroupAgreement, probe: RankProbe) -> None:
        self._spec = spec
        self._trainer = trainer
        self._agreement = agreement
        self._probe = probe
        self._keeper = None if spec.keeper is None else KeeperClient(spec.keeper, spec.rank)

    def saves(
        self, journal: JournalWriter, report: Callable[[CheckpointTold], None], ended: Callable[[SaveEnd], None]
    ) -> GroupSaves:
        """Checkpoints and snapshots.

        Collective over: all ranks of the group.

        Args:
            journal: The rank's.
            report: Tells the supervisor of a save that has ended.
            ended: Tells the others of it, with the next vote.
        """
        return GroupSaves(
            saver=self._saver() if self._spec.config.checkpoint.is_wanted else None,
            snapshotter=None if self._keeper is None else self._snapshotter(self._keeper),
            agreement=self._agreement,
            journal=journal,
            report=report,
            ended=ended,
        )

    def start_over(self, store: ControlStore) -> StartOver:
        """What there is to start again from."""
        return StartOver(
            config=self._spec.config,
            run_dir=self._spec.run_dir,
            rank=self._spec.rank,
            trainer=self._trainer,
            wiped_out_at_s=self._spec.wiped_out_at_s,
            snapshots=None if self._keeper is None else self._loader(self._keeper, store),
            probe=self._probe,
        )

    def save_alone(self, action: SaveCheckpoint) -> None:
        """Has this rank save its state, with nobody's help and for nobody in particular.

        Args:
            action: What the state would be as a checkpoint of this group.
        """
        spec, trainer = self._spec, self._trainer
        path = last_state_path(spec.config, spec.run_dir, action.step)
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

    def _snapshotter(self, keeper: KeeperClient) -> Snapshotter:
        return Snapshotter(
            member=self._spec.member,
            position=self._spec.rank,
            trainer=self._trainer,
            keeper=keeper,
            probe=self._probe,
        )

    def _loader(self, keeper: KeeperClient, store: ControlStore) -> SnapshotLoader:
        config = self._spec.config
        return SnapshotLoader(
            member=self._spec.member,
            position=self._spec.rank,
            trainer=self._trainer,
            keeper=keeper,
            agreement=self._agreement,
            store=store,
            groups=[GroupId(group) for group in range(config.layout.num_groups)],
            timeout_s=config.reduce.timeout_s,
            progress=self._probe.progress,
        )
