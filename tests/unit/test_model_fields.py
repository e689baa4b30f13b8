"""`[model]` and `[megatron]` as two spellings of one model, and the list of its tensors."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.checks import requirements
from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.loader import ConfigError, dump_run_config, load_and_judge, load_run_config
from spare_megatron.config.megatron_fields import by_field, honoured_row
from spare_megatron.config.model.model_tensors import flops_per_token, model_shape, model_tensors
from spare_megatron.config.schema import ModelConfig, RunConfig
from spare_megatron.config.training.run_sizes import rank_memory
from spare_megatron.config.training.terms import differences, terms_of

SPELLINGS = [
    (["normalization=rmsnorm"], ["normalization=RMSNorm"]),
    (["norm_eps=1e-6"], ["layernorm_epsilon=1e-6"]),
    (["activation=swiglu"], ["activation_func=silu", "gated_linear_unit=true"]),
    (["activation=geglu"], ["gated_linear_unit=true"]),
    (["activation=squared_relu"], ["activation_func=squared_relu"]),
    (["num_query_groups=2"], ["num_query_groups=2"]),
    (["linear_bias=false", "qkv_bias=true"], ["add_bias_linear=false", "add_qkv_bias=true"]),
    (["qk_norm=true"], ["qk_layernorm=true"]),
    (["sliding_window=9"], ["window_size=[8, 0]"]),
]
BOTH = pytest.mark.parametrize(("ours", "theirs"), SPELLINGS, ids=lambda words: words[0].partition("=")[0])


def configured(*overrides: str) -> RunConfig:
    return load_run_config(None, overrides).config


def model(*words: str) -> list[str]:
    return [f"model.{word}" for word in words]


def megatron(*words: str) -> list[str]:
    return [f"megatron.{word}" for word in words]


@BOTH
def test_both_spellings_are_one_model(ours: list[str], theirs: list[str]) -> None:
    one, other = configured(*model(*ours)), configured(*megatron(*theirs))
    assert terms_of(one) == terms_of(other) != terms_of(RunConfig())
    assert differences(terms_of(one), other) == []
    assert differences(terms_of(one), RunConfig()) != [] != differences(terms_of(RunConfig()), one)
    for derived in (model_shape, rank_memory, flops_per_token):
        assert derived(one) == derived(other)
    assert terms_of(configured(*model(*ours), *megatron(*theirs))) == terms_of(one)


def test_a_model_of_the_defaults_has_the_terms_that_it_had() -> None:
    """Those of a checkpoint that an earlier version wrote, which knew none of these settings."""
    assert terms_of(RunConfig())["[megatron]"] == ""
    earlier = "activation_func=silu, gated_linear_unit=True, normalization=RMSNorm, num_query_groups=2"
    words = ["gated_linear_unit=true", "activation_func=silu", "normalization=RMSNorm", "num_query_groups=2"]
    assert terms_of(configured(*megatron(*words)))["[megatron]"] == earlier


@pytest.mark.parametrize("setting", ["rope_base=500000", "rope_scaling_factor=8"])
def test_another_rotation_is_another_model(setting: str) -> None:
    rope = configured("model.position_embedding=rope")
    other = configured("model.position_embedding=rope", *model(setting))
    assert len(differences(terms_of(rope), other)) == 1
    assert len(differences(terms_of(other), rope)) == 1


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("normalization=rmsnorm", "normalization=LayerNorm"),
        ("normalization=layernorm", "normalization=RMSNorm"),  # the default, which was given
        ("norm_eps=1e-6", "layernorm_epsilon=1e-5"),
        ("activation=swiglu", "activation_func=gelu"),
        ("activation=gelu", "gated_linear_unit=true"),
        ("num_query_groups=2", "num_query_groups=4"),
        ("linear_bias=true", "add_bias_linear=false"),
        ("qkv_bias=true", "add_qkv_bias=false"),
        ("qk_norm=true", "qk_layernorm=false"),
        ("sliding_window=8", "window_size=[8, 0]"),
    ],
)
def test_two_spellings_that_differ_are_refused_with_both_names(ours: str, theirs: str) -> None:
    given = [*model(ours), *megatron(theirs)]
    with pytest.raises(ConfigError) as error:
        load_run_config(None, given)
    (text,) = str(error.value).splitlines()
    assert f"model.{ours.partition('=')[0]}=" in text
    assert f"megatron.{theirs.partition('=')[0]}=" in text
    assert text.endswith(f"remove one of them (set by --set model.{ours})")
    machine = MachineResources(num_gpus=0, num_cores=64, has_corpus=True)
    _, found = load_and_judge(None, ["data.corpus=c", *given], lambda config: problems(config, machine))
    assert text in found


@BOTH
def test_a_run_written_with_either_spelling_is_read_back(ours: list[str], theirs: list[str], tmp_path: Path) -> None:
    """With both it could not be: every setting was written, so that the default stood against Megatron's field."""
    for given in (model(*ours), megatron(*theirs), [*model(*ours), *megatron(*theirs)]):
        config = configured(*given)
        (tmp_path / "config.toml").write_text(dump_run_config(config))
        assert load_run_config(tmp_path / "config.toml").config == config


