"""What is refused of mixtures of experts, with the reason, before any process starts."""

import pytest

from spare_megatron.config.checks.requirements import EXPERTS, broken
from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.megatron_fields import field_problems
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.terms import differences, terms_of
from spare_megatron.tools.weights.megatron_args import args_of

MIXTURE = ("model.num_experts=8", "model.linear_bias=false")


def configured(*overrides: str) -> RunConfig:
    return load_run_config(None, overrides).config


@pytest.mark.parametrize("setting", ["expert_ffn_hidden_size=8", "experts_per_token=1", "num_dense_layers=1"])
def test_settings_of_experts_need_experts(setting: str) -> None:
    (found,) = broken(EXPERTS, configured(f"model.{setting}"))
    assert found.startswith(f"model.{setting} has no effect without experts")
    assert not list(broken(EXPERTS, configured(*MIXTURE, f"model.{setting}")))


def test_lanes_divide_nothing_without_experts() -> None:
    (found,) = broken(EXPERTS, configured("layout.data_parallel=2", "layout.expert_parallel=2"))
    assert found.startswith("layout.expert_parallel=2 has no effect without experts")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.experts_per_token=9"], "exceeds model.num_experts=8"),
        (["model.num_dense_layers=4"], "leaves none of model.num_layers=4"),
        (["model.linear_bias=true"], "set model.linear_bias=false"),
        (["layout.tensor_parallel=2"], "megatron.sequence_parallel=true"),
        (["layout.tensor_parallel=0", "model.linear_bias=true"], "set model.linear_bias=false"),
        (["layout.tensor_parallel=2", "model.expert_ffn_hidden_size=33"], "model.expert_ffn_hidden_size=33 is not a"),
        (["megatron.moe_expert_capacity_factor=1.0"], "whether a token is dropped would depend on"),
        (["megatron.moe_router_load_balancing_type=global_aux_loss"], "global_aux_loss depends on other microbatches"),
        (['megatron.moe_router_load_balancing_type=["aux_loss", "sinkhorn"]'], "'sinkhorn'] cannot be had"),
        (["megatron.moe_router_enable_expert_bias=true"], "moe_router_score_function=softmax: biases are added to"),
        (["megatron.moe_token_dispatcher_type=flex"], "choose alltoall or allgather"),
        (["megatron.moe_input_jitter_eps=0.1"], "its noise would not be that of the microbatch"),
    ],
)
def test_what_no_mixture_can_have_is_refused_with_the_reason(overrides: list[str], message: str) -> None:
    config = configured(*MIXTURE, *overrides)
    found = [*field_problems(config), *broken(EXPERTS, config)]
    assert any(message in text for text in found), found


@pytest.mark.parametrize("field", ["moe_token_dispatcher_type=alltoall", "moe_grouped_gemm=true"])
def test_what_needs_gpus_is_refused_on_cpus(field: str) -> None:
    config = configured("data.corpus=c", "cluster.device=cpu", *MIXTURE, f"megatron.{field}")
    cpus, gpus = (MachineResources(num_gpus=number, num_cores=64, has_corpus=True) for number in (0, 64))
    assert any(f"megatron.{field.partition('=')[0]}" in text for text in problems(config, cpus))
    assert not any("megatron." in text for text in problems(configured("data.corpus=c", *MIXTURE), gpus))


@pytest.mark.parametrize(
    "setting",
    [
        "model.num_experts=4",
        "model.experts_per_token=3",
        "model.expert_ffn_hidden_size=8",
        "model.shared_expert_ffn_hidden_size=8",
        "model.num_dense_layers=1",
        "megatron.moe_router_score_function=sigmoid",
    ],
)
def test_other_experts_are_another_model(setting: str) -> None:
    one, other = configured(*MIXTURE), configured(*MIXTURE, setting)
    assert len(differences(terms_of(one), other)) == 1
    assert not differences(terms_of(one), configured(*MIXTURE, "megatron.moe_aux_loss_coeff=0.1"))


def test_exports_to_megatron_lm_refuse_mixtures() -> None:
    args_of(configured("model.linear_bias=false", "model.activation=swiglu"))
    with pytest.raises(ValueError, match=r"num_moe_experts=8"):
        args_of(configured(*MIXTURE, "model.activation=swiglu"))
