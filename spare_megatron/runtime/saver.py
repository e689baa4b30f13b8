"""One rank's part in saving checkpoints: copied between two updates, written by a thread while training goes on.

The state does not change from one update to the next, so that it is copied while the next step is computed; only the
update waits for the copy. The thread has a process group of its own, for collectives of two threads on one would mix.
A save that fails leaves nothing visible and every earlier checkpoint as it was; training goes on.
"""

import threading
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.liveness import Operation
from spare_megatron.core.phases import Phase
from spare_megatron.core.retention import superseded
from spare_megatron.core.saves import SaveCheckpoint
from spare_megatron.core.topology import Member
from spare_megatron.journal.records import CheckpointRecord, SaveOutcome
from spare_megatron.mcore.checkpoint import GroupState
from spare_megatron.mcore.trainer import GroupTrainer
from spare_megatron.runtime.agreement import GroupAgreement
from spare_megatron.runtime.checkpoints import (
    DamagedCheckpoint,
    Manifest,
    StoredFile,
    aside_path,
    clear_leftovers,
    drop,
    manifest_of,
    publish,
    verify_file,
    visible_steps,
)
from spare_megatron.runtime.probe import RankProbe

T = TypeVar("T")


class SaveFailed(Exception):
    """A rank could not do its part; the text says which and why."""


@dataclass(slots=True)
class _Save:
    """A save from its beginning to its end."""

    step: int
    started_s: float
    stall_s: float = 0.0
    outcome: SaveOutcome = "failed"
    reason: str = ""
    num_bytes: int = 0
    write_s: float = 0.0


