"""A run's settings to and from Hugging Face's config.json, by families of models. Loads without torch.

Both directions go through `Architecture`, and raise ValueError for what the other side does not have.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spare_megatron.config.foreign_fields import shown
from spare_megatron.config.megatron_fields import FUNCTION_IN_MEGATRON, OF_LATENT_ATTENTION
from spare_megatron.config.model_fields import (
    SETTING_OF,
    as_written,
    computed_activation,
    is_latent,
    model_fields,
    num_future_tokens,
    uses_yarn,
)
from spare_megatron.config.schema import RunConfig
from spare_megatron.tools.weights import hf_fields
from spare_megatron.tools.weights.hf_fields import YARN, Family

FAMILIES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_NAMES: Mapping[Family, str] = {
    "llama": "Llama",
    "qwen2": "Qwen2, the family with biases of queries, keys and values",
    "qwen3": "Qwen3, the family with norms of queries and keys",
    "qwen3_moe": "Qwen3-MoE, the family with mixtures of experts and norms of queries and keys",
    "mixtral": "Mixtral, the family with mixtures of experts",
    "deepseek_v3": "DeepSeek-V3, the family with latent attention",
    "gpt_oss": "gpt-oss, the family with mixtures of experts and sinks of attention",
    "gpt2": "GPT-2, the family with learned positions",
}

_DENSE: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
_GROUPED = {**_DENSE, "num_key_value_heads": "num_query_groups"}
_MIXTURE = {**_GROUPED, "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"}
_OF_MODEL: Mapping[Family, Mapping[str, str]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "qwen3_moe": {**_MIXTURE, "moe_intermediate_size": "expert_ffn_hidden_size"},
    **dict.fromkeys(("mixtral", "gpt_oss"), _MIXTURE),
    "deepseek_v3": {
        **_DENSE,
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "first_k_dense_replace": "num_dense_layers",
    },
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_inner": "ffn_hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_attention_heads",
        "n_positions": "seq_length",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
}
"""Fields of config.json, and their settings of `[model]`."""

_OF_LATENT: Mapping[str, str] = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
"""The same of DeepSeek-V3 and `[megatron]`."""
_ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

_ROTATED = {"position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu"}
_FIXED: Mapping[Family, Mapping[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"), _ROTATED),
    "deepseek_v3": {**_ROTATED, "linear_bias": False, "qk_norm": True},
    "gpt_oss": {**_ROTATED, "activation": "quick_geglu"},
    "gpt2": {"position_embedding": "learned_absolute", "normalization": "layernorm", "linear_bias": True},
}
"""Settings of `[model]` that are the same in all models of a family."""

_OF_GPT_OSS = {"softmax_type": "learnable", "glu_linear_offset": 1.0}
"""Settings of `[megatron]` that are the same in all its models."""

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""GPT-2's, and the setting; the first name of a function is the one that is written."""

_EPS = 1e-6
"""Of the norms of latent vectors in `transformers`, whatever the configuration says; here all norms have one."""

_WITHOUT_BIAS = {"normalization": "RMSNorm", "add_bias_linear": False}
_EXPECTED: Mapping[Family, Mapping[str, Any]] = {
    "llama": {"normalization": "RMSNorm"},
    **dict.fromkeys(("qwen2", "qwen3", "mixtral"), _WITHOUT_BIAS),
    "qwen3_moe": {**_WITHOUT_BIAS, "qk_layernorm": True},
    "deepseek_v3": {**_WITHOUT_BIAS, **_ROUTER, "qk_layernorm": True, "layernorm_epsilon": _EPS},
    "gpt_oss": {"normalization": "RMSNorm", **_OF_GPT_OSS},
    "gpt2": {},
}
"""Megatron's fields that have another value in all models of a family than Megatron's default."""

