"""Finds the gradient buckets that a backward pass has completed, so that they can be sent while it goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from spare_megatron.mcore.gradients.flat_gradients import ScatterRange, flat_parameters
from spare_megatron.mcore.model.model import Chunk

OnReady = Callable[[int], None]
"""Called with the number of leading buckets whose gradients are complete."""


class ReadyBuckets:
    """Counts the backward passes of every parameter to find buckets that are complete, given their ranges."""

    def __init__(self, chunks: Sequence[Chunk], buckets: Sequence[ScatterRange]) -> None:
        self._buckets_of = {
            flat.parameter: [
                index for index, bucket in enumerate(buckets) if bucket.start < flat.stop and flat.start < bucket.stop
            ]
            for flat in flat_parameters(chunks)
        }
        self._num_buckets = len(buckets)
        self._nodes = [node for chunk in chunks for node in chunk.module.grad_accs]
        self._passes_left: dict[object, int] = {}
        self._num_awaited: list[int] = []
        self._num_ready = 0

    @contextmanager
    def reporting(self, num_passes: int, on_ready: OnReady | None) -> Iterator[None]:
        """In this context, reports buckets whose parameters have all had `num_passes` backward passes."""
        if on_ready is None:
            yield
            return
        self._passes_left = dict.fromkeys(self._buckets_of, num_passes)
        self._num_awaited = [0] * self._num_buckets
        for touched in self._buckets_of.values():
            for bucket in touched:
                self._num_awaited[bucket] += 1
        self._num_ready = 0
        # Megatron's hooks on these nodes add gradients to its buffers; registered earlier, they run earlier.
        hooks = [node.register_hook(partial(self._passed, node.variable, on_ready)) for node in self._nodes]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _passed(self, parameter: object, on_ready: OnReady, *_gradients: object) -> None:
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter]:
            return
        for bucket in self._buckets_of[parameter]:
            self._num_awaited[bucket] -= 1
        while self._num_ready < self._num_buckets and not self._num_awaited[self._num_ready]:
            self._num_ready += 1
        if self._num_ready:
            on_ready(self._num_ready)
