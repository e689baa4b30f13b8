"""One rank's part in snapshots: a thread copies its state to the node's snapshot server. The next update waits for the
copy; only the last one before the next snapshot waits for the server's checksum.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from spare_megatron.core.log.actions import TakeSnapshot
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.journal.records import SnapshotRecord
from spare_megatron.mcore.state import StateCopy
from spare_megatron.process.snapshot_wire import PartKey
from spare_megatron.state.rank_context import RankContext
from spare_megatron.state.snapshot.mapped_files import MappedFile
from spare_megatron.state.snapshot.snapshot_client import SnapshotClient, SnapshotServerGone

_PATIENCE_S = 30.0
"""Longest wait of training for a snapshot server that does not answer; then the rank uses it no more."""


@dataclass(slots=True)
class _Copy:
    action: TakeSnapshot
    parts: dict[PartKey, StateCopy]
    began_s: float
    stall_s: float = 0.0
    copy_s: float = 0.0
    registered_bytes: int = 0
    register_s: float = 0.0
    not_registered: str = ""
    failure: str = "its snapshot server did not answer"


class Snapshotter:
    """Copies this rank's state when its group is to keep it. `snapshot_server` is the connection to the node's."""

    def __init__(self, ctx: RankContext, snapshot_server: SnapshotClient) -> None:
        self._ctx = ctx
        self._snapshot_server = snapshot_server
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._asking: Future[None] | None = None
        self._copied = threading.Event()
        self._may_read = threading.Lock()
        self._is_given_up = False  # the snapshot server
        self._copy: _Copy | None = None
        self._postponed: TakeSnapshot | None = None

    def start_copy(self, action: TakeSnapshot) -> None:
        """Starts to copy what this rank is to store, if anything; without all parameters, `start_postponed` does."""
        self._postponed = action if self._ctx.progress.lacks_params else None
        if self._is_given_up or self._postponed is not None:
            return
        began_s = time.monotonic()
        parts = self._parts(action)
        if not parts:
            self._asking = self._thread.submit(self._pass_over, action)
            return
        self._copy = _Copy(action=action, parts=parts, began_s=began_s)
        self._copied.clear()
        self._asking = self._thread.submit(self._run, self._copy)
        self._copy.stall_s = time.monotonic() - began_s

    def start_postponed(self) -> None:
        """Starts a postponed copy: the rank has all parameters of the step."""
        if self._postponed is not None:
            self.start_copy(self._postponed)

    def _parts(self, action: TakeSnapshot) -> dict[PartKey, StateCopy]:
        """What this rank is to keep; under None all but state partitions."""
        parts = self._ctx.optimizer_state.snapshot_parts(action)
        if self._ctx.member.group in action.holders[self._ctx.spec.rank]:
            parts[None] = self._ctx.trainer.state_copy()
        return parts

    def await_copy(self, step: int) -> None:
        """Waits until the update that makes `step` committed steps may change the state."""
        copy = self._copy
        if copy is None:
            return
        began_s = time.monotonic()
        with self._ctx.probe.during(Operation.SAVE):
            is_done = self._copied.wait(_PATIENCE_S)
            if is_done and step >= copy.action.settled_by:
                is_done = self._settle()
            if not is_done:
                with self._may_read:  # waits for a copy under way
                    self._is_given_up = True
        copy.stall_s += time.monotonic() - began_s

    def finish(self) -> None:
        with self._ctx.probe.during(Operation.SAVE):
            if self._settle() and not self._is_given_up:  # else the thread may still use them
                self._snapshot_server.close()

    def take_finished(self) -> list[SnapshotRecord]:
        """The record of the last copy, once, after it has ended."""
        copy = self._copy
        if copy is None or self._asking is None or not (self._asking.done() or self._is_given_up):
            return []
        if self._asking.done():
            self._asking.result()  # raises any error but a lost server
        self._copy = None
        record = SnapshotRecord(
            group=self._ctx.member.group,
            rank=self._ctx.spec.rank,
            step=copy.action.step,
            attempt=copy.action.attempt,
            is_kept=not copy.failure,
            reason=copy.failure,
            num_bytes=sum(part.num_bytes for part in copy.parts.values()),
            slices=[number for number in copy.parts if number is not None],
            has_params=None in copy.parts,
            stall_s=round(copy.stall_s, 6),
            copy_s=round(copy.copy_s, 6),
            registered_bytes=copy.registered_bytes,
            register_s=round(copy.register_s, 6),
            not_registered=copy.not_registered,
            incarnation=self._ctx.member.incarnation,
        )
        return [record]

    def _settle(self) -> bool:
        return self._asking is None or self._is_given_up or bool(wait([self._asking], _PATIENCE_S).done)

    # -------------------------------------------------------------------------------------------- the copying thread

    def _run(self, copy: _Copy) -> None:
        action = copy.action
        num_bytes = {number: part.num_bytes for number, part in copy.parts.items()}
        try:
            self._snapshot_server.copy(action.attempt, action.kept, num_bytes, partial(self._write, copy))
            copy.failure = ""
            mapped = self._snapshot_server.mapped
            copy.registered_bytes, copy.register_s = mapped.registered_bytes, mapped.last_register_s
            copy.not_registered = mapped.failure
        except (SnapshotServerGone, _GivenUp) as error:
            copy.failure = str(error)
        finally:
            self._copied.set()
            copy.copy_s = time.monotonic() - copy.began_s

    def _write(self, copy: _Copy, files: Sequence[MappedFile]) -> None:
        with self._may_read:
            if self._is_given_up:
                raise _GivenUp("its snapshot server answered too late")
            for part, file in zip(copy.parts.values(), files, strict=True):
                part.write(file.memory, file.range_bytes)
        self._copied.set()

    def _pass_over(self, action: TakeSnapshot) -> None:
        with contextlib.suppress(SnapshotServerGone):  # with all its snapshots
            self._snapshot_server.pass_over(action.attempt, action.kept)


class _GivenUp(Exception):
    """Training has gone on without the copy."""
