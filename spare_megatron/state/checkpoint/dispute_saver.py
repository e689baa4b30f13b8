"""Saves the parameters of steps in which groups have computed a microbatch to different values.

They lie in the run's directory as checkpoints with weights alone (`checkpoint_folder`), the newest few of them. With
them `spare replay` computes the microbatch again.
"""

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from spare_megatron.core.log.actions import SaveCheckpoint, SaveDispute
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.journal.records import DisputeRecord
from spare_megatron.mcore.group_checkpoint import GroupState
from spare_megatron.process.processes import say
from spare_megatron.state.checkpoint import checkpoint_folder as folders
from spare_megatron.state.checkpoint.saver import agreed, in_a_line, stored, writing_ranks
from spare_megatron.state.rank_context import RankContext


class DisputeSaver:
    """One rank's part in these saves. Construction is collective over: all ranks of the group."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._folder = folders.disputes_of(ctx.spec.run_dir)
        self._ranks = writing_ranks(ctx.config)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._under_way: list[Future[DisputeRecord]] = []

    def save(self, action: SaveDispute, head: int) -> None:
        """Copies the parameters and starts to write them; `head` counts the log entries folded so far.

        Collective over: all ranks of the group.
        """
        began_s = time.monotonic()
        with self._ctx.probe.during(Operation.SAVE):
            state = self._ctx.trainer.weights_state()
            state.copy()
        self._under_way.append(self._thread.submit(self._run, action, head, state, began_s))

    def finish(self) -> None:
        """Waits until nothing is written any more, for `checkpoint.timeout_s` at most."""
        with self._ctx.probe.during(Operation.SAVE):
            wait(self._under_way, self._ctx.config.checkpoint.timeout_s)

    def take_finished(self) -> list[DisputeRecord]:
        """The records of the saves that have ended since the last call."""
        ended = [writing.result() for writing in self._under_way if writing.done()]
        self._under_way = [writing for writing in self._under_way if not writing.done()]
        return ended

    # -------------------------------------------------------------------------------------------- the writing thread

    def _run(self, action: SaveDispute, head: int, state: GroupState, began_s: float) -> DisputeRecord:
        record = DisputeRecord(
            group=action.member.group,
            step=action.step,
            attempt=action.attempt,
            outcome="saved",
            incarnation=action.member.incarnation,
        )
        try:
            record = replace(record, num_bytes=self._write(action, head, state))
        except (Exception, CheckpointException) as error:  # noqa: BLE001  (whatever it is, training goes on)
            record = replace(record, outcome="failed", reason=f"{in_a_line(error)} (in {self._folder})")
            say(f"the parameters of step {action.step} are not saved: {record.reason}")
            if self._ranks.rank() == 0:
                with contextlib.suppress(OSError):  # perhaps what made the save fail
                    folders.clear_leftovers(self._folder, ())
        return replace(record, write_s=round(time.monotonic() - began_s, 6))

    def _write(self, action: SaveDispute, head: int, state: GroupState) -> int:
        """Returns the number of bytes, on the first rank."""
        aside = folders.aside_path(self._folder, action.step, action.member)
        agreed(lambda: self._prepare(aside), self._ranks)
        written = agreed(lambda: stored(state.write(aside, self._ranks, lambda: None)), self._ranks)
        files = {name: file for of_rank in written for name, file in of_rank.items()}
        return agreed(lambda: self._publish(action, head, aside, files), self._ranks)[0]

    def _prepare(self, aside: Path) -> None:
        if self._ranks.rank() == 0:
            self._folder.mkdir(exist_ok=True)
            folders.clear_leftovers(self._folder, ())
            aside.mkdir()

    def _publish(self, action: SaveDispute, head: int, aside: Path, files: dict[str, folders.StoredFile]) -> int:
        if self._ranks.rank() > 0:
            return 0
        save = SaveCheckpoint(step=action.step, member=action.member, voters=(), epoch=action.epoch)
        manifest = folders.manifest_of(self._ctx.config, save, head, files)
        folders.publish(aside, replace(manifest, optimizer={"sharding": folders.WEIGHTS_ALONE}), lambda _: None)
        folders.drop(self._folder, folders.visible_steps(self._folder)[folders.NUM_DISPUTES_KEPT :])
        return manifest.num_bytes
