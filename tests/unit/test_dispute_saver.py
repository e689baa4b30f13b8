"""The parameters of steps with disputes: written beside the training, a few of them kept, and no failure ends a run."""

import errno
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from spare_megatron.core.log.actions import SaveDispute
from spare_megatron.journal.records import DisputeRecord
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.checkpoint_folder import (
    NUM_DISPUTES_KEPT,
    WEIGHTS_ALONE,
    aside_path,
    visible_steps,
)
from spare_megatron.state.checkpoint.saver import Saver
from spare_megatron.state.checkpoint.verification import verify
from tests.rank_context import rank_context

pytestmark = pytest.mark.timeout(60)

OTHER = Member(GroupId(3))


class State:
    """Parameters of a rank, which are copied before the step goes on."""

    def __init__(self, values: bytearray, gate: threading.Event, error: OSError | None) -> None:
        self._values, self._gate, self._error = values, gate, error
        self._copy = b""

    def copy(self) -> None:
        self._copy = bytes(self._values)

    def write(self, folder: Path, ranks: object, on_write: object) -> dict[str, tuple[int, str]]:
        assert self._gate.wait(30)
        (folder / "0.distcp").write_bytes(self._copy[:2])
        if self._error is not None:
            raise self._error
        (folder / "0.distcp").write_bytes(self._copy)
        return {"0.distcp": (len(self._copy), hashlib.sha256(self._copy).hexdigest())}


class Trained:
    """A rank that saves disputes; it writes once `gate` is set, and fails with `error` if there is one."""

    def __init__(self, run_dir: Path) -> None:
        self.values = bytearray(b"as they were")
        self.gate = threading.Event()
        self.error: OSError | None = None
        self.folder = run_dir / "disputes"
        trainer: Any = SimpleNamespace(weights_state=lambda: State(self.values, self.gate, self.error))
        controller: Any = SimpleNamespace(head=7, voters=(Member(GroupId(2), 1), OTHER))
        self.saver = Saver(rank_context(run_dir=run_dir, trainer=trainer, controller=controller))

    def save(self, step: int) -> None:
        member = Member(GroupId(2), 1)
        self.saver.save_weights(SaveDispute(step=step, attempt=step + 3, member=member, epoch=1))

    def ended(self) -> list[DisputeRecord]:
        self.gate.set()
        self.saver.finish()
        return self.saver.take_finished()


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Trained(tmp_path)
    dist.destroy_process_group()


def test_what_is_saved_is_what_the_step_was_computed_with_though_training_has_gone_on(trained: Trained) -> None:
    trained.save(4)
    trained.values[:] = b"an update so"
    assert trained.saver.take_finished() == [], "it is written while training goes on"
    [record] = trained.ended()
    assert (record.group, record.incarnation, record.step, record.attempt) == (2, 1, 4, 7)
    assert (record.outcome, record.reason, record.num_bytes) == ("saved", "", len(b"as they were"))
    saved = verify(trained.folder / "step-00000004")
    assert (saved.path / "0.distcp").read_bytes() == b"as they were"
    assert saved.manifest.optimizer == {"sharding": WEIGHTS_ALONE}
    assert trained.saver.take_finished() == []


def test_the_newest_few_are_kept_and_one_of_the_same_step_takes_the_place_of_the_earlier(trained: Trained) -> None:
    for step in (*range(5), 4):
        trained.save(step)
        trained.values[:1] = bytes([step])
    assert [record.outcome for record in trained.ended()] == ["saved"] * 6
    assert visible_steps(trained.folder) == [4, 3, 2]
    assert len(visible_steps(trained.folder)) == NUM_DISPUTES_KEPT
    assert (trained.folder / "step-00000004" / "0.distcp").read_bytes()[0] == 4


def test_a_save_leaves_alone_what_another_group_is_still_writing(trained: Trained) -> None:
    """The next dispute's turn may come before it is done, and removed its files."""
    aside_path(trained.folder, 3, OTHER).mkdir(parents=True)
    aside_path(trained.folder, 2, Member(GroupId(4))).mkdir()  # of a group that is gone
    trained.save(4)
    assert [record.outcome for record in trained.ended()] == ["saved"]
    assert set(trained.folder.iterdir()) == {aside_path(trained.folder, 3, OTHER), trained.folder / "step-00000004"}


def test_a_full_disk_leaves_nothing_and_is_reported_and_the_next_is_saved(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.error = OSError(errno.ENOSPC, "No space left on device")
    admitted = aside_path(trained.folder, 1, Member(GroupId(4), 1))
    gate: Any = SimpleNamespace(wait=lambda _: admitted.mkdir() or True, set=lambda: None)
    trained.gate = gate
    trained.save(1)
    [record] = trained.ended()
    full = f"rank 0: OSError: [Errno 28] No space left on device (in {trained.folder})"
    assert (record.outcome, record.reason) == ("failed", full)
    assert f"the parameters of step 1 are not saved: {full}" in capsys.readouterr().out
    assert list(trained.folder.iterdir()) == [admitted], "a group that was admitted meanwhile saves, too"
    trained.error, trained.gate = None, threading.Event()
    trained.save(2)
    assert [record.outcome for record in trained.ended()] == ["saved"]
    assert visible_steps(trained.folder) == [2]
