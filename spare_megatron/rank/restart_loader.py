"""Finds and loads the state with which a rank begins, starts again after a wipe-out, or goes back to in an undo."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spare_megatron.config.training.terms import differences, phases_after, sequences_before, step_of
from spare_megatron.core.log.actions import CheckpointCandidate, LoadCheckpoint, RefuseCheckpoint
from spare_megatron.core.log.events import HeldPartition
from spare_megatron.core.log.votes import Held
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.records import RestartRecord
from spare_megatron.stacking.state_partitions import Hosts, hosted_by
from spare_megatron.state.checkpoint.checkpoint_folder import (
    Checkpoint,
    checkpoint_path,
    folder_of,
    require_folder,
    visible_steps,
)
from spare_megatron.state.checkpoint.checkpoint_reader import CheckpointReader
from spare_megatron.state.checkpoint.emergency_checkpoint import assemble, files_for, is_emergency_checkpoint
from spare_megatron.state.checkpoint.verification import DamagedCheckpoint, candidate_of, glance, refuse
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.state.transfer.state_digests import StateDigests
from spare_megatron.state.transfer.state_transfer import JoinFailed

_NUM_OFFERED = 3
"""Checkpoints that a group offers: another group may have looked before the last was visible."""


class RestartLoader:
    """One rank's part in a start from a checkpoint or, if the run takes `snapshots`, from one in the nodes' memory."""

    def __init__(self, ctx: RankContext, snapshots: SnapshotLoader | None) -> None:
        self._ctx = ctx
        checkpoint = ctx.config.checkpoint
        self._folder = folder_of(checkpoint, ctx.spec.run_dir)
        self._first = Path(checkpoint.load) if checkpoint.load else None
        self._wiped_out_at_s = ctx.spec.wiped_out_at_s  # None if the process is older
        self._snapshots = snapshots
        self._load_s = 0.0
        self.reader = CheckpointReader()
        self._offered: dict[CheckpointCandidate, Checkpoint] = {}
        self._withdrawn: dict[CheckpointCandidate, str] = {}
        self.rejected: tuple[str, ...] = ()  # what cannot be used, and why, as of the last search

    def now_s(self) -> float:
        """The time at which log entries are folded: up to the restart, that of the wipe-out."""
        return time.monotonic() if self._wiped_out_at_s is None else self._wiped_out_at_s

    def on_wipe_out(self) -> None:
        self._wiped_out_at_s = self.now_s()
        self._withdrawn = {}

    def refuse(self, action: RefuseCheckpoint) -> None:
        """Marks a checkpoint that holds wrong state: the groups that found it may be lost."""
        refuse(self._folder, action)

    def on_left_out(self) -> None:
        """Training goes on without the rank, which came too late."""
        self.reader.stop()
        self._wiped_out_at_s = None

    def candidates(self) -> tuple[CheckpointCandidate, ...]:
        """The newest usable checkpoints of this training, three at most. OSError: their folder cannot be read."""
        self._require_folder()
        self._offered = {}
        rejected: list[str] = []
        for step in visible_steps(self._folder):
            try:
                checkpoint = glance(checkpoint_path(self._folder, step))
                manifest = checkpoint.manifest
            except DamagedCheckpoint as error:
                rejected.append(str(error))
                continue
            found = differences(manifest.terms, self._ctx.config, manifest.num_samples)
            if phases_after(manifest.terms, self._ctx.config, manifest.num_samples) != self._ctx.config.data.phases:
                found.append("it is not of the phase that this run goes on with")
            elif manifest.num_samples != (expected := sequences_before(self._ctx.config, step)):
                found.append(f"its steps have read {manifest.num_samples} sequences, and those of this run {expected}")
            if found:
                rejected.append(f"{checkpoint.path.name} is of another training: {'; '.join(found)}")
                continue
            offer = candidate_of(checkpoint.manifest)
            if offer in self._withdrawn:
                rejected.append(self._withdrawn[offer])
                continue
            self._offered[offer] = checkpoint
            if len(self._offered) == _NUM_OFFERED:
                break
        self._require_folder()  # if it has vanished meanwhile, missing files are no damage
        self.rejected = tuple(rejected)
        return tuple(self._offered)

    def withdraw(self, reasons: Mapping[CheckpointCandidate, str]) -> None:
        """Does not offer these any more until the next wipe-out."""
        self._withdrawn |= reasons

    def read(self, offer: CheckpointCandidate, numbers: Collection[int]) -> None:
        """Starts to verify files of a checkpoint, if it is offered."""
        if offer in self._offered:
            self.reader.read(offer, self._offered[offer], numbers)

    def find_snapshots(self) -> tuple[tuple[Held, ...], tuple[HeldPartition, ...]]:
        """Intact snapshots on the group's nodes: of rank positions, and of partitions that all ranks hold. Collective
        over: all ranks of the group.
        """
        if self._snapshots is None:
            return (), ()
        held, partitions, rejected = self._snapshots.announce_intact()
        self.rejected += rejected
        return held, partitions

    def _require_folder(self) -> None:
        if self._ctx.config.checkpoint.is_wanted:
            require_folder(self._folder)

    def load_initial(self) -> None:
        """Loads `checkpoint.load`, if set. Collective over: all ranks of the group."""
        if self._first is not None:
            with self._loading(step_of(self._first)):
                self._load_first(self._first, self._ctx.controller.state_hosts)

    def restart(self, action: LoadCheckpoint, digests: StateDigests) -> None:
        """Loads the checkpoint, snapshot or initial state; the first vote compares it. Collective over: all ranks of
        the group. Raises `JoinFailed` if it is gone.
        """
        self._load(action)
        progress = self._ctx.progress
        progress.step, progress.num_steps = None, action.step
        progress.num_restarts = self._ctx.controller.num_restarts
        digests.check(action.step)
        record = self._record(action)
        self._ctx.write_if_leader(record)
        self._ctx.send(record)

    def _load(self, action: LoadCheckpoint) -> None:
        self.reader.stop()
        began_s = time.monotonic()
        if action.holders:
            self._wiped_out_at_s = began_s
            self._ctx.trainer.forget_moments()
        with self._loading(action.step + action.rework_steps):
            if action.snapshot is None:
                self._load_checkpoint(action)
            else:
                assert self._snapshots is not None, "only a run that takes snapshots starts again from one"
                self._snapshots.load(action.snapshot, action.hosts, action.members, action.holders)
        self._load_s = time.monotonic() - began_s

    def _load_checkpoint(self, action: LoadCheckpoint) -> None:
        path = checkpoint_path(self._folder, action.step)
        if self._first is not None and action.step == step_of(self._first):
            self._load_first(self._first, action.hosts)  # the folder may have one of as many steps that is refused
        elif path.exists():
            self._ctx.trainer.load_checkpoint(path, hosted_by(action.hosts, self._ctx.member))
        elif action.step > 0:  # a new process already has the state of step 0
            raise JoinFailed(f"the checkpoint {path} is gone")

    def _load_first(self, path: Path, hosts: Hosts) -> None:
        """Loads what the run began with: a checkpoint or an emergency checkpoint."""
        partitions = hosted_by(hosts, self._ctx.member)
        if is_emergency_checkpoint(path):
            if self._ctx.member.group in self._ctx.controller.stages:
                raise JoinFailed(f"{path} holds the state of the ranks of whole pipelines, and this one is shorter")
            self._ctx.trainer.load_state(files_for(path, assemble(path).files, self._ctx.spec.rank), partitions)
        else:
            self._ctx.trainer.load_checkpoint(path, partitions)

    @contextmanager
    def _loading(self, step: int) -> Iterator[None]:
        """Surrounds a load; `step` is the step that follows."""
        self._ctx.probe.between_steps(step, FaultPoint.LOAD)
        with self._ctx.probe.during(Operation.LOAD):
            yield
        self._ctx.probe(FaultPoint.LOAD_DONE)

    def _record(self, action: LoadCheckpoint) -> RestartRecord:
        return RestartRecord(
            group=self._ctx.member.group,
            incarnation=self._ctx.member.incarnation,
            step=action.step,
            rework_steps=action.rework_steps,
            restart_s=round(time.monotonic() - self.now_s(), 6),
            rejected=list(self.rejected),
            loaded_from="storage" if action.snapshot is None else "memory",
            load_s=round(self._load_s, 6),
            num_restarts=self._ctx.controller.num_restarts,
            stages=self._ctx.spec.stages,
            is_undo=bool(action.holders),
        )
