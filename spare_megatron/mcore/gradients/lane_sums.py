"""Sums of a rank's flat space over the lanes of its group, in place: each lane gets the sums of its own strips. Before
a further computation of the step everything else is zeroed, so that what was there is summed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from spare_megatron.mcore.gradients.flat_gradients import FlatSpace, ScatterRange, Segment, parts_of


class LaneSums:
    """Sums the gradients of `local` over lanes, range by range, and the small tensors `counted` at once, in the type of
    the first. `added`, if not empty, has a number for each strip of each range, which is summed as the strip is.
    """

    added: Sequence[Tensor] = ()

    def __init__(
        self, space: FlatSpace, lanes: dist.ProcessGroup, local: Sequence[Segment], counted: Sequence[Tensor]
    ) -> None:
        self._space, self._lanes = space, lanes
        self._local, self._counted = local, counted
        self._is_alone = lanes.size() == 1
        self._is_summed = False  # in this step
        self._kept: dict[int, list[Tensor]] = {}
        self._next = len(space.ranges)
        self._pending: tuple[int, list[_StripSum]] | None = None

    def reset(self) -> None:
        self._is_summed = False

    def start(self, num_kept: int, num_kept_by_all: int) -> None:
        """Before a computation, which adds to all ranges but those that all lanes keep; this lane keeps `num_kept`
        strips.
        """
        if self._is_alone:
            return
        if self._is_summed:
            self._clear_others(num_kept_by_all)
        self._kept = {index: [part.clone() for part in self._own(index)] for index in range(num_kept_by_all, num_kept)}
        self._next, self._is_summed = num_kept_by_all, True

    def sum_counted(self) -> None:
        """Collective over: the lanes."""
        together = torch.cat([one.view(-1).to(self._counted[0].dtype) for one in self._counted])
        dist.all_reduce(together, group=self._lanes)
        for one, total in zip(self._counted, together.split([one.numel() for one in self._counted]), strict=True):
            one.copy_(total.view_as(one))

    def any_lane(self, flag: Tensor) -> Tensor:
        """Whether a flag on the device is set on any lane. Collective over: the lanes."""
        number = flag.to(torch.int64)
        dist.all_reduce(number, group=self._lanes)
        return number > 0

    def sum_next(self, num_ready: int) -> Iterator[int]:
        """Sums those of the first `num_ready` ranges that are not summed yet, and yields each after its sum. The last
        goes on, while a backward pass does, until another has begun. Collective over: the lanes that share the range.
        """
        while self._next < num_ready:
            before, self._pending = self._pending, self._begin(self._next)
            self._next += 1
            if before is not None:
                yield self._end(*before)
        if self._pending is not None and self._next == len(self._space.ranges):
            last, self._pending = self._pending, None
            yield self._end(*last)

    def _begin(self, index: int) -> tuple[int, "list[_StripSum]"]:
        of, lanes = self._space.ranges[index], self._space.lanes[index]
        if lanes.size() == 1:
            return index, []
        numbers = replace(of, start=0, stop=of.num_lanes)
        beside = [_StripSum(self.added[index], numbers, lanes)] if self.added else []
        return index, [_StripSum(whole_range(self._local, of), of, lanes), *beside]

    def _end(self, index: int, pending: "list[_StripSum]") -> int:
        for one in pending:
            one.wait()
        if index in self._kept:
            for part, kept in zip(self._own(index), self._kept.pop(index), strict=True):
                part.copy_(kept)
        return index

    def _clear_others(self, first: int) -> None:
        """Leaves each sum on one lane: of ranges from `first` on those in own strips, and what is counted on lane 0."""
        for index, of in enumerate(self._space.ranges[first:], first):
            if of.num_lanes > 1:
                local = whole_range(self._local, of)
                local[: of.own.start - of.start].zero_()
                local[of.own.stop - of.start :].zero_()
                if self.added:
                    self.added[index][: of.lane].zero_()
                    self.added[index][of.lane + 1 :].zero_()
        for one in self._counted if self._lanes.rank() else ():
            one.zero_()

    def _own(self, index: int) -> list[Tensor]:
        return [part.gradients for part in parts_of(self._local, self._space.ranges[index].own)]


def whole_range(local: Sequence[Segment], of: ScatterRange) -> Tensor:
    """A range that other lanes share, which lies in one segment."""
    [part] = parts_of(local, range(of.start, of.stop))
    return part.gradients


class _StripSum:
    """The sum of a range over its lanes, into the own strip of each: in place, or beside it if strips are unequal."""

    def __init__(self, whole: Tensor, of: ScatterRange, lanes: dist.ProcessGroup) -> None:
        self._own = self._sum = whole[of.own.start - of.start : of.own.stop - of.start]
        num_missing = of.strip_length * of.num_lanes - len(of)
        if num_missing:
            whole = torch.cat([whole, whole.new_zeros(num_missing)])
            self._sum = whole[of.lane * of.strip_length :][: of.strip_length]
        self._work = _scatter(self._sum, whole, group=lanes, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._sum is not self._own:
            self._own.copy_(self._sum[: len(self._own)])


_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed by torch 2.13