class Saver:
    """Saves when it is this group's turn.

    Args:
        config: The run's configuration.
        folder: Where checkpoints go.
        trainer: The rank's part of the model.
        agreement: The group's voice.
        ranks: The group's ranks, with gloo, for this saver alone.
        probe: Told of the moments of a save.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        folder: Path,
        trainer: GroupTrainer,
        agreement: GroupAgreement,
        ranks: dist.ProcessGroup,
        probe: RankProbe,
    ) -> None:
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._agreement = agreement
        self._ranks = ranks
        self._probe = probe
        self._copied = threading.Event()
        self._copied.set()
        # One thread for all saves, which the beacon knows.
        self._thread = ThreadPoolExecutor(max_workers=1, initializer=probe.write_here)
        self._writing: Future[None] | None = None
        self._save: _Save | None = None
        self._finished: list[_Save] = []

    # ------------------------------------------------------------------------------------------ the training's thread

    def save(self, action: SaveCheckpoint, head: int) -> None:
        """Begins the save, if this group is to do it.

        Collective over: all ranks of the group.

        Args:
            action: The controller's.
            head: Entries of the log folded so far.
        """
        if action.member != self._agreement.member:
            return
        save = _Save(step=action.step, started_s=time.monotonic())
        with self._probe.during(Operation.SAVE):
            if self._agreement.highest(self._writing is not None and not self._writing.done()):
                save.outcome, save.reason = "skipped", "the group is still writing an earlier one"
                self._finished.append(save)
                return
            self._collect()
            self._probe(Phase.SAVE)
            state = self._trainer.checkpoint_state()
            self._save = save
            self._copied.clear()
            self._writing = self._thread.submit(self._run, save, action, head, state)
            if not self._config.checkpoint.asynchronous:
                wait([self._writing])
        save.stall_s += time.monotonic() - save.started_s

    def await_copy(self) -> None:
        """Returns when the state may change."""
        if self._copied.is_set():
            return
        assert self._save is not None, "who copies has begun to save"
        since_s = time.monotonic()
        with self._probe.during(Operation.SAVE):
            self._copied.wait()
        self._save.stall_s += time.monotonic() - since_s

    def finish(self) -> None:
        """Returns when nothing is written any more, or has been for longer than a save may take."""
        if self._writing is not None:
            with self._probe.during(Operation.SAVE):
                wait([self._writing], self._config.checkpoint.timeout_s)

    def take_finished(self) -> list[CheckpointRecord]:
        """How saves have ended since this was asked last."""
        if self._writing is not None and self._writing.done():
            self._collect()
        finished, self._finished = self._finished, []
        member = self._agreement.member
        return [
            CheckpointRecord(
                group=member.group,
                step=save.step,
                outcome=save.outcome,
                reason=save.reason,
                num_bytes=save.num_bytes,
                stall_s=round(save.stall_s, 6),
                write_s=round(save.write_s, 6),
                incarnation=member.incarnation,
            )
            for save in finished
        ]

    def _collect(self) -> None:
        if self._save is not None:
            self._finished.append(self._save)
        self._save = self._writing = None

    # -------------------------------------------------------------------------------------------- the writing thread

    def _run(self, save: _Save, action: SaveCheckpoint, head: int, state: GroupState) -> None:
        aside = aside_path(self._folder, action.step, action.member)
        others = set(action.voters) - {action.member}
        try:
            self._agree(lambda: self._prepare(aside, others, state))
            files = self._agree(lambda: self._write(aside, state))
            manifest = manifest_of(self._config, action, head, dict(ChainMap(*files)))
            # All wait for the first rank: one that ended earlier would break the connections that it still reads from.
            self._agree(lambda: self._publish(save, aside, manifest) if self._ranks.rank() == 0 else None)
        except (Exception, CheckpointException) as error:  # noqa: BLE001  (whatever it is, training goes on)
            if save.outcome != "saved":
                save.outcome, save.reason = "failed", _in_a_line(error)
            if self._ranks.rank() == 0:
                clear_leftovers(self._folder, others)
        finally:
            self._copied.set()
            save.write_s = time.monotonic() - save.started_s

    def _prepare(self, aside: Path, others: Collection[Member], state: GroupState) -> None:
        state.copy()
        self._copied.set()
        if self._ranks.rank() == 0:
            aside.parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(aside.parent, others)
            aside.mkdir()

    def _write(self, aside: Path, state: GroupState) -> dict[str, StoredFile]:
        written = state.write(aside, self._ranks, lambda: self._probe(Phase.SAVE_WRITE))
        files = {name: StoredFile(num_bytes=size, sha256=sha256) for name, (size, sha256) in written.items()}
        for name, file in files.items():
            verify_file(aside / name, file)
        return files

    def _publish(self, save: _Save, aside: Path, manifest: Manifest) -> None:
        publish(aside, manifest, self._probe)
        save.outcome, save.num_bytes = "saved", manifest.num_bytes
        self._probe(Phase.SAVE_DROP)
        policy = self._config.checkpoint
        # Later ones are from before a restart, or of a group that was faster: they say nothing of what is superseded.
        steps = [step for step in visible_steps(self._folder) if step <= manifest.step]
        try:
            drop(self._folder, superseded(steps, policy.keep_last, policy.keep_every_steps))
        except OSError as error:
            save.reason = f"what it supersedes could not be removed: {error}"

    def _agree(self, work: Callable[[], T]) -> Sequence[T]:
        """What the work gave on every rank of the group.

        Collective over: all ranks of the group.

        Raises:
            SaveFailed: It failed on one of them; all raise the same.
        """
        result: tuple[T | None, str, str] = (None, "", "")
        try:
            result = (work(), "", "")
        except CheckpointException as error:  # what others have met as well
            result = (None, "", _in_a_line(error))
        except Exception as error:  # noqa: BLE001  (the others must hear of it, whatever it is)
            result = (None, f"rank {self._ranks.rank()}: {_in_a_line(error)}", "")
        gathered: list[Any] = [None] * self._ranks.size()
        dist.all_gather_object(gathered, result, group=self._ranks)
        own, common = ([texts[kind] for texts in gathered if texts[kind]] for kind in (1, 2))
        if own or common:
            raise SaveFailed("; ".join(own) or common[0])
        return [value for value, *_ in gathered]


def _in_a_line(error: BaseException) -> str:
    if isinstance(error, SaveFailed | DamagedCheckpoint):
        return str(error)
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_in_a_line(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
    return f"{type(error).__name__}: {error}".splitlines()[0]
