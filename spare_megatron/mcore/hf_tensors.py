"""Which tensors of Hugging Face's Llama and Qwen models make up which tensor of Megatron's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spare_megatron.config.hf_config import Architecture
from spare_megatron.config.model_tensors import ModelTensor, model_tensors
from spare_megatron.config.schema import RunConfig

_MODULES: Mapping[str, Sequence[str]] = {
    "embedding.word_embeddings": ["model.embed_tokens"],
    "decoder.layers.self_attention.linear_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "decoder.layers.self_attention.linear_proj": ["self_attn.o_proj"],
    "decoder.layers.self_attention.linear_qkv.layer_norm": ["input_layernorm"],
    "decoder.layers.self_attention.q_layernorm": ["self_attn.q_norm"],
    "decoder.layers.self_attention.k_layernorm": ["self_attn.k_norm"],
    "decoder.layers.mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
    "decoder.layers.mlp.linear_fc1.layer_norm": ["post_attention_layernorm"],
    "decoder.layers.mlp.linear_fc2": ["mlp.down_proj"],
    "decoder.final_layernorm": ["model.norm"],
    "output_layer": ["lm_head"],
}
"""Megatron's modules, and those that have their rows in Hugging Face's; of layers without the layer's prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """A tensor of Megatron's, and the names and shapes of those that Hugging Face divides its rows into.

    Megatron orders rows of queries, keys and values by query group, and joins the gate and the other input of the
    feed-forward layers.
    """

    tensor: ModelTensor
    parts: Mapping[str, tuple[int, ...]]

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
        return torch.cat(rows, dim=1).view(self.tensor.shape)


def tensor_pairs(config: RunConfig, model: Architecture) -> Iterator[TensorPair]:
    """All tensors of the model, which is that of the settings, in the order of its layers."""
    for tensor in model_tensors(config):
        kind = "bias" if tensor.key.endswith("bias") else "weight"
        names = _MODULES[tensor.key.removesuffix(kind)[:-1]]
        prefix = "" if tensor.layer is None else f"model.layers.{tensor.layer}."
        num_rows, *others = tensor.shape
        keys = model.num_query_groups * model.head_dim
        rows = (num_rows - 2 * keys, keys, keys) if len(names) == 3 else [num_rows // len(names)] * len(names)
        parts = {f"{prefix}{name}.{kind}": (part, *others) for name, part in zip(names, rows, strict=True)}
        yield TensorPair(tensor=tensor, parts=parts)
