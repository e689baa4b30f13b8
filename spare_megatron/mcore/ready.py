"""Which buckets have all of their gradients, told from inside the backward passes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from spare_megatron.mcore.flat import flat_parameters
from spare_megatron.mcore.model import Chunk

Tell = Callable[[int], None]
"""Told how many buckets, from the first on, have all of their gradients. Whatever it raises ends the backward pass."""


class ReadyBuckets:
    """Counts the backward passes of every parameter.

    Args:
        chunks: The rank's part of the model.
        buckets: The ranges of its flat gradient space.
    """

    def __init__(self, chunks: Sequence[Chunk], buckets: Sequence[range]) -> None:
        self._buckets_of = {
            flat.parameter: [
                index for index, bucket in enumerate(buckets) if bucket.start < flat.stop and flat.start < bucket.stop
            ]
            for flat in flat_parameters(chunks)
        }
        self._num_buckets = len(buckets)
        self._tell: Tell | None = None
        self._passes_left: dict[object, int] = {}
        self._num_awaited: list[int] = []
        self._num_ready = 0
        for chunk in chunks:
            # The nodes at which Megatron adds gradients to its buffers; its hooks were there first, so they run first.
            for node in chunk.module.grad_accs:
                node.register_hook(lambda *_, parameter=node.variable: self._passed(parameter))

    @contextmanager
    def telling(self, num_passes: int, tell: Tell | None) -> Iterator[None]:
        """Inside the block, a parameter has its gradient after this many backward passes, and `tell` hears of it."""
        self._tell = tell
        self._passes_left = dict.fromkeys(self._buckets_of, num_passes)
        self._num_awaited = [0] * self._num_buckets
        for touched in self._buckets_of.values():
            for bucket in touched:
                self._num_awaited[bucket] += 1
        self._num_ready = 0
        try:
            yield
        finally:
            self._tell = None

    def _passed(self, parameter: object) -> None:
        if self._tell is None:
            return
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter]:
            return
        for bucket in self._buckets_of[parameter]:
            self._num_awaited[bucket] -= 1
        while self._num_ready < self._num_buckets and not self._num_awaited[self._num_ready]:
            self._num_ready += 1
        if self._num_ready:
            self._tell(self._num_ready)
