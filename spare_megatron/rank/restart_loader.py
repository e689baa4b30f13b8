"""Finds and loads the state with which a rank begins, or starts again after a wipe-out."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spare_megatron.config.schema import RunConfig
from spare_megatron.config.terms import differences, step_of
from spare_megatron.core.actions import (
    AppendEntry,
    CheckpointCandidate,
    LoadCheckpoint,
    ReadFiles,
    RefuseCheckpoint,
    WithdrawOffers,
)
from spare_megatron.core.controller import Controller
from spare_megatron.core.events import RestartState, WaitingRead
from spare_megatron.core.failure_detector import Operation
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.core.snapshot_policy import Held, HeldPartition
from spare_megatron.journal.records import RestartRecord
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.process.rank_probe import RankProbe
from spare_megatron.stacking.layout import GroupId, Member, PartitionId
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
from spare_megatron.state.snapshot.snapshot_loader import SnapshotLoader
from spare_megatron.state.transfer.state_transfer import JoinFailed
from spare_megatron.voting.agreement import GroupAgreement

_NUM_OFFERED = 3
"""Checkpoints that a group offers: another group may have looked before the last was visible."""


class RestartLoader:
    """One rank's part in a start from a checkpoint or a snapshot.

    Args:
        trainer: The rank's part of the model, as its process has built it.
        wiped_out_at_s: Monotonic time at which the rank's supervisor learned of the wipe-out; None if the process is
            older.
        snapshots: Loads snapshots from the nodes' memory; None if the run takes none.

    Attributes:
        rejected: Checkpoints and snapshots that cannot be used, and why, as of the last search.
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
        self._offered: dict[CheckpointCandidate, Checkpoint] = {}
        self._withdrawn: dict[CheckpointCandidate, str] = {}
        self.rejected: tuple[str, ...] = ()

    def now_s(self) -> float:
        """The time at which log entries are folded: up to the restart, that of the wipe-out."""
        return time.monotonic() if self._wiped_out_at_s is None else self._wiped_out_at_s

    def wiped_out(self) -> None:
        """The rank has read of a wipe-out in the log."""
        self._wiped_out_at_s = self.now_s()
        self._withdrawn = {}

    def refuse(self, action: RefuseCheckpoint) -> None:
        """Marks a checkpoint that holds wrong state: the groups that found it may be lost."""
        refuse(self._folder, action)

    def left_out(self) -> None:
        """Training goes on without the rank, which came too late."""
        self.reader.stop()
        self._wiped_out_at_s = None

    def offers(self) -> tuple[CheckpointCandidate, ...]:
        """The newest checkpoints of this training that pass `glance` and are not withdrawn, three at most.

        Raises `OSError` if the checkpoint folder cannot be read.
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

    def held(self) -> tuple[tuple[Held, ...], tuple[HeldPartition, ...]]:
        """Intact snapshots on the group's nodes: of rank positions, and of partitions that all ranks hold.

        Collective over: all ranks of the group, after `offers`, if that is called.
        """
        if self._snapshots is None:
            return (), ()
        held, slices, rejected = self._snapshots.announce_intact()
        self.rejected += rejected
        return held, slices

    def _require_folder(self) -> None:
        if self._takes_checkpoints:
            require_folder(self._folder)

    def begin(self, slices: Collection[PartitionId]) -> None:
        """Loads `checkpoint.load`, if set, with these partitions. Collective over: all ranks of the group."""
        if self._first is not None:
            with self._loading(step_of(self._first)):
                self._load_first(self._first, slices)

    def load(self, action: LoadCheckpoint, member: Member, head: int) -> None:
        """Loads the checkpoint, the snapshot or the run's initial state, with the group's state partitions.

        Collective over: all ranks of the group. `head` counts the log entries folded so far. Raises `JoinFailed` if it
        is gone.
        """
        self.reader.stop()
        began_s = time.monotonic()
        slices = [PartitionId(number) for number, hosts in enumerate(action.hosts) if member in hosts]
        with self._loading(action.step + action.rework_steps):
            if action.snapshot is None:
                self._load_checkpoint(action, slices)
            else:
                assert self._snapshots is not None, "only a run that takes snapshots starts again from one"
                self._snapshots.load(action.snapshot, slices, action.members, head)
        self._load_s = time.monotonic() - began_s

    def _load_checkpoint(self, action: LoadCheckpoint, slices: Collection[PartitionId]) -> None:
        path = checkpoint_path(self._folder, action.step)
        if path.exists():
            self._trainer.load_checkpoint(path, slices)
        elif self._first is not None and action.step == step_of(self._first):
            self._load_first(self._first, slices)
        elif action.step > 0:  # a new process already has the state of step 0
            raise JoinFailed(f"the checkpoint {path} is gone")

    def _load_first(self, path: Path, slices: Collection[PartitionId]) -> None:
        """Loads what the run began with: a checkpoint or an emergency checkpoint."""
        if is_emergency_checkpoint(path):
            self._trainer.load_state(files_for(path, assemble(path).files, self._rank), slices)
        else:
            self._trainer.load_checkpoint(path, slices)

    @contextmanager
    def _loading(self, step: int) -> Iterator[None]:
        """Surrounds a load; `step` is the step that follows."""
        self._probe.between_steps(step, FaultPoint.LOAD)
        with self._probe.during(Operation.LOAD):
            yield
        self._probe(FaultPoint.LOAD_DONE)

    def record(self, member: Member, action: LoadCheckpoint) -> RestartRecord:
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


_TURN_S = 2.0

_POLL_S = 0.05

_POLL_S_PER_GROUP = 0.001
"""Every group reads the announcements of all groups from the store."""

_SEARCH_AGAIN_S = 1.0
"""A checkpoint folder that cannot be read may be back after this time."""


class RestartSearch:
    """The leader's part in finding the state to restart from: announces, reads, and lets the controller decide."""

    def __init__(
        self, controller: Controller, agreement: GroupAgreement, start_over: RestartLoader, groups: Sequence[GroupId]
    ) -> None:
        self._controller = controller
        self._agreement = agreement
        self._start_over = start_over
        self._groups = groups
        self._pause_s = max(_POLL_S, _POLL_S_PER_GROUP * len(groups))
        self._since_s = self._searched_at_s = 0.0
        self._own = RestartState(member=agreement.member, offers=())
        self._told: RestartState | None = None
        self._heard: dict[Member, tuple[RestartState, float]] = {}  # and since when it is unchanged

    def begin(self) -> None:
        """Forgets what was announced before and searches for checkpoints."""
        self._since_s = time.monotonic()
        self._own = RestartState(member=self._agreement.member, offers=())
        self._told = None
        self._heard = {}
        self._search()

    def tell(self, held: tuple[Held, ...], slices: tuple[HeldPartition, ...]) -> None:
        """Announces the snapshots that the group holds: of its rank positions, and of state partitions."""
        self._own = replace(self._own, held=held, slices=slices)
        self._tell()

    def seek(self, index: int) -> None:
        """Works on the restart for some seconds, until the entry at the index is written."""
        end_s = time.monotonic() + _TURN_S
        while time.monotonic() < end_s and not self._agreement.is_written(index):
            if self._own.failure and time.monotonic() - self._searched_at_s > _SEARCH_AGAIN_S:
                self._search()
            if self._decide():
                return
            self._tell()
            time.sleep(self._pause_s)

    def _decide(self) -> bool:
        """Lets the controller decide. Returns whether an entry is written."""
        waited_s = time.monotonic() - self._since_s
        event = WaitingRead(group=self._agreement.member.group, waiting=self._listen(), waited_s=waited_s)
        for action in self._controller.handle(event, now_s=self._start_over.now_s()):
            match action:
                case AppendEntry(index=index, entry=entry):
                    self._agreement.append(index, entry)
                    return True
                case ReadFiles(offer=offer, numbers=numbers):
                    self._start_over.read(offer, numbers)
                case WithdrawOffers(reasons=reasons):
                    self._start_over.withdraw(reasons)
                    self._search()
                case _:
                    raise AssertionError(f"nothing asks who waits for {action}")
        return False

    def _listen(self) -> tuple[RestartState, ...]:
        """The last announcement of every group, and for how long it has not changed."""
        now_s = time.monotonic()
        for item in self._agreement.waiting_to_restart(self._groups):
            if item.member not in self._heard or self._heard[item.member][0] != item:
                self._heard[item.member] = item, now_s
        latest = {item.member.group: (item, since_s) for item, since_s in self._heard.values()}
        return tuple(replace(item, silent_s=now_s - since_s) for item, since_s in latest.values())

    def _search(self) -> None:
        """Searches for checkpoints that pass `glance`."""
        offers: tuple[CheckpointCandidate, ...] = ()
        failure = ""
        try:
            offers = self._start_over.offers()
        except OSError as error:
            failure = str(error)
        self._own = replace(self._own, offers=offers, failure=failure)
        self._searched_at_s = time.monotonic()

    def _tell(self) -> None:
        """Announces what has changed."""
        reader = self._start_over.reader
        own = replace(self._own, readings=reader.readings(), is_reading=reader.is_reading)
        if own != self._told:
            self._agreement.announce_restart(own)
            self._told = own
