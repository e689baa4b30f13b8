"""Injected memory and arithmetic faults: changes values of a rank without its knowledge.

Memory is written with dispatch modes disabled, so that no operation that changes it is seen by what watches those.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spare_megatron.faults.kinds import KINDS
from spare_megatron.faults.points import Fault, FaultPoint
from spare_megatron.mcore.trainer import GroupTrainer

DRIFT = 1e-3
"""Relative error of what drifts."""

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

NO_FAULT = "an injected fault has changed nothing: "


class ChangedNothing(ValueError):
    """A fault has changed no number, so that what a run makes of it shows nothing."""

    def __init__(self, why: str) -> None:
        super().__init__(NO_FAULT + why)


def _bits(values: Tensor, bit: int | None = None) -> tuple[Tensor, int]:
    """Dense values as whole numbers, in the order of memory, and one with this bit, by default the second highest."""
    patterns = values.as_strided((values.numel(),), (1,)).view(_WHOLE_NUMBERS[values.element_size()])
    num_bits = 8 * values.element_size()
    bit = num_bits - 2 if bit is None else bit
    return patterns, -(1 << bit) if bit == num_bits - 1 else 1 << bit


def _require_change(before: Tensor | None, after: Tensor) -> None:
    if before is not None and torch.equal(before, after):
        raise ChangedNothing(f"none of {len(after)} values has another bit than before")


def flip_bit(tensors: Iterable[Tensor], bit: int | None) -> None:
    """Sets a clear bit in the first tensor's largest element where it is clear. Raises ChangedNothing without one."""
    first = next(iter(tensors), None)
    if first is None:
        raise ChangedNothing("moments are there after the first update of a group, and buckets while staged")
    with torch._C._DisableTorchDispatch():
        values = first.data.view(-1)  # whose version autograd counts apart
        patterns, mask = _bits(values, bit)
        sizes = torch.where((patterns & mask) == 0, values.abs(), -1)
        patterns[sizes.argmax()] ^= mask


def _spoil_tokens(trainer: GroupTrainer, bit: int | None) -> None:
    """Flips a bit, by default the lowest, of a token of the microbatch that is read next."""
    trainer.on_loaded = lambda tokens: flip_bit([tokens], 0 if bit is None else bit)


