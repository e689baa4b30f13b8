"""Shares of buffers as gloo brings them to some members alone, held against plain sums."""

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from spare_megatron.comm.transfers import Exchange, SharedBackend, Transfer

TIMEOUT = timedelta(seconds=60)
LENGTHS = (5, 1, 4000, 17)
"""Of the shares of a buffer."""
RECIPIENTS = ((0, 1), (2,), (), (1, 0, 2))
NUM_BUFFERS = 3
EXTRAS = 2


def test_recipients_alone_get_the_sums_bitwise_alike_and_extras_come_to_all() -> None:
    for dtype in (torch.int64, torch.float32):
        local = [[values(rank, buffer, dtype) for buffer in range(NUM_BUFFERS)] for rank in range(3)]
        summed = on_members(3, dtype)
        for buffer in range(NUM_BUFFERS):
            expected = torch.stack([of_rank[buffer] for of_rank in local]).sum(dim=0)
            for number, place in enumerate(places()):
                whom = RECIPIENTS[number] or range(3)
                got = [summed[rank][buffer][place] for rank in whom]
                assert all(torch.equal(one, got[0]) for one in got)
                if dtype is torch.int64:
                    assert torch.equal(got[0], expected[place])
                torch.testing.assert_close(got[0], expected[place], rtol=1e-6, atol=1.0)  # of numbers around 2^20
            for rank in range(3):
                torch.testing.assert_close(summed[rank][buffer][-EXTRAS:], expected[-EXTRAS:], rtol=1e-6, atol=1.0)


# ---------------------------------------------------------------------------------------------------------- helpers


def places() -> list[slice]:
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    return [slice(start, start + length) for start, length in zip(starts, LENGTHS, strict=True)]


def values(rank: int, buffer: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + buffer)
    return (torch.randn(sum(LENGTHS) + EXTRAS, generator=generator) * 2**20).to(dtype)


def on_members(num_members: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """The buffers of each member, of which some ask for the last of them first."""
    store = dist.HashStore()
    buffers = [[values(rank, buffer, dtype) for buffer in range(NUM_BUFFERS)] for rank in range(num_members)]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            backend = dist.ProcessGroupGloo(store, rank, num_members, TIMEOUT)
            exchange = Exchange(backend, rank, is_polled=False)
            transfers = []
            for number, buffer in enumerate(buffers[rank]):
                shares = [(buffer[p], r) for p, r in zip(places(), RECIPIENTS, strict=True)]
                transfers.append(Transfer(connection=SharedBackend(backend, buffer.device, 60.0), tensors=[buffer]))
                exchange.post(transfers[-1], shares, buffer[-EXTRAS:], number * len(shares))
            order = transfers if rank % 2 else transfers[::-1]
            while {transfer.advance() for transfer in order} != {True}:
                time.sleep(0.001)
            backend.barrier(dist.BarrierOptions()).wait()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT.total_seconds())
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    return buffers
