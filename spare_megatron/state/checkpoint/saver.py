"""One rank's part in saves: state is copied between two updates and written while training goes on.

Only the next update waits for the copy. The writing thread has its own process group, as collectives of two threads
would mix. A failed save leaves all as it was. All hosts of state partitions take part (`partition_saver`). The
parameters alone of a step with a dispute, a microbatch that groups have computed to different values, are saved in the
run's directory for `spare replay`; the newest few are kept.
"""

import contextlib
import threading
import time
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from spare_megatron.core.log.actions import RefuseCheckpoint, SaveCheckpoint, SaveDispute
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.core.saves.checkpoint_policy import superseded
from spare_megatron.faults.points import FaultPoint
from spare_megatron.formats.output import real_paths
from spare_megatron.journal.records import CheckpointRecord, DisputeRecord, SaveOutcome
from spare_megatron.mcore.group_checkpoint import GroupState, Written, join_partitions
from spare_megatron.process.processes import say
from spare_megatron.stacking.layout import Member
from spare_megatron.stacking.state_partitions import hosted_by
from spare_megatron.state.checkpoint import checkpoint_folder as folders
from spare_megatron.state.checkpoint.partition_saver import PartitionSaver, SaveBoard, SaveFailed, WrittenShare
from spare_megatron.state.checkpoint.verification import (
    DamagedCheckpoint,
    refusal_in_log,
    refusal_of,
    refuse,
    verify_file,
)
from spare_megatron.state.rank_context import RankContext
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import ControlStore, StoreLost
from spare_megatron.store.open_store import open_store

T = TypeVar("T")

_POLL_S = 0.5
"""How often the end of a save that needs the store looks whether that is lost."""


@dataclass(slots=True)
class SaveJob:
    """A save of all state in `folder` or, for a `dispute`, of the parameters alone."""

    action: SaveCheckpoint
    head: int
    folder: Path
    is_saver: bool = True
    """Whether it is this group's turn; other groups write state partitions only and report no end."""
    dispute: SaveDispute | None = None
    started_s: float = field(default_factory=time.monotonic)
    stall_s: float = 0.0
    outcome: SaveOutcome = "failed"
    reason: str = ""
    num_bytes: int = 0
    write_s: float = 0.0
    board: SaveBoard | None = None
    """On the leader, the exchange with the other groups about their state partitions."""

    @property
    def others(self) -> frozenset[Member]:
        """Groups that may be writing an earlier checkpoint."""
        return frozenset(self.action.voters) - {self.action.member}

    @property
    def aside(self) -> Path:
        """Where it is written before it is published."""
        return folders.aside_path(self.folder, self.action.step, self.action.member)

    def reason_of(self, error: BaseException) -> str:
        reason = in_a_line(error)
        return real_paths(with_folder(reason, self.folder)) if self.dispute is None else f"{reason} (in {self.folder})"

    def record(self) -> CheckpointRecord | DisputeRecord:
        member, write_s = self.action.member, round(self.write_s, 6)
        if self.dispute is not None:
            assert self.outcome != "skipped", "every dispute is saved"
            return DisputeRecord(
                group=member.group,
                step=self.action.step,
                attempt=self.dispute.attempt,
                outcome=self.outcome,
                reason=self.reason,
                num_bytes=self.num_bytes,
                write_s=write_s,
                incarnation=member.incarnation,
            )
        return CheckpointRecord(
            group=member.group,
            step=self.action.step,
            outcome=self.outcome,
            reason=self.reason,
            num_bytes=self.num_bytes,
            stall_s=round(self.stall_s, 6),
            write_s=write_s,
            incarnation=member.incarnation,
        )


