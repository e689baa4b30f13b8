"""Layers with experts: their specification, and what is changed in Megatron's router."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from spare_megatron.mcore.model.compatibility import experts_submodules, number_of_layer

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # Megatron asks for it in each router, and defines it with that package alone


class Router(TopKRouter):
    """Megatron's router, with losses that weigh the same in every layout and size of microbatches.

    The gradient of a loss is that of its mean over the tokens of a microbatch, times their number, as gradients are
    sums over tokens. Megatron multiplies by the tokens of one tensor- and context-parallel rank, or of one sequence.
    """

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,  # noqa: ARG002  (Megatron passes it)
        aux_loss: Tensor,
        aux_loss_name: str,  # noqa: ARG002  (Megatron passes it)
        reduce_group: ProcessGroup,
        **_others: object,
    ) -> Tensor:
        """Adds a loss, of which each rank of `reduce_group` has the part of its tokens; no log."""
        num_tokens = activation.shape[0] * reduce_group.size()
        return _with_loss(activation, aux_loss * num_tokens)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        assert padding_mask is None, "every token counts for the losses of routers"
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        return _with_loss(logits, coefficient * logits.logsumexp(-1).square().sum())

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """As Megatron's, which compiles itself at its first call."""
        assert padding_mask is None, "every token counts for the biases of routers"
        if self.enable_expert_bias and torch.is_grad_enabled():
            self.local_tokens_per_expert += routing_map.sum(dim=0)


class ExpertCounts:
    """Tokens of a step that the routers of a rank chose each expert for: int64 `tokens`, a row for each router. By them
    Megatron's finalization of gradients moves the biases of routers that have some (arXiv 2408.15664).
    """

    def __init__(self, modules: Iterable[torch.nn.Module], device: torch.device) -> None:
        layers = [layer for module in modules for layer in module.modules()]
        self._routers = [layer for layer in layers if isinstance(layer, TopKRouter)]
        num_experts = self._routers[0].config.num_moe_experts if self._routers else 0
        self.tokens = torch.zeros(len(self._routers), num_experts, dtype=torch.int64, device=device)
        self._is_counting = False
        for router, row in zip(self._routers, self.tokens, strict=True):
            if router.enable_expert_bias:
                router._maintain_float32_expert_bias()  # Megatron's does so in the first pass, after state has arrived
                del router.local_tokens_per_expert  # a buffer in the format of the parameters
                router.local_tokens_per_expert = row
            router._apply_expert_bias = self._counter(row)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """In this context forward passes count: neither padding nor what backward passes compute again does."""
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def biases(self) -> Iterator[tuple[str, Tensor]]:
        """The biases of each router, by a name."""
        for router in self._routers:
            if router.enable_expert_bias:
                yield f"expert biases of layer {number_of_layer(router)}", router.expert_bias

    def by_layer(self, tokens: Tensor) -> dict[str, list[int]]:
        """Such tokens for each expert of a layer, by its name in metrics; the numbers of layers count from 0, and apart
        in multi-token prediction.
        """
        numbers = [(number_of_layer(router) - 1, router.config.num_layers) for router in self._routers]
        layers = [f"layer_{one}" if one < num_layers else f"mtp_{one - num_layers}" for one, num_layers in numbers]
        return dict(zip(layers, tokens.tolist(), strict=True))

    def _counter(self, row: Tensor) -> Callable[..., None]:
        def count(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
            assert padding_mask is None, "every token counts for the biases of routers"
            if self._is_counting:
                row.add_(routing_map.sum(dim=0))

        return count


def _with_loss(activation: Tensor, loss: Tensor) -> Tensor:
    joined: Tensor = moe_utils.MoEAuxLossAutoScaler.apply(activation, loss)
    return joined


def prepare_experts(spec: ModuleSpec) -> None:
    """Changes the specification of a layer with experts to ours; checkpoints name norms alike in all of them."""
    experts_submodules(spec.submodules.mlp).router = Router
    names = spec.submodules.sharded_state_dict_keys_map
    spec.submodules.sharded_state_dict_keys_map = {
        local: stored for local, stored in names.items() if local != "pre_mlp_layernorm."
    }


def initialize_experts(model: torch.nn.Module, transformer: TransformerConfig, draw: Callable[..., None]) -> None:
    """Initializes experts anew, so that their values depend neither on lanes nor stages. `draw` seeds by layer, expert,
    matrix.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers if transformer.perform_initialization else ():
        for name, parameter in layer.experts.named_parameters():
            if "bias" in name:  # begins as 0
                continue
            is_first = "linear_fc1" in name
            [local] = _LOCAL_EXPERT.findall(name)
            draw(number_of_layer(layer), layer.local_expert_indices[int(local)], int(is_first))
            (transformer.init_method if is_first else transformer.output_layer_init_method)(parameter)


def return_no_views(model: torch.nn.Module, transformer: TransformerConfig) -> None:
    """Lets Megatron add the biases of its own local experts in place, as it does: their last layers return the views of
    a sum over one rank, which torch cannot train, unless experts communicate by themselves.
    """
    for layer in model.modules() if transformer.add_bias_linear else ():
        for part in layer.experts.modules() if isinstance(layer, MoELayer) else ():
            if isinstance(part, RowParallelLinear):
                part.explicit_expert_comm = True


_LOCAL_EXPERT = re.compile(r"(?:^local_experts\.|weight)(\d+)")


def scale_auxiliary_losses(factor: float) -> None:
    """Sets the factor of routers' losses in the backward pass that begins, which one of the loss does not reach."""
    scale = moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale
    if scale is not None:
        scale.fill_(factor)
