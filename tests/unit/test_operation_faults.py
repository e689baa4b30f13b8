"""Faults in results of operations: each is found again by computing every operation a second time from what it took."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from spare_megatron.faults.points import Fault, FaultKind, FaultPoint
from spare_megatron.mcore.corruption import CORRUPTIONS, DRIFT, ChangedNothing, OperationFaults, site_of
from spare_megatron.stacking.layout import GroupId

BIT = 13
PRODUCTS = {"forward": 3, "inputs": 2, "weights": 3}
"""Of a pass of the model below, whose inputs need no gradient."""


class Operation(NamedTuple):
    name: str
    is_backward: bool
    result: Tensor
    expected: Tensor
    """What the operation makes of what it has taken, computed again."""

    @property
    def is_wrong(self) -> bool:
        return not torch.equal(self.result, self.expected)

    @property
    def num_bits(self) -> int:
        changed = patterns(self.result) ^ patterns(self.expected)
        return sum(int(one).bit_count() for one in changed)


class Watch(TorchDispatchMode):
    """Writes down the results of operations, and whether they are right; entered after the faults."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Operation] = []

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        name = function.overloadpacket.__name__
        if name in ("mm", "gelu", "gelu_backward", "native_layer_norm", "native_layer_norm_backward"):
            with _disable_current_modes():
                first, again = (one if isinstance(one, Tensor) else one[0] for one in (result, function(*arguments)))
                is_backward = torch._C._current_graph_task_id() != -1
                self.seen.append(Operation(name, is_backward, first.clone(), again))
        return result


