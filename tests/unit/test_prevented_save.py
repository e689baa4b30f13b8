"""A save of the present state that cannot end because the store is lost is found, so that the rank saves alone."""

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from spare_megatron.core.log.actions import SaveCheckpoint
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.saver import Saver
from spare_megatron.state.rank_context import RankProgress
from spare_megatron.store.interface import StoreLost
from tests.rank_context import rank_context
from tests.unit.test_dispute_saver import State

pytestmark = pytest.mark.timeout(60)

SAVE = SaveCheckpoint(step=4, member=Member(GroupId(0)), voters=(Member(GroupId(0)),), epoch=0)


@pytest.mark.parametrize(
    ("num_steps", "is_store_lost", "has_ended", "is_found"),
    [(4, True, False, True), (4, True, True, True), (4, False, True, False), (5, True, True, False)],
)
def test_only_a_save_of_the_present_state_that_lacks_the_store_is_found(
    tmp_path: Path, num_steps: int, *, is_store_lost: bool, has_ended: bool, is_found: bool
) -> None:
    def get(_keys: list[str]) -> list[None]:
        if is_store_lost:
            raise StoreLost("gone")
        return [None]

    gate = threading.Event()
    state = State(bytearray(b"state"), gate, OSError(errno.EIO, "the save fails"))
    trainer: Any = SimpleNamespace(checkpoint_state=lambda _hosted, has_rest: state)
    agreement = SimpleNamespace(highest=lambda value: value)
    progress = RankProgress(num_steps=num_steps)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = SimpleNamespace(get=get)
        saver = Saver(
            rank_context(run_dir=tmp_path, trainer=trainer, agreement=agreement, progress=progress, store=store)
        )
        saver.save(SAVE)
        if has_ended:
            gate.set()
        assert saver.finish() == (SAVE if is_found else None)
        gate.set()
        saver._thread.shutdown()
    finally:
        dist.destroy_process_group()
