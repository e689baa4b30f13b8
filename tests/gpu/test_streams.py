"""The streams of cross-group communicators, and how a rank waits for what runs there."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spare_megatron.comm import nccl
from spare_megatron.config.schema import LayoutConfig, RunConfig
from tests.gpu.one_device import GPU, run_on
from tests.integration.whole_run import tiny_config

pytestmark = [pytest.mark.timeout(300), pytest.mark.gpu]

PATIENCE = timedelta(seconds=30)
POOL_SIZE = 32
"""Streams of one priority in torch, which hands them out in turn."""
NUM_REBUILDS = 40
SECONDS_OF_CYCLES = 2_000_000_000
"""About a second of a GPU's clock."""


@contextmanager
def communicators(device: torch.device, number: int) -> Iterator[list[Any]]:
    """Communicators of this rank alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        built = [
            nccl.connect(
                dist.PrefixStore(str(index), store), 0, 1, device=device, timeout=PATIENCE, is_wanted=lambda: True
            )
            for index in range(number)
        ]
        yield built
        for backend in built:
            backend.abort()


def test_no_communicator_ever_shares_a_stream_with_the_rest_of_the_process(text_corpus: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2))
    assert run_on(GPU, sums_beside_busy_streams, config) == (NUM_REBUILDS, POOL_SIZE)


def sums_beside_busy_streams(device: torch.device, _config: RunConfig) -> tuple[int, int]:
    """How many communicators have summed, and how many of torch's usual streams were busy all the while."""
    with communicators(device, NUM_REBUILDS) as built:
        tensors = [torch.ones(1, device=device) for _ in built]
        torch.cuda.synchronize(device)
        streams = [torch.cuda.Stream(device) for _ in range(POOL_SIZE)]
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(3 * SECONDS_OF_CYCLES)
        works = [
            backend.allreduce([tensor], dist.AllreduceOptions()) for backend, tensor in zip(built, tensors, strict=True)
        ]
        end_of_work = nccl.EndOfWork(device)
        for work in works:
            end_of_work.wait(work, 0.05)
        return sum(work.is_completed() for work in works), sum(not stream.query() for stream in streams)


def test_a_waiting_rank_wakes_at_the_end_of_a_sum(text_corpus: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2))
    assert run_on(GPU, wait_for_a_sum, config) == (False, True)


def wait_for_a_sum(device: torch.device, _config: RunConfig) -> tuple[bool, bool]:
    """Whether a sum of a second was complete after a short wait, and after the next one, which its end cuts short."""
    with communicators(device, 1) as built:
        tensor = torch.ones(1, device=device)
        torch.cuda._sleep(SECONDS_OF_CYCLES)  # the sum comes after it
        work = built[0].allreduce([tensor], dist.AllreduceOptions())
        end_of_work = nccl.EndOfWork(device)
        end_of_work.wait(work, 0.01)
        was_complete = work.is_completed()
        end_of_work.wait(work, 200.0)
        return was_complete, work.is_completed()
