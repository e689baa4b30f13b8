"""Injected memory and arithmetic faults: changes values of a rank without its knowledge."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor

from spare_megatron.faults.points import FaultKind
from spare_megatron.mcore.trainer import GroupTrainer

CORRUPTIONS: frozenset[FaultKind] = frozenset(
    {"nan", "bit_flip", "param_flip", "moment_flip", "sum_flip", "data_flip", "activation_flip", "stuck_bit", "drift"}
)
"""The fault kinds that `corrupt` injects."""

DRIFT = 1e-3
"""Relative error of a layer that drifts."""

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def corrupt(trainer: GroupTrainer, kind: FaultKind, bit: int | None, staged: Tensor | None) -> None:
    """Changes one value of a rank: a local gradient sum, a parameter, a first moment, one of the bucket `staged`, a
    token of the microbatch that is read next, by default its lowest bit, or an output of its last layer.

    `activation_flip` changes the next output alone; `stuck_bit` and `drift`, a relative error, change all that come.
    `bit` is the one to flip, 0 being the lowest; None is the second highest, the top of a float's exponent.
    """
    match kind:
        case "nan":
            trainer.gradients.poison()
        case "bit_flip":
            flip_bit(trainer.gradients.local_sums(), bit)
        case "param_flip":
            flip_bit(trainer.kept_values(), bit)
        case "moment_flip":
            flip_bit(trainer.moments(), bit)
        case "sum_flip":
            flip_bit([] if staged is None else [staged], bit)
        case "data_flip":
            trainer.on_loaded = lambda tokens: flip_bit([tokens], 0 if bit is None else bit)
        case "activation_flip":
            _spoil_outputs(trainer, lambda output: flip_bit([output], bit), is_transient=True)
        case "stuck_bit":
            _spoil_outputs(trainer, lambda output: flip_bit([output], bit))
        case "drift":
            _spoil_outputs(trainer, lambda output: output.mul_(1 + DRIFT))


def _spoil_outputs(trainer: GroupTrainer, spoil: Callable[[Tensor], object], *, is_transient: bool = False) -> None:
    """Spoils what the rank's last layer puts out: the next time, or from now on."""
    *_, layer = (m for chunk in trainer.chunks for m in chunk.module.modules() if isinstance(m, BaseTransformerLayer))

    def on_output(_layer: torch.nn.Module, _inputs: Any, outputs: Any) -> Any:
        if is_transient:
            hook.remove()
        output, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        spoiled = output.clone()
        spoil(spoiled.data)
        return (spoiled, *rest) if isinstance(outputs, tuple) else spoiled

    hook = layer.register_forward_hook(on_output)


def flip_bit(tensors: Iterable[Tensor], bit: int | None) -> None:
    """Sets a clear bit in the first tensor's largest element where it is clear. Raises ValueError without a tensor."""
    first = next(iter(tensors), None)
    if first is None:
        raise ValueError("there is nothing to flip a bit of: moments are there after the first update of a group")
    values = first.view(-1)
    patterns = values.view(_WHOLE_NUMBERS[values.element_size()])
    num_bits = 8 * values.element_size()
    bit = num_bits - 2 if bit is None else bit
    mask = -(1 << bit) if bit == num_bits - 1 else 1 << bit
    sizes = torch.where((patterns & mask) == 0, values.abs(), -1)
    patterns[sizes.argmax()] ^= mask