class Trainer:
    """What faults need of a rank's trainer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(width, 24, bias=False, dtype=dtype) for width in (16, 24, 24)]
        self.model = torch.nn.Sequential(
            layers[0], torch.nn.GELU(), layers[1], torch.nn.LayerNorm(24, dtype=dtype), layers[2]
        )
        self.chunks = [type("", (), {"module": self.model})]
        self.inputs = torch.randn(32, 16, dtype=dtype)
        self.injector = OperationFaults(self)  # type: ignore[arg-type]
        self.injector._num_layers = len(layers)

    def run(self, on_forward: Callable[[], object] = lambda: None) -> list[Operation]:
        """Two passes; the faults strike before the first."""
        on_forward()
        watch = Watch()
        with self.injector, watch:
            for _ in range(2):
                self.model(self.inputs).square().sum().backward()
        return watch.seen


def patterns(values: Tensor) -> Any:
    whole = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return values.contiguous().view(whole).numpy().view(f"u{values.element_size()}").ravel()


def faults(kind: str, phase: FaultPoint) -> Iterator[Fault]:
    for ordinal in range(1, 13):
        yield Fault(step=2, group=GroupId(1), rank=0, phase=phase, kind=FaultKind(kind), ordinal=ordinal, bit=BIT)


def run_with(fault: Fault, trainer: Trainer | None = None) -> list[Operation]:
    trainer = trainer or Trainer()
    return trainer.run(lambda: CORRUPTIONS[fault.kind](trainer, fault, None))  # type: ignore[arg-type]


def is_of(site: str, one: Operation) -> bool:
    """By shapes: gradients of weights have 24 rows and others the 32 of the inputs."""
    if site == "forward":
        return not one.is_backward
    return one.is_backward and (len(one.result) == 24) == (site == "weights")


PHASES = [FaultPoint.FORWARD, FaultPoint.BACKWARD]


def test_without_a_fault_all_results_are_right() -> None:
    seen = Trainer().run()
    assert not [one for one in seen if one.is_wrong]
    for site, number in PRODUCTS.items():
        assert sum(one.name == "mm" and is_of(site, one) for one in seen) == 2 * number


@pytest.mark.parametrize("phase", PHASES)
def test_a_flip_changes_one_bit_of_one_product_where_the_fault_says(phase: FaultPoint) -> None:
    places = set()
    for fault in faults("product_flip", phase):
        (_, site), _ = site_of(fault)
        seen = run_with(fault)
        [wrong] = [number for number, one in enumerate(seen) if one.is_wrong]
        assert seen[wrong].name == "mm"
        assert is_of(site, seen[wrong])
        [changed] = np.flatnonzero(patterns(seen[wrong].result) != patterns(seen[wrong].expected))
        assert patterns(seen[wrong].result)[changed] ^ patterns(seen[wrong].expected)[changed] == 1 << BIT
        places.add((site, wrong))
        assert [one.is_wrong for one in run_with(fault)] == [one.is_wrong for one in seen]
    assert {site for site, _ in places} == ({"forward"} if phase is FaultPoint.FORWARD else {"inputs", "weights"})
    assert len(places) >= 3


@pytest.mark.parametrize("phase", PHASES)
def test_a_flip_of_another_operation_changes_one_bit_of_no_product(phase: FaultPoint) -> None:
    for fault in faults("operation_flip", phase):
        [wrong] = [one for one in run_with(fault) if one.is_wrong]
        assert (wrong.name != "mm", wrong.is_backward) == (True, phase is FaultPoint.BACKWARD)
        assert wrong.num_bits == 1


class Twice(TorchDispatchMode):
    """Repeats each operation at once, as a check does."""

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if "layer_norm" in function.overloadpacket.__name__ or "gelu" in function.overloadpacket.__name__:
            function(*arguments, **(named or {}))
        return result


@pytest.mark.parametrize("phase", PHASES)
def test_a_flip_strikes_the_same_operation_where_checks_repeat_them(phase: FaultPoint) -> None:
    for fault in faults("operation_flip", phase):
        plain = [(one.name, one.is_wrong) for one in run_with(fault)]
        trainer = Trainer()
        CORRUPTIONS[fault.kind](trainer, fault, None)  # type: ignore[arg-type]
        faulty, watch = trainer.injector, Watch()
        with faulty, Twice(), watch:
            for _ in range(2):
                trainer.model(trainer.inputs).square().sum().backward()
        assert [(one.name, one.is_wrong) for one in watch.seen] == plain


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["product_drift", "product_stuck", "product_rare"])
def test_what_lasts_changes_all_products_of_a_site_and_no_others(kind: str, phase: FaultPoint) -> None:
    for fault in faults(kind, phase):
        (_, site), _ = site_of(fault)
        seen = run_with(fault)
        meant = [one for one in seen if one.name == "mm" and is_of(site, one)]
        assert len(meant) == 2 * PRODUCTS[site]
        assert not [one for one in seen if one.is_wrong and not any(one is other for other in meant)]
        assert meant[0].is_wrong
        for one in meant:
            check_lasting(kind, one, meant[0])


def check_lasting(kind: str, one: Operation, first: Operation) -> None:
    result, expected = patterns(one.result), patterns(one.expected)
    if kind == "product_drift":
        assert torch.equal(one.result, one.expected * (1 + DRIFT))
        return
    changed = np.flatnonzero(result != expected)
    assert set((result ^ expected)[changed]) <= {1 << BIT}
    if kind == "product_stuck":  # the same place, where it is clear
        [place] = np.flatnonzero(patterns(first.result) != patterns(first.expected))
        assert result[place % len(result)] == expected[place % len(result)] | 1 << BIT
        assert set(changed) <= {place % len(result)}
    else:
        [pattern] = {
            int(one) & 0xFFFF for one in patterns(first.expected)[patterns(first.result) != patterns(first.expected)]
        }
        assert set(changed) == set(np.flatnonzero((expected & 0xFFFF) == pattern))


def test_a_product_that_cannot_drift_in_bf16_is_an_error_and_no_fault() -> None:
    [fault, *_] = faults("product_drift", FaultPoint.FORWARD)
    with pytest.raises(ChangedNothing, match="has changed nothing: none of 768 values"):
        run_with(fault, Trainer(torch.bfloat16))


def test_a_bit_that_is_set_everywhere_is_an_error_and_no_fault() -> None:
    trainer = Trainer()
    trainer.inputs.zero_()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(1.0)
    trainer.inputs.fill_(1 / 16)  # of 16: the results are 1.0, all bits of whose exponent but the highest are set
    fault = Fault(step=2, group=GroupId(1), rank=0, phase=FaultPoint.FORWARD, kind=FaultKind("product_stuck"), bit=29)
    with pytest.raises(ChangedNothing):
        run_with(fault, trainer)
