"""Checksums of int64 tensors, computed on their device: the checksum of a sum is the sum of the checksums.

An element is weighted by its row and column in rows of `COLUMNS`. Two sums of the weighted elements are taken, modulo
2^61 - 1 and modulo 2^64: each finds what the other cannot (docs/protocol_sums.md). A checksum is three int64
numbers, the first sum in two digits, so that those of up to 2^12 terms can be added as integers.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PRIME = (1 << 61) - 1
NUM_DIGITS = 3
"""Numbers of a checksum."""

COLUMNS = 1 << 11
ROWS = 1 << 12
"""Rows of a block, which are summed before anything is reduced: the weights of a block's rows add up to under 2^32."""

_FIRST = (1 << 15) + 1
"""Pseudo-random numbers before this one are the multipliers of digests."""
_MOST_BLOCKS = 1 << 15
"""More than the largest bucket has."""
_DIGIT_BITS = 31
_CPU_PIECE_ROWS = 64
"""Rows that are weighted at a time on a CPU: 1 MiB stays in the cache of a core."""
_DEVICE_PIECE_ROWS = 2048
"""The same elsewhere: large against the start of a kernel, small against the memory of a device."""
_ROW_WEIGHT_BITS = 20


class Weights(NamedTuple):
    """Weights of rows, of columns for either modulus, and of blocks for either; those for 2^64 are odd."""

    rows: Tensor
    columns: Tensor
    wrapping_columns: Tensor
    blocks: Tensor
    wrapping_blocks: Tensor


def checksum(parts: Sequence[Tensor]) -> Tensor:
    """The checksum of flat tensors, each of which begins a row; never waits for the device."""
    weights = weights_on(parts[0].device)
    num_columns = min(max(len(part) for part in parts), COLUMNS)
    reduced, wrapped = [], []
    for wrapping, high in _blocks(parts, weights.rows, num_columns):
        # Of the exact sum of a column, a + 2^32 b with 0 <= a < 2^64: `wrapping` modulo 2^64, and b.
        low = wrapping - (high << 32)
        column_sums = ((low & PRIME) + ((low >> 61) & 7) + _rotated(high % PRIME, 32)) % PRIME
        reduced.append(_weighted(column_sums, weights.columns[:num_columns]))
        wrapped.append((wrapping * weights.wrapping_columns[:num_columns]).sum())
    first = _weighted(torch.stack(reduced), weights.blocks[: len(reduced)])
    second = (torch.stack(wrapped) * weights.wrapping_blocks[: len(wrapped)]).sum()
    return torch.stack([first >> _DIGIT_BITS, first & (1 << _DIGIT_BITS) - 1, second])


def differ(summed: Tensor, computed: Tensor) -> Tensor:
    """Whether a sum of checksums is not the checksum that was computed of the sum; a flag on the device."""

    def first(digits: Tensor) -> Tensor:
        return (_rotated(digits[0] % PRIME, _DIGIT_BITS) + digits[1] % PRIME) % PRIME

    return (first(summed) != first(computed)) | (summed[2] != computed[2])


