"""Checksums of integer sums, against Python's integers, which have no limit, and every change of one or two bits.

A change of elements by d changes both sums of a checksum by the weights times d; what escapes is what leaves both as
they are. So every change of two bits is found exactly if no two bits have opposite effects.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spare_megatron.mcore.gradients.checksums import (
    COLUMNS,
    PRIME,
    ROWS,
    SectionSums,
    SumChecks,
    checksum,
    differ,
    weights_on,
)
from tests.unit.test_staged_gradients import LAST, add, make_sums

CPU = torch.device("cpu")
INT64 = st.integers(-(2**63), 2**63 - 1)


def expected(parts: Sequence[Tensor]) -> tuple[int, int]:
    """Both sums of a checksum."""
    rows = [row for part in parts for row in part.split(COLUMNS)]
    weights = [of.tolist() for of in weights_on(CPU)]
    of_rows, columns, wrapping_columns, blocks, wrapping_blocks = weights
    first = second = 0
    for number, row in enumerate(rows):
        block, place = divmod(number, ROWS)
        values = row.tolist()
        first += of_rows[place] * blocks[block] * sum(map(int.__mul__, values, columns))
        second += of_rows[place] * wrapping_blocks[block] * sum(map(int.__mul__, values, wrapping_columns))
    return first % PRIME, second % 2**64


def sums_of(digits: Tensor) -> tuple[int, int]:
    high, low, second = digits.tolist()
    return (high * 2**31 + low) % PRIME, second % 2**64


def tensor(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def drawn(length: int, seed: int, bits: int = 63) -> Tensor:
    return torch.randint(-(2**bits), 2**bits - 1, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 5, COLUMNS - 1, COLUMNS, COLUMNS + 1, 40 * COLUMNS + 7])
def test_a_checksum_is_what_integers_without_limit_give(length: int) -> None:
    for parts in (
        [drawn(length, 1), drawn(3, 2)],
        [torch.full((length,), -(2**63))],
        [torch.full((length,), 2**63 - 1)],
    ):
        assert sums_of(checksum(parts)) == expected(parts)


def test_a_checksum_of_several_blocks_is_what_integers_without_limit_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", 8), ("ROWS", 32)):
        monkeypatch.setattr(f"spare_megatron.mcore.gradients.checksums.{name}", value)
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr("spare_megatron.mcore.gradients.checksums._CPU_PIECE_ROWS", 4)
    parts = [drawn(8 * 77 + 3, 3), drawn(5, 4)]
    assert sums_of(checksum(parts)) == expected(parts)


def test_no_sum_within_a_block_can_overflow() -> None:
    rows = weights_on(CPU).rows
    assert len(rows) == len(set(rows.tolist())) == ROWS
    assert int(rows.min()) > 0
    assert int(rows.sum()) < 2**32, "of numbers of 31 bits and a sign, and of those of 32 bits without"
    assert bool((rows % 2 == 1).all())


@given(st.lists(st.tuples(INT64, INT64, INT64), min_size=1, max_size=6), st.integers(1, 9))
@settings(max_examples=60)
def test_the_sum_of_checksums_is_the_checksum_of_the_sum_whatever_the_order(
    rows: list[tuple[int, ...]], by: int
) -> None:
    """While no element overflows, and up to the most groups of a run."""
    groups = [tensor([value // (8 * len(rows)) for value in row]) for row in zip(*rows, strict=True)]
    digits = torch.stack([checksum([group]) for group in groups]).sum(0)
    whole = torch.stack(groups).sum(0)
    assert not bool(differ(digits, checksum([whole])))
    wrong = whole.clone()
    wrong[0] ^= 1 << by
    assert bool(differ(digits, checksum([wrong])))


def test_the_checksums_of_the_most_groups_can_be_added() -> None:
    largest = tensor([(PRIME - 1) >> 31, 2**31 - 1, 0])
    total = largest.clone()
    for _ in range(12):
        total = total + total
    assert total[:2].tolist() == [2**12 * digit for digit in largest[:2].tolist()]


def flipped(values: Tensor, bit: int) -> Tensor:
    changed = values.clone()
    changed[bit // 64] ^= (-(2**63)) if bit % 64 == 63 else 1 << bit % 64
    return changed


def test_changes_of_one_or_two_bits_of_a_small_sum_are_found() -> None:
    """All bits, and of pairs some, with those that escape one of both moduli; the next test has all pairs."""
    values = drawn(2, 5, bits=62)
    digits = checksum([values])
    bits = range(64 * len(values))
    pairs = [*islice(combinations(bits, 2), 0, None, 40), (0, 61), (1, 62), (2, 63), (63, 127)]
    changes = [flipped(values, bit) for bit in bits]
    changes += [flipped(changes[one], other) for one, other in pairs]
    assert [change.tolist() for change in changes if not bool(differ(digits, checksum([change])))] == []


def effects(places: Iterator[tuple[int, int]]) -> set[tuple[int, int]]:
    """What setting any bit of the elements at these rows and columns adds to both sums."""
    weights = [of.tolist() for of in weights_on(CPU)]
    found = set()
    for row, column in places:
        first, second = (weights[0][row] * weights[of][column] * weights[of + 2][0] for of in (1, 2))
        for bit in range(64):
            change = 2**bit if bit < 63 else -(2**63)
            found.add((first * change % PRIME, second * change % 2**64))
    return found


def test_no_two_bits_of_a_bucket_of_some_rows_have_opposite_or_equal_effects() -> None:
    """So any two flips are found, whichever way they go. Either modulus by itself misses some."""
    places = [(row, column) for row in (0, 1, 2, ROWS - 1) for column in range(0, COLUMNS, 13)]
    found = effects(iter(places))
    assert len(found) == 64 * len(places)
    assert not any((-first % PRIME, -second % 2**64) in found for first, second in found)
    of_one = effects(iter(places[:1]))
    assert len({first for first, _ in of_one}) < 64, "2^61 is 1 modulo the prime"
    of_two = effects(iter(places[:2]))
    assert len({second for _, second in of_two}) < 128, "top bits are alike modulo 2^64"


def test_elements_that_are_exchanged_shifted_or_lost_are_found() -> None:
    values = drawn(3 * COLUMNS + 5, 6, bits=61)
    digits = checksum([values])
    pairs = np.random.default_rng(7).integers(0, len(values), (60, 2)).tolist()
    pairs += [(0, COLUMNS), (5, 2 * COLUMNS + 5), (0, 1)]
    for one, other in pairs:
        changed = values.clone()
        changed[[one, other]] = values[[other, one]]
        assert bool(differ(digits, checksum([changed]))) == bool(values[one] != values[other])
    for changed in (values.roll(1), values.roll(COLUMNS), torch.zeros_like(values), values.flip(0)):
        assert bool(differ(digits, checksum([changed])))


# ------------------------------------------------------------------------------------------------- of staged buckets


def test_a_flip_in_what_is_staged_sent_or_counted_is_found_in_its_bucket_alone() -> None:
    groups = [make_sums("reproducible") for _ in range(3)]
    for number, sums in enumerate(groups):
        for element in range(10):
            add(sums, element, 0.37 * (number + 1) * (-1) ** element)
    for bucket in range(LAST + 1):
        staged = [sums.stage(bucket, sums.new_staging()) for sums in groups]
        length = len(staged[0])
        for element in range(length):
            for bit in (0, 17, 40, 61, 62):
                whole = torch.stack(staged).sum(0)
                whole[element] ^= 1 << bit
                groups[0].check(bucket, whole)
                assert groups[0].wrong_sums() == (bucket,), (bucket, element, bit)
        groups[0].check(bucket, torch.stack(staged).sum(0))
        assert groups[0].wrong_sums() == ()


def test_a_copy_that_differs_from_the_local_sums_is_found_where_it_was_made() -> None:
    sums = make_sums("reproducible")
    add(sums, 5, 1.0)
    staged = sums.stage(1, sums.new_staging())
    staged[1] += 1
    sums.check(1, staged)
    assert sums.wrong_sums() == (1,)


def test_a_new_attempt_forgets_what_it_has_compared() -> None:
    sums = make_sums("reproducible")
    staged = sums.stage(0, sums.new_staging())
    staged[0] += 1
    sums.check(0, staged)
    sums.mark_kept(0)
    assert sums.wrong_sums() == ()


def test_of_a_bucket_that_is_sent_in_parts_each_is_compared_where_it_comes() -> None:
    checks = SumChecks([10], SectionSums)
    checks.divide([[slice(0, 4), slice(4, 6), slice(6, 10)]])
    assert checks.num_digits == 9
    groups = [drawn(10, seed, bits=50) for seed in (8, 9)]
    counted, digits = tensor([1, 2, 3]), torch.zeros(9, dtype=torch.int64)
    total = torch.zeros(9, dtype=torch.int64)
    for values in groups:
        checks.write(checks.read(0, values), counted, digits)
        total += digits
    summed = torch.stack(groups).sum(0)
    summed[4:6] = 77  # goes to others, and what is here is anything
    for places, wrong in (
        ([slice(0, 4), slice(6, 10)], ()),
        ([slice(4, 6)], (0,)),
        ([slice(None)], (0,)),
        ([slice(0, 6)], (0,)),
    ):
        checks.compare(0, summed, 2 * counted, total, places)
        assert checks.wrong() == wrong, places
