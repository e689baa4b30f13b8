"""The tensors of the whole model as a checkpoint names them: Megatron's names, no rows that pad the vocabulary.

Exports and imports of all formats go through this list. Names and shapes depend neither on the layout nor on the
implementation of the layers. Loads without torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from spare_megatron.config.model_fields import model_fields
from spare_megatron.config.schema import RunConfig

LAYERS = "decoder.layers."
"""Prefix of the layers' tensors, which a checkpoint stacks along a first dimension."""

WORDS = "embedding.word_embeddings.weight"

_LOCAL_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms as transformer-engine and checkpoints name them, in the linear layer that follows, and as other layers do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A tensor; of one layer if `layer` is set, with the shape and the key of all layers' stack without its number."""

    key: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def key_in_layer(self) -> str:
        """The key with the number of the layer."""
        return self.key if self.layer is None else self.key.replace(LAYERS, f"{LAYERS}{self.layer}.", 1)


def with_local_norms(name: str) -> str:
    """The name of a tensor in layers that do not fuse norms."""
    for fused, norm in _LOCAL_NORMS.items():
        name = name.replace(fused, norm)
    return name


def model_tensors(config: RunConfig) -> Iterator[ModelTensor]:
    """All tensors, in the order of the layers.

    `[megatron]` fields that add tensors (attention gates, learned softmax offsets) are not looked at.
    """
    model = config.model
    hidden = model.hidden_size
    norm = _norm_of(config)
    yield ModelTensor(key=WORDS, shape=(model.vocab_size, hidden))
    if model.position_embedding == "learned_absolute":
        yield ModelTensor(key="embedding.position_embeddings.weight", shape=(model.seq_length, hidden))
    for layer in range(model.num_layers):
        for name, shape in _layer_tensors(config, norm):
            yield ModelTensor(key=LAYERS + name, shape=shape, layer=layer)
    for part in norm:
        yield ModelTensor(key=f"decoder.final_layernorm.{part}", shape=(hidden,))
    if not model.tie_embeddings:
        yield ModelTensor(key="output_layer.weight", shape=(model.vocab_size, hidden))


def _norm_of(config: RunConfig) -> tuple[str, ...]:
    return ("weight",) if model_fields(config)["normalization"] == "RMSNorm" else ("weight", "bias")


def _layer_tensors(config: RunConfig, norm: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    model, fields = config.model, model_fields(config)
    hidden, num_heads = model.hidden_size, model.num_attention_heads
    head = fields.get("kv_channels") or hidden // num_heads
    heads, keys = num_heads * head, (fields["num_query_groups"] or num_heads) * head
    ffn = model.ffn_hidden_size or 4 * hidden
    has_bias = fields["add_bias_linear"]
    linear = (
        ("self_attention.linear_qkv", heads + 2 * keys, hidden, has_bias or fields["add_qkv_bias"]),
        ("self_attention.linear_proj", hidden, heads, has_bias),
        ("mlp.linear_fc1", ffn * (2 if fields["gated_linear_unit"] else 1), hidden, has_bias),
        ("mlp.linear_fc2", hidden, ffn, has_bias),
    )
    for name, num_outputs, num_inputs, is_biased in linear:
        yield f"{name}.weight", (num_outputs, num_inputs)
        if is_biased:
            yield f"{name}.bias", (num_outputs,)
    for name in ("self_attention.linear_qkv", "mlp.linear_fc1"):  # a norm has the name of the layer that it precedes
        yield from ((f"{name}.layer_norm_{part}", (hidden,)) for part in norm)
    if fields["qk_layernorm"]:
        for name in ("q_layernorm", "k_layernorm"):
            yield from ((f"self_attention.{name}.{part}", (head,)) for part in norm)
