"""What rides in a staged bucket beside its gradients: whether they are unsound, judged without waiting for a device."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spare_megatron.mcore.gradients import FixedPoint, FixedPointSums, FloatSums

NUM_ELEMENTS = 10
BUCKET_ELEMENTS = 4
LAST = 2
FIXED = FixedPoint(scale=2.0**20, largest=2.0**40)


def make_sums(mode: str, device: str = "cpu") -> Any:
    """Sums of a model with a single parameter, in three buckets; all gradients are zero."""
    parameter = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS, device=device))
    parameter.main_grad = torch.zeros(NUM_ELEMENTS, device=device)
    buffer = SimpleNamespace(grad_data=parameter.main_grad, param_index_map={parameter: (0, NUM_ELEMENTS, 0)})
    module = SimpleNamespace(buffers=[buffer], zero_grad_buffer=parameter.main_grad.zero_)
    chunks: Any = [SimpleNamespace(module=module)]
    if mode == "fast":
        return FloatSums(chunks, torch.device(device), BUCKET_ELEMENTS * 4, torch.float32)
    return FixedPointSums(chunks, torch.device(device), BUCKET_ELEMENTS * 8, FIXED)


def add(sums: Any, element: int, value: float) -> None:
    """Adds a microbatch with one gradient that is not zero."""
    if isinstance(sums, FloatSums):
        sums.local_sums()[element // BUCKET_ELEMENTS][element % BUCKET_ELEMENTS] += value
    else:
        gradient = torch.zeros(NUM_ELEMENTS)
        gradient[element] = value
        sums._add(sums._sums, gradient)
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


class NoTransfers(TorchDispatchMode):
    """Raises where a number becomes a tensor: torch makes it on the host, copies it and waits for the device.

    `element = number` and `torch.where(mask, values, number)` do so; `fill_` and `masked_fill` pass the number on.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.scalar_tensor.default, f"{args} is copied to the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_staging_a_bucket_and_judging_it_waits_for_no_device(mode: str) -> None:
    """Tensors of `meta` have no values: whatever reads one raises."""
    sums = make_sums(mode, "meta")
    with NoTransfers():
        for bucket in range(len(sums.buckets)):
            sums.stage(bucket, sums.new_staging())
            sums.measure(bucket, 10.0)
            sums.stage(bucket, sums.new_staging())


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
    sums.add_loss(torch.tensor(math.nan))
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
    assert float(sums.stage(1, sums.new_staging())[-3]) == 0.0
    assert sums.norms() == {}
