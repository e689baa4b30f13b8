"""DeepSeek-V3: a run's settings to and from Hugging Face's config.json, as `hf_config` has the other families."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spare_megatron.config.foreign_fields import shown
from spare_megatron.config.megatron_fields import FUNCTION_IN_MEGATRON, OF_LATENT_ATTENTION
from spare_megatron.config.model_fields import SETTING_OF, as_written, model_fields
from spare_megatron.config.schema import RunConfig
from spare_megatron.tools.weights.hf_fields import YARN, DeepSeekFields

_OF_MODEL: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "first_k_dense_replace": "num_dense_layers",
    "max_position_embeddings": "seq_length",
}
_OF_MEGATRON: Mapping[str, str] = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
"""Of config.json, and its setting of `[model]` or `[megatron]`."""

_EPS = 1e-6
"""Of the norms of latent vectors in `transformers`, whatever the configuration says; here all norms have one."""

_FIXED = {
    "activation_func": "silu",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "layernorm_epsilon": _EPS,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "normalization": "RMSNorm",
    "qk_layernorm": True,
}
_CHOSEN = {
    *OF_LATENT_ATTENTION,
    *_OF_MEGATRON.values(),
    *("multi_latent_attention", "num_moe_experts", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeek:
    """A DeepSeek-V3: fields of config.json, and the constants of YaRN, if it stretches rotations."""

    fields: Mapping[str, Any]
    yarn: Mapping[str, Any]
    rope_base: float
    is_tied: bool

    @property
    def num_layers(self) -> int:
        return int(self.fields["num_hidden_layers"])

    @property
    def num_query_groups(self) -> int:
        return int(self.fields["num_attention_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.fields["qk_rope_head_dim"])

    @property
    def num_experts(self) -> int:
        return int(self.fields["n_routed_experts"])


def deepseek_of(config: RunConfig) -> DeepSeek:
    """The DeepSeek-V3 that the settings describe. Raises ValueError if it is none, with every reason."""
    model, fields = config.model, {**FUNCTION_IN_MEGATRON, **model_fields(config)}
    if reasons := list(_not_of_deepseek(config, fields)):
        what = "Hugging Face's DeepSeek-V3, the family with latent attention, has no model like this one:"
        raise ValueError("\n  - ".join([what, *reasons]))
    found = {name: getattr(model, setting) for name, setting in _OF_MODEL.items()}
    found |= {name: 1 if fields[field] is None else fields[field] for name, field in _OF_MEGATRON.items()}
    found |= {"intermediate_size": model.ffn_width, "moe_intermediate_size": model.expert_width}
    found["n_shared_experts"] = (model.shared_expert_ffn_hidden_size or 0) // model.expert_width
    yarn = {name: fields[YARN[name]] for name in YARN if fields["rope_type"] == "yarn"}
    return DeepSeek(fields=found, yarn=yarn, rope_base=model.rope_base, is_tied=model.tie_embeddings)


def _not_of_deepseek(config: RunConfig, fields: Mapping[str, Any]) -> Iterator[str]:
    model = config.model
    if model.num_experts is None:
        yield "model.num_experts is absent: it has mixtures of experts"
    for field in sorted(FUNCTION_IN_MEGATRON.keys() - _CHOSEN):
        expected = _FIXED.get(field, FUNCTION_IN_MEGATRON[field])
        if fields[field] != expected:
            is_given = field in SETTING_OF or field in config.megatron
            yield f"{as_written(config, field) if is_given else f'megatron.{field}'}: it has {expected} alone"
    shared, chosen = model.shared_expert_ffn_hidden_size, fields["moe_router_group_topk"]
    if not shared or shared % model.expert_width:
        yield f"model.shared_expert_ffn_hidden_size={shared}: it has a multiple of an expert's, {model.expert_width}"
    if model.experts_per_token == 1 or (chosen is not None and model.experts_per_token // chosen != 2):
        yield f"model.experts_per_token={model.experts_per_token}: it has twice megatron.moe_router_group_topk"
    is_scaled = fields["mscale"] != 0 if fields["mscale_all_dim"] else fields["mscale"] == 1
    if fields["rope_type"] == "yarn" and not is_scaled:
        yield f"megatron.mscale={fields['mscale']}: it has 1 if megatron.mscale_all_dim is 0, and never 0"


def deepseek_settings(found: DeepSeek, precision: str) -> dict[str, dict[str, Any]]:
    model = {setting: found.fields[name] for name, setting in _OF_MODEL.items()}
    model["shared_expert_ffn_hidden_size"] = found.fields["n_shared_experts"] * model["expert_ffn_hidden_size"]
    model |= {"activation": "swiglu", "linear_bias": False, "normalization": "rmsnorm", "norm_eps": _EPS}
    model |= {"position_embedding": "rope", "rope_base": found.rope_base, "qk_norm": True}
    model |= {"tie_embeddings": found.is_tied, "precision": precision}
    groups = ("n_group", "topk_group") if found.fields["n_group"] == 1 else ()
    megatron = {field: found.fields[name] for name, field in _OF_MEGATRON.items() if name not in groups}
    megatron |= {"multi_latent_attention": True, "rope_type": "yarn" if found.yarn else "rope"}
    megatron |= {YARN[name]: value for name, value in found.yarn.items()}
    megatron |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return {"model": model, "megatron": megatron}


def deepseek_json(found: DeepSeek, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": dtype,
        **found.fields,
        "num_key_value_heads": found.fields["num_attention_heads"],
        "num_nextn_predict_layers": 0,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": _EPS,
        "rope_theta": found.rope_base,
        "rope_scaling": {"rope_type": "yarn", **found.yarn} if found.yarn else None,
        "rope_interleave": True,
        "tie_word_embeddings": found.is_tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def deepseek_in(fields: DeepSeekFields, rope_base: float, yarn: Mapping[str, Any]) -> DeepSeek:
    """The DeepSeek-V3 that a config.json describes. Raises ValueError."""
    heads, chosen, of_groups = fields.num_attention_heads, fields.num_experts_per_tok, fields.topk_group
    experts = f"n_routed_experts (num_local_experts)={shown(fields.n_routed_experts)}"
    must = {
        "num_key_value_heads": (fields.num_key_value_heads in (None, heads), f"be num_attention_heads={heads}"),
        "hidden_size": (not fields.hidden_size % heads, f"be a multiple of num_attention_heads={heads}"),
        "qk_rope_head_dim": (not fields.qk_rope_head_dim % 2, "be even, as RoPE rotates pairs"),
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
    found = {name: getattr(fields, name) for name in (*_OF_MODEL, *_OF_MEGATRON, "n_shared_experts")}
    return DeepSeek(fields=found, yarn=yarn, rope_base=rope_base, is_tied=fields.tie_word_embeddings)
