"""Which tensors of Hugging Face's models make up which tensor of Megatron's, and what else may be stored."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import spare_megatron.mcore  # noqa: F401 before megatron-core, which may need an adaptation to be imported

# isort: split
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from spare_megatron.config.model.model_tensors import LAYERS, ModelTensor, model_tensors
from spare_megatron.config.schema import RunConfig
from spare_megatron.tools.weights.hf_config import Architecture
from spare_megatron.tools.weights.hf_fields import Family

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
"""Megatron's modules, and those that have their rows in Llama and Qwen; of layers without the layer's prefix. Below
also single tensors, with the whole names of both.
"""

_MODULES_OF_MIXTRAL: Mapping[str, Sequence[str]] = {
    **_MODULES,
    "decoder.layers.pre_mlp_layernorm": ["post_attention_layernorm"],
    "decoder.layers.mlp.router": ["block_sparse_moe.gate"],
    "decoder.layers.mlp.experts.experts.linear_fc1": [
        "block_sparse_moe.experts.{expert}.w1",
        "block_sparse_moe.experts.{expert}.w3",
    ],
    "decoder.layers.mlp.experts.experts.linear_fc2": ["block_sparse_moe.experts.{expert}.w2"],
}
"""The same of Mixtral, whose experts have tensors of their own."""

_MODULES_OF_QWEN3_MOE: Mapping[str, Sequence[str]] = {
    **_MODULES,
    "decoder.layers.pre_mlp_layernorm": ["post_attention_layernorm"],
    "decoder.layers.mlp.router": ["mlp.gate"],
    "decoder.layers.mlp.experts.experts.linear_fc1": ["mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"],
    "decoder.layers.mlp.experts.experts.linear_fc2": ["mlp.experts.{expert}.down_proj"],
}
"""The same of Qwen3's mixtures."""

_MODULES_OF_DEEPSEEK: Mapping[str, Sequence[str]] = {
    **_MODULES_OF_QWEN3_MOE,
    "decoder.layers.input_layernorm": ["input_layernorm"],
    "decoder.layers.self_attention.linear_q_down_proj": ["self_attn.q_a_proj"],
    "decoder.layers.self_attention.linear_q_up_proj": ["self_attn.q_b_proj"],
    "decoder.layers.self_attention.linear_q_up_proj.layer_norm": ["self_attn.q_a_layernorm"],
    "decoder.layers.self_attention.linear_kv_down_proj": ["self_attn.kv_a_proj_with_mqa"],
    "decoder.layers.self_attention.linear_kv_up_proj": ["self_attn.kv_b_proj"],
    "decoder.layers.self_attention.linear_kv_up_proj.layer_norm": ["self_attn.kv_a_layernorm"],
    "decoder.layers.mlp.router.expert_bias": ["mlp.gate.e_score_correction_bias"],
    "decoder.layers.mlp.shared_experts.linear_fc1": ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
    "decoder.layers.mlp.shared_experts.linear_fc2": ["mlp.shared_experts.down_proj"],
    "mtp.layers.enorm": ["enorm"],
    "mtp.layers.hnorm": ["hnorm"],
    "mtp.layers.eh_proj": ["eh_proj"],
    "mtp.layers.final_layernorm": ["shared_head.norm"],
}
"""The same of DeepSeek-V3, whose modules of multi-token prediction are further layers."""

_MODULES_OF_GPT_OSS: Mapping[str, Sequence[str]] = {
    **_MODULES,
    "decoder.layers.self_attention.core_attention.softmax_offset": ["self_attn.sinks"],
    "decoder.layers.pre_mlp_layernorm": ["post_attention_layernorm"],
    "decoder.layers.mlp.router": ["mlp.router"],
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": ["mlp.experts.gate_up_proj"],
    "decoder.layers.mlp.experts.experts.linear_fc1.bias": ["mlp.experts.gate_up_proj_bias"],
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": ["mlp.experts.down_proj"],
    "decoder.layers.mlp.experts.experts.linear_fc2.bias": ["mlp.experts.down_proj_bias"],
}
"""The same of gpt-oss, whose experts share transposed tensors, in which rows of gate and other input alternate."""

