"""Injected memory and arithmetic faults: changes values of a rank without its knowledge."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor

from spare_megatron.mcore.trainer import GroupTrainer

DRIFT = 1e-3
"""Relative error of a layer that drifts."""

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _spoil_tokens(trainer: GroupTrainer, bit: int | None) -> None:
    """Flips a bit, by default the lowest, of a token of the microbatch that is read next."""
    trainer.on_loaded = lambda tokens: flip_bit([tokens], 0 if bit is None else bit)


def _spoil_outputs(trainer: GroupTrainer, spoil: Callable[[Tensor], object], *, is_transient: bool = False) -> None:
    """Spoils what the rank's last layer outputs: the next time, or from now on."""
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


Corruption = Callable[[GroupTrainer, int | None, Tensor | None], object]
"""Changes one value of a rank. The number is the bit to flip, 0 being the lowest; None is the second highest, the top
of a float's exponent. The tensor is the bucket that is staged.
"""

CORRUPTIONS: dict[str, Corruption] = {
    "nan": lambda trainer, *_: trainer.slabs[0].gradients.poison(),
    "bit_flip": lambda trainer, bit, _: flip_bit(trainer.slabs[0].gradients.local_sums(), bit),
    "param_flip": lambda trainer, bit, _: flip_bit(trainer.kept_values(), bit),
    "moment_flip": lambda trainer, bit, _: flip_bit(trainer.moments(), bit),
    "sum_flip": lambda _, bit, staged: flip_bit([] if staged is None else [staged], bit),
    "data_flip": lambda trainer, bit, _: _spoil_tokens(trainer, bit),
    "activation_flip": lambda trainer, bit, _: _spoil_outputs(trainer, lambda o: flip_bit([o], bit), is_transient=True),
    "stuck_bit": lambda trainer, bit, _: _spoil_outputs(trainer, lambda output: flip_bit([output], bit)),
    "drift": lambda trainer, *_: _spoil_outputs(trainer, lambda output: output.mul_(1 + DRIFT)),
}
"""By kind of fault."""