def _blocks(parts: Sequence[Tensor], row_weights: Tensor, num_columns: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each block, the weighted sums of its columns modulo 2^64, and those of the high 32 bits of its elements."""
    row, sums = 0, row_weights.new_zeros(2, num_columns)
    for part in parts:
        for piece in _pieces(part, row):
            if row == ROWS:
                yield sums[0], sums[1]
                row, sums = 0, torch.zeros_like(sums)
            of_rows = row_weights[row : row + len(piece)]
            sums[0, : piece.shape[1]] += _column_sums(piece, of_rows)
            sums[1, : piece.shape[1]] += _column_sums(piece >> 32, of_rows)
            row += len(piece)
    yield sums[0], sums[1]


def _pieces(part: Tensor, row: int) -> Iterator[Tensor]:
    """A few whole rows of a block at a time, from this row of the block on, and the rest in a row by itself."""
    num_rows, num_left = divmod(len(part), COLUMNS)
    piece_rows = _CPU_PIECE_ROWS if part.device.type == "cpu" else _DEVICE_PIECE_ROWS
    whole = part[: num_rows * COLUMNS].view(num_rows, COLUMNS)
    first = min(-row % piece_rows, num_rows)  # as pieces divide a block
    yield from (whole[:first],) if first else ()
    yield from whole[first:].split(piece_rows) if first < num_rows else ()
    if num_left:
        yield part[-num_left:].view(1, num_left)


def _column_sums(piece: Tensor, weights: Tensor) -> Tensor:
    if piece.device.type == "cpu":
        return torch.mv(piece.t(), weights)  # at memory bandwidth; GPUs have no product of integer matrices
    return (piece * weights[:, None]).sum(0)


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """The sum of `values` times `weights` modulo the prime, both below it."""
    digit = (1 << _DIGIT_BITS) - 1
    high, low = values >> _DIGIT_BITS, values & digit
    weight_high, weight_low = weights >> _DIGIT_BITS, weights & digit
    middle = high * weight_low + low * weight_high  # below 2^62, as the high digits are below 2^30
    # The high digits' product counts 2^62 times, that is twice.
    products = 2 * (high * weight_high) + _rotated(middle % PRIME, _DIGIT_BITS) + (low * weight_low) % PRIME
    products = products % PRIME
    sums = _rotated((products >> _DIGIT_BITS).sum(), _DIGIT_BITS) + (products & digit).sum()
    return sums % PRIME


def _rotated(values: Tensor, num_bits: int) -> Tensor:
    """`values` below 2^61 times 2^num_bits modulo the prime: bits beyond the 61st come in again below."""
    return ((values << num_bits) & PRIME) | (values >> (61 - num_bits))


def wrapping_weights(first: int, num: int, device: torch.device) -> Tensor:
    """Weights of elements from place `first` of a section on, in the last number of its checksum."""
    weights, places = weights_on(device), torch.arange(first, first + num, device=device)
    rows = places // COLUMNS
    of_rows = weights.rows[rows % ROWS] * weights.wrapping_blocks[rows // ROWS]
    return of_rows * weights.wrapping_columns[places % COLUMNS]


@cache
def weights_on(device: torch.device) -> Weights:
    """Fixed pseudo-random weights; those of rows are odd, differ, and have 20 bits."""
    numbers = pseudo_random(_FIRST, 2 * (COLUMNS + _MOST_BLOCKS))
    for_prime, wrapping = numbers.reshape(2, -1)
    for_prime = np.maximum((for_prime >> np.uint64(3)) % np.uint64(PRIME), np.uint64(1))
    wrapping = wrapping | np.uint64(1)
    drawn = pseudo_random(_FIRST + 2 * (COLUMNS + _MOST_BLOCKS), 2 * ROWS)
    odd = (drawn & np.uint64((1 << _ROW_WEIGHT_BITS) - 1)) | np.uint64(1)
    rows = np.fromiter(dict.fromkeys(odd.tolist()), dtype=np.uint64)[:ROWS]
    arrays = (rows, for_prime[:COLUMNS], wrapping[:COLUMNS], for_prime[COLUMNS:], wrapping[COLUMNS:])
    return Weights(*(torch.from_numpy(array.view(np.int64).copy()).to(device) for array in arrays))


def pseudo_random(first: int, num: int) -> npt.NDArray[np.uint64]:
    """Numbers from `first` on of the generator splitmix64 (Steele, Lea and Flood, OOPSLA 2014) with seed 0."""
    state = np.arange(first, first + num, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def elements_at_once(device: torch.device) -> int:
    """Elements to convert at a time: on CPUs copies stay in the cache, on GPUs launches cost more."""
    return 1 << (20 if device.type == "cpu" else 24)


def squares_in_fp64(values: Tensor) -> Tensor:
    """Sum of squares, bitwise deterministic."""
    pieces = values.view(-1).split(elements_at_once(values.device))
    return torch.stack([piece.double().square_().sum() for piece in pieces]).sum()


class SectionSums:
    """What is taken from a section of a bucket, which is copied meanwhile: its squares and its checksum. By torch
    alone; `kernels.TritonSectionSums` reads each element once.
    """

    def __init__(self, values: Tensor, copy: Tensor | None = None) -> None:
        self._values = values
        if copy is not None:
            copy.copy_(values)

    def squares(self) -> Tensor:
        """The sum of squares in fp64, infinite beyond fp32."""
        pieces = self._values.split(elements_at_once(self._values.device))  # torch has no norm of integers
        return torch.stack([torch.linalg.vector_norm(piece.float()).double() ** 2 for piece in pieces]).sum()

    def checksum(self, counted: Tensor) -> Tensor:
        """That of the section, and of what is counted beside it."""
        return checksum([self._values, counted])


class SumChecks:
    """Checksums of staged buckets and what is counted beside them, one for each section of a bucket that is summed by
    itself.
    """

    def __init__(self, lengths: Sequence[int], read: type[SectionSums]) -> None:
        self._sections: Sequence[Sequence[slice]] = [[slice(0, length)] for length in lengths]
        self._read = read
        self._compared: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def divide(self, sections: Sequence[Sequence[slice]]) -> None:
        """Sets the sections of each bucket, before any is staged. No gradient is outside them."""
        self._sections = sections

    @property
    def num_digits(self) -> int:
        """Numbers that a staged bucket has room for."""
        return NUM_DIGITS * max(map(len, self._sections))

    def read(self, bucket: int, local: Tensor, copy: Tensor | None = None) -> list[SectionSums]:
        """Reads the sections of the local sums, once for all that is taken from them and for their copy."""
        return [self._read(local[of], None if copy is None else copy[of]) for of in self._sections[bucket]]

    def write(self, sections: Sequence[SectionSums], counted: Tensor, digits: Tensor) -> None:
        """Writes the checksums of the local sums, from which the bucket was staged, to `digits`."""
        digits.fill_(0)
        for number, section in enumerate(sections):
            digits[NUM_DIGITS * number :][:NUM_DIGITS].copy_(section.checksum(counted))

    def contradict(self, bucket: int, digits: Tensor, counted: Tensor, added: Tensor) -> Tensor:
        """Whether checksums of local sums are not those of what was `added` to them; a flag on the device."""
        ends = [-(-(of.stop - of.start) // COLUMNS) * COLUMNS for of in self._sections[bucket]]  # of their rows
        beside = [(counted * wrapping_weights(end, len(counted), counted.device)).sum() for end in ends]
        return (digits.view(-1, NUM_DIGITS)[: len(ends), -1] - torch.stack(beside) != added).any()

    def staged_differ(self, bucket: int, staged: Tensor, counted: Tensor, digits: Tensor) -> Tensor:
        """Whether a staged bucket contradicts its own checksums; a flag on the device."""
        pairs = self._pairs(bucket, staged, counted, digits, [slice(None)])
        return differ(*(torch.stack(side, 1) for side in zip(*pairs, strict=True))).any()

    def compare(self, bucket: int, summed: Tensor, counted: Tensor, digits: Tensor, places: Sequence[slice]) -> None:
        """Takes the checksums of a complete sum's sections within `places`, to be compared with the sums of theirs."""
        self._compared[bucket] = self._pairs(bucket, summed, counted, digits, places)

    def _pairs(
        self, bucket: int, values: Tensor, counted: Tensor, digits: Tensor, places: Sequence[slice]
    ) -> list[tuple[Tensor, Tensor]]:
        received = [place.indices(len(values)) for place in places]
        return [
            (digits[NUM_DIGITS * number :][:NUM_DIGITS].clone(), self._read(values[section]).checksum(counted))
            for number, section in enumerate(self._sections[bucket])
            if any(start <= section.start and section.stop <= stop for start, stop, _ in received)
        ]

    def wrong(self) -> tuple[int, ...]:
        """The buckets that have been found wrong since the last call, ascending. Waits for the device."""
        compared, self._compared = self._compared, {}
        buckets = [bucket for bucket, pairs in compared.items() for _ in pairs]
        if not buckets:
            return ()
        summed, computed = (torch.stack(side, 1) for side in zip(*chain(*compared.values()), strict=True))
        found = differ(summed, computed).tolist()
        return tuple(sorted({bucket for bucket, is_wrong in zip(buckets, found, strict=True) if is_wrong}))

    def forget(self) -> None:
        self._compared.clear()


class AddedSums:
    """What is added to each section of a flat space since a step began, as the last number of its checksum."""

    def __init__(self, sections: Sequence[Sequence[range]], device: torch.device) -> None:
        """The sections of each range of the space, ascending."""
        self.of_ranges = [torch.zeros(len(of), dtype=torch.int64, device=device) for of in sections]
        self._sections = list(chain(*sections))
        self._starts = [section.start for section in self._sections]
        self._sums = [one for of in self.of_ranges for one in of.unbind()]

    def reset(self) -> None:
        for sums in self.of_ranges:
            sums.zero_()

    def parts(self, start: int, stop: int) -> Iterator[tuple[slice, Tensor, int]]:
        """The parts of a range of the space in one section each, with the sum of that and the place where it begins."""
        number = max(bisect_right(self._starts, start) - 1, 0)
        while number < len(self._sections) and self._starts[number] < stop:
            section = self._sections[number]
            first, end = max(start, section.start), min(stop, section.stop)
            if first < end:
                yield slice(first - start, end - start), self._sums[number], first - section.start
            number += 1