_MODULES_OF_GPT2: Mapping[str, Sequence[str]] = {
    "embedding.word_embeddings": ["transformer.wte"],
    "embedding.position_embeddings": ["transformer.wpe"],
    "decoder.layers.self_attention.linear_qkv": ["attn.c_attn"],
    "decoder.layers.self_attention.linear_proj": ["attn.c_proj"],
    "decoder.layers.self_attention.linear_qkv.layer_norm": ["ln_1"],
    "decoder.layers.mlp.linear_fc1": ["mlp.c_fc"],
    "decoder.layers.mlp.linear_fc1.layer_norm": ["ln_2"],
    "decoder.layers.mlp.linear_fc2": ["mlp.c_proj"],
    "decoder.final_layernorm": ["transformer.ln_f"],
    "output_layer": ["lm_head"],
}
"""The same of GPT-2, whose linear layers are transposed, and have queries, keys and values in one."""

_MODULES_OF: Mapping[Family, Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _MODULES),
    "qwen3_moe": _MODULES_OF_QWEN3_MOE,
    "mixtral": _MODULES_OF_MIXTRAL,
    "deepseek_v3": _MODULES_OF_DEEPSEEK,
    "gpt_oss": _MODULES_OF_GPT_OSS,
    "gpt2": _MODULES_OF_GPT2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """A tensor of Megatron's, and the names and shapes of those that Hugging Face divides its rows into.

    Megatron orders rows of queries, keys and values by query group, and joins the gate and the other input of the
    feed-forward layers, and all experts. Hugging Face's may have all blocks in one part.
    """

    tensor: ModelTensor
    parts: Mapping[str, tuple[int, ...]]
    is_transposed: bool

    def split(self, values: Tensor, model: Architecture) -> dict[str, Tensor]:
        if _shares_experts(self.tensor, model):
            if _is_gated(self.tensor):
                values = values.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            return dict.fromkeys(self.parts, (values.mT if values.dim() == 3 else values).contiguous())
        blocks = self._blocks_of(values, model)
        if len(self.parts) < len(blocks):
            blocks = [torch.cat(blocks)]
        if self.is_transposed:
            blocks = [block.T for block in blocks]
        return {name: block.contiguous() for name, block in zip(self.parts, blocks, strict=True)}

    def join(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        if _shares_experts(self.tensor, model):
            values = parts[0].mT if parts[0].dim() == 3 else parts[0]
            return values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if _is_gated(self.tensor) else values
        blocks = [part.T for part in parts] if self.is_transposed else list(parts)
        if not _is_qkv(self.tensor):
            return torch.cat(blocks).view(self.tensor.shape)
        if len(blocks) == 1:
            blocks = list(blocks[0].split(_rows(self.tensor.shape[0], model)))
        rows = [block.reshape(model.num_query_groups, -1, model.head_dim, *block.shape[1:]) for block in blocks]
        return torch.cat(rows, dim=1).view(self.tensor.shape)

    def _blocks_of(self, values: Tensor, model: Architecture) -> list[Tensor]:
        if not _is_qkv(self.tensor):
            return list((values.flatten(0, 1) if values.dim() == 3 else values).chunk(len(self.parts)))
        rows = values.view(model.num_query_groups, -1, model.head_dim, *values.shape[1:])
        return [part.reshape(-1, *values.shape[1:]) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])]


def _shares_experts(tensor: ModelTensor, model: Architecture) -> bool:
    return model.family == "gpt_oss" and ".experts." in tensor.key


def _is_gated(tensor: ModelTensor) -> bool:
    return ".linear_fc1." in tensor.key


def _is_qkv(tensor: ModelTensor) -> bool:
    return ".linear_qkv." in tensor.key and ".layer_norm_" not in tensor.key


def _rows(num_rows: int, model: Architecture) -> list[int]:
    """Of queries, keys and values."""
    keys = model.num_query_groups * model.head_dim
    return [num_rows - 2 * keys, keys, keys]


def tied_names(model: Architecture) -> tuple[str, str]:
    """The tensors of the output layer and of the embedding, which are one if the model is tied."""
    modules = _MODULES_OF[model.family]
    return f"{modules['output_layer'][0]}.weight", f"{modules['embedding.word_embeddings'][0]}.weight"


_TABLES_AHEAD: Mapping[str, str] = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
_COPY = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, _TABLES_AHEAD))})\.weight")