class Saver:
    """Saves in its group's turn, writes partitions in others'. Construction is collective over: ranks of the group."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._folder = folders.folder_of(ctx.config.checkpoint, ctx.spec.run_dir)
        timeout = timedelta(seconds=ctx.config.checkpoint.timeout_s)
        self._ranks = dist.new_group(backend="gloo", timeout=timeout)  # for the writing thread alone
        self._copied = threading.Event()
        self._copied.set()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._store: ControlStore | None = None  # of that thread
        self._save: SaveJob | None = None  # whose copy is being made
        self._under_way: deque[tuple[SaveJob, Future[None]]] = deque()
        self._refusing: list[Future[None]] = []
        self._finished: list[SaveJob] = []
        self._postponed: SaveJob | None = None

    # ------------------------------------------------------------------------------------------ the training's thread

    def save(self, action: SaveCheckpoint) -> None:
        """Starts the save if this group has a part in it, once its parameters are here. Collective over: all ranks of
        the group.
        """
        member, head = self._ctx.member, self._ctx.controller.head
        is_saver = action.member == member
        if not is_saver and not any(member in hosts for hosts in action.hosts):
            return
        save = SaveJob(action=action, head=head, folder=self._folder, is_saver=is_saver)
        if is_saver and self._ctx.progress.lacks_params:
            self._postponed = save
        else:
            self._start(save)

    def save_weights(self, dispute: SaveDispute) -> None:
        """Copies the parameters and starts to write them. Collective over: all ranks of the group."""
        voters = self._ctx.controller.voters
        action = SaveCheckpoint(step=dispute.step, member=dispute.member, voters=voters, epoch=dispute.epoch)
        folder = folders.disputes_of(self._ctx.spec.run_dir)
        save = SaveJob(action=action, head=self._ctx.controller.head, folder=folder, dispute=dispute)
        with self._ctx.probe.during(Operation.SAVE):
            state = self._ctx.trainer.weights_state()
            state.copy()
        self._submit(save, self._run, save, state)

    def _start(self, save: SaveJob) -> None:
        action = save.action
        with self._ctx.probe.during(Operation.SAVE):
            num_under_way = self._ctx.agreement.highest(sum(not writing.done() for _, writing in self._under_way))
            # Hosts of state partitions may still wait for the end of the last save when the next begins.
            if num_under_way > bool(action.hosts) and not action.is_last:
                save.outcome, save.reason = "skipped", "the group is still writing an earlier one"
                self._refuse(save)
                return
            self._ctx.probe(FaultPoint.SAVE)
            hosted = hosted_by(action.hosts, self._ctx.member)
            state = self._ctx.trainer.checkpoint_state(hosted, has_rest=save.is_saver)
            if num_under_way:
                state.copy()
            else:
                self._save = save
                self._copied.clear()
            writing = self._submit(save, self._run, save, state)
            if save.is_saver and not self._ctx.config.checkpoint.asynchronous:
                wait([writing])
        save.stall_s += time.monotonic() - save.started_s

    def start_postponed(self, step: int) -> None:
        """Starts a postponed save, as all parameters are here now. Collective over: all ranks of the group."""
        if self._postponed is not None:
            save, self._postponed = self._postponed, None
            assert save.action.step == step, "nothing is updated while parameters are lacking"
            save.started_s = time.monotonic()
            self._start(save)

    def refuse(self, action: RefuseCheckpoint) -> None:
        """On the first rank, marks a checkpoint as refused, in the writing thread."""
        if self._is_first:
            self._refusing.append(self._thread.submit(refuse, self._folder, action))

    def await_copy(self) -> None:
        if self._copied.is_set():
            return
        assert self._save is not None, "a copy belongs to a save"
        since_s = time.monotonic()
        with self._ctx.probe.during(Operation.SAVE):
            self._copied.wait()
        self._save.stall_s += time.monotonic() - since_s

    def finish(self) -> SaveCheckpoint | None:
        """Waits until nothing is written any more, for `checkpoint.timeout_s` at most. Returns the save of the present
        state if that cannot end, or has failed, and the store is lost.
        """
        if self._postponed is not None:
            save, self._postponed = self._postponed, None
            save.reason, save.started_s = "the parameters have not come together", time.monotonic()
            self._refuse(save)
        with self._ctx.probe.during(Operation.SAVE):
            under_way = [*self._refusing, *(writing for _, writing in self._under_way)]
            end_s, is_over = time.monotonic() + self._ctx.config.checkpoint.timeout_s, False
            while not is_over:
                is_over = not wait(under_way, _POLL_S).not_done or time.monotonic() >= end_s
                if (unsaved := self._unsaved()) is not None and self._is_store_lost():
                    return unsaved
        return None

    def _unsaved(self) -> SaveCheckpoint | None:
        ours = [save for save, _ in self._under_way if save.dispute is None and save.outcome != "saved"]
        return next((save.action for save in ours if save.action.step == self._ctx.progress.num_steps), None)

    def _is_store_lost(self) -> bool:
        try:
            self._ctx.store.get([keys.RUN_NAME])
        except StoreLost:
            return True
        return False

    def take_finished(self) -> list[CheckpointRecord | DisputeRecord]:
        """The records of this group's saves that have ended since the last call."""
        while self._under_way and self._under_way[0][1].done():
            self._finished.append(self._under_way.popleft()[0])
        finished, self._finished = self._finished, []
        return [save.record() for save in finished if save.is_saver]

    def _refuse(self, save: SaveJob) -> None:
        """Ends a save that does not start, and informs the other groups."""
        if save.action.hosts:
            self._submit(save, self._report_refusal, save)
        else:
            self._finished.append(save)

    def _submit(self, save: SaveJob, work: Callable[..., None], *arguments: Any) -> Future[None]:
        writing = self._thread.submit(work, *arguments)
        self._under_way.append((save, writing))
        return writing

    # -------------------------------------------------------------------------------------------- the writing thread

    def _run(self, save: SaveJob, state: GroupState) -> None:
        try:
            self._agree(lambda: self._prepare(save, state))
            files = dict(ChainMap(*self._agree(lambda: self._write(save, state)))) if save.is_saver else {}
            shares: Sequence[WrittenShare] | None = ()
            if save.action.hosts:
                shares = self._write_partitions(save, state)
            if shares is not None:
                # All ranks wait for the first: an earlier exit would break connections that it reads from.
                self._agree(lambda: self._publish(save, files, shares) if self._is_first else None)
            elif not save.is_saver:
                save.outcome = "saved"
        except (Exception, CheckpointException) as error:  # noqa: BLE001  (whatever it is, training goes on)
            if save.outcome != "saved":
                save.outcome, save.reason = "failed", save.reason_of(error)
            if save.dispute is not None:
                say(f"the parameters of step {save.action.step} are not saved: {save.reason}")
            if save.is_saver and self._is_first:
                with contextlib.suppress(OSError):  # perhaps what made the save fail
                    folders.forestall(save.folder, save.action.step, save.action.member)
        finally:
            self._copied.set()
            self._report_end(save)
            save.write_s = time.monotonic() - save.started_s

    def _prepare(self, save: SaveJob, state: GroupState) -> None:
        state.copy()
        self._copied.set()
        if save.action.hosts:
            self._open_board(save)
        if save.is_saver and self._is_first:
            if save.dispute is None:
                folders.require_folder(save.folder)  # never made: an unmounted storage leaves its mount point
            else:
                save.folder.mkdir(exist_ok=True)
            folders.clear_leftovers(save.folder, save.others)
            save.aside.mkdir()
            if save.board is not None:
                save.board.announce_folder()

    def _write(self, save: SaveJob, state: GroupState) -> dict[str, folders.StoredFile]:
        if save.dispute is not None:
            return folders.stored(state.write(save.aside, self._ranks, lambda: None))
        return self._verified(save.aside, partial(state.write, save.aside))

    def _verified(self, folder: Path, write: Callable[..., Written]) -> dict[str, folders.StoredFile]:
        files = folders.stored(write(self._ranks, partial(self._ctx.probe, FaultPoint.SAVE_WRITE)))
        for name, file in files.items():
            verify_file(folder, name, file)
        return files

    def _write_partitions(self, save: SaveJob, state: GroupState) -> Sequence[WrittenShare] | None:
        """On the group that saves, what all groups have written, as its first rank knows; None on others."""
        saver = PartitionSaver(
            action=save.action,
            member=self._ctx.member,
            board=save.board,
            aside=save.aside,
            agree=self._agree,
            write=lambda folder, move: self._verified(folder, partial(state.write, folder, partitions=move.partitions)),
            timeout_s=self._ctx.config.checkpoint.timeout_s,
        )
        return saver.shares if saver.run() else None

    def _publish(self, save: SaveJob, files: Mapping[str, folders.StoredFile], shares: Sequence[WrittenShare]) -> None:
        if save.dispute is not None:
            self._publish_weights(save, files)
            return
        everything = dict(files)
        for share in shares:
            everything |= {f"{share.folder}/{name}": file for name, file in share.files.items()}
        if shares:
            everything |= folders.stored(join_partitions(save.aside, [share.folder for share in shares]))
        writers = {share.member for share in shares}
        manifest = folders.manifest_of(self._ctx.config, save.action, save.head, everything, writers)
        reason = refusal_in_log(DecisionLog(self._own_store()), save.head, save.action)
        if reason:
            raise SaveFailed(f"what was to be saved does not count: {reason}")
        folders.publish(save.aside, manifest, self._ctx.probe)
        save.outcome, save.num_bytes = "saved", manifest.num_bytes
        self._ctx.probe(FaultPoint.SAVE_DROP)
        policy, saved = self._ctx.config.checkpoint, self._ctx.controller.saved
        # Later checkpoints are from before a restart, or from a group that was faster: they supersede nothing here.
        earlier = [step for step in folders.visible_steps(self._folder) if step <= manifest.step]
        # A refused checkpoint supersedes nothing, and is kept for diagnosis.
        steps = [step for step in earlier if not refusal_of(folders.checkpoint_path(self._folder, step))]
        # One later than what the run began with that it has not saved was damaged then, and is no better now.
        doubtful = {step for step in steps if step > min(saved) and step not in saved} | {*save.action.doubtful}
        left_out = superseded(steps, doubtful, policy.keep_last, policy.keep_every_steps, save.action.audited_steps)
        try:
            folders.drop(self._folder, left_out)
        except OSError as error:
            save.reason = f"what it supersedes could not be removed: {error}"

    def _publish_weights(self, save: SaveJob, files: Mapping[str, folders.StoredFile]) -> None:
        manifest = folders.manifest_of(self._ctx.config, save.action, save.head, files)
        folders.publish(save.aside, replace(manifest, optimizer={"sharding": folders.WEIGHTS_ALONE}), lambda _: None)
        folders.drop(save.folder, folders.visible_steps(save.folder)[folders.NUM_DISPUTES_KEPT :])
        save.outcome, save.num_bytes = "saved", manifest.num_bytes

    def _report_refusal(self, save: SaveJob) -> None:
        with contextlib.suppress(StoreLost):
            self._open_board(save)
        self._report_end(save)

    def _open_board(self, save: SaveJob) -> None:
        """On the first rank, opens the exchange with the other groups, in the writing thread."""
        if self._is_first:
            save.board = SaveBoard(self._own_store(), save.head, save.action.voters)

    def _own_store(self) -> ControlStore:
        self._store = self._store or open_store(self._ctx.spec.store)
        return self._store

    def _report_end(self, save: SaveJob) -> None:
        """On the first rank, informs the other groups how a save of state partitions has ended here."""
        board, member = save.board, self._ctx.member
        if board is None:
            return
        with contextlib.suppress(StoreLost):
            if save.is_saver:
                board.announce_end()
            elif save.outcome == "saved":
                board.remove_report(member)
            else:
                board.report(member, (), save.reason)

    @property
    def _is_first(self) -> bool:
        return bool(self._ranks.rank() == 0)

    def _agree(self, work: Callable[[], T]) -> Sequence[T]:
        return agreed(work, self._ranks)


