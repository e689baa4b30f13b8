"""What a rank begins with, or starts again with after a wipe-out, and since when training stands still."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.terms import differences
from spare_megatron.core.liveness import Operation
from spare_megatron.core.phases import Phase
from spare_megatron.core.restart_messages import LoadCheckpoint, Offer
from spare_megatron.core.saves import RefuseCheckpoint
from spare_megatron.core.snapshots import Held, HeldSlice
from spare_megatron.core.topology import Member, SliceId
from spare_megatron.journal.records import RestartRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.checkpoint.checkpoint_reader import CheckpointReader
from spare_megatron.runtime.checkpoint.checkpoints import (
    Checkpoint,
    checkpoint_path,
    folder_of,
    require_folder,
    step_of,
    visible_steps,
)
from spare_megatron.runtime.checkpoint.last_state import assemble, files_for, is_last_state
from spare_megatron.runtime.checkpoint.refusals import refuse
from spare_megatron.runtime.checkpoint.verification import DamagedCheckpoint, glance, offer_of
from spare_megatron.runtime.process.probe import RankProbe
from spare_megatron.runtime.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.runtime.state.join import JoinFailed

_NUM_OFFERED = 3
"""Checkpoints that a group names: another may have looked before the last was visible."""


class StartOver:
    """One rank's part in a start from a checkpoint.

    Args:
        config: The run's configuration.
        run_dir: The run's directory.
        rank: The rank inside its group.
        trainer: The rank's part of the model, as it is when its process begins.
        wiped_out_at_s: Monotonic time at which the rank's supervisor knew of the wipe-out; None if the rank's process
            was started before.
        snapshots: What the nodes hold; None where no snapshots are taken.
        probe: Told of the moments of a load.

    Attributes:
        reader: Reads checkpoints that might be loaded.
        rejected: Checkpoints and snapshots that cannot be used, and why, as of the last look.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run_dir: Path,
        rank: int,
        trainer: GroupTrainer,
        wiped_out_at_s: float | None,
        snapshots: SnapshotLoader | None,
        probe: RankProbe,
    ) -> None:
        self._config = config
        self._folder = folder_of(config, run_dir)
        self._takes_checkpoints = config.checkpoint.is_wanted
        self._first = Path(config.checkpoint.load) if config.checkpoint.load else None
        self._rank = rank
        self._trainer = trainer
        self._wiped_out_at_s = wiped_out_at_s
        self._snapshots = snapshots
        self._load_s = 0.0
        self._probe = probe
        self.reader = CheckpointReader()
        self._offered: dict[Offer, Checkpoint] = {}
        self._withdrawn: dict[Offer, str] = {}
        self.rejected: tuple[str, ...] = ()

    def now_s(self) -> float:
        """The time for what the log says: up to the restart, that of the wipe-out."""
        return time.monotonic() if self._wiped_out_at_s is None else self._wiped_out_at_s

    def wiped_out(self) -> None:
        """The rank has read of a wipe-out in the log."""
        self._wiped_out_at_s = self.now_s()
        self._withdrawn = {}

    def refuse(self, action: RefuseCheckpoint) -> None:
        """Marks a checkpoint that holds wrong state: those who found it out may not have lived to do so."""
        refuse(self._folder, action)

    def left_out(self) -> None:
        """Training goes on without the rank, which comes too late."""
        self.reader.stop()
        self._wiped_out_at_s = None

    def offers(self) -> tuple[Offer, ...]:
        """The newest checkpoints of this training that lack nothing at a glance, but for those that are withdrawn.

        Raises:
            OSError: The folder of the checkpoints cannot be read.
        """
        self._require_folder()
        self._offered = {}
        rejected: list[str] = []
        for step in visible_steps(self._folder):
            try:
                checkpoint = glance(checkpoint_path(self._folder, step))
            except DamagedCheckpoint as error:
                rejected.append(str(error))
                continue
            if found := differences(checkpoint.manifest.terms, self._config):
                rejected.append(f"{checkpoint.path.name} is of another training: {'; '.join(found)}")
                continue
            offer = offer_of(checkpoint.manifest)
            if offer in self._withdrawn:
                rejected.append(self._withdrawn[offer])
                continue
            self._offered[offer] = checkpoint
            if len(self._offered) == _NUM_OFFERED:
                break
        self._require_folder()  # else what is missing is not damaged
        self.rejected = tuple(rejected)
        return tuple(self._offered)

    def withdraw(self, reasons: Mapping[Offer, str]) -> None:
        """These are not offered any more until the next wipe-out."""
        self._withdrawn |= reasons

    def read(self, offer: Offer, numbers: Collection[int]) -> None:
        """Has files of a checkpoint read, if it is offered."""
        if offer in self._offered:
            self.reader.read(offer, self._offered[offer], numbers)

    def held(self) -> tuple[tuple[Held, ...], tuple[HeldSlice, ...]]:
        """Snapshots of the group's ranks that are whole on its nodes, and of slices those of all of its ranks.

        Collective over: all ranks of the group, after `offers` where that is asked.
        """
        if self._snapshots is None:
            return (), ()
        held, slices, rejected = self._snapshots.held()
        self.rejected += rejected
        return held, slices

    def _require_folder(self) -> None:
        if self._takes_checkpoints:
            require_folder(self._folder)

    def begin(self, slices: Collection[SliceId]) -> None:
        """At the start of the run: takes over what it begins with, if that is a checkpoint, and slices to host.

        Collective over: all ranks of the group.
        """
        if self._first is not None:
            with self._loading(step_of(self._first)):
                self._load_first(self._first, slices)

    def load(self, action: LoadCheckpoint, member: Member, head: int) -> None:
        """Takes over the checkpoint or the snapshot, or what the run began with, and the slices the group is to host.

        Collective over: all ranks of the group, with the number of log entries folded so far.

        Raises:
            JoinFailed: It is not there any more.
        """
        self.reader.stop()
        began_s = time.monotonic()
        slices = [SliceId(number) for number, hosts in enumerate(action.hosts) if member in hosts]
        with self._loading(action.step + action.rework_steps):
            if action.snapshot is None:
                self._load_checkpoint(action, slices)
            else:
                assert self._snapshots is not None, "only a run that takes snapshots starts again from one"
                self._snapshots.load(action.snapshot, slices, action.members, head)
        self._load_s = time.monotonic() - began_s

    def _load_checkpoint(self, action: LoadCheckpoint, slices: Collection[SliceId]) -> None:
        path = checkpoint_path(self._folder, action.step)
        if path.exists():
            self._trainer.load_checkpoint(path, slices)
        elif self._first is not None and action.step == step_of(self._first):
            self._load_first(self._first, slices)
        elif action.step > 0:  # at 0 a new process has it
            raise JoinFailed(f"the checkpoint {path} is gone")

    def _load_first(self, path: Path, slices: Collection[SliceId]) -> None:
        """What the run began with, be it a checkpoint or what ranks had saved by themselves."""
        if is_last_state(path):
            self._trainer.load_state(files_for(path, assemble(path).files, self._rank), slices)
        else:
            self._trainer.load_checkpoint(path, slices)

    @contextmanager
    def _loading(self, step: int) -> Iterator[None]:
        """Around a load, before this step."""
        self._probe.between_steps(step, Phase.LOAD)
        with self._probe.during(Operation.LOAD):
            yield
        self._probe(Phase.LOAD_DONE)

    def record(self, member: Member, action: LoadCheckpoint) -> RestartRecord:
        """For the journal, when it is loaded."""
        return RestartRecord(
            group=member.group,
            incarnation=member.incarnation,
            step=action.step,
            rework_steps=action.rework_steps,
            restart_s=round(time.monotonic() - self.now_s(), 6),
            rejected=list(self.rejected),
            loaded_from="storage" if action.snapshot is None else "memory",
            load_s=round(self._load_s, 6),
        )