def table_of(name: str, model: Architecture) -> str | None:
    """The table that a stored tensor repeats, as published weights have both again in multi-token prediction."""
    found = _COPY.fullmatch(name)
    return f"{_TABLES_AHEAD[found[2]]}.weight" if found and int(found[1]) >= model.num_layers else None


_OF_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(transformer_layer\.)?")


def _place_of(tensor: ModelTensor, num_layers: int) -> tuple[int | None, str]:
    """The layer of Hugging Face's that has a tensor, if one does, and the tensor's name in any such layer."""
    found, key = _OF_LAYER.match(tensor.key_in_layer), tensor.key_in_layer
    if found is None:
        return None, key
    in_layer = LAYERS if found[1] == "decoder" or found[3] else "mtp.layers."
    before = num_layers if found[1] == "mtp" else 0
    return before + int(found[2]), in_layer + key[found.end() :]


def tensor_pairs(config: RunConfig, model: Architecture) -> Iterator[TensorPair]:
    """All tensors of the model, which is that of the settings, in the order of its layers."""
    is_gpt2, modules = model.family == "gpt2", _MODULES_OF[model.family]
    layers = "transformer.h" if is_gpt2 else "model.layers"
    for tensor in model_tensors(config):
        layer, key = _place_of(tensor, model.num_layers)
        kind = "bias" if key.endswith("bias") else "weight"
        names = modules.get(key) or [f"{name}.{kind}" for name in modules[key.removesuffix(kind)[:-1]]]
        names = [name if layer is None else f"{layers}.{layer}.{name}" for name in names]
        if _shares_experts(tensor, model):
            shape = (tensor.shape[0], *tensor.shape[:0:-1])
            yield TensorPair(tensor=tensor, parts=dict.fromkeys(names, shape), is_transposed=False)
            continue
        if len(tensor.shape) == 3:
            names = [name.format(expert=expert) for expert in range(tensor.shape[0]) for name in names]
        others = tensor.shape[-1:] if len(tensor.shape) > 1 else ()
        num_rows = math.prod(tensor.shape) // math.prod(others)
        is_split_qkv = _is_qkv(tensor) and len(names) > 1
        rows = _rows(num_rows, model) if is_split_qkv else [num_rows // len(names)] * len(names)
        is_transposed = is_gpt2 and tensor.layer is not None and bool(others)
        yield TensorPair(
            tensor=tensor,
            parts={
                name: (*others, part) if is_transposed else (part, *others)
                for name, part in zip(names, rows, strict=True)
            },
            is_transposed=is_transposed,
        )


_FREQUENCIES = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
_LEAST_MASKED = -1e4
"""What GPT-2 adds to the scores of later tokens is at most this."""


def is_constant(name: str, read: Callable[[], Tensor], model: Architecture) -> bool:
    """Whether a stored tensor is not a parameter but a constant that the model computes: frequencies of RoPE, GPT-2's
    masks. Old versions of `transformers` have stored them.
    """
    if model.family == "gpt2":
        mask = _MASK.fullmatch(name)
        return mask is not None and _is_mask(read(), is_bias=mask[1] == "bias", length=model.model["seq_length"])
    return _FREQUENCIES.fullmatch(name) is not None and _has_frequencies(read(), model)


def _is_mask(values: Tensor, *, is_bias: bool, length: int) -> bool:
    if not is_bias:
        return values.numel() == 1 and values.item() <= _LEAST_MASKED
    if values.numel() != length**2:
        return False
    return torch.equal(values.float().view(length, length), torch.ones(length, length).tril())


def _has_frequencies(values: Tensor, model: Architecture) -> bool:
    if model.megatron.get("rope_type") == "yarn":
        return False
    factor = model.model.get("rope_scaling_factor", 1.0)
    if values.shape != (model.head_dim // 2,) or not values.is_floating_point():
        return False
    used = RotaryEmbedding(
        kv_channels=model.head_dim,
        rotary_percent=1.0,
        rotary_base=model.model["rope_base"],
        rope_scaling=factor != 1.0,
        rope_scaling_factor=factor,
        use_cpu_initialization=True,
    ).inv_freq
    limits = torch.finfo(values.dtype)  # they were rounded to that type, and computed by other versions
    tolerance = {"rtol": 8 * limits.eps, "atol": limits.tiny * limits.eps}
    return torch.allclose(values.double(), used.to(values.dtype).double(), **tolerance)
