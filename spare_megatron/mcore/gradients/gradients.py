"""Gradient, loss and microbatch sums of one step, bucket by bucket of a rank's flat gradient space.

Local sums stay unscaled sums over tokens until the commit. Each bucket is reduced in a staging buffer, so that its
local sum survives a failed attempt. The last elements of a staged bucket are checksums of integer sums
(`mcore.gradients.checksums`), whether its local sums are unsound, its number of microbatches and, in the last bucket,
the loss, where need be the tokens that count for it, sums and counts of further terms, and the tokens of each expert: a
group that is lost after the reduction cannot report them otherwise, and no rank waits for its device to judge what it
sends. They are never in bf16, which would not count beyond 256.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.devices import gpu
from spare_megatron.mcore.gradients import checksums
from spare_megatron.mcore.gradients.fixed_point import FixedPoint, choose_kernels, fixed_point
from spare_megatron.mcore.gradients.flat_gradients import (
    FlatParameter,
    Segment,
    diverted,
    flat_parameters,
    flat_space,
    parts_of,
)
from spare_megatron.mcore.gradients.host_copies import HostCopies
from spare_megatron.mcore.gradients.lane_sums import LaneSums
from spare_megatron.mcore.model.experts import ExpertCounts
from spare_megatron.mcore.model.model import Chunk
from spare_megatron.mcore.model.process_groups import GroupCollection

NUM_EXTRAS = 3
"""Elements at the end of a staged bucket that are no gradients and no checksums; two more where tokens are counted."""
_TOKENS_HIGH, _TOKENS_LOW, _UNSOUND, _COUNT, _LOSS = -5, -4, -3, -2, -1
_WHOLE = (slice(None),)
_INTEGERS = {2: torch.int16, 4: torch.int32}
_WRONG = (
    "the local sum of bucket {} is not what was added to it",
    "the staged copy of bucket {} differs from its checksum",
)

_PER_TERM = 3
"""Elements of a further term: its sum, and its count in two digits."""

_TOKENS_BASE = 2**12
"""A count of tokens is summed as two digits to this base: exact in fp32 up to 2^36 tokens of 2^12 groups."""

_DIGITS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Microbatches summed in each bucket, their loss and further terms, whose totals are 0 except on the last stage."""

    num_microbatches: tuple[int, ...]
    loss: LossSum
    terms: tuple[LossSum, ...] = ()