def agreed(work: Callable[[], T], ranks: dist.ProcessGroup) -> Sequence[T]:
    """Runs `work` on every rank; returns all results, or all raise the same `SaveFailed`. Collective over: all ranks of
    the group.
    """
    result: tuple[T | None, str, str] = (None, "", "")
    try:
        result = (work(), "", "")
    except CheckpointException as error:  # raised on the other ranks as well
        result = (None, "", in_a_line(error))
    except Exception as error:  # noqa: BLE001  (the other ranks must learn of any error)
        result = (None, f"rank {ranks.rank()}: {in_a_line(error)}", "")
    gathered: list[Any] = [None] * ranks.size()
    dist.all_gather_object(gathered, result, group=ranks)
    own, common = ([texts[kind] for texts in gathered if texts[kind]] for kind in (1, 2))
    if own or common:
        raise SaveFailed("; ".join(own) or common[0])
    return [value for value, *_ in gathered]


def with_folder(reason: str, folder: Path) -> str:
    """The reason of a failed save, with the folder and its setting if it is a system error that names no path.

    >>> with_folder("OSError: [Errno 28] No space left on device", Path("/kept"))
    'OSError: [Errno 28] No space left on device: checkpoint.folder /kept'
    """
    is_bare = "[Errno " in reason and str(folder) not in reason
    return f"{reason}: checkpoint.folder {folder}" if is_bare else reason


def in_a_line(error: BaseException) -> str:
    if isinstance(error, SaveFailed | DamagedCheckpoint):
        return str(error)
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {in_a_line(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
    return f"{type(error).__name__}: {error}".splitlines()[0]
