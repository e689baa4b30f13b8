"""How many parameters a model has, and how many of them each pipeline stage holds."""

from dataclasses import dataclass

from spare_megatron.config.schema import RunConfig

_VOCAB_MULTIPLE = 128
"""The vocabulary of each tensor-parallel rank is padded to a multiple of this, as Megatron's training does."""


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding table.

    >>> padded_vocab_size(257, 2)
    512
    """
    multiple = _VOCAB_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Parameters of a GPT, over all its tensor-parallel ranks.

    Attributes:
        embedding: The embedding table.
        positions: The learned positions; 0 if positions are rotated.
        layer: One transformer layer.
        final_norm: The norm behind the last layer.
        num_layers: Layers over all stages.
        is_tied: The output layer shares the embedding table.
    """

    embedding: int
    positions: int
    layer: int
    final_norm: int
    num_layers: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a table that is shared counted once."""
        tables = self.embedding * (1 if self.is_tied else 2)
        return tables + self.positions + self.num_layers * self.layer + self.final_norm

    def of_stages(self, num_stages: int) -> list[int]:
        """Parameters that each pipeline stage holds; with tied tables the last stage holds a copy."""
        stages = [self.num_layers // num_stages * self.layer] * num_stages
        stages[0] += self.embedding + self.positions
        stages[-1] += self.final_norm + (0 if num_stages == 1 and self.is_tied else self.embedding)
        return stages


def model_shape(config: RunConfig) -> ModelShape:
    """The shape of the model as Megatron builds it; `[megatron]` fields that change the number of parameters count."""
    model, megatron = config.model, config.megatron
    hidden = model.hidden_size
    has_bias = bool(megatron.get("add_bias_linear", True))
    num_heads = model.num_attention_heads
    head = megatron.get("kv_channels") or hidden // num_heads
    keys = head * (megatron.get("num_query_groups") or num_heads)
    heads = head * num_heads
    ffn = model.ffn_hidden_size or 4 * hidden
    wide = ffn * (2 if megatron.get("gated_linear_unit") else 1)
    per_value = 1 if megatron.get("normalization") == "RMSNorm" else 2
    norm = hidden * per_value
    attention = hidden * (heads + 2 * keys) + heads * hidden
    if has_bias or megatron.get("add_qkv_bias"):
        attention += heads + 2 * keys
    if megatron.get("qk_layernorm"):
        attention += 2 * head * per_value
    feed_forward = hidden * wide + ffn * hidden
    biases = hidden + wide + hidden if has_bias else 0
    return ModelShape(
        embedding=padded_vocab_size(model.vocab_size, config.layout.tensor_parallel) * hidden,
        positions=model.seq_length * hidden if model.position_embedding == "learned_absolute" else 0,
        layer=attention + feed_forward + biases + 2 * norm,
        final_norm=norm,
        num_layers=model.num_layers,
        is_tied=model.tie_embeddings,
    )