_SIZES = {"layernorm_epsilon", "kv_channels", "num_query_groups"}
_ROTATION = {"rope_type", *YARN.values()}
_WINDOW = {"window_size", "window_attn_skip_freq"}
_EXPERTS = {"num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"}
_CHOSEN: Mapping[Family, Collection[str]] = {
    "llama": {*_SIZES, *_ROTATION, "add_bias_linear", "add_qkv_bias"},
    "qwen2": {*_SIZES, *_ROTATION, *_WINDOW, "add_qkv_bias"},
    "qwen3": {*_SIZES, *_ROTATION, *_WINDOW, "qk_layernorm"},
    "qwen3_moe": {*_SIZES, *_ROTATION, *_EXPERTS, "moe_router_pre_softmax"},
    "mixtral": {*_SIZES, *_ROTATION, *_EXPERTS},
    "deepseek_v3": {
        *(*OF_LATENT_ATTENTION, "multi_latent_attention", *_OF_LATENT.values()),
        *(*_EXPERTS, "moe_layer_freq", "moe_shared_expert_intermediate_size", "mtp_num_layers"),
    },
    "gpt_oss": {*_SIZES, *_ROTATION, *_WINDOW, *_EXPERTS, "add_qkv_bias", "activation_func_clamp_value"},
    "gpt2": {"layernorm_epsilon", "add_qkv_bias"},
}
"""Megatron's fields in which models of a family differ. Of all of them the activation is checked apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model of a family, by the settings of `[model]` and `[megatron]` that describe it, all but the precision."""

    family: Family
    model: Mapping[str, Any]
    megatron: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        return int(self.model["num_layers"])

    @property
    def num_query_groups(self) -> int:
        return int(self.model.get("num_query_groups", self.model["num_attention_heads"]))

    @property
    def head_dim(self) -> int:
        """Of latent attention that of the rotated part of a head."""
        usual = self.model["hidden_size"] // self.model["num_attention_heads"]
        return int(self.megatron.get("qk_pos_emb_head_dim", self.megatron.get("kv_channels", usual)))

    @property
    def is_tied(self) -> bool:
        return bool(self.model["tie_embeddings"])

    def settings(self, precision: str) -> dict[str, dict[str, Any]]:
        """The tables of a run's TOML file that describe the model, as little as they need to hold."""
        model = {**self.model, "precision": precision}
        return {"model": model, "megatron": dict(self.megatron)} if self.megatron else {"model": model}


# ------------------------------------------------------------------------------------------------------- settings


def architecture_of(config: RunConfig) -> Architecture:
    """The architecture that the settings describe. Raises ValueError if it is of no family, with every reason."""
    model, fields = config.model, {**FUNCTION_IN_MEGATRON, **model_fields(config)}
    family = _family_of(config, fields)
    if reasons := list(_not_of(family, config, fields)):
        raise ValueError("\n  - ".join([f"Hugging Face's {_NAMES[family]}, has no model like this one:", *reasons]))
    found = {**{setting: getattr(model, setting) for setting in _OF_MODEL[family].values()}, **_FIXED[family]}
    found |= {"ffn_hidden_size": model.ffn_width, "norm_eps": fields["layernorm_epsilon"]}
    if family == "gpt2":
        return Architecture(family=family, model={**found, "activation": computed_activation(config)}, megatron={})
    found["rope_base"] = model.rope_base
    yarn = {field: fields[field] for field in YARN.values() if uses_yarn(config)}
    if family == "deepseek_v3":
        found["expert_ffn_hidden_size"] = model.expert_width
        found["shared_expert_ffn_hidden_size"] = model.shared_expert_ffn_hidden_size
        of_latent = {field: 1 if fields[field] is None else fields[field] for field in _OF_LATENT.values()}
        return Architecture(family=family, model=found, megatron=_latent(of_latent, yarn, num_future_tokens(config)))
    if family in ("mixtral", "gpt_oss"):
        found["ffn_hidden_size"] = fields["moe_ffn_hidden_size"]
    if family == "qwen3_moe":
        found["expert_ffn_hidden_size"] = model.expert_width
    found |= {
        "num_query_groups": fields["num_query_groups"] or model.num_attention_heads,
        "rope_scaling_factor": model.rope_scaling_factor,
        "linear_bias": fields["add_bias_linear"],
        "qkv_bias": fields["add_qkv_bias"] and not fields["add_bias_linear"],
        "qk_norm": fields["qk_layernorm"],
    }
    window = fields["window_size"]
    window = None if window is None or window[0] < 0 else window[0] + 1
    windows = _windows_of(window, _layers_with_windows(model.num_layers, fields["window_attn_skip_freq"]))
    others = {**_router(fields["moe_router_pre_softmax"]), **_gpt_oss(family, fields["activation_func_clamp_value"])}
    return _rotated(family, found, fields["kv_channels"], windows, yarn, others)


