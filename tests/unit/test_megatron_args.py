"""Settings and the arguments of Megatron-LM: what has an equal on the other side, and what is refused by name."""

import random
from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.config.building import build_run_config
from spare_megatron.config.limits import violations
from spare_megatron.config.schema import ModelConfig, RunConfig
from spare_megatron.config.training.terms import weights_terms_of
from spare_megatron.tools.weights.megatron_args import args_of, flags_of, settings_in


def config_of(megatron: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    return RunConfig(model=replace(ModelConfig(), **model), megatron=megatron or {})


LLAMA = {
    "num_query_groups": 2,
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "linear_bias": False,
    "tie_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (config_of(), ["--no-bias-gelu-fusion"]),
        (config_of(activation="gelu_tanh", norm_eps=1e-6), ["--norm-epsilon=1e-06"]),
        (config_of(activation="squared_relu", linear_bias=False, vocab_size=50257), []),
        (config_of(activation="quick_geglu", linear_bias=False), ["--quick-geglu"]),
        (
            config_of({"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}, **LLAMA),
            ["--no-bias-swiglu-fusion", "--activation-func-clamp-value=7.0", "--glu-linear-offset=1.0"],
        ),
        (config_of(**LLAMA, rope_base=5e5, rope_scaling_factor=8.0), ["--use-rope-scaling"]),
        (config_of(**LLAMA, qkv_bias=True, sliding_window=9), ["--window-size=(8,0)"]),
        (config_of({"kv_channels": 32}, **LLAMA, qk_norm=True), ["--qk-layernorm"]),
        (config_of({"rotary_interleaved": True, "no_rope_freq": [0, 1, 0, 1]}, **LLAMA), ["--no-rope-freq=[0,1,0,1]"]),
        (config_of({"rotary_percent": 0.5}, **LLAMA), []),
        (config_of({"layernorm_zero_centered_gamma": True}, **LLAMA), ["--apply-layernorm-1p"]),
    ],
)
def test_settings_come_back_from_the_arguments_that_they_become(config: RunConfig, flags: list[str]) -> None:
    args = args_of(config)
    assert flags_of(args) == flags
    tables = settings_in(args, config.model.vocab_size, "bf16")
    flat = {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
    back, mistakes = build_run_config(flat)
    assert (list(mistakes), back.model.precision, back.model.seq_length) == ([], "bf16", config.model.seq_length)
    assert weights_terms_of(back) == weights_terms_of(config)


def test_swiglu_that_megatron_fuses_is_not_clamped() -> None:
    args = {**args_of(config_of({"activation_func_clamp_value": 7.0}, **LLAMA)), "bias_swiglu_fusion": True}
    assert "megatron" not in settings_in(args, 256, "fp32")
    del args["bias_swiglu_fusion"]  # on in Megatron-LM unless it is switched off
    assert "megatron" not in settings_in(args, 256, "fp32")


def test_gelu_that_megatron_fuses_with_a_bias_is_the_tanh_form() -> None:
    args = args_of(config_of({"bias_activation_fusion": True}))
    assert args["bias_gelu_fusion"]
    assert settings_in(args, 256, "fp32")["model"]["activation"] == "gelu_tanh"
    del args["bias_gelu_fusion"]  # on in Megatron-LM unless it is switched off
    assert settings_in(args, 256, "fp32")["model"]["activation"] == "gelu_tanh"
    assert settings_in({**args, "add_bias_linear": False}, 256, "fp32")["model"]["activation"] == "gelu"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of(activation="geglu"), "model.activation=geglu"),
        (config_of(activation="gelu_tanh", linear_bias=False), "model.activation=gelu_tanh"),
        (config_of(**LLAMA, rope_scaling_factor=32.0), "model.rope_scaling_factor=32.0"),
        (config_of({"softmax_scale": 0.5}), "megatron.softmax_scale=0.5"),
        (config_of({"softmax_type": "learnable"}), "megatron.softmax_type=learnable"),
        (config_of({"attention_output_gate": True}), "megatron.attention_output_gate=True"),
    ],
)
def test_what_pretrain_gpt_has_no_argument_for_is_refused_with_the_setting(config: RunConfig, reason: str) -> None:
    with pytest.raises(ValueError, match="has no model like this one") as error:
        args_of(config)
    assert f"\n  - {reason}: " in str(error.value)


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 4, 10**40, 2.0, 0.5, -0.0, float("nan"), float("inf"), "", "2", "false", "rope",
    "LayerNorm", "bad\n\ud800", [], [1], (4, 0), (-1, -1), (1, 2, 3), {}, object(),
]  # fmt: skip


def test_drawn_arguments_become_valid_settings_or_are_refused_by_name() -> None:
    draw = random.Random(4)
    usual = args_of(config_of(**LLAMA))
    num_refused = 0
    for _ in range(2000):
        changed = draw.sample(sorted(usual), k=draw.choice([1, 1, 2]))
        args = {**usual, **{name: draw.choice(ODD) for name in changed}}
        error = ""
        try:
            tables = settings_in(args, 256, "fp32")
        except ValueError as found:
            error = str(found)
        if error:
            assert error.isprintable()
            assert any(name in error for name in changed), (error, changed)
            num_refused += 1
            continue
        flat = {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
        config, mistakes = build_run_config(flat)
        assert not mistakes
        assert not list(violations(config.model))
    assert 200 < num_refused < 1800


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mup": True}, "use_mup=True is not supported here; only False can be imported"),
        ({"num_experts": 8}, "num_experts=8 is not supported here; only null can be imported"),
        ({"qk_l2_norm": True}, "qk_l2_norm=True is not supported"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable' is not supported"),
        (
            {"position_embedding_type": "mrope", "use_rotary_position_embeddings": False},
            "position_embedding_type='mrope' is not supported",
        ),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, "rope_scaling_factor=32.0 is ambiguous"),
        ({"window_size": (-1, 0)}, r"window_size=\(-1, 0\) is not supported"),
        ({"normalization": "L2Norm"}, "normalization='L2Norm' is not supported"),
        ({"hidden_size": None}, "hidden_size=None must be a whole number"),
        ({"num_layers": 2.0}, "num_layers=2.0 must be a whole number"),
        ({"num_layers": True}, "num_layers=True must be a whole number"),
        ({"layernorm_epsilon": float("nan")}, "layernorm_epsilon=nan must be a number or null"),
        (
            {"layernorm_epsilon": 1e-6, "norm_epsilon": 1e-5},
            "layernorm_epsilon=1e-06 and norm_epsilon=1e-05",
        ),
        ({"swiglu": "false"}, "swiglu='false' must be true or false"),
        ({"window_size": (4, "0")}, r"window_size=\(4, '0'\) must be a tuple"),
        ({"rotary_base": 0}, "rotary_base=0 must be a finite number from 1"),
        ({"num_query_groups": 3}, "num_query_groups=3 does not divide num_attention_heads=4"),
        ({"num_query_groups": None}, "num_query_groups=None must be a whole number"),
        ({"kv_channels": None, "num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=64"),
    ],
)
def test_arguments_without_an_equal_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        settings_in({**args_of(config_of(**LLAMA)), **changes}, 256, "fp32")