class GradientSums(ABC):
    """The sums of one step on one rank; each range in `buckets` is reduced as a unit, in backward order.

    They are the rank's own strips of the ranges of `space`, which are summed over lanes before the strips are staged.
    `all_count`: tokens of a microbatch if all of them always count, so that their number needs no sum; else None.
    The extras begin with sum and count of each of `num_terms` terms, and the tokens of experts.
    """

    _loss: Tensor
    _count: Tensor
    """Microbatches."""
    _term_sums: Tensor
    _num_digits = 0
    """Elements of checksums, before the extras."""
    _checks: checksums.SumChecks | None = None
    """Sums of floating-point numbers have no checksums."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        groups: GroupCollection,
        bucket_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        all_count: int | None,
        num_terms: int,
        scale: float = 1.0,
    ) -> None:
        self._chunks, self._groups = chunks, groups
        self.space = flat_space(chunks, groups, max(bucket_bytes // dtype.itemsize, 1))
        self._all_count = all_count
        self.experts = ExpertCounts((chunk.module for chunk in chunks), device)
        self._of_experts = slice(_PER_TERM * num_terms, _PER_TERM * num_terms + _DIGITS * self.experts.tokens.numel())
        self._num_extras = self._of_experts.stop + NUM_EXTRAS + _DIGITS * (all_count is None)
        self._term_counts = torch.zeros(num_terms, dtype=torch.int64, device=device)
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.buckets = tuple(one.own for one in self.space.ranges)
        self._dtype = dtype
        self._device = device
        self.is_counting = True
        """False while the gradients of a microbatch that is not to be counted come: they have to become zeros."""
        self._num_kept = self._num_kept_by_all = 0
        self._next = 0  # next bucket to stage; the last bucket once all are staged
        self._extras_dtype = torch.float32 if dtype is torch.bfloat16 else dtype
        self._per_extra = self._extras_dtype.itemsize // dtype.itemsize  # elements
        self._scale = scale
        self._extras_of = [[0] * self._num_extras for _ in self.buckets]  # of the sums over groups
        self._copies = HostCopies(device, buffer_bytes=self._num_extras * self._extras_dtype.itemsize)
        self._staged_at: dict[int, gpu.Event | None] = {}
        self._norms: dict[int, Tensor] = {}
        self._is_unsound: dict[int, Tensor] = {}
        self._is_wrong = torch.zeros(len(_WRONG), len(self.buckets), dtype=torch.bool, device=device)

    # ----------------------------------------------------------------------------------------------------- adding

    def reset(self) -> None:
        for chunk in self._chunks:
            chunk.module.zero_grad_buffer()
        for sums in (*self._counted, self._is_wrong):
            sums.zero_()
        self._lanes.reset()
        self.mark_kept(0)

    def adding(self) -> AbstractContextManager[None]:
        """In this context, backward passes add to the local sums of buckets that are not kept, and to no others."""
        self._lanes.start(self._num_kept, self._num_kept_by_all)
        return nullcontext()

    def sum_counts(self) -> None:
        """Sums all but gradients over several lanes, once each has counted. Collective over: the lanes."""
        self._lanes.sum_counted()

    def sum_over_lanes(self, num_ready: int) -> Iterator[int]:
        """Sums those of the first `num_ready` buckets over lanes that are not yet, and yields each. Collective over:
        the lanes.
        """
        return self._lanes.sum_next(num_ready)

    def add_loss(self, total: Tensor, num_tokens: Tensor | None) -> None:
        """Adds a microbatch's loss, and the number of its tokens that count: int64, None if all always do."""
        assert (num_tokens is None) == (self._all_count is not None), (
            "either all tokens always count, or each is counted"
        )
        self._add(self._loss, total)
        if num_tokens is not None:
            self._tokens += num_tokens

    def add_terms(self, totals: Tensor, counts: Tensor) -> None:
        """Adds the further terms of the loss of a microbatch: their sums, and their counts as int64 on the device."""
        self._add(self._term_sums, totals)
        self._term_counts += counts

    def add_count(self, num_microbatches: int) -> None:
        """Counts microbatches that are summed, or will be before any bucket is staged."""
        self._count += num_microbatches

    @abstractmethod
    def _add(self, sums: Tensor, values: Tensor) -> None:
        """Adds values to local sums, in place."""

    def mark_kept(self, num_kept: int, num_kept_by_all: int | None = None) -> None:
        """Marks the first buckets as holding sums over groups; `num_kept_by_all` of them do on all lanes."""
        self._num_kept = num_kept
        self._num_kept_by_all = num_kept if num_kept_by_all is None else num_kept_by_all
        self._next = min(num_kept, len(self.buckets) - 1)
        self._norms.clear()
        self._is_unsound.clear()
        if self._checks is not None:
            self._checks.forget()

    @property
    def _kept_end(self) -> int:
        return self.space.ranges[self._num_kept_by_all - 1].stop if self._num_kept_by_all else 0

    @abstractmethod
    def local_sums(self) -> Sequence[Tensor]:
        """Flat views of the local gradient sums of buckets still to be staged."""

    @abstractmethod
    def poison(self) -> None:
        """Makes a local sum NaN: a fault."""

    def _sum_lanes(self, local: Sequence[Segment], counted: Sequence[Tensor]) -> None:
        """Has a subclass's local sums and what it counts summed over lanes."""
        self._counted = [*counted, self._tokens, self._term_sums, self._term_counts, self.experts.tokens]
        self._lanes = LaneSums(self.space, self._groups.lanes, local, self._counted)

    # ---------------------------------------------------------------------------------------------------- staging

    def measure(self, bucket: int, limit: float, norm: Tensor | None = None) -> None:
        """Judges a bucket's local sums on the device before they are staged: sound if their norm is at most `limit`."""
        self._norms[bucket] = norm = self.norm(bucket) if norm is None else norm
        self._is_unsound[bucket] = torch.logical_not(norm <= limit)  # this form also catches NaN

    def norms(self) -> dict[int, float]:
        """The norms of the buckets measured since the last call in this attempt. Waits for the device."""
        measured, self._norms = self._norms, {}
        return dict(zip(measured, torch.stack(list(measured.values())).tolist(), strict=True)) if measured else {}

    @abstractmethod
    def norm(self, bucket: int) -> Tensor:
        """L2 norm of a bucket's local sums, in fp64 on the device; not finite if a gradient or the loss is not, or
        overflows.
        """

    def new_staging(self) -> Tensor:
        """An uninitialized flat tensor that fits any bucket."""
        length = max(map(self._staged_length, range(len(self.buckets))))
        return torch.empty(length, dtype=self._dtype, device=self._device)

    @abstractmethod
    def stage(self, bucket: int, staging: Tensor, limit: float | None = None) -> Tensor:
        """Copies the local sums of a bucket into `staging`, and measures them if there is a limit. Returns the part of
        it to be summed over groups.
        """

    def check_local(self, bucket: int) -> None:  # noqa: B027  (of other sums that is not known)
        """Has the device compare integer local sums with what was added to them, as staging does."""

    @abstractmethod
    def check_staged(self, bucket: int, staging: Tensor) -> None:
        """Has the device compare what is about to be summed over groups with what was staged."""

    def wrong_numbers(self) -> str:
        """The first that these checks have found wrong since the step began; empty if nothing. Waits for the device."""
        found = self._is_wrong.nonzero().tolist()
        return _WRONG[found[0][0]].format(found[0][1]) if found else ""

    def _finish_staging(self, bucket: int, staged: Tensor) -> None:
        extras = self._beside_gradients(staged)
        extras[: _UNSOUND + 1].fill_(0)
        if self._is_last(bucket):
            size = len(self._term_counts)
            extras[:size].copy_(self._term_sums)
            _write_digits(extras[size : _PER_TERM * size], self._term_counts)
            _write_digits(extras[self._of_experts], self.experts.tokens)
            if self._all_count is None:
                _write_digits(extras[_TOKENS_HIGH : _TOKENS_LOW + 1], self._tokens)
        if bucket in self._is_unsound:
            extras[_UNSOUND].copy_(self._is_unsound[bucket])
        self._next = min(bucket + 1, len(self.buckets) - 1)
        self._staged_at[bucket] = self._copies.now()

    def extras(self, staged: Tensor) -> Tensor:
        """What a staged bucket has beside gradients, in a format that counts exactly: a view of its end."""
        return staged[-(self._num_digits + self._num_extras) * self._per_extra :].view(self._extras_dtype)

    def _beside_gradients(self, staged: Tensor) -> Tensor:
        return self.extras(staged)[self._num_digits :]

    def _in_staged(self, bucket: int, staging: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients, what is counted beside them, and checksums."""
        staged = self._part(bucket, staging)
        digits = self.extras(staged)[: self._num_digits]
        return staged[: len(self.buckets[bucket])], self._beside_gradients(staged), digits

    def _part(self, bucket: int, staging: Tensor) -> Tensor:
        return staging[: self._staged_length(bucket)]

    def _staged_length(self, bucket: int) -> int:
        """Elements of a staged bucket; the extras stand at a multiple of their size."""
        num_extras = self._num_digits + self._num_extras
        return (-(-len(self.buckets[bucket]) // self._per_extra) + num_extras) * self._per_extra

    def _is_last(self, bucket: int) -> bool:
        return bucket == len(self.buckets) - 1

    # ------------------------------------------------------------------------------------------- sums over groups

    def on_summed(self, bucket: int, staging: Tensor) -> int:
        """Stores the count and loss of a bucket whose sum over groups is complete, waiting for no other work. Returns
        the number of groups whose local sums of it are unsound.
        """
        # Terms and experts are counted in the last bucket alone.
        num_zeros = 0 if self._is_last(bucket) else self._of_experts.stop
        extras = torch.empty(self._num_extras - num_zeros, dtype=self._extras_dtype)
        # The sum is complete, so the copy waits for nothing; in a group that is alone, for the staging.
        source = self._beside_gradients(self._part(bucket, staging))[num_zeros:]
        self._copies.copy([(source, extras)], self._staged_at.get(bucket))
        self._extras_of[bucket] = [0] * num_zeros + extras.tolist()
        return round(self._extras_of[bucket][_UNSOUND])

    def divide(self, sections: Sequence[Sequence[slice]]) -> None:
        """Has these ranges of each bucket checked each by itself, as they are summed for some groups alone."""
        if self._checks is not None:
            self._checks.divide(sections)
            self._num_digits = self._checks.num_digits

    def check(self, bucket: int, staging: Tensor, places: Sequence[slice] = _WHOLE) -> None:
        """Has the device compare a sum over groups, of sound local sums, at these places with its checksums."""
        if self._checks is not None:
            self._checks.compare(bucket, *self._in_staged(bucket, staging), places)

    def wrong_sums(self) -> tuple[int, ...]:
        """Buckets whose checks since the last call have failed in this attempt. Waits for the device if any are due."""
        return () if self._checks is None else self._checks.wrong()

    @abstractmethod
    def put(self, bucket: int, staging: Tensor, places: Sequence[slice] = _WHOLE) -> None:
        """Overwrites the local sum of a bucket with the sum over groups, at the given places of the bucket."""

    def squares(self, values: Tensor) -> Tensor:
        """Sum of squares of some gradients of a staged bucket, in fp64 and bitwise deterministic."""
        return checksums.squares_in_fp64(values) / self._scale**2

    def totals(self) -> Totals:
        """Counts and loss of the sums over groups that have arrived."""
        counts = tuple(round(extras[_COUNT]) for extras in self._extras_of)
        last = self._extras_of[-1]
        if self._all_count is not None:
            num_tokens = counts[-1] * self._all_count
        else:
            num_tokens = _number(last[_TOKENS_HIGH], last[_TOKENS_LOW])
        size = len(self._term_counts)
        of_terms = zip(last[:size], last[size : 2 * size], last[2 * size : 3 * size], strict=True)
        terms = tuple(LossSum(total / self._scale, _number(high, low)) for total, high, low in of_terms)
        return Totals(num_microbatches=counts, loss=LossSum(last[_LOSS] / self._scale, num_tokens), terms=terms)

    def tokens_of_experts(self) -> Tensor:
        """As `ExpertCounts.tokens`, by the sums over groups that have arrived, on the host."""
        digits = torch.tensor(self._extras_of[-1][self._of_experts], dtype=torch.int64)
        high, low = digits.view(_DIGITS, *self.experts.tokens.shape)
        return high * _TOKENS_BASE + low

    def finish(self, factor: float = 1.0) -> None:
        """Writes all sums, times a factor, to `main_grad` of every parameter, as far as it is in own strips.

        The tokens of experts become those of the sums.
        """
        self.experts.tokens.copy_(self.tokens_of_experts())
        for segment in self.space.own_segments:
            self._write_back(segment, factor)

    @abstractmethod
    def _write_back(self, segment: Segment, factor: float) -> None:
        """Writes the sums of a segment, times a factor, to Megatron's buffer."""


def _write_digits(into: Tensor, numbers: Tensor) -> None:
    """Writes the high digits of all numbers, then the low ones."""
    digits = into.view(_DIGITS, *numbers.shape)
    digits[0].copy_(numbers // _TOKENS_BASE)
    digits[1].copy_(numbers % _TOKENS_BASE)


def _number(high: float, low: float) -> int:
    """The number that two digits stand for."""
    return round(high) * _TOKENS_BASE + round(low)


class FloatSums(GradientSums):
    """Sums in fp32, accumulated in Megatron's gradient buffers; staged, and summed over groups, in `staged_dtype`."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        groups: GroupCollection,
        device: torch.device,
        bucket_bytes: int,
        staged_dtype: torch.dtype,
        all_count: int | None = None,
        num_terms: int = 0,
    ) -> None:
        super().__init__(chunks, groups, bucket_bytes, staged_dtype, device, all_count, num_terms)
        self._parameters = list(flat_parameters(chunks))
        self._pieces = [_pieces(self.space.segments, bucket) for bucket in self.buckets]
        self._beside: dict[int, Tensor] = {}  # gradients, in staged buckets
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._term_sums = torch.zeros(num_terms, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.float64, device=device)
        self._sum_lanes(self.space.segments, [self._count, self._loss])

    def adding(self) -> AbstractContextManager[None]:
        context = super().adding()
        return diverted(self._parameters, self._kept_end) if self._kept_end else context

    def _add(self, sums: Tensor, values: Tensor) -> None:
        sums += values

    def stage(self, bucket: int, staging: Tensor, limit: float | None = None) -> Tensor:
        if limit is not None:
            self.measure(bucket, limit)
        staged = self._part(bucket, staging)
        for gradients, place in self._pieces[bucket]:
            staged[place].copy_(gradients)
        extras = self.extras(staged)
        # fp32 is exact up to 2^24 microbatches. Assigning a number to an element would copy it and wait for the device.
        extras[_COUNT].copy_(self._count)
        extras[_LOSS].fill_(0.0)
        if self._is_last(bucket):
            extras[_LOSS].copy_(self._loss)
        self._finish_staging(bucket, staged)
        self._beside[bucket] = extras.clone()
        return staged

    def check_staged(self, bucket: int, staging: Tensor) -> None:
        staged = self._part(bucket, staging)
        pairs = [(staged[place], gradients.to(self._dtype)) for gradients, place in self._pieces[bucket]]
        for pair in (*pairs, (self.extras(staged), self._beside.pop(bucket))):
            one, other = (side.view(_INTEGERS[side.itemsize]) for side in pair)  # NaN is not equal to itself
            self._is_wrong[1, bucket].logical_or_((one != other).any())

    def norm(self, bucket: int) -> Tensor:
        # One pass without a copy, at memory bandwidth. A norm beyond fp32 counts as not finite.
        norms = [torch.linalg.vector_norm(gradients).double() for gradients, _ in self._pieces[bucket]]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if not self._is_last(bucket):
            return norm
        is_finite = self._loss.isfinite()
        if len(self._term_sums):
            is_finite = is_finite & self._term_sums.isfinite().all()
        return norm.masked_fill(~is_finite, math.inf)

    def put(self, bucket: int, staging: Tensor, places: Sequence[slice] = _WHOLE) -> None:
        for gradients, whole in self._pieces[bucket]:
            for place in places:
                start, stop, _ = place.indices(len(self.buckets[bucket]))
                start, stop = max(start, whole.start), min(stop, whole.stop)
                if start < stop:
                    gradients[start - whole.start : stop - whole.start].copy_(staging[start:stop])

    def _write_back(self, segment: Segment, factor: float) -> None:
        segment.gradients.mul_(factor)

    def local_sums(self) -> Sequence[Tensor]:
        return [gradients for pieces in self._pieces[self._next :] for gradients, _ in pieces]

    def poison(self) -> None:
        self.local_sums()[0][0] += math.nan


class FixedPointSums(GradientSums):
    """Integer sums, each gradient of each microbatch rounded once, by a hook: bitwise independent of where and when it
    is computed. Megatron adds none to its buffers.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        groups: GroupCollection,
        device: torch.device,
        bucket_bytes: int,
        fixed: FixedPoint,
        all_count: int | None = None,
        num_terms: int = 0,
    ) -> None:
        super().__init__(chunks, groups, bucket_bytes, torch.int64, device, all_count, num_terms, fixed.scale)
        self._fixed = fixed
        num_elements = self.space.ranges[-1].stop
        self._sums = torch.zeros(num_elements, dtype=torch.int64, device=device)
        self._extras = torch.zeros(NUM_EXTRAS, dtype=torch.int64, device=device)
        self._loss, self._count = self._extras[_LOSS], self._extras[_COUNT]
        self._term_sums = torch.zeros(num_terms, dtype=torch.int64, device=device)
        strips = [[of.strip(lane) for lane in range(of.num_lanes)] for of in self.space.ranges]
        self._added = checksums.AddedSums(strips, device)
        self._added_beside = torch.zeros((), dtype=torch.int64, device=device)  # loss, then further terms
        local = Segment(gradients=self._sums, start=0, stop=num_elements)
        self._sum_lanes([local], [self._extras, self._added_beside])
        self._lanes.added = self._added.of_ranges
        # Over single microbatches. Kept on the device, where the overflow check takes place.
        self._largest = torch.zeros((), dtype=torch.float32, device=device)
        self._add_rounded, read = choose_kernels(device)
        self._checks: checksums.SumChecks = checksums.SumChecks([len(bucket) for bucket in self.buckets], read)
        self._num_digits = self._checks.num_digits
        self._parameters = [flat.parameter for flat in flat_parameters(chunks)]
        for flat in flat_parameters(chunks):
            self._watch(flat)

    def reset(self) -> None:
        super().reset()
        for parameter in self._parameters:
            # As if a kernel had added it, which leaves zeros where an embedding is tied. `zero_grad_buffer` undoes it.
            parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = True, False  # type: ignore[attr-defined]
        self._sums.zero_()
        self._added.reset()
        self._largest.zero_()

    def divide(self, sections: Sequence[Sequence[slice]]) -> None:
        super().divide(sections)
        places = zip(self.buckets, sections, strict=True)  # of the one lane that there is
        self._added = checksums.AddedSums([[bucket[of] for of in each] for bucket, each in places], self._device)

    def sum_over_lanes(self, num_ready: int) -> Iterator[int]:
        for bucket in super().sum_over_lanes(num_ready):
            # A value that does not fit leaves no trace in the sum.
            is_too_large = torch.logical_not(self._largest <= self._fixed.largest)
            self._largest.masked_fill_(self._lanes.any_lane(is_too_large), math.inf)
            yield bucket

    def stage(self, bucket: int, staging: Tensor, limit: float | None = None) -> Tensor:
        staged, local = self._part(bucket, staging), self._local(bucket)
        sections = self._checks.read(bucket, local, staged[: len(local)])
        if limit is not None:
            self.measure(bucket, limit, self._norm(sections))
        staged[-NUM_EXTRAS:].copy_(self._extras)
        if not self._is_last(bucket):
            staged[_LOSS].fill_(0)
        self._finish_staging(bucket, staged)
        _, counted, digits = self._in_staged(bucket, staging)
        self._write(bucket, sections, counted, digits)
        return staged

    def check_local(self, bucket: int) -> None:
        sections = self._checks.read(bucket, self._local(bucket))
        self._write(bucket, sections, self._extras, self._sums.new_empty(self._num_digits))

    def _write(self, bucket: int, sections: Sequence[checksums.SectionSums], counted: Tensor, digits: Tensor) -> None:
        """Writes the checksums of local sums, and compares them with those of what was added."""
        self._checks.write(sections, counted, digits)
        of, added = self.space.ranges[bucket], self._added.of_ranges[bucket]
        added = added[of.lane : of.lane + 1] if of.num_lanes > 1 else added
        self._is_wrong[0, bucket].logical_or_(self._checks.contradict(bucket, digits, counted, added))
        if self._is_last(bucket):
            beside = torch.cat([self._loss.view(1), self._term_sums])
            beside = (beside * checksums.wrapping_weights(0, len(beside), self._device)).sum()
            self._is_wrong[0, bucket].logical_or_(beside != self._added_beside)

    def check_staged(self, bucket: int, staging: Tensor) -> None:
        self._is_wrong[1, bucket].logical_or_(self._checks.staged_differ(bucket, *self._in_staged(bucket, staging)))

    def norm(self, bucket: int) -> Tensor:
        return self._norm(self._checks.read(bucket, self._local(bucket)))

    def _norm(self, sections: Sequence[checksums.SectionSums]) -> Tensor:
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for section in sections:
            squares += section.squares()
        norm = squares.sqrt() / self._fixed.scale
        fits = self._largest <= self._fixed.largest  # this form also catches NaN
        return norm.masked_fill(~fits, math.inf)

    def put(self, bucket: int, staging: Tensor, places: Sequence[slice] = _WHOLE) -> None:
        local = self._local(bucket)
        for place in places:
            local[place].copy_(staging[: len(local)][place])

    def _write_back(self, segment: Segment, factor: float) -> None:
        segment.gradients.copy_(self._sums[segment.start : segment.stop]).mul_(factor / self._fixed.scale)

    def local_sums(self) -> Sequence[Tensor]:
        return [self._local(bucket) for bucket in range(self._next, len(self.buckets))]

    def _local(self, bucket: int) -> Tensor:
        return self._sums[self.buckets[bucket].start : self.buckets[bucket].stop]

    def poison(self) -> None:
        self._add_gradients(self.buckets[self._next].start, torch.full((1,), math.nan, device=self._sums.device))

    def _watch(self, flat: FlatParameter) -> None:
        def add(gradient: Tensor) -> None:
            start = max(self._kept_end, flat.start)
            if self.is_counting and start < flat.stop:
                with torch._C._DisableTorchDispatch():  # sums are checked as such, not operation by operation
                    self._add_gradients(start, gradient.reshape(-1)[start - flat.start :])

        # A hook on a leaf runs once per backward pass, with the sum over all uses of the parameter.
        flat.parameter.register_hook(add)

    def _add_gradients(self, start: int, values: Tensor) -> None:
        """Adds to local sums from this place of the flat space on, and to what is known of what was added to them."""
        sums = self._sums[start : start + len(values)]
        for part, added, place in self._added.parts(start, start + len(values)):
            self._add_rounded(sums[part], values[part], self._fixed.scale, self._largest, added, place)

    def _add(self, sums: Tensor, values: Tensor) -> None:
        into, place = (sums.view(-1), values.reshape(-1)), int(sums is not self._loss)
        self._add_rounded(*into, self._fixed.scale, self._largest, self._added_beside, place)


def _pieces(of: Sequence[Segment], bucket: range) -> list[tuple[Tensor, slice]]:
    parts = parts_of(of, bucket)
    pieces = [(part.gradients, slice(part.start - bucket.start, part.stop - bucket.start)) for part in parts]
    return pieces or [(of[0].gradients[:0], slice(0, 0))]


def counts_tokens(config: RunConfig) -> bool:
    """Whether the number of tokens that count for the loss may differ between microbatches; else it needs no sum."""
    return config.data.eod_mask_loss or bool(config.program.file)


def make_gradient_sums(
    config: RunConfig, chunks: Sequence[Chunk], groups: GroupCollection, device: torch.device, num_terms: int = 0
) -> GradientSums:
    """The sums of a rank; `num_terms`: terms of the loss beside the first."""
    bucket_bytes = round(config.bucket_mib * 2**20)
    num_tokens = config.train.micro_batch_size * config.model.seq_length
    all_count = None if counts_tokens(config) else num_tokens
    if config.reduce.mode != "reproducible":
        staged_dtype = torch.bfloat16 if config.reduce.mode == "fast_bf16" else torch.float32
        return FloatSums(chunks, groups, device, bucket_bytes, staged_dtype, all_count, num_terms)
    fixed = fixed_point(num_tokens, config.layout.num_groups * config.spare.microbatches_per_shard)
    return FixedPointSums(chunks, groups, device, bucket_bytes, fixed, all_count, num_terms)