def _spoil_outputs(trainer: GroupTrainer, spoil: Callable[[Tensor], object], *, is_transient: bool = False) -> None:
    """Spoils the memory of what the rank's last layer puts out, before another reads it: once, or from now on."""
    *_, layer = (m for chunk in trainer.chunks for m in chunk.module.modules() if isinstance(m, BaseTransformerLayer))

    def on_output(_layer: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        if is_transient:
            hook.remove()
        with torch._C._DisableTorchDispatch():
            output = (outputs[0] if isinstance(outputs, tuple) else outputs).data
            before = _bits(output)[0].clone()
            spoil(output)
            _require_change(before, _bits(output)[0])

    hook = layer.register_forward_hook(on_output)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_OTHERS = re.compile("exp|rsqrt|.*(layer_norm|rms_norm|softmax|attention|gelu|silu).*")
"""Norms, attention, activation functions and their gradients; `exp` is of the loss, `rsqrt` of a norm in parts."""

_SINGLE = ("product_flip", "operation_flip")
"""Kinds that change one result."""

Site = tuple[bool, str]
"""Whether products, and which: `forward`, or gradients of `inputs` or `weights`."""


def site_of(fault: Fault) -> tuple[Site, Random]:
    """Which operations a fault strikes, and random numbers for the rest. All of it follows from the fault."""
    random = Random(f"{fault.step} {fault.group} {fault.rank} {fault.ordinal}")
    is_product, gradient = fault.kind != "operation_flip", random.choice(("inputs", "weights"))
    if fault.phase is FaultPoint.FORWARD:
        return (is_product, "forward"), random
    return (is_product, gradient if is_product else "inputs"), random


class _Struck:
    """A fault that has struck: `num_right` operations of its site are still right."""

    def __init__(self, fault: Fault, num_choices: int) -> None:
        self.site, random = site_of(fault)
        self.fault, self.is_single = fault, fault.kind in _SINGLE
        self.num_right = random.randrange(num_choices) if self.is_single else 0
        self._place = random.randrange(2**31)
        self._key: int | None = None
        """The number of an element, or what values have to end with; chosen by the first result, which it changes."""

    def spoil(self, result: Tensor) -> None:
        kind, before = self.fault.kind, None
        patterns, mask = _bits(result, self.fault.bit)
        ends = patterns.view(torch.int16)[:: result.element_size() // 2]
        if self._key is None:
            before = patterns.clone()
            allowed = ((patterns & mask) == 0).nonzero() if kind == "product_stuck" else torch.arange(len(patterns))
            element = int(allowed[self._place % len(allowed)]) if len(allowed) else 0
            self._key = int(ends[element]) if kind == "product_rare" else element
        if kind == "product_drift":
            result.mul_(1 + DRIFT)
        elif kind == "product_rare":  # of random fp32, one in 2^16
            patterns[ends == self._key] ^= mask
        elif kind == "product_stuck":
            patterns[self._key % len(patterns)] |= mask
        else:
            patterns[self._key % len(patterns)] ^= mask
        _require_change(before, patterns)


class OperationFaults(TorchDispatchMode):
    """Changes results of operations of a rank's forward and backward passes, around which it is entered from the start
    on, before what watches them. Kernels that torch does not dispatch are never struck.
    """

    def __init__(self, trainer: GroupTrainer) -> None:
        super().__init__()
        modules = [module for chunk in trainer.chunks for module in chunk.module.modules()]
        self._num_layers = sum(isinstance(one, ColumnParallelLinear | RowParallelLinear) for one in modules)
        self._parameters = {one.untyped_storage().data_ptr() for module in modules for one in module.parameters()}
        self._struck: list[_Struck] = []
        self._last: tuple[Any, list[int]] | None = None

    def strike(self, fault: Fault) -> None:
        """From now on: changes one of as many results as there are linear layers, or all if the fault lasts."""
        self._struck.append(_Struck(fault, max(self._num_layers, 1)))

    def __torch_dispatch__(
        self, function: Any, _types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        results = function(*arguments, **(named or {}))
        call = function, [id(one) for one in arguments if isinstance(one, Tensor)]
        site = self._site(function.overloadpacket.__name__, arguments) if self._struck else None
        is_again, self._last = call == self._last, call  # a check, which repeats an operation at once
        for struck in [one for one in self._struck if one.site == site and not (one.is_single and is_again)]:
            struck.num_right -= 1
            if struck.num_right < 0:
                struck.spoil(results if isinstance(results, Tensor) else results[0])
                if struck.is_single:
                    self._struck.remove(struck)
        return results

    def _site(self, name: str, arguments: Sequence[Any]) -> Site | None:
        is_product = name in _PRODUCTS
        if not is_product and not _OTHERS.fullmatch(name):
            return None
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs
            return is_product, "forward"
        factors = (one.untyped_storage().data_ptr() for one in arguments if isinstance(one, Tensor))
        return is_product, "inputs" if not is_product or self._parameters.intersection(factors) else "weights"


def _strike(trainer: GroupTrainer, fault: Fault, _staged: Tensor | None) -> None:
    assert isinstance(trainer.injector, OperationFaults), "what is struck in operations has them watched"
    trainer.injector.strike(fault)


Corruption = Callable[[GroupTrainer, Fault, Tensor | None], object]
"""Changes values of a rank. The fault's bit is 0 for the lowest; None is the second highest, the top of a float's
exponent. The tensor is the bucket that is staged.
"""

CORRUPTIONS: dict[str, Corruption] = {
    "nan": lambda trainer, *_: trainer.slabs[0].gradients.poison(),
    "bit_flip": lambda trainer, fault, _: flip_bit(trainer.slabs[0].gradients.local_sums(), fault.bit),
    "param_flip": lambda trainer, fault, _: flip_bit(trainer.kept_values(), fault.bit),
    "moment_flip": lambda trainer, fault, _: flip_bit(trainer.moments(), fault.bit),
    "sum_flip": lambda _, fault, staged: flip_bit([] if staged is None else [staged], fault.bit),
    "data_flip": lambda trainer, fault, _: _spoil_tokens(trainer, fault.bit),
    "activation_flip": lambda trainer, fault, _: _spoil_outputs(
        trainer, lambda output: flip_bit([output], fault.bit), is_transient=True
    ),
    "stuck_bit": lambda trainer, fault, _: _spoil_outputs(trainer, lambda output: flip_bit([output], fault.bit)),
    "drift": lambda trainer, *_: _spoil_outputs(trainer, lambda output: output.mul_(1 + DRIFT)),
    **dict.fromkeys((kind for kind, row in KINDS.items() if row.in_operations), _strike),
}
"""By kind of fault."""