def _family_of(config: RunConfig, fields: Mapping[str, Any]) -> Family:
    if config.model.position_embedding == "learned_absolute":
        return "gpt2"
    if is_latent(config):
        return "deepseek_v3"
    if config.model.num_experts is not None and fields["softmax_type"] == "learnable":
        return "gpt_oss"
    if config.model.num_experts is not None:
        return "qwen3_moe" if fields["qk_layernorm"] else "mixtral"
    if fields["qk_layernorm"]:
        return "qwen3"
    return "qwen2" if fields["add_qkv_bias"] and not fields["add_bias_linear"] else "llama"


def _latent(of_latent: dict[str, Any], yarn: Mapping[str, Any], num_future: int) -> dict[str, Any]:
    """Settings of `[megatron]`; a limit to groups of experts is left out where there is one group."""
    of_latent |= {"mtp_num_layers": num_future} if num_future else {}
    groups = ("moe_router_num_groups", "moe_router_group_topk") if of_latent["moe_router_num_groups"] == 1 else ()
    found = {field: value for field, value in of_latent.items() if field not in groups}
    return {**found, **yarn, **_ROUTER, "multi_latent_attention": True, "rope_type": "yarn" if yarn else "rope"}


def _router(is_over_all: bool) -> Mapping[str, Any]:
    """Settings of a router whose weights are a softmax over all experts, or over those of the token."""
    return {"moe_router_pre_softmax": True} if is_over_all else {}


def _gpt_oss(family: Family, limit: float) -> Mapping[str, Any]:
    return {**_OF_GPT_OSS, "activation_func_clamp_value": limit} if family == "gpt_oss" else {}


_Windows = tuple[int | None, int | list[int] | None]
"""Tokens that a window has, if a layer has one, and `megatron.window_attn_skip_freq`, None where all layers do."""


def _windows_of(window: int | None, layers: list[int]) -> _Windows:
    """By whether each layer has a window, as 0 or 1."""
    if window is None or not any(layers):
        return None, None
    alternates = layers == [number % 2 for number in range(1, len(layers) + 1)]
    return window, None if all(layers) else 2 if alternates else layers


def _rotated(
    family: Family,
    model: dict[str, Any],
    head_dim: int | None,
    windows: _Windows,
    yarn: Mapping[str, Any],
    others: Mapping[str, Any],
) -> Architecture:
    """Llama, Qwen, Mixtral or gpt-oss, with the width of heads and the window where they are not the usual ones."""
    is_usual = head_dim is None or head_dim * model["num_attention_heads"] == model["hidden_size"]
    window, every = windows
    return Architecture(
        family=family,
        model=model if window is None else {**model, "sliding_window": window},
        megatron={
            **({} if is_usual else {"kv_channels": head_dim}),
            **({} if every is None else {"window_attn_skip_freq": every}),
            **({"rope_type": "yarn", **yarn} if yarn else {}),
            **others,
        },
    )


