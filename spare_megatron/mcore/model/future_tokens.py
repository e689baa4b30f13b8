"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the last layer, each of which
predicts a token further ahead.

Megatron adds their losses to the gradients itself, by counts of a microbatch that differ between its versions. Here its
factor is 0, and they are terms of the loss, whose tokens are counted over the global batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import unwrap_model
from torch import Tensor

from spare_megatron.config.model_fields import num_future_tokens
from spare_megatron.config.program_file import LossTerm
from spare_megatron.config.schema import RunConfig
from spare_megatron.mcore.model.compatibility import name_of_future_layer


def future_terms(config: RunConfig) -> Mapping[str, LossTerm]:
    """The terms of the loss that these modules add: as in Megatron, each has an equal part of the factor."""
    number, factor = num_future_tokens(config), config.megatron.get("mtp_loss_scaling_factor", 0.1)
    return {_term(depth): LossTerm(weight=factor / number) for depth in range(1, number + 1)}


def _term(depth: int) -> str:
    return f"mtp_{depth}_loss"


def future_block(
    config: RunConfig, layer: ModuleSpec, groups: ProcessGroupCollection, *, is_fused: bool
) -> MultiTokenPredictionBlockSubmodules:
    """What the modules are built of: a projection, and a layer like the model's last one."""
    MTPLossLoggingHelper.tracker.clear()  # a log that nobody reads, of the size of the process's last model
    layer = copy(layer)
    if name_of_future_layer() == "transformer_layer":  # such versions build it with Megatron's global groups
        layer.params = {**layer.params, "pg_collection": groups}
    module = get_mtp_layer_spec(layer, is_fused)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[module] * num_future_tokens(config))


@contextmanager
def as_stage(number: int, num_stages: int) -> Iterator[None]:
    """In this context Megatron's global state, by which these modules number their layers, has this pipeline stage."""
    parallel_state.set_pipeline_model_parallel_rank(number)
    parallel_state.set_pipeline_model_parallel_world_size(num_stages)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)


class FutureLosses:
    """In the place of a model's `compute_language_model_loss`: keeps the losses of a forward pass, each
    [micro_batch_size, seq_length], of which that of the next token is the last.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._compute = compute
        self._losses: list[Tensor] = []

    def __call__(self, labels: Tensor, logits: Tensor) -> Tensor:
        loss = self._compute(labels, logits)
        self._losses.append(loss)
        return loss

    def take(self) -> list[Tensor]:
        """Those of the tokens after the next one, nearest first."""
        losses, self._losses = self._losses[:-1], []
        return losses


def take_terms(model: torch.nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Sum and count of each of these terms in the forward pass that has just ended; none in other models. The last
    positions of a sequence have no token so far ahead.
    """
    losses = getattr(unwrap_model(model), "compute_language_model_loss", None)
    found = losses.take() if isinstance(losses, FutureLosses) else []
    counted = [of_depth[:, :-depth] for depth, of_depth in enumerate(found, 1)]
    return {_term(depth): (one.float().sum(), one.numel()) for depth, one in enumerate(counted, 1)}
