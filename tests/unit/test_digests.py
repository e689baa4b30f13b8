"""What a digest of tensors is, by an implementation of its own, and which changes it cannot miss."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spare_megatron.mcore.gradients import digests
from spare_megatron.mcore.gradients.digests import BLOCK_WORDS, TensorsDigest, block_sums
from spare_megatron.mcore.optimizer import parameters

MASK = (1 << 64) - 1
SMALL = 8
"""Words of a block in tests that try every change."""


def multipliers(lane: int, number: int) -> list[int]:
    """The first numbers of a lane, by splitmix64 as its authors write it."""
    found, state = [], lane * BLOCK_WORDS * 0x9E3779B97F4A7C15 & MASK
    for _ in range(number):
        state = state + 0x9E3779B97F4A7C15 & MASK
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
        found.append((mixed ^ mixed >> 31) | 1)
    return found


LANES = [multipliers(lane, BLOCK_WORDS) for lane in range(2)]


def expected(tensors: Sequence[tuple[str, bytes]]) -> str:
    """The digest by its description, in Python's integers."""
    head = "".join(f"\n{name} {len(data)}" for name, data in tensors)
    sums = b""
    for _, data in tensors:
        for start in range(0, len(data), 4 * BLOCK_WORDS):
            block = data[start : start + 4 * BLOCK_WORDS]
            words = [
                int.from_bytes(block[at : at + 4].ljust(4, b"\0"), "little", signed=True)
                for at in range(0, len(block), 4)
            ]
            for lane in LANES:
                value = sum(word * by for word, by in zip(words, lane, strict=False)) & MASK
                sums += value.to_bytes(8, "little")
    return sha256(head.encode() + sums).hexdigest()


def digest(*tensors: Tensor) -> str:
    return TensorsDigest([("one", tensor) for tensor in tensors]).hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 3, 1000, 3 * BLOCK_WORDS, 3 * BLOCK_WORDS + 5])
def test_a_digest_is_what_its_description_says(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    scalar = torch.tensor(7.0)
    found = TensorsDigest([("values", tensor), ("of no dimension", scalar)]).hexdigest()
    assert found == expected([("values", bytes_of(tensor)), ("of no dimension", bytes_of(scalar))])


@given(st.integers(1, 4 * BLOCK_WORDS), st.integers(1, 7), st.integers(0, 9))
def test_it_does_not_depend_on_how_the_work_is_cut_nor_on_where_the_bytes_lie(
    num_words: int, piece_blocks: int, offset: int
) -> None:
    data = torch.randint(0, 256, (4 * num_words + offset,), dtype=torch.uint8)
    found = [torch.cat(list(block_sums(data[offset:], blocks))) for blocks in (piece_blocks, 64)]
    assert torch.equal(found[0], found[1])
    assert digest(data[offset:]) == digest(data[offset:].clone())
    columns = data[: 4 * (num_words // 4)].view(-1, 4).T
    assert digest(columns) == digest(columns.contiguous())


def test_computing_it_waits_for_no_device() -> None:
    """Tensors without values refuse to be read, and everything that needs their values."""
    tensors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (1, 7, 5 * BLOCK_WORDS + 3)]
    computing = TensorsDigest([(str(tensor.numel()), tensor) for tensor in tensors])
    with pytest.raises(NotImplementedError):
        computing.hexdigest()


# ------------------------------------------------------------------------------------------------ changes of values


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several, and few values."""
    first = digests.multipliers_on(torch.device("cpu"))[:, :SMALL].contiguous()
    monkeypatch.setattr(digests, "BLOCK_WORDS", SMALL)
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 4 * SMALL)
    monkeypatch.setattr(digests, "multipliers_on", lambda _: first)


def values(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.usefixtures("small_blocks")
def test_every_flip_of_one_or_two_bits_shows() -> None:
    tensor = values(2 * SMALL + 3)
    words = tensor.view(torch.int32)
    flips = [(at, 1 << bit if bit < 31 else -(1 << 31)) for at in range(len(words)) for bit in range(32)]
    found = {digest(tensor)}
    for at, mask in flips:
        words[at] ^= mask
        found.add(digest(tensor))
        words[at] ^= mask
    assert len(found) == 1 + len(flips)
    tops = [(one, other) for one, other in combinations(flips, 2) if one[1] == other[1] and one[0] < other[0]]
    for (one, mask), (other, _) in tops:
        words[one] ^= mask
        words[other] ^= mask
        found.add(digest(tensor))
        words[one] ^= mask
        words[other] ^= mask
    assert len(found) == 1 + len(flips) + len(tops)


@pytest.mark.usefixtures("small_blocks")
def test_every_exchange_of_two_elements_shows() -> None:
    tensor = torch.cat([values(2 * SMALL), torch.tensor([0.0, -0.0, 1.0])])
    before, pairs = digest(tensor), list(combinations(range(len(tensor)), 2))
    for one, other in pairs:
        exchanged = tensor.clone()
        exchanged[[one, other]] = tensor[[other, one]]
        assert digest(exchanged) != before


def test_zeros_at_the_end_show_and_so_does_the_sign_of_a_zero() -> None:
    tensor = values(100)
    longer = torch.cat([tensor, torch.zeros(1)])
    assert len({digest(tensor), digest(longer), digest(tensor, torch.zeros(1)), digest(torch.zeros(1), tensor)}) == 4
    assert digest(torch.zeros(5)) != digest(-torch.zeros(5))
    assert len({digest(torch.zeros(size)) for size in range(5)}) == 5
    assert digest(torch.zeros(3, dtype=torch.uint8)) != digest(torch.zeros(4, dtype=torch.uint8))


def test_tensors_exchanged_named_otherwise_or_with_other_signs_show() -> None:
    one, other = values(BLOCK_WORDS + 9), values(BLOCK_WORDS + 10)[1:]
    found = {
        digest(one, other),
        digest(other, one),
        digest(-one, other),
        digest(-one, -other),
        digest(one.flip(0), other),
        digest(one.roll(1), other),
        digest(one.roll(BLOCK_WORDS), other),
        TensorsDigest([("one", one), ("other", other)]).hexdigest(),
        TensorsDigest([("one", one), ("one", other)], head="a head").hexdigest(),
    }
    assert len(found) == 9
    assert digest(one, other) == digest(one.clone(), other.clone())


@pytest.mark.parametrize("lane", range(2))
def test_multipliers_are_such_that_no_exchange_and_no_two_signs_escape(lane: int) -> None:
    """A difference of words is a multiple of at most 2^31, which leaves 33 bits of a multiplier."""
    found = digests.multipliers_on(torch.device("cpu"))[lane].tolist()
    assert [value & MASK for value in found] == LANES[lane]
    low = {value % 2**33 for value in found} | {-value % 2**33 for value in found}
    assert len(low) == 2 * BLOCK_WORDS
    assert all(value % 2 for value in found)


# ---------------------------------------------------------------------------------------------------------- SHA-256


def test_sha256_is_that_of_all_bytes_and_reports_progress_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for a large model, and a rank without progress is lost."""
    named = [SimpleNamespace(name=name, parameter=values(size)) for name, size in (("one", 100), ("other", 1))]
    monkeypatch.setattr(parameters, "named_parameters", lambda _: named)
    monkeypatch.setattr(parameters, "_HASHED_BYTES", 64)
    moments: list[int] = []
    found = parameters.parameters_sha256([], lambda: moments.append(1))
    content = b"".join(each.name.encode() + bytes_of(each.parameter) for each in named)
    assert found == sha256(content).hexdigest()
    assert len(moments) == 7 + 1