def _not_of(family: Family, config: RunConfig, fields: Mapping[str, Any]) -> Iterator[str]:
    """Why no model of the family equals these settings."""
    model = config.model
    of_family = {"gpt2": tuple(dict.fromkeys(_ACTIVATIONS.values())), "gpt_oss": ("quick_geglu",)}
    activations = of_family.get(family, ("swiglu",))
    if computed_activation(config) not in activations:
        yield f"{as_written(config, 'activation_func')}: it has {' and '.join(activations)} alone"
    usual = {
        "kv_channels": model.hidden_size // model.num_attention_heads,
        "num_query_groups": model.num_attention_heads,
    }
    apart = {*_CHOSEN[family], "activation_func", "gated_linear_unit"}
    for field, expected in {**FUNCTION_IN_MEGATRON, **_EXPECTED[family]}.items():
        if field not in apart and fields[field] not in (expected, usual.get(field, expected)):
            is_written = field in SETTING_OF or field in config.megatron
            written = as_written(config, field) if is_written else f"megatron.{field}={fields[field]}"
            yield f"{written}: it has {'none' if expected is None else f'{expected} alone'}"
    if family == "deepseek_v3":
        yield from _not_of_deepseek(config, fields)
    if family == "gpt_oss" and fields["activation_func_clamp_value"] is None:
        yield "megatron.activation_func_clamp_value is absent: it has a limit"
    is_scaled = fields["mscale"] != 0 if fields["mscale_all_dim"] else fields["mscale"] == 1
    if uses_yarn(config) and not is_scaled:
        yield f"megatron.mscale={fields['mscale']}: it has 1 if megatron.mscale_all_dim is 0, and never 0"


