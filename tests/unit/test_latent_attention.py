"""What goes with latent attention, by settings alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_tensors import model_shape
from spare_megatron.config.training.terms import differences, terms_of

MACHINE = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)
LATENT = (
    "model.position_embedding=rope",
    "megatron.multi_latent_attention=true",
    "data.corpus=none",
    "cluster.device=cpu",
)
ON_GPUS = ("cluster.device=gpu", "layout.num_groups=1", "spare.redundancy=1")


def found(*settings: str) -> list[str]:
    return problems(load_run_config(None, [*LATENT, *settings]).config, MACHINE)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("model.position_embedding=learned_absolute",), "has no effect without model.position_embedding=rope"),
        (("model.num_query_groups=2",), "remove num_query_groups"),
        (("megatron.num_query_groups=2",), "remove num_query_groups"),
        (("model.linear_bias=false", "model.qkv_bias=true"), "model.qkv_bias would be ignored; remove it"),
        (("model.rope_scaling_factor=8",), "stretches wavelengths by megatron.rotary_scaling_factor"),
        (
            ("megatron.softmax_scale=2.0",),
            "megatron.softmax_scale=2.0 does not go with megatron.multi_latent_attention",
        ),
        (("megatron.kv_channels=8",), "megatron.kv_channels=8 does not go with megatron.multi_latent_attention"),
        (("megatron.rope_type=linear",), "megatron.rope_type=linear cannot be had: Megatron has rope and yarn"),
        (("megatron.rope_type=rope", "megatron.beta_fast=8"), "has no effect without megatron.rope_type=yarn"),
        (("megatron.qk_pos_emb_head_dim=7",), "rotates pairs of values, but a head is 7 wide"),
        (("megatron.v_head_dim=0",), "megatron.v_head_dim=0 must be at least 1"),
        (("layout.tensor_parallel=2",), "gathers latent queries over Megatron's global groups"),
        ((*ON_GPUS, "layout.context_parallel=2"), "with layers of transformer-engine was not checked with"),
        (
            (*ON_GPUS, "data.reset_attention_mask=true", "data.end_of_document=1"),
            "with layers of transformer-engine was not checked with",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(settings: tuple[str, ...], text: str) -> None:
    [problem] = found(*settings)
    assert text in problem


@pytest.mark.parametrize("more", [(), ("layout.context_parallel=2",)])
def test_what_goes_with_it_passes(more: tuple[str, ...]) -> None:
    assert found(*more) == []
    assert found(*more, *ON_GPUS, "model.transformer_impl=local") == []


def test_deepseek_v3_has_as_many_parameters_as_it_has_published() -> None:
    """671B, of which 37B compute a token: arXiv 2412.19437, section 4.2. The published weights have as many numbers,
    without those of a further predicted token, and 256 biases in each of 58 routers.
    """
    shape = model_shape(load_run_config(Path("deepseek_v3_like"), ["model.num_layers=61"]).config)
    assert shape.num_parameters == 671_026_419_200 - 58 * 256
    assert shape.num_active_parameters == pytest.approx(37e9, rel=0.02)


def test_a_training_may_go_on_with_other_wavelengths_and_with_no_other_widths() -> None:
    config = load_run_config(None, [*LATENT, "megatron.rope_type=rope"]).config
    yarn: dict[str, Any] = {"multi_latent_attention": True, "rotary_scaling_factor": 8.0, "mscale_all_dim": 1.0}
    longer = replace(config, megatron=yarn)
    names = ("megatron.mscale_all_dim", "megatron.rope_type", "megatron.rotary_scaling_factor")
    assert len(differences(terms_of(config), longer)) == len(names)
    allowed = replace(longer, checkpoint=replace(longer.checkpoint, allow_changes=names))
    assert differences(terms_of(config), allowed) == []
    wider = replace(allowed, megatron={**yarn, "v_head_dim": 64})
    assert len(differences(terms_of(config), wider)) == 1
