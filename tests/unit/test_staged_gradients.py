"""What rides in a staged bucket beside its gradients: whether they are unsound, judged without waiting for a device."""

import contextlib
import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.mcore.gradients.checksums import NUM_DIGITS
from spare_megatron.mcore.gradients.fixed_point import FixedPoint
from spare_megatron.mcore.gradients.gradients import FixedPointSums, FloatSums
from spare_megatron.mcore.model.experts import Router

NUM_ELEMENTS = 10
BUCKET_ELEMENTS = 4
LAST = 2
FIXED = FixedPoint(scale=2.0**20, largest=2.0**40)


def make_sums(
    mode: str, device: str = "cpu", all_count: int | None = None, num_terms: int = 0, num_routers: int = 0
) -> Any:
    """Sums of a model with a single parameter, in three buckets; all gradients are zero."""
    parameter = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS, device=device))
    parameter.main_grad = torch.zeros(NUM_ELEMENTS, device=device)
    places = {parameter: (0, NUM_ELEMENTS, 0)}
    buffer = SimpleNamespace(grad_data=parameter.main_grad, param_index_map=places, params=[parameter])
    routers = [make_router() for _ in range(num_routers)]
    module = SimpleNamespace(
        buffers=[buffer],
        expert_parallel_buffers=[],
        zero_grad_buffer=parameter.main_grad.zero_,
        modules=lambda: routers,
    )
    chunks: Any = [SimpleNamespace(module=module)]
    groups: Any = SimpleNamespace(lanes=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    place = (chunks, groups, torch.device(device))
    if mode == "reproducible":
        return FixedPointSums(*place, BUCKET_ELEMENTS * 8, FIXED, all_count, num_terms)
    dtype = torch.float32 if mode == "fast" else torch.bfloat16
    return FloatSums(*place, BUCKET_ELEMENTS * dtype.itemsize, dtype, all_count, num_terms)


def make_router() -> Router:
    """Of three experts with biases, as far as sums know it."""
    router = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.enable_expert_bias, router.config = True, SimpleNamespace(num_moe_experts=3)
    for name in ("expert_bias", "local_tokens_per_expert"):
        router.register_buffer(name, torch.zeros(3))
    return router


def add(sums: Any, element: int, value: float) -> None:
    """Adds a microbatch with one gradient that is not zero."""
    if isinstance(sums, FloatSums):
        sums.local_sums()[element // BUCKET_ELEMENTS][element % BUCKET_ELEMENTS] += value
    else:
        gradient = torch.zeros(NUM_ELEMENTS)
        gradient[element] = value
        sums._add_gradients(0, gradient)
    sums.add_count(1)


def unsound_over(groups: list[Any], limit: float = math.inf) -> list[int]:
    """For each bucket, the groups that are unsound, as its sum over groups says."""
    found = []
    for bucket in range(len(groups[0].buckets)):
        for sums in groups:
            sums.measure(bucket, min(limit, 1e300))
        staged = [sums.stage(bucket, sums.new_staging()) for sums in groups]
        found.append(groups[0].on_summed(bucket, torch.stack(staged).sum(dim=0)))
    return found


class OperatorsSeen(TorchDispatchMode):
    """Notes every operator that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


WAITING = {torch.ops.aten.scalar_tensor.default, torch.ops.aten._local_scalar_dense.default}
"""Operators that wait for a device: a number becomes a tensor on the host and is copied, as by `element = number` and
`torch.where(mask, values, number)` (`fill_` and `masked_fill` pass it on); and an element becomes a number.
"""


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_staging_a_bucket_and_judging_it_waits_for_no_device(mode: str) -> None:
    """Tensors of `meta` have no values: whatever reads one raises."""
    sums = make_sums(mode, "meta")
    with OperatorsSeen() as operators:
        for bucket in range(len(sums.buckets)):
            sums.stage(bucket, sums.new_staging())
            sums.measure(bucket, 10.0)
            staging = sums.new_staging()
            sums.stage(bucket, staging)
            sums.check(bucket, staging)
    assert operators.seen
    assert operators.seen.isdisjoint(WAITING)


def test_what_waits_for_a_device_is_seen() -> None:
    values = torch.zeros(3, device="meta")
    waits = (lambda: values.__setitem__(0, 1.0), lambda: torch.where(values > 0, values, 2.0), values.sum().item)
    for wait in waits:
        with OperatorsSeen() as operators, contextlib.suppress(RuntimeError):
            wait()
        assert not operators.seen.isdisjoint(WAITING)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_a_sum_says_how_many_groups_are_unsound_in_it(mode: str) -> None:
    groups = [make_sums(mode) for _ in range(3)]
    for sums, values in zip(groups, ([1.0, 5.0], [6.0, 5.0], [7.0, 0.0]), strict=True):
        for element, value in zip((1, 5), values, strict=True):
            add(sums, element, value)
    assert unsound_over(groups, limit=5.5) == [2, 0, 0]
    assert groups[0].totals().num_microbatches == (6, 6, 6)
    assert groups[0].norms() == {0: 1.0, 1: 5.0, 2: 0.0}
    assert groups[0].norms() == {}, "each is read once"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_unsound_from_its_bucket_on(value: float) -> None:
    sums = make_sums("fast")
    add(sums, 5, value)
    assert unsound_over([sums]) == [0, 1, 0]
    sums = make_sums("reproducible")
    add(sums, 5, value)
    assert unsound_over([sums]) == [1, 1, 1], "the largest value is that of all buckets"


def test_a_loss_that_is_not_finite_is_unsound_in_the_last_bucket() -> None:
    sums = make_sums("fast")
    sums.add_loss(torch.tensor(math.nan), torch.tensor(1))
    assert unsound_over([sums]) == [0, 0, 1]


@pytest.mark.parametrize(("factor", "expected"), [(1.0, [0, 0, 0]), (1.001, [1, 1, 1])])
def test_a_value_that_does_not_fit_the_fixed_point_is_unsound(factor: float, expected: list[int]) -> None:
    sums = make_sums("reproducible")
    add(sums, 5, -factor * FIXED.largest / FIXED.scale)
    assert unsound_over([sums]) == expected


def test_a_new_attempt_judges_anew() -> None:
    sums = make_sums("fast")
    add(sums, 5, 3.0)
    sums.measure(1, 2.0)
    sums.mark_kept(0)
    assert float(sums.extras(sums.stage(1, sums.new_staging()))[-3]) == 0.0
    assert sums.norms() == {}


# ---------------------------------------------------------------------------------------------------- tokens that count


def summed(groups: list[Any]) -> Any:
    """What the first group has after the last bucket is summed over groups in the format that is sent."""
    staged = [sums.extras(sums.stage(LAST, sums.new_staging())) for sums in groups]
    staging = groups[0].new_staging()
    groups[0].extras(groups[0].stage(LAST, staging)).copy_(functools.reduce(torch.add, staged))
    groups[0].on_summed(LAST, staging)
    return groups[0].totals().loss


@pytest.mark.parametrize("mode", ["fast", "fast_bf16", "reproducible"])
def test_tokens_are_counted_exactly_where_fp32_would_round_their_number(mode: str) -> None:
    counts = [2**24 + 1, 2**24 + 3, 2**33 - 1, *range(4090, 4100)]
    assert int(functools.reduce(np.add, np.array(counts, np.float32))) != sum(counts)
    groups = [make_sums(mode) for _ in counts]
    for sums, count in zip(groups, counts, strict=True):
        for part in (count // 3, count - count // 3):
            sums.add_loss(torch.tensor(0.5), torch.tensor(part))
    assert summed(groups) == LossSum(1.0 * len(counts), sum(counts))


def test_most_groups_and_tokens_that_fp32_counts_are_counted() -> None:
    """As many groups as the configuration allows, each of which has one token less than a carry."""
    sums = make_sums("fast")
    sums.add_loss(torch.tensor(0.0), torch.tensor(2**24 - 1))
    staged = sums.extras(sums.stage(LAST, sums.new_staging()))
    whole = torch.zeros_like(staged)
    for _ in range(2**12):
        whole += staged
    staging = sums.new_staging()
    sums.extras(sums.stage(LAST, staging)).copy_(whole)
    sums.on_summed(LAST, staging)
    assert sums.totals().loss.num_tokens == 2**12 * (2**24 - 1)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_where_all_tokens_count_their_number_is_that_of_the_microbatches(mode: str) -> None:
    """And what is sent is as long as it was: an all-reduce adds in an order that depends on that."""
    sums = make_sums(mode, all_count=100)
    sums.add_loss(torch.tensor(2.0), None)
    sums.add_count(3)
    num_checked = NUM_DIGITS if mode == "reproducible" else 0
    assert len(sums.stage(LAST, sums.new_staging())) == len(sums.buckets[LAST]) + num_checked + 3
    assert summed([sums]) == LossSum(2.0, 300)


def test_a_new_step_counts_anew() -> None:
    for mode in ("fast", "reproducible"):
        sums = make_sums(mode)
        sums.add_loss(torch.tensor(2.0), torch.tensor(5))
        sums.reset()
        assert summed([sums]) == LossSum(0.0, 0)


# ----------------------------------------------------------------------------------------------------- further terms


@pytest.mark.parametrize("mode", ["fast", "fast_bf16", "reproducible"])
def test_sums_and_counts_of_further_terms_ride_in_the_last_bucket(mode: str) -> None:
    groups = [make_sums(mode, all_count=100, num_terms=2) for _ in range(3)]
    for number, sums in enumerate(groups):
        sums.add_loss(torch.tensor(2.0), None)
        sums.add_terms(torch.tensor([0.25, 1.0 + number]), torch.tensor([2**24 + 1, number]))
        sums.add_count(1)
    assert summed(groups) == LossSum(6.0, 300)
    assert groups[0].totals().terms == (LossSum(0.75, 3 * (2**24 + 1)), LossSum(6.0, 3))
    early = groups[0].extras(groups[0].stage(0, groups[0].new_staging()))
    assert early[-9:-3].tolist() == [0.0] * 6
    groups[0].reset()
    assert summed(groups[:1]) == LossSum(0.0, 0)
    assert groups[0].totals().terms == (LossSum(0.0, 0), LossSum(0.0, 0))


@pytest.mark.parametrize("mode", ["fast", "fast_bf16", "reproducible"])
def test_the_tokens_of_each_expert_ride_in_the_last_bucket(mode: str) -> None:
    """Beside tokens that count and a term, exactly where fp32 would round their number."""
    counts = [torch.tensor([[0, 1, 2**24 + 1], [2**33 - 1, number, 4096]]) for number in range(3)]
    groups = [make_sums(mode, num_terms=1, num_routers=2) for _ in counts]
    for sums, count in zip(groups, counts, strict=True):
        sums.experts.tokens += count
        sums.add_loss(torch.tensor(2.0), torch.tensor(5))
        sums.add_terms(torch.tensor([1.0]), torch.tensor([7]))
    assert summed(groups) == LossSum(6.0, 15)
    groups[0].finish()
    assert torch.equal(groups[0].experts.tokens, sum(counts))
    assert groups[0].totals().terms == (LossSum(3.0, 21),)
    early = groups[1].extras(groups[1].stage(0, groups[1].new_staging()))
    assert not early.any()


@pytest.mark.parametrize(
    ("mode", "value"), [("fast", math.nan), ("fast", math.inf), ("reproducible", FIXED.largest), ("fast", 1.0)]
)
def test_a_term_that_does_not_fit_is_unsound_as_the_loss_would_be(mode: str, value: float) -> None:
    sums = make_sums(mode, num_terms=1)
    sums.add_loss(torch.tensor(0.0), torch.tensor(1))
    sums.add_terms(torch.tensor([value]), torch.tensor([1]))
    assert unsound_over([sums])[LAST] == (value != 1.0)
