"""Parameters of the model that a configuration describes, per layer and stage, and FLOPs per token."""

from dataclasses import dataclass
from math import prod

from spare_megatron.config.model.model_tensors import layer_has_experts, layer_tensors, norm_parts
from spare_megatron.config.model_fields import head_widths
from spare_megatron.config.schema import RunConfig
from spare_megatron.stacking.layout import Slabs

_VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary of each tensor-parallel rank to a multiple of this."""


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding table.

    >>> padded_vocab_size(257, 2)
    512
    """
    multiple = _VOCAB_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Parameter counts of a layer, summed over the ranks that share it.

    Attributes:
        experts: Of `num_parameters`, those of the experts that a router chooses from.
        idle: Of `experts`, those by which a token is not multiplied.
        matrices: The matrices by which each token is multiplied.
    """

    num_parameters: int
    experts: int
    idle: int
    matrices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Parameter counts of a GPT, summed over the ranks of a stage.

    Attributes:
        is_tied: The output layer shares the embedding table.
    """

    embedding: int
    positions: int
    layers: tuple[LayerShape, ...]
    final_norm: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a shared table counts once."""
        tables = self.embedding * (1 if self.is_tied else 2)
        return tables + self.positions + sum(layer.num_parameters for layer in self.layers) + self.final_norm

    @property
    def num_active_parameters(self) -> int:
        """Parameters that take part in the computation of a token."""
        return self.num_parameters - sum(layer.idle for layer in self.layers)

    def of_stages(self, num_stages: int) -> list[int]:
        """Parameters of each pipeline stage; with tied tables the last stage holds a copy."""
        stages = [sum(layer.num_parameters for layer in layers) for layers in self._stages(num_stages)]
        stages[0] += self.embedding + self.positions
        stages[-1] += self.final_norm + (0 if num_stages == 1 and self.is_tied else self.embedding)
        return stages

    def experts_of_stages(self, num_stages: int) -> list[int]:
        """The part of `of_stages` that is divided over expert-parallel ranks."""
        return [sum(layer.experts for layer in layers) for layers in self._stages(num_stages)]

    def _stages(self, num_stages: int) -> list[tuple[LayerShape, ...]]:
        return [self.layers[own.start : own.stop] for own in Slabs(len(self.layers), (num_stages,)).layers]


def model_shape(config: RunConfig) -> ModelShape:
    """The shape that Megatron builds, including the effect of `[megatron]` fields."""
    model = config.model
    kinds = {kind: _layer_shape(config, has_experts=kind) for kind in (False, model.num_experts is not None)}
    return ModelShape(
        embedding=padded_vocab_size(model.vocab_size, config.layout.tensor_parallel) * model.hidden_size,
        positions=model.seq_length * model.hidden_size if model.position_embedding == "learned_absolute" else 0,
        layers=tuple(kinds[layer_has_experts(config, layer)] for layer in range(model.num_layers)),
        final_norm=model.hidden_size * len(norm_parts(config)),
        is_tied=model.tie_embeddings,
    )


def _layer_shape(config: RunConfig, *, has_experts: bool) -> LayerShape:
    tensors = list(layer_tensors(config, has_experts=has_experts))
    experts = sum(prod(shape) for name, shape in tensors if ".experts." in name)
    num_experts = config.model.num_experts or 1
    idle = experts // num_experts * (num_experts - config.model.experts_per_token)
    return LayerShape(
        num_parameters=sum(prod(shape) for _, shape in tensors),
        experts=experts,
        idle=idle,
        matrices=sum(prod(shape) for _, shape in tensors if len(shape) > 1) - idle,
    )


def flops_per_token(config: RunConfig) -> float:
    """Floating-point operations to train on one token: a forward pass, and twice as many backward.

    A forward pass takes 2 per element of each matrix that the token is multiplied by and 2 s (k + v) per layer for
    attention, with s tokens in a sequence and k and v the widths of all heads' keys and values (Narayanan et al., arXiv
    2104.04473, appendix), also with a sliding window. Norms, activations, softmax, recomputation and redundant
    microbatches do not count.
    """
    shape, model = model_shape(config), config.model
    matrices = sum(layer.matrices for layer in shape.layers)
    scores = 2 * model.seq_length * sum(head_widths(config)) * model.num_attention_heads
    forward: float = 2 * (matrices + shape.embedding) + model.num_layers * scores
    return 3.0 * forward
