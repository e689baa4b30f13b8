"""Llama, Qwen, Mixtral and GPT-2 models: a run's settings to and from Hugging Face's config.json. Loads without torch.

Both directions go through `Architecture` or, for GPT-2, `Gpt2`, and raise ValueError for what the other side does not
have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spare_megatron.config.hf_gpt2 import GPT2, Gpt2, gpt2_in, gpt2_json, gpt2_of, gpt2_settings, whole_number
from spare_megatron.config.model_fields import SETTING_OF, as_written, model_fields
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.terms import FUNCTION_IN_MEGATRON

Family = Literal["llama", "qwen2", "qwen3", "mixtral"]

FAMILIES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}

_DEFAULT_ROPE_BASE = 10_000.0
"""In a config.json that has none."""

_LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The constants of Llama 3.1 that megatron-core has; only the factor can be chosen."""


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
    def family(self) -> Family:
        if self.num_experts is not None:
            return "mixtral"
        if self.has_qk_norm:
            return "qwen3"
        return "qwen2" if self.has_qkv_bias and not self.has_bias else "llama"


Model = Architecture | Gpt2


# ------------------------------------------------------------------------------------------------------- settings


def architecture_of(config: RunConfig) -> Model:
    """The architecture that the settings describe. Raises ValueError if it is of no family, with every reason."""
    if config.model.position_embedding == "learned_absolute":
        return gpt2_of(config)
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
    """The content of config.json. Token ids of the tokenizer are in the tokenizer's files alone."""
    if isinstance(found, Gpt2):
        return gpt2_json(found, dtype)
    rope = {} if found.rope_scaling_factor == 1.0 else {**_LLAMA3_ROPE, "factor": found.rope_scaling_factor}
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
        "rope_scaling": rope or None,
        "tie_word_embeddings": found.is_tied,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
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
    """The architecture that a config.json describes. Raises ValueError for one that has no equal here, naming why."""
    family = content.get("model_type")
    if family == GPT2:
        return gpt2_in(content)
    if family not in FAMILIES:
        names = ", ".join([*FAMILIES, GPT2])
        raise ValueError(f"config.json: model_type={family} is none of {names}, which can be imported")
    _require(content, "hidden_act", "silu")
    has_bias = family == "llama" and bool(content.get("attention_bias", False))
    _require({"mlp_bias": False, **content}, "mlp_bias", has_bias)
    if family == "qwen3":
        _require(content, "attention_bias", False)
    if family == "mixtral":
        _require(content, "sliding_window", None)
    num_heads, hidden_size = whole_number(content, "num_attention_heads"), whole_number(content, "hidden_size")
    rope_base, rope_scaling_factor = _rope(content)
    return Architecture(
        num_layers=whole_number(content, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=whole_number(content, "intermediate_size"),
        num_heads=num_heads,
        num_query_groups=content.get("num_key_value_heads") or num_heads,
        head_dim=content.get("head_dim") or hidden_size // num_heads,
        seq_length=whole_number(content, "max_position_embeddings"),
        vocab_size=whole_number(content, "vocab_size"),
        is_tied=bool(content.get("tie_word_embeddings", False)),
        norm_eps=float(content.get("rms_norm_eps", 1e-6)),
        has_bias=has_bias,
        has_qkv_bias=has_bias or family == "qwen2",
        has_qk_norm=family == "qwen3",
        rope_base=rope_base,
        rope_scaling_factor=rope_scaling_factor,
        sliding_window=_window(content) if content.get("use_sliding_window") else None,
        num_experts=whole_number(content, "num_local_experts") if family == "mixtral" else None,
        experts_per_token=whole_number(content, "num_experts_per_tok") if family == "mixtral" else 2,
    )


def _rope(content: Mapping[str, Any]) -> tuple[float, float]:
    """Base and scaling factor, from `rope_parameters` or, as files of before transformers 5 have it, two fields."""
    rope = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    base = float(rope.pop("rope_theta", content.get("rope_theta", _DEFAULT_ROPE_BASE)))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind == "default":
        return base, 1.0
    factor = float(rope.pop("factor", 1.0))
    constants = {name: value for name, value in _LLAMA3_ROPE.items() if name != "rope_type"}
    if kind != "llama3" or rope != constants:
        raise ValueError(
            f"config.json: RoPE is scaled by rope_type={kind} with {rope}; megatron-core has only llama3, with "
            f"{constants}"
        )
    return base, factor


def _window(content: Mapping[str, Any]) -> int:
    kinds = set(content.get("layer_types") or ())
    if kinds - {"sliding_attention"} or (not kinds and content.get("max_window_layers", 0) > 0):
        raise ValueError(
            "config.json: use_sliding_window=true for some layers only; here all layers have model.sliding_window "
            "or none"
        )
    return whole_number(content, "sliding_window")


def _require(content: Mapping[str, Any], name: str, value: object) -> None:
    if content.get(name, value) != value:
        raise ValueError(f"config.json: {name}={content[name]} has no equal here; only {value} can be imported")
