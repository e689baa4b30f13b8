"""What the cross-group communicators rest on, as far as one GPU can show it."""

import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm import nccl
from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.comm.nccl import warm_up
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.model.probe import SilentProbe
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.tcp_store import TcpControlStore, listen
from tests.gpu.one_device import DEVICES, GPU, run_on
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 3.0
DECIDED_S = 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_a_missing_member_delays_no_other_and_leaves_no_threads_behind(text_corpus: Path, device: str) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2))
    waited_s, evidence, alone, left = run_on(device, wait_in_vain, config)
    assert DECIDED_S <= waited_s < PATIENCE_S
    assert evidence == "the log has moved on"
    assert alone == [3.0]
    assert left == []


def wait_in_vain(device: torch.device, config: RunConfig) -> tuple[float, str, Sequence[float], list[str]]:
    """How long a rank waited for a communicator until the log moved on; its message; a sum of its own afterwards; the
    threads of the first communicator that have not ended when its time was over."""
    server = listen("127.0.0.1", timedelta(seconds=PATIENCE_S))
    communicator = CrossGroupCommunicator(
        group=GroupId(0),
        position=0,
        device=device,
        store=TcpControlStore("127.0.0.1", server.port),
        timeout_s=PATIENCE_S,
        ask_interval_s=0.01,
        probe=SilentProbe(),
    )
    before = set(threading.enumerate())
    started_s = time.monotonic()
    communicator.start_build(0, [GroupId(0), GroupId(1)])
    communicator.start_attempt()
    assert not communicator.connect(lambda: time.monotonic() >= started_s + DECIDED_S)
    waited_s, evidence = time.monotonic() - started_s, communicator.evidence
    builders = set(threading.enumerate()) - before
    communicator.start_build(1, [GroupId(0)])
    tensor = torch.tensor([3.0], device=device)
    assert communicator.reduce(tensor, lambda: False)
    for thread in builders:
        thread.join(timeout=4 * PATIENCE_S)
    return waited_s, evidence, tensor.tolist(), [thread.name for thread in builders if thread.is_alive()]


@pytest.mark.gpu
def test_an_aborted_communicator_makes_room_for_the_next(text_corpus: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2))
    assert run_on(GPU, sum_abort_and_sum_again, config) == [[5.0], [5.0], [5.0]]


def sum_abort_and_sum_again(device: torch.device, config: RunConfig) -> list[list[float]]:
    """What each of three communicators of this rank alone summed once it was warm; each is aborted before the next."""
    sums = []
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        for number in range(3):
            backend = nccl.connect(
                dist.PrefixStore(str(number), store),
                0,
                1,
                device=device,
                timeout=timedelta(seconds=PATIENCE_S),
                is_wanted=lambda: True,
            )
            with nccl.own_stream(device):
                for call in warm_up(partial(torch.zeros, 1000, device=device), 1, is_stacked=True):
                    finish(call.start(backend))
            tensor = torch.tensor([5.0], device=device)
            preceding = nccl.event_now()
            finish(backend.allreduce([tensor], dist.AllreduceOptions()))
            preceding.synchronize()
            sums.append(tensor.tolist())
            ending = nccl.Abort(backend, threading.Lock(), device, limit_s=60.0)
            ending.thread.join(PATIENCE_S)
            assert ending.has_ended
            assert ending.is_harmless
    return sums


def finish(work: Any) -> None:
    """As a communicator does, and torch's watchdog has to see it, too."""
    ends_s = time.monotonic() + PATIENCE_S
    while not (work.is_completed() and nccl.has_result(work)):
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    nccl.finish(work)
