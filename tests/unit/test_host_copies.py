"""Copies to host memory through a few buffers: which bytes go where, whatever a device does when."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spare_megatron.mcore.host_copies import Batch, HostCopies, batches, copy_through


class LateBuffer:
    """Stands in for pinned memory: what it was to be filled with comes at the last moment."""

    def __init__(self) -> None:
        self._filling: Batch | None = None

    def fill(self, batch: Batch) -> None:
        assert self._filling is None, "what was there has not been taken yet"
        self._filling = batch

    def empty(self, batch: Batch) -> None:
        assert self._filling is batch
        for source, target in batch:
            target.copy_(source)
        self._filling = None


@given(
    sizes=st.lists(st.integers(0, 40), max_size=8),
    num_bytes=st.integers(1, 64),
    num_buffers=st.integers(1, 3),
)
def test_all_bytes_come_to_their_places_in_batches_that_fit(sizes: list[int], num_bytes: int, num_buffers: int) -> None:
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    cut = list(batches(zip(sources, targets, strict=True), num_bytes))
    assert all(sum(source.numel() for source, _ in batch) == num_bytes for batch in cut[:-1])
    assert all(0 < sum(source.numel() for source, _ in batch) <= num_bytes for batch in cut[-1:])
    copy_through([LateBuffer() for _ in range(num_buffers)], cut)  # type: ignore[misc]
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


@pytest.mark.parametrize(
    "source", [torch.arange(6.0).view(2, 3).T, torch.tensor(3.0), torch.ones(0, dtype=torch.int64)]
)
def test_where_nothing_is_to_be_waited_for_values_are_copied_at_once(source: Tensor) -> None:
    copies = HostCopies(torch.device("cpu"))
    target = torch.empty(source.shape, dtype=source.dtype)
    copies.copy([(source, target)], copies.now())
    assert torch.equal(source, target)
