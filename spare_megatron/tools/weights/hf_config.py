"""A run's settings to and from Hugging Face's config.json, by families of models. Loads without torch.

Both directions go through `Architecture`, `DeepSeek` or `Gpt2`, and raise ValueError for what the other side does not
have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spare_megatron.config.foreign_fields import shown
from spare_megatron.config.megatron_fields import FUNCTION_IN_MEGATRON
from spare_megatron.config.model_fields import SETTING_OF, as_written, is_latent, model_fields
from spare_megatron.config.schema import RunConfig
from spare_megatron.tools.weights import hf_fields
from spare_megatron.tools.weights.hf_deepseek import (
    DeepSeek,
    deepseek_in,
    deepseek_json,
    deepseek_of,
    deepseek_settings,
)
from spare_megatron.tools.weights.hf_gpt2 import Gpt2, gpt2_in, gpt2_json, gpt2_of, gpt2_settings

FAMILIES: Mapping[hf_fields.Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model of one of the families; `has_bias` is of all linear layers, `has_qkv_bias` of q, k and v.

    `ffn_hidden_size` is that of an expert where there are experts.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    seq_length: int
    vocab_size: int
    is_tied: bool
    norm_eps: float
    has_bias: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    rope_base: float
    rope_scaling_factor: float
    sliding_window: int | None
    num_experts: int | None = None
    experts_per_token: int = 2

    @property
    def family(self) -> hf_fields.Family:
        if self.num_experts is not None:
            return "mixtral"
        if self.has_qk_norm:
            return "qwen3"
        return "qwen2" if self.has_qkv_bias and not self.has_bias else "llama"


Model = Architecture | DeepSeek | Gpt2


# ------------------------------------------------------------------------------------------------------- settings


def architecture_of(config: RunConfig) -> Model:
    """The architecture that the settings describe. Raises ValueError if it is of no family, with every reason."""
    if config.model.position_embedding == "learned_absolute":
        return gpt2_of(config)
    if is_latent(config):
        return deepseek_of(config)
    model, fields = config.model, model_fields(config)
    window = fields["window_size"]
    found = Architecture(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=fields.get("moe_ffn_hidden_size") or model.ffn_hidden_size or 4 * model.hidden_size,
        num_heads=model.num_attention_heads,
        num_query_groups=fields["num_query_groups"] or model.num_attention_heads,
        head_dim=fields.get("kv_channels") or model.hidden_size // model.num_attention_heads,
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        is_tied=model.tie_embeddings,
        norm_eps=fields["layernorm_epsilon"],
        has_bias=fields["add_bias_linear"],
        has_qkv_bias=fields["add_bias_linear"] or fields["add_qkv_bias"],
        has_qk_norm=fields["qk_layernorm"],
        rope_base=model.rope_base,
        rope_scaling_factor=model.rope_scaling_factor,
        sliding_window=None if window is None or window[0] < 0 else window[0] + 1,
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
    )
    if reasons := [*_not_of_any_family(config, fields), *_not_of(found, config)]:
        raise ValueError(
            "\n  - ".join(["Hugging Face's Llama, Qwen and Mixtral have no model like this one:", *reasons])
        )
    return found


_IN_EVERY_FAMILY = {"activation_func": "silu", "gated_linear_unit": True, "normalization": "RMSNorm"}
_OF_MIXTRAL = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size")
_EXPORTED = ("kv_channels", *_OF_MIXTRAL, *(field for field in SETTING_OF if field not in _IN_EVERY_FAMILY))
"""Megatron fields that `Architecture` has."""


def _not_of_any_family(config: RunConfig, fields: Mapping[str, Any]) -> Iterator[str]:
    wrong = [field for field, value in _IN_EVERY_FAMILY.items() if fields[field] != value]
    for text in dict.fromkeys(as_written(config, field) for field in wrong):
        yield f"{text}: they have rmsnorm and swiglu alone"
    for field, default in FUNCTION_IN_MEGATRON.items():
        value = fields.get(field, default)
        if field not in {*_EXPORTED, *_IN_EVERY_FAMILY} and value != default:
            yield f"megatron.{field}={value}: they have nothing that equals it"


def _not_of(found: Architecture, config: RunConfig) -> Iterator[str]:
    if found.has_qk_norm and found.has_qkv_bias:
        biases = as_written(config, "add_bias_linear" if found.has_bias else "add_qkv_bias")
        yield f"{biases} with {as_written(config, 'qk_layernorm')}: Qwen3, which has that norm, lacks these biases"
    if found.sliding_window is not None and found.family in ("llama", "mixtral"):
        name = found.family.title()
        yield f"{as_written(config, 'window_size')}: of them only Qwen has windows, and this is a {name}"
    for field in ("add_qkv_bias", "qk_layernorm") if found.family == "mixtral" else ():
        if model_fields(config)[field]:
            yield f"{as_written(config, field)}: of them only Qwen has that, and this is a Mixtral"


def settings_of(found: Model, precision: str) -> dict[str, dict[str, Any]]:
    """The tables of a run's TOML file that describe the model, as little as they need to hold."""
    if isinstance(found, Gpt2):
        return gpt2_settings(found, precision)
    if isinstance(found, DeepSeek):
        return deepseek_settings(found, precision)
    model: dict[str, Any] = {
        "num_layers": found.num_layers,
        "hidden_size": found.hidden_size,
        "ffn_hidden_size": found.ffn_hidden_size,
        "num_attention_heads": found.num_heads,
        "num_query_groups": found.num_query_groups,
        "seq_length": found.seq_length,
        "vocab_size": found.vocab_size,
        "position_embedding": "rope",
        "rope_base": found.rope_base,
        "rope_scaling_factor": found.rope_scaling_factor,
        "tie_embeddings": found.is_tied,
        "normalization": "rmsnorm",
        "norm_eps": found.norm_eps,
        "activation": "swiglu",
        "linear_bias": found.has_bias,
        "qkv_bias": found.has_qkv_bias and not found.has_bias,
        "qk_norm": found.has_qk_norm,
        "precision": precision,
    }
    if found.sliding_window is not None:
        model["sliding_window"] = found.sliding_window
    if found.num_experts is not None:
        model |= {"num_experts": found.num_experts, "experts_per_token": found.experts_per_token}
    is_usual = found.head_dim * found.num_heads == found.hidden_size
    return {"model": model} if is_usual else {"model": model, "megatron": {"kv_channels": found.head_dim}}


