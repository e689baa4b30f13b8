"""Parameters of the model that a configuration describes, per layer and stage, and FLOPs per token."""

from dataclasses import dataclass

from spare_megatron.config.model_fields import model_fields
from spare_megatron.config.schema import RunConfig

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
class ModelShape:
    """Parameter counts of a GPT, summed over tensor-parallel ranks.

    Attributes:
        layer_matrices: The matrices of a layer, by which each token is multiplied.
        is_tied: The output layer shares the embedding table.
    """

    embedding: int
    positions: int
    layer: int
    layer_matrices: int
    final_norm: int
    num_layers: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a shared table counts once."""
        tables = self.embedding * (1 if self.is_tied else 2)
        return tables + self.positions + self.num_layers * self.layer + self.final_norm

    def of_stages(self, num_stages: int) -> list[int]:
        """Parameters of each pipeline stage; with tied tables the last stage holds a copy."""
        stages = [self.num_layers // num_stages * self.layer] * num_stages
        stages[0] += self.embedding + self.positions
        stages[-1] += self.final_norm + (0 if num_stages == 1 and self.is_tied else self.embedding)
        return stages


def model_shape(config: RunConfig) -> ModelShape:
    """The shape that Megatron builds, including the effect of `[megatron]` fields."""
    model, megatron = config.model, model_fields(config)
    hidden = model.hidden_size
    has_bias = bool(megatron["add_bias_linear"])
    num_heads = model.num_attention_heads
    head = megatron.get("kv_channels") or hidden // num_heads
    keys = head * (megatron["num_query_groups"] or num_heads)
    heads = head * num_heads
    ffn = model.ffn_hidden_size or 4 * hidden
    wide = ffn * (2 if megatron["gated_linear_unit"] else 1)
    per_value = 1 if megatron["normalization"] == "RMSNorm" else 2
    norm = hidden * per_value
    norms = 2 * norm
    gates = heads if megatron.get("attention_output_gate") else 0
    matrices = hidden * (heads + gates + 2 * keys) + heads * hidden + hidden * wide + ffn * hidden
    biases = 0
    if has_bias or megatron["add_qkv_bias"]:
        biases += heads + gates + 2 * keys
    if megatron["qk_layernorm"]:
        norms += 2 * head * per_value
    if has_bias:
        biases += hidden + wide + hidden
    return ModelShape(
        embedding=padded_vocab_size(model.vocab_size, config.layout.tensor_parallel) * hidden,
        positions=model.seq_length * hidden if model.position_embedding == "learned_absolute" else 0,
        layer=matrices + biases + norms,
        layer_matrices=matrices,
        final_norm=norm,
        num_layers=model.num_layers,
        is_tied=model.tie_embeddings,
    )


def flops_per_token(config: RunConfig) -> float:
    """Floating-point operations to train on one token: a forward pass, and twice as many backward.

    A forward pass takes 2 per element of each matrix and 4 s h per layer for attention, with s tokens in a sequence and
    h the width of all heads (Narayanan et al., arXiv 2104.04473, appendix), also with a sliding window. Norms,
    activations, softmax, recomputation and redundant microbatches do not count.
    """
    shape, model = model_shape(config), config.model
    head = config.megatron.get("kv_channels") or model.hidden_size // model.num_attention_heads
    scores = 4 * model.seq_length * head * model.num_attention_heads
    forward = 2 * (shape.num_layers * shape.layer_matrices + shape.embedding) + shape.num_layers * scores
    return 3.0 * forward