def _not_of_deepseek(config: RunConfig, fields: Mapping[str, Any]) -> Iterator[str]:
    model = config.model
    if model.num_experts is None:
        yield "model.num_experts is absent: it has mixtures of experts"
    shared, chosen = model.shared_expert_ffn_hidden_size, fields["moe_router_group_topk"]
    if not shared or shared % model.expert_width:
        yield f"model.shared_expert_ffn_hidden_size={shared}: it has a multiple of an expert's, {model.expert_width}"
    if model.experts_per_token == 1 or (chosen is not None and model.experts_per_token // chosen != 2):
        yield f"model.experts_per_token={model.experts_per_token}: it has twice megatron.moe_router_group_topk"


# ---------------------------------------------------------------------------------------------------- config.json


def config_json(found: Architecture, dtype: str) -> dict[str, Any]:
    """The content of config.json, without ids of tokens."""
    model, family = found.model, found.family
    content: dict[str, Any] = {"architectures": [FAMILIES[family]], "model_type": family, "torch_dtype": dtype}
    content |= {name: model[setting] for name, setting in _OF_MODEL[family].items()}
    if family == "gpt2":
        content["activation_function"] = next(
            name for name, ours in _ACTIVATIONS.items() if ours == model["activation"]
        )
        return {**content, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
    content |= {"hidden_act": "silu", "attention_dropout": 0.0, "rope_theta": model["rope_base"]}
    if family == "deepseek_v3":
        return {**content, **_latent_json(found)}
    factor, scaling = model["rope_scaling_factor"], _yarn_json(found)
    if factor != 1.0:
        scaling = {"rope_type": "llama3", **hf_fields.LLAMA3_CONSTANTS, "factor": factor}
    content |= {"head_dim": found.head_dim, "rope_scaling": scaling}
    if family == "llama":
        return {**content, "attention_bias": model["linear_bias"], "mlp_bias": model["linear_bias"]}
    if family == "mixtral":
        return {**content, "sliding_window": None}
    if family == "qwen3_moe":
        is_over_all = found.megatron.get("moe_router_pre_softmax", False)
        # Older versions of `transformers` know only the first name of the number of experts.
        layers = {"num_experts": found.model["num_experts"], "decoder_sparse_step": 1, "mlp_only_layers": []}
        return {**content, **layers, "norm_topk_prob": not is_over_all, "attention_bias": False}
    content |= _windows_json(found)
    if family == "gpt_oss":
        limit = {"swiglu_limit": found.megatron["activation_func_clamp_value"]}
        # Without a table its rotations are those of YaRN.
        return {**content, **limit, "attention_bias": True, "rope_scaling": scaling or {"rope_type": "default"}}
    return {**content, **({"attention_bias": False} if family == "qwen3" else {})}


def _layers_with_windows(num_layers: int, every: int | list[int] | None) -> list[int]:
    """For each layer whether it has a window, as 0 or 1, by `megatron.window_attn_skip_freq`."""
    if isinstance(every, list):
        return every
    return [int(every is None or number % every > 0) for number in range(1, num_layers + 1)]


def _windows_json(found: Architecture) -> dict[str, Any]:
    window = found.model.get("sliding_window")
    kinds = ("full_attention", "sliding_attention")
    layers = _layers_with_windows(found.num_layers, found.megatron.get("window_attn_skip_freq"))
    layer_types = {"layer_types": [kinds[has if window else 0] for has in layers]}
    if found.family == "gpt_oss":
        return {"sliding_window": window, **layer_types}
    windows = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": found.num_layers if window is None else 0,
    }
    return windows if all(layers) else {**windows, **layer_types}


def _yarn_json(found: Architecture) -> dict[str, Any] | None:
    if found.megatron.get("rope_type") != "yarn":
        return None
    return {"rope_type": "yarn", **{name: found.megatron[field] for name, field in YARN.items()}}


def _latent_json(found: Architecture) -> dict[str, Any]:
    return {
        **{name: found.megatron.get(field, 1) for name, field in _OF_LATENT.items()},
        "n_shared_experts": found.model["shared_expert_ffn_hidden_size"] // found.model["expert_ffn_hidden_size"],
        "num_key_value_heads": found.num_query_groups,
        "num_nextn_predict_layers": found.megatron.get("mtp_num_layers", 0),
        "norm_topk_prob": True,
        "rope_scaling": _yarn_json(found),
        "rope_interleave": True,
        "attention_bias": False,
    }


def architecture_in(content: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes. Raises ValueError for unsupported ones."""
    fields = hf_fields.fields_in(content)
    family: Family = content["model_type"]
    model = {**{setting: getattr(fields, name) for name, setting in _OF_MODEL[family].items()}, **_FIXED[family]}
    if isinstance(fields, hf_fields.Gpt2Fields):
        if fields.n_embd % fields.n_head:
            raise ValueError(f"config.json: n_head={fields.n_head} does not divide n_embd={fields.n_embd}")
        model |= {"ffn_hidden_size": fields.n_inner or 4 * fields.n_embd}
        model |= {"activation": _ACTIVATIONS[fields.activation_function]}
        return Architecture(family=family, model=model, megatron={})
    if isinstance(fields, hf_fields.DeepSeekFields):
        rope = hf_fields.rope_in(content, family, fields.max_position_embeddings)
        model["rope_base"] = rope.base
        _require_deepseek(fields)
        model["shared_expert_ffn_hidden_size"] = fields.n_shared_experts * fields.moe_intermediate_size
        of_latent = {field: getattr(fields, name) for name, field in _OF_LATENT.items()}
        megatron = _latent(of_latent, rope.yarn, fields.num_nextn_predict_layers)
        return Architecture(family=family, model=model, megatron=megatron)
    rope = hf_fields.rope_in(content, family, fields.max_position_embeddings)
    has_bias = isinstance(fields, hf_fields.LlamaFields) and fields.attention_bias
    if isinstance(fields, hf_fields.LlamaFields) and fields.mlp_bias != has_bias:
        raise ValueError(
            f"config.json: attention_bias={has_bias} with mlp_bias={fields.mlp_bias} is not supported here; only "
            f"biases of all linear layers, or of none, can be imported"
        )
    model |= {
        "num_query_groups": fields.num_key_value_heads or fields.num_attention_heads,
        "rope_base": rope.base,
        "rope_scaling_factor": rope.factor,
        "linear_bias": has_bias or family == "gpt_oss",
        "qkv_bias": family == "qwen2",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
    }
    others = _router(isinstance(fields, hf_fields.Qwen3MoeFields) and not fields.norm_topk_prob)
    if isinstance(fields, hf_fields.GptOssFields):
        others = _gpt_oss(family, fields.swiglu_limit)
    found = _rotated(family, model, fields.head_dim, _windows(fields), rope.yarn, others)
    _require_sizes(found, fields)
    return found


def _require_deepseek(fields: hf_fields.DeepSeekFields) -> None:
    heads, chosen, of_groups = fields.num_attention_heads, fields.num_experts_per_tok, fields.topk_group
    experts = f"n_routed_experts (num_local_experts)={shown(fields.n_routed_experts)}"
    must = {
        "num_key_value_heads": (fields.num_key_value_heads in (None, heads), f"be num_attention_heads={heads}"),
        "hidden_size": (not fields.hidden_size % heads, f"be a multiple of num_attention_heads={heads}"),
        "qk_rope_head_dim": (not fields.qk_rope_head_dim % 2, "be even, as RoPE rotates pairs"),
        "head_dim": (fields.head_dim in (None, fields.qk_rope_head_dim), "be qk_rope_head_dim, or absent"),
        "first_k_dense_replace": (0 <= fields.first_k_dense_replace < fields.num_hidden_layers, "leave mixtures"),
        "num_experts_per_tok": (2 <= chosen <= fields.n_routed_experts, f"be from 2 to {experts}"),
        "n_group": (not fields.n_routed_experts % fields.n_group, f"divide {experts}"),
        "topk_group": (
            of_groups <= fields.n_group and (fields.n_group == 1 or chosen // of_groups == 2),
            f"be at most n_group={fields.n_group} and half of num_experts_per_tok={chosen}",
        ),
        "rms_norm_eps": (fields.rms_norm_eps == _EPS, f"be {_EPS}, which latent vectors have anyway"),
    }
    for name, (is_so, text) in must.items():
        if not is_so:
            raise ValueError(f"config.json: {name}={shown(getattr(fields, name))} must {text}")


_MOST_LISTED = 10_000
"""Layers of which windows are listed: what a file says may be any number."""


def _windows(fields: hf_fields.RopeFields) -> _Windows:
    """The same condition as in `transformers` decides which layers have a window."""
    num_layers, kinds, name = fields.num_hidden_layers, fields.layer_types, "layer_types"
    if kinds is not None and len(kinds) != num_layers:
        raise ValueError(f"config.json: layer_types has {len(kinds)} layers, and num_hidden_layers={num_layers}")
    window, first, alternates = None, num_layers, isinstance(fields, hf_fields.GptOssFields)
    if isinstance(fields, hf_fields.GptOssFields):
        window = fields.sliding_window
    elif isinstance(fields, hf_fields.Qwen2Fields) and fields.use_sliding_window and fields.sliding_window is not None:
        name = "max_window_layers" if kinds is None else name
        window, first = fields.sliding_window, max(0, fields.max_window_layers)
    if kinds is not None:
        layers = [int(kind == "sliding_attention") for kind in kinds]
    elif alternates or first < num_layers:
        if num_layers > _MOST_LISTED:
            raise ValueError(f"config.json: num_hidden_layers={shown(num_layers)} are too many to list their windows")
        layers = [number % 2 if alternates else int(number > first) for number in range(1, num_layers + 1)]
    else:
        return None, None
    if any(layers) and (window is None or window < 1):
        raise ValueError(f"config.json: sliding_window={window} must be at least 1, as layers have one by {name}")
    return _windows_of(window, layers)


def _require_sizes(found: Architecture, fields: hf_fields.RopeFields) -> None:
    """Raises ValueError for sizes that do not divide each other, and more experts per token than there are."""
    num_heads, hidden_size = fields.num_attention_heads, fields.hidden_size
    heads = f"num_attention_heads={num_heads}"
    if isinstance(fields, hf_fields.MixtralFields | hf_fields.Qwen3MoeFields | hf_fields.GptOssFields) and (
        fields.num_experts_per_tok > fields.num_local_experts
    ):
        raise ValueError(
            f"config.json: num_experts_per_tok={fields.num_experts_per_tok} is more than "
            f"num_local_experts={fields.num_local_experts}"
        )
    if hidden_size % num_heads and (fields.head_dim is None or isinstance(fields, hf_fields.LlamaFields)):
        raise ValueError(f"config.json: {heads} does not divide hidden_size={hidden_size}")
    if num_heads % found.num_query_groups:
        raise ValueError(f"config.json: num_key_value_heads={found.num_query_groups} does not divide {heads}")
    if found.head_dim % 2:
        origin = f" (hidden_size={hidden_size} / {heads})" if fields.head_dim is None else ""
        raise ValueError(f"config.json: head_dim={found.head_dim}{origin} is odd, and RoPE rotates pairs")