# ---------------------------------------------------------------------------------------------------- config.json


def config_json(found: Model, dtype: str) -> dict[str, Any]:
    """The content of config.json, without ids of tokens."""
    if isinstance(found, Gpt2):
        return gpt2_json(found, dtype)
    if isinstance(found, DeepSeek):
        return deepseek_json(found, dtype)
    scaling = {"rope_type": "llama3", **hf_fields.LLAMA3_CONSTANTS, "factor": found.rope_scaling_factor}
    content: dict[str, Any] = {
        "architectures": [FAMILIES[found.family]],
        "model_type": found.family,
        "torch_dtype": dtype,
        "vocab_size": found.vocab_size,
        "hidden_size": found.hidden_size,
        "intermediate_size": found.ffn_hidden_size,
        "num_hidden_layers": found.num_layers,
        "num_attention_heads": found.num_heads,
        "num_key_value_heads": found.num_query_groups,
        "head_dim": found.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": found.seq_length,
        "rms_norm_eps": found.norm_eps,
        "rope_theta": found.rope_base,
        "rope_scaling": None if found.rope_scaling_factor == 1.0 else scaling,
        "tie_word_embeddings": found.is_tied,
        "attention_dropout": 0.0,
    }
    if found.family == "llama":
        return {**content, "attention_bias": found.has_bias, "mlp_bias": found.has_bias}
    if found.num_experts is not None:
        experts = {"num_local_experts": found.num_experts, "num_experts_per_tok": found.experts_per_token}
        return {**content, **experts, "sliding_window": None}
    windows = {
        "use_sliding_window": found.sliding_window is not None,
        "sliding_window": found.sliding_window,
        "max_window_layers": found.num_layers if found.sliding_window is None else 0,
    }
    return {**content, **windows, **({"attention_bias": False} if found.family == "qwen3" else {})}


