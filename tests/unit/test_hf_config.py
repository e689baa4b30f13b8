"""Settings and Hugging Face's config.json: what has an equal on the other side, and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import GptOssConfig

from spare_megatron.config.building import build_run_config
from spare_megatron.config.schema import ModelConfig, RunConfig
from spare_megatron.tools.weights.hf_config import architecture_in, architecture_of, config_json
from spare_megatron.tools.weights.hf_fields import YARN

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LLAMA = ModelConfig(
    num_query_groups=2,
    position_embedding="rope",
    normalization="rmsnorm",
    activation="swiglu",
    linear_bias=False,
    tie_embeddings=False,
)


DEEPSEEK_MODEL = {
    "num_query_groups": None,
    "norm_eps": 1e-6,
    "qk_norm": True,
    "num_experts": 8,
    "experts_per_token": 4,
    "expert_ffn_hidden_size": 20,
    "shared_expert_ffn_hidden_size": 40,
    "num_dense_layers": 1,
}
DEEPSEEK = {
    "multi_latent_attention": True,
    "rope_type": "rope",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}


GPT_OSS_MODEL = {"activation": "quick_geglu", "linear_bias": True, "num_experts": 8, "sliding_window": 16}
GPT_OSS = {"softmax_type": "learnable", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}


GPT_OSS_JSON = {"model_type": "gpt_oss", "attention_bias": True}


def config_of(megatron: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    return RunConfig(model=replace(LLAMA, **model), megatron=megatron or {})


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", config_of()),
        ("llama", config_of(linear_bias=True, rope_base=5e5, rope_scaling_factor=8.0)),
        ("llama", config_of({"kv_channels": 32}, tie_embeddings=True)),
        ("qwen2", config_of(qkv_bias=True, norm_eps=1e-6)),
        ("qwen3", config_of(qk_norm=True, sliding_window=7)),
        ("mixtral", config_of(num_experts=8, experts_per_token=3, expert_ffn_hidden_size=40)),
        ("qwen3_moe", config_of(qk_norm=True, num_experts=8, experts_per_token=3, expert_ffn_hidden_size=40)),
        ("qwen3_moe", config_of({"moe_router_pre_softmax": True}, qk_norm=True, num_experts=8, tie_embeddings=True)),
        ("deepseek_v3", config_of(DEEPSEEK, **DEEPSEEK_MODEL)),
        ("deepseek_v3", config_of({**DEEPSEEK, **GROUPS, "rope_type": "yarn"}, **DEEPSEEK_MODEL)),
        ("qwen3", config_of({"window_attn_skip_freq": 3}, qk_norm=True, sliding_window=7)),
        ("gpt_oss", config_of({**GPT_OSS, "window_attn_skip_freq": 2, "kv_channels": 32}, **GPT_OSS_MODEL)),
        ("gpt_oss", config_of({**GPT_OSS, "window_attn_skip_freq": [0, 1, 1, 0]}, **GPT_OSS_MODEL)),
        (
            "gpt_oss",
            config_of(
                {**GPT_OSS, "rope_type": "yarn", "correction_range_round_to_int": False},
                **{**GPT_OSS_MODEL, "sliding_window": None},
            ),
        ),
        ("gpt2", RunConfig(model=ModelConfig(activation="gelu_tanh"))),
        ("gpt2", RunConfig(model=ModelConfig(tie_embeddings=False, norm_eps=1e-6, ffn_hidden_size=96))),
        ("gpt2", RunConfig(model=ModelConfig(), megatron={"bias_activation_fusion": True})),
        ("llama", RunConfig(
            model=ModelConfig(position_embedding="rope"),
            megatron={"normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True},
        )),
    ],
)  # fmt: skip
def test_settings_come_back_from_the_config_json_that_they_become(family: str, config: RunConfig) -> None:
    found = architecture_of(config)
    content = config_json(found, "float32")
    assert content["model_type"] == family
    assert architecture_in(content) == found
    tables = found.settings("bf16")
    flat = {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
    back, mistakes = build_run_config(flat)
    assert (list(mistakes), back.model.precision) == ([], "bf16")
    assert architecture_of(back) == found


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of(activation="geglu"), "model.activation=geglu"),
        (config_of(normalization="layernorm"), "model.normalization=layernorm"),
        (config_of(position_embedding="learned_absolute"), "model.normalization=rmsnorm"),
        (RunConfig(model=ModelConfig(num_query_groups=2)), "model.num_query_groups=2"),
        (RunConfig(model=ModelConfig(linear_bias=False)), "model.linear_bias=False"),
        (RunConfig(model=ModelConfig(activation="squared_relu")), "model.activation=squared_relu"),
        (RunConfig(model=ModelConfig(), megatron={"kv_channels": 8}), "megatron.kv_channels=8"),
        (config_of(sliding_window=4), "model.sliding_window=4"),
        (config_of(qk_norm=True, qkv_bias=True), "model.qkv_bias=True"),
        (config_of(qk_norm=True, linear_bias=True), "model.linear_bias=True"),
        (config_of(num_experts=4, qk_norm=True, num_dense_layers=1), "megatron.moe_layer_freq=[0, 1, 1, 1]"),
        (config_of({"moe_router_pre_softmax": True}, num_experts=4), "megatron.moe_router_pre_softmax=True"),
        (config_of(num_experts=4, linear_bias=True), "model.linear_bias=True"),
        (RunConfig(model=ModelConfig(num_experts=4)), "megatron.num_moe_experts=4"),
        (
            config_of({"moe_router_score_function": "sigmoid"}, num_experts=4),
            "megatron.moe_router_score_function=sigmoid",
        ),
        (config_of(num_experts=4, shared_expert_ffn_hidden_size=8), "megatron.moe_shared_expert_intermediate_size=8"),
        (config_of(DEEPSEEK, **{**DEEPSEEK_MODEL, "num_experts": None}), "model.num_experts is absent"),
        (config_of(DEEPSEEK, **{**DEEPSEEK_MODEL, "norm_eps": 1e-5}), "model.norm_eps=1e-05"),
        (config_of(DEEPSEEK, **{**DEEPSEEK_MODEL, "qk_norm": False}), "model.qk_norm=False"),
        (
            config_of(DEEPSEEK, **{**DEEPSEEK_MODEL, "shared_expert_ffn_hidden_size": 30}),
            "model.shared_expert_ffn_hidden_size=30",
        ),
        (
            config_of({**DEEPSEEK, "moe_router_score_function": "softmax"}, **DEEPSEEK_MODEL),
            "megatron.moe_router_score_function=softmax",
        ),
        (config_of({**DEEPSEEK, **GROUPS, "moe_router_group_topk": 1}, **DEEPSEEK_MODEL), "model.experts_per_token=4"),
        (config_of({**DEEPSEEK, "rope_type": "yarn", "mscale": 0.7}, **DEEPSEEK_MODEL), "megatron.mscale=0.7"),
        (config_of(GPT_OSS, **{**GPT_OSS_MODEL, "linear_bias": False}), "model.linear_bias=False"),
        (config_of(GPT_OSS, **{**GPT_OSS_MODEL, "activation": "swiglu"}), "model.activation=swiglu"),
        (config_of({**GPT_OSS, "glu_linear_offset": 0.5}, **GPT_OSS_MODEL), "megatron.glu_linear_offset=0.5"),
        (
            config_of({**GPT_OSS, "activation_func_clamp_value": None}, **GPT_OSS_MODEL),
            "megatron.activation_func_clamp_value is absent",
        ),
        (config_of({"rotary_interleaved": True}), "megatron.rotary_interleaved=True"),
        (config_of({"softmax_scale": 0.5}), "megatron.softmax_scale=0.5"),
        (config_of({"layernorm_zero_centered_gamma": True}), "megatron.layernorm_zero_centered_gamma=True"),
    ],
)
def test_what_no_family_has_is_refused_with_the_setting(config: RunConfig, reason: str) -> None:
    with pytest.raises(ValueError, match="no model like this one") as error:
        architecture_of(config)
    assert f"\n  - {reason}: " in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "mistral"},
            "only llama, qwen2, qwen3, qwen3_moe, mixtral, deepseek_v3, gpt_oss, gpt2 can",
        ),
        ({"model_type": "qwen3_next"}, "model_type='qwen3_next' cannot be imported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True with mlp_bias=False is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "rope_scaling.low_freq_factor=2.0 is not supported"),
        ({"rope_scaling": {**LLAMA3, "mscale": 2.0}}, "rope_scaling.mscale=2.0 is not supported"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config={'bits': 4} is not supported here; only null can be",
        ),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers, and num_hidden_layers=4"),
        ({"model_type": "qwen3_moe", "num_experts": 7}, "num_experts_per_tok=8 is more than num_local_experts=7"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_local_experts=8"),
        ({"hidden_size": None}, "hidden_size=None must be a whole number"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias=False is not supported"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        (GPT_OSS_JSON | {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        (GPT_OSS_JSON | {"num_experts": 3}, "num_experts_per_tok=4 is more than num_local_experts=3"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "sliding_window=None must be at least 1"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True is not supported"),
    ],
)
def test_a_config_json_without_an_equal_is_refused_with_its_field(changes: dict[str, Any], reason: str) -> None:
    content = config_json(architecture_of(config_of()), "float32")
    with pytest.raises(ValueError, match=reason):
        architecture_in({**content, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention_heads=4"),
        ({"q_lora_rank": None}, "q_lora_rank=None must be a whole number"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 must be 1e-06"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace=4 must leave mixtures"),
        ({"n_group": 3}, "n_group=3 must divide n_routed_experts"),
        ({"n_group": 4, "topk_group": 1}, "topk_group=1 must be at most n_group=4 and half of num_experts_per_tok=4"),
        ({"rope_interleave": False}, "rope_interleave=False is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor=None must be"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": 1}}, "mscale_all_dim=1 is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": False}}, "truncate=False is not supported"),
        ({"rope_scaling": {"type": "llama3", "factor": 4}}, "rope_scaling.rope_type='llama3' is not supported"),
    ],
)
def test_a_deepseek_without_an_equal_is_refused_with_its_field(changes: dict[str, Any], reason: str) -> None:
    content = config_json(architecture_of(config_of(DEEPSEEK, **DEEPSEEK_MODEL)), "float32")
    with pytest.raises(ValueError, match=reason):
        architecture_in({**content, **changes})


def test_windows_of_some_layers_and_the_rotations_of_a_gpt_oss_are_those_that_transformers_gives_them() -> None:
    content = config_json(architecture_of(config_of(qkv_bias=True)), "float32")
    some = architecture_in({**content, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3})
    assert some.model["sliding_window"] == 9
    assert some.megatron["window_attn_skip_freq"] == [0, 0, 0, 1]
    bare = {"model_type": "gpt_oss", "hidden_size": 64, "num_attention_heads": 8}
    found, theirs = architecture_in(bare), GptOssConfig(hidden_size=64, num_attention_heads=8)
    rope = theirs.rope_parameters
    assert {name: found.megatron[field] for name, field in YARN.items() if name in rope} == {
        name: rope[name] for name in YARN if name in rope
    }
    assert found.model["rope_base"] == rope["rope_theta"]
    assert [kind == "sliding_attention" for kind in theirs.layer_types] == [number % 2 == 1 for number in range(1, 37)]
    assert (found.megatron["window_attn_skip_freq"], found.model["sliding_window"]) == (2, theirs.sliding_window)


def test_a_bias_of_the_attention_alone_is_refused_also_where_the_other_is_not_mentioned() -> None:
    content = config_json(architecture_of(config_of()), "float32")
    del content["mlp_bias"]
    assert not architecture_in(content).model["linear_bias"]
    with pytest.raises(ValueError, match="attention_bias=True with mlp_bias=False is not supported"):
        architecture_in({**content, "attention_bias": True})


def test_rope_is_read_as_transformers_5_writes_it() -> None:
    content = config_json(architecture_of(config_of(rope_base=7.0, rope_scaling_factor=3.0)), "float32")
    rope = {**content.pop("rope_scaling"), "rope_theta": content.pop("rope_theta")}
    found = architecture_in({**content, "rope_parameters": rope})
    assert (found.model["rope_base"], found.model["rope_scaling_factor"]) == (7.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_function": "relu"}, "activation_function='relu' is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ({"n_layer": "12"}, "n_layer='12' must be a whole number"),
    ],
)
def test_a_gpt2_without_an_equal_is_refused_with_its_field(changes: dict[str, Any], reason: str) -> None:
    content = config_json(architecture_of(RunConfig(model=ModelConfig(activation="gelu_tanh"))), "float32")
    with pytest.raises(ValueError, match=reason):
        architecture_in({**content, **changes})