@pytest.mark.parametrize("exchange", [None, "p2p", "a2a", '["a2a", "all_gather", "a2a", "a2a"]'])
def test_windows_over_split_sequences_need_an_exchange_that_knows_them(exchange: Any) -> None:
    gpus = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)
    words = ["data.corpus=c", "layout.context_parallel=2", "model.sliding_window=8"]
    config = configured(*words, *([f"megatron.cp_comm_type={exchange}"] if exchange else []))
    found = problems(config, gpus)
    assert len(found) == ("a2a" not in str(exchange))
    assert all("model.sliding_window=8 with layout.context_parallel=2 needs an exchange" in text for text in found)
    if exchange is None:
        [text] = problems(configured(*words, "data.reset_attention_mask=true"), gpus)
        assert "and data.reset_attention_mask=true needs other layers than those of transformer-engine" in text
        for place in ("model.transformer_impl=local", "cluster.device=cpu"):
            for masked in ("false", "true"):
                assert problems(configured(*words, place, f"data.reset_attention_mask={masked}"), gpus) == []


SINK = ("data.corpus=c", "megatron.softmax_type=learnable")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("layout.context_parallel=2",), "with layout.context_parallel=2 needs the one exchange"),
        (("layout.context_parallel=2", "megatron.cp_comm_type=all_gather"), "set megatron.cp_comm_type=a2a"),
        (("layout.context_parallel=2", "megatron.cp_comm_type=a2a"), ""),
        (("layout.context_parallel=2", 'megatron.cp_comm_type=["a2a", "a2a", "a2a", "a2a"]'), ""),
        (("megatron.attention_backend=flash",), "leaves transformer-engine no attention"),
        (("data.reset_attention_mask=true",), "with data.reset_attention_mask=true needs kernels that"),
        (("layout.context_parallel=2", "data.reset_attention_mask=true"), "from 2.12 on; install that"),
        ((), ""),
    ],
)
def test_heads_that_attend_to_nothing_need_kernels_that_know_it(
    settings: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "installed_version", lambda _: "2.11.0")
    gpus = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)
    found = problems(configured(*SINK, *settings), gpus)
    assert len(found) == bool(named)
    assert all(text.startswith("megatron.softmax_type=learnable with ") and named in text for text in found)
    others = [text for text in settings if not text.startswith("megatron.")]
    for place in ("model.transformer_impl=local", "cluster.device=cpu"):
        assert problems(configured(*SINK, *others, place), gpus) == []
    assert not any("softmax_type" in text for text in problems(configured(SINK[0], *settings), gpus))
    if "data.reset_attention_mask=true" in settings:
        monkeypatch.setattr(requirements, "installed_version", lambda _: "2.12.0")
        assert problems(configured(*SINK, *settings), gpus) == []


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"needs": ["fp9"]}, "the need fp9"),
        ({"needs": ["megatron.softmax=on"]}, "the need softmax=on"),
        ({"where": "tpu"}, "tpu, which is no such place"),
        ({"kind": "float"}, "float"),
        ({"limit": "from 2"}, "from 2"),
        ({"limits": "from 1"}, "limits"),
    ],
)
def test_a_row_of_the_table_that_means_nothing_is_not_loaded(row: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError), match=named):
        honoured_row("fp8", **row)


def test_a_field_that_stands_twice_in_the_table_is_not_loaded() -> None:
    with pytest.raises(ValueError, match="moe_latent_size is listed twice"):
        by_field([("fp8 moe_latent_size", "one reason"), ("moe_latent_size", "another")])


@pytest.mark.parametrize(
    ("model", "megatron"),
    [
        ({}, {}),
        ({"tie_embeddings": False, "position_embedding": "rope", "linear_bias": False, "qkv_bias": True}, {}),
        ({"num_query_groups": 2, "activation": "swiglu", "ffn_hidden_size": 96, "qk_norm": True}, {"kv_channels": 24}),
        ({"qk_norm": True, "position_embedding": "rope"}, {"multi_latent_attention": True, "q_lora_rank": 12}),
        ({"activation": "geglu", "normalization": "rmsnorm", "qk_norm": True}, {"add_bias_linear": False}),
    ],
)
def test_the_tensors_have_all_parameters_of_the_model(model: dict[str, Any], megatron: dict[str, Any]) -> None:
    config = RunConfig(model=replace(ModelConfig(), **model), megatron=megatron)
    tensors = list(model_tensors(config))
    assert sum(math.prod(tensor.shape) for tensor in tensors) == model_shape(config).num_parameters
    assert len({(tensor.key, tensor.layer) for tensor in tensors}) == len(tensors)
