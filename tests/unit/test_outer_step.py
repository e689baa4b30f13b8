"""The arithmetic of the outer step, beside a reference in plain numpy that shares nothing with it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spare_megatron.core.outer.entries import Revision, SiteId
from spare_megatron.mcore.optimizer.outer_step import OuterRule, OuterState, SiteValues, exchanged_bytes

SHAPES = ((3, 171), (256,), (1,), (2, 1, 300))
"""Of parameters: whole blocks, parts of one, and odd numbers."""


WEIGHTS = [
    {SiteId(site): weight for site, weight in each}
    for each in (((0, 5), (1, 7), (2, 5)), ((0, 4), (2, 9)), ((0, 4), (1, 4), (2, 1)))
]
"""Of each round: sites and their microbatches."""


class Model(torch.nn.Module):
    def __init__(self, values: list[np.ndarray], *, has_main: bool = False) -> None:
        super().__init__()
        for number, one in enumerate(values):
            parameter = torch.nn.Parameter(torch.from_numpy(one.copy()))
            if has_main:
                parameter.data = parameter.data.bfloat16()
                parameter.main_param = torch.from_numpy(one.copy())  # type: ignore[attr-defined]
            parameter.main_grad = torch.zeros(1)  # type: ignore[attr-defined]
            self.register_parameter(f"p{number}", parameter)


def chunks_of(values: list[np.ndarray], *, has_main: bool = False) -> list[Any]:
    return [SimpleNamespace(module=Model(values, has_main=has_main))]


def drawn(seed: int, scale: float = 1.0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [(scale * random.standard_normal(shape)).astype(np.float32) for shape in SHAPES]


def reference_received(start: np.ndarray, value: np.ndarray, bits: int) -> np.ndarray:
    """What others take a site's values of one parameter for, number by number."""
    if bits == 32:
        return value.astype(np.float64).ravel()
    most = {8: 127, 4: 7}[bits]
    start, value = start.ravel(), value.ravel()
    found = np.empty(start.size, dtype=np.float64)
    for first in range(0, start.size, 256):
        block = value[first : first + 256] - start[first : first + 256]
        scale = np.float32(np.abs(block).max()) / np.float32(most)
        for place, one in enumerate(block, first):
            number = 0.0 if scale == 0 else float(np.clip(np.rint(one / scale), -most, most))
            found[place] = np.float64(start[place]) + np.float64(number) * np.float64(scale)
    return found


def reference_step(
    start: np.ndarray,
    momentum: np.ndarray,
    received: Mapping[SiteId, np.ndarray],
    weights: Mapping[SiteId, int],
    rule: OuterRule,
) -> tuple[np.ndarray, np.ndarray]:
    sites = sorted(weights)
    added = received[sites[0]] * np.float64(weights[sites[0]])
    for site in sites[1:]:
        added = added + received[site] * np.float64(weights[site])
    mean = added / np.float64(sum(weights.values()))
    first = start.ravel().astype(np.float64)
    rate, factor = rule.learning_rate, rule.momentum
    new_momentum = (momentum.ravel().astype(np.float64) * factor + (first - mean)).astype(np.float32)
    if rate == 1.0 and factor == 0.0:
        return mean.astype(np.float32), new_momentum
    new = (first * (1.0 - rate) + mean * rate) - new_momentum.astype(np.float64) * (rate * factor)
    return new.astype(np.float32), new_momentum


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize(
    "rule", [OuterRule(learning_rate=0.7, momentum=0.9), OuterRule(learning_rate=1.0, momentum=0.0)]
)
def test_rounds_of_three_sites_are_those_of_the_reference(bits: int, rule: OuterRule) -> None:
    start, momentum = drawn(0), [np.zeros(shape, dtype=np.float32) for shape in SHAPES]
    sites = {site: chunks_of(start) for site in map(SiteId, range(3))}
    states = {site: OuterState(chunks) for site, chunks in sites.items()}
    for round_number, weights in enumerate(WEIGHTS, 1):
        moved = {
            site: [a + b for a, b in zip(start, drawn(10 * round_number + site, 1e-3), strict=True)] for site in sites
        }
        for site, chunks in sites.items():
            for parameter, value in zip(chunks[0].module.parameters(), moved[site], strict=True):
                parameter.data.copy_(torch.from_numpy(value))
        sizes = states[0].sizes(sites[0])
        sent = {site: states[site].message(sites[site], bits) for site in weights}
        assert {len(one) for one in sent.values()} == {exchanged_bytes(sizes, bits)}
        messages = {site: SiteValues(one, sizes, bits) for site, one in sent.items()}
        results = [states[site].result(sites[site], messages, weights, rule) for site in sites]
        assert all(torch.equal(one, results[0]) for one in results)
        expected = [
            reference_step(
                start[number],
                momentum[number],
                {site: reference_received(start[number], moved[site][number], bits) for site in weights},
                weights,
                rule,
            )
            for number in range(len(SHAPES))
        ]
        wanted = np.concatenate([*(new for new, _ in expected), *(velocity for _, velocity in expected)])
        assert results[0].numpy().tobytes() == wanted.tobytes()
        for site, chunks in sites.items():
            states[site].apply(chunks, results[0])
            held = [parameter.detach().numpy().ravel() for parameter in chunks[0].module.parameters()]
            assert np.concatenate(held).tobytes() == np.concatenate([new for new, _ in expected]).tobytes()
        start = [new.reshape(shape) for (new, _), shape in zip(expected, SHAPES, strict=True)]
        momentum = [velocity for _, velocity in expected]