def architecture_in(content: Mapping[str, Any]) -> Model:
    """The architecture that a config.json describes. Raises ValueError for unsupported ones."""
    fields = hf_fields.fields_in(content)
    if isinstance(fields, hf_fields.Gpt2Fields):
        return gpt2_in(fields)
    family = content["model_type"]
    if isinstance(fields, hf_fields.DeepSeekFields):
        return deepseek_in(fields, *hf_fields.yarn_in(content, family, fields.max_position_embeddings))
    rope_base, rope_scaling_factor = hf_fields.rope_in(content, family, fields.max_position_embeddings)
    has_bias = isinstance(fields, hf_fields.LlamaFields) and fields.attention_bias
    if isinstance(fields, hf_fields.LlamaFields) and fields.mlp_bias != has_bias:
        raise ValueError(
            f"config.json: attention_bias={has_bias} with mlp_bias={fields.mlp_bias} is not supported here; only "
            f"biases of all linear layers, or of none, can be imported"
        )
    found = Architecture(
        num_layers=fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        ffn_hidden_size=fields.intermediate_size,
        num_heads=fields.num_attention_heads,
        num_query_groups=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=fields.head_dim or fields.hidden_size // fields.num_attention_heads,
        seq_length=fields.max_position_embeddings,
        vocab_size=fields.vocab_size,
        is_tied=fields.tie_word_embeddings,
        norm_eps=fields.rms_norm_eps,
        has_bias=has_bias,
        has_qkv_bias=has_bias or family == "qwen2",
        has_qk_norm=family == "qwen3",
        rope_base=rope_base,
        rope_scaling_factor=rope_scaling_factor,
        sliding_window=_window(fields),
        **_experts(fields),
    )
    _require_divisible(found, fields)
    return found


def _window(fields: hf_fields.RopeFields) -> int | None:
    """The window of all layers; the same condition as in `transformers` decides which layers have one."""
    num_layers, layers = fields.num_hidden_layers, fields.layer_types
    if layers is not None and len(layers) != num_layers:
        raise ValueError(f"config.json: layer_types has {len(layers)} layers, and num_hidden_layers={num_layers}")
    window, first = None, num_layers
    if isinstance(fields, hf_fields.Qwen2Fields) and fields.use_sliding_window and fields.sliding_window is not None:
        window, first = fields.sliding_window, max(0, fields.max_window_layers)
    num_windows = max(0, num_layers - first) if layers is None else layers.count("sliding_attention")
    if num_windows == 0:
        return None
    name = "max_window_layers" if layers is None else "layer_types"
    if num_windows < num_layers:
        raise ValueError(
            f"config.json: {name}={shown(getattr(fields, name))} is a sliding window for some layers only; here all "
            f"layers have model.sliding_window, or none"
        )
    if window is None or window < 1:
        raise ValueError(f"config.json: sliding_window={window} must be at least 1, as all layers have one by {name}")
    return window


def _experts(fields: hf_fields.RopeFields) -> dict[str, int]:
    if not isinstance(fields, hf_fields.MixtralFields):
        return {}
    if fields.num_experts_per_tok > fields.num_local_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok={fields.num_experts_per_tok} is more than "
            f"num_local_experts={fields.num_local_experts}"
        )
    return {"num_experts": fields.num_local_experts, "experts_per_token": fields.num_experts_per_tok}


def _require_divisible(found: Architecture, fields: hf_fields.RopeFields) -> None:
    heads = f"num_attention_heads={found.num_heads}"
    if found.hidden_size % found.num_heads and (fields.head_dim is None or isinstance(fields, hf_fields.LlamaFields)):
        raise ValueError(f"config.json: {heads} does not divide hidden_size={found.hidden_size}")
    if found.num_heads % found.num_query_groups:
        raise ValueError(f"config.json: num_key_value_heads={found.num_query_groups} does not divide {heads}")
    if found.head_dim % 2:
        origin = f" (hidden_size={found.hidden_size} / {heads})" if fields.head_dim is None else ""
        raise ValueError(f"config.json: head_dim={found.head_dim}{origin} is odd, and RoPE rotates pairs")
