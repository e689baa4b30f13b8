"""Which tensors of Hugging Face's Llama and Qwen models make up which tensor of Megatron's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spare_megatron.config.hf_config import Architecture

Shapes = Mapping[str, tuple[int, ...]]
"""Shape by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """A tensor of Megatron's, of one layer if `layer` is set, and those that Hugging Face divides its rows into.

    Megatron orders rows of queries, keys and values by query group, and joins the gate and the other input of the
    feed-forward layers.
    """

    key: str
    parts: Shapes
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        first, *_ = self.parts.values()
        return (sum(rows for rows, *_ in self.parts.values()), *first[1:])

    def split(self, values: Tensor, model: Architecture) -> dict[str, Tensor]:
        if len(self.parts) < 3:
            return dict(zip(self.parts, values.chunk(len(self.parts)), strict=True))
        rows = values.view(model.num_query_groups, -1, model.head_dim, *values.shape[1:])
        of_parts = (rows[:, :-2], rows[:, -2], rows[:, -1])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.parts.items(), of_parts, strict=True)}

    def join(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        if len(parts) < 3:
            return torch.cat(list(parts))
        rows = [part.view(model.num_query_groups, -1, model.head_dim, *part.shape[1:]) for part in parts]
        return torch.cat(rows, dim=1).view(self.shape)


def tensor_pairs(model: Architecture) -> Iterator[TensorPair]:
    """All tensors of the model, in the order of its layers; the vocabulary without rows that pad it."""
    table = (model.vocab_size, model.hidden_size)
    yield TensorPair(key="embedding.word_embeddings.weight", parts={"model.embed_tokens.weight": table})
    for layer in range(model.num_layers):
        for key, parts in _layer_tensors(model):
            full = {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
            yield TensorPair(key=f"decoder.layers.{key}", parts=full, layer=layer)
    yield TensorPair(key="decoder.final_layernorm.weight", parts={"model.norm.weight": (model.hidden_size,)})
    if not model.is_tied:
        yield TensorPair(key="output_layer.weight", parts={"lm_head.weight": table})


def _layer_tensors(model: Architecture) -> Iterator[tuple[str, Shapes]]:
    """Tensors of a layer in the checkpoint's names, which do not depend on the layer implementation."""
    hidden, ffn, head = model.hidden_size, model.ffn_hidden_size, model.head_dim
    heads, keys = model.num_heads * head, model.num_query_groups * head
    qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    linear = (
        ("self_attention.linear_qkv", qkv, hidden, model.has_qkv_bias),
        ("self_attention.linear_proj", {"self_attn.o_proj": hidden}, heads, model.has_bias),
        ("mlp.linear_fc1", {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}, hidden, model.has_bias),
        ("mlp.linear_fc2", {"mlp.down_proj": hidden}, ffn, model.has_bias),
    )
    for key, outputs, num_inputs, has_bias in linear:
        yield f"{key}.weight", {f"{name}.weight": (rows, num_inputs) for name, rows in outputs.items()}
        if has_bias:
            yield f"{key}.bias", {f"{name}.bias": (rows,) for name, rows in outputs.items()}
    yield "self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": (hidden,)}
    yield "mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": (hidden,)}
    if model.has_qk_norm:
        yield "self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": (head,)}
        yield "self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": (head,)}