def test_one_site_keeps_its_own_bits_whatever_its_weight() -> None:
    values = drawn(3)
    values[0][0, :3] = [-0.0, 1e-45, np.finfo(np.float32).max]
    chunks = chunks_of(drawn(4))
    state = OuterState(chunks)
    for parameter, value in zip(chunks[0].module.parameters(), values, strict=True):
        parameter.data.copy_(torch.from_numpy(value))
    sizes = state.sizes(chunks)
    message = SiteValues(state.message(chunks, 32), sizes, 32)
    for weight in (1, 3, 7919, 2**29 - 1):
        result = state.result(
            chunks, {SiteId(1): message}, {SiteId(1): weight}, OuterRule(learning_rate=1.0, momentum=0.0)
        )
        assert result[: sum(sizes)].numpy().tobytes() == np.concatenate([one.ravel() for one in values]).tobytes()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_difference_without_a_scale_is_none(bits: int) -> None:
    """The largest number of a block over 127 is 0 in fp32 for the smallest ones."""
    chunks = chunks_of([np.zeros(300, dtype=np.float32)])
    state = OuterState(chunks)
    next(chunks[0].module.parameters()).data[0] = 1e-45
    message = SiteValues(state.message(chunks, bits), [300], bits)
    assert not message.values(0, torch.zeros(300), 0).any()


def test_rounding_costs_what_the_model_says() -> None:
    """0.9% of a normal difference with 8 bits, 12% with 4."""
    difference = np.random.default_rng(5).standard_normal(1 << 16).astype(np.float32)
    for bits, least, most in ((8, 0.006, 0.010), (4, 0.10, 0.14)):
        chunks = chunks_of([np.zeros_like(difference)])
        state = OuterState(chunks)
        next(chunks[0].module.parameters()).data.copy_(torch.from_numpy(difference))
        found = SiteValues(state.message(chunks, bits), [len(difference)], bits).values(
            0, torch.zeros(len(difference)), 0
        )
        error = np.linalg.norm(found.numpy() - difference) / np.linalg.norm(difference)
        assert least < error < most


def test_the_copy_that_computes_follows_the_one_that_the_optimizer_keeps() -> None:
    values = drawn(6)
    chunks = chunks_of(values, has_main=True)
    state = OuterState(chunks)
    result = torch.cat([torch.full((size,), 1.0 + 2**-12) for size in state.sizes(chunks)] * 2)
    state.apply(chunks, result)
    for parameter in chunks[0].module.parameters():
        assert torch.equal(parameter.main_param, torch.full_like(parameter.main_param, 1.0 + 2**-12))  # type: ignore[attr-defined]
        assert torch.equal(parameter.detach().float(), torch.ones_like(parameter.main_param))  # type: ignore[attr-defined]


def test_a_state_goes_to_another_rank_and_its_digest_with_it() -> None:
    chunks, others = chunks_of(drawn(7)), chunks_of(drawn(8))
    state, other = OuterState(chunks), OuterState(others)
    state.apply(chunks, torch.cat([torch.arange(float(2 * sum(state.sizes(chunks))))]))
    state.revision = Revision(4, "ab")
    state.count(6)
    assert state.digest(chunks).hexdigest() != other.digest(others).hexdigest()
    other.load_part(others, state.part(chunks))
    assert state.digest(chunks).hexdigest() == other.digest(others).hexdigest()
    assert (other.revision, other.weight, other.num_steps) == (Revision(4, "ab"), 6, 1)


def test_bytes_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes of differences, not 265"):
        SiteValues(torch.zeros(266, dtype=torch.uint8), [256, 1], 8)
