"""The numbers of parameters that a configuration implies, against the models that Megatron builds."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_shape import flops_per_token, model_shape
from spare_megatron.config.model.model_tensors import parameter_names
from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig, TrainConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.optimizer.optimizer import names_for_rules
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration.mcore_group import CPU, run_group, work_of

LLAMA_LIKE = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "kv_channels": 24,
    "qk_layernorm": True,
}


def parameters_of(config: RunConfig) -> tuple[int, list[str]]:
    """Elements and names of a rank's parameters."""
    chunks = GroupTrainer(config, CPU).chunks
    number = sum(parameter.numel() for chunk in chunks for parameter in chunk.module.parameters())
    return number, [name for name, _ in names_for_rules(chunks)]


@pytest.mark.parametrize(
    ("stages", "is_tied", "megatron"),
    [
        (1, True, {}),
        (2, True, {"add_bias_linear": False, "add_qkv_bias": True}),
        (1, False, LLAMA_LIKE),
        (1, True, {"attention_output_gate": True, "num_query_groups": 2}),
    ],
)
def test_each_stage_holds_the_parameters_that_shape_and_names_say(
    text_corpus: Path, stages: int, is_tied: bool, megatron: dict[str, object]
) -> None:
    model = ModelConfig(hidden_size=64, ffn_hidden_size=160, vocab_size=200, tie_embeddings=is_tied)
    if megatron is LLAMA_LIKE:
        model = replace(model, position_embedding="rope")
    config = RunConfig(
        model=model,
        layout=LayoutConfig(num_groups=1, pipeline_parallel=stages),
        data=DataConfig(corpus=str(text_corpus)),
        megatron=megatron,
    )
    prepare_index(config)
    numbers, names = zip(*run_group(parameters_of, config), strict=True)
    assert list(numbers) == model_shape(config).of_stages(stages)
    found = [name for of_stage in names for name in of_stage]
    if stages > 1 and is_tied:  # the last stage has a copy
        found.remove("embedding.word_embeddings.weight")
    assert sorted(found) == sorted(parameter_names(config))


def count_flops(config: RunConfig) -> int:
    """Of one microbatch, forward and backward."""
    trainer = GroupTrainer(config, CPU)
    # torch counts no operations of the fused attention on CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer.begin_step(0)
        trainer.compute(work_of((0, 0)))
    return counter.get_total_flops()


@pytest.mark.parametrize("megatron", [{}, LLAMA_LIKE])
def test_a_token_costs_what_torch_counts(text_corpus: Path, megatron: dict[str, object]) -> None:
    model = ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=160, vocab_size=200, seq_length=32)
    config = RunConfig(model=model, data=DataConfig(corpus=str(text_corpus)), megatron=megatron)
    config = replace(config, layout=LayoutConfig(num_groups=1), train=TrainConfig(micro_batch_size=2))
    prepare_index(config)
    (counted,) = run_group(count_flops, config)
    assert flops_per_token(config) * 2 * 32 == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "published"),
    [("125m", 125e6), ("350m", 350e6), ("1p3b", 1.3e9), ("7b", 6.7e9), ("22b", 22e9), ("175b", 175e9)],
)
def test_presets_have_the_published_sizes(preset: str, published: float) -> None:
    config = load_run_config(Path(f"gpt_{preset}")).config
    assert model_shape(config).num_parameters == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3p2_1b", 1_235_814_400),
        ("qwen3_8b", 8_190_735_360),
        ("mixtral_8x7b", 46_702_792_704),
        ("llama_10m", 10_490_112),
    ],
)
def test_presets_have_as_many_parameters_as_the_published_weights(preset: str, published: int) -> None:
    """Counts in the metadata of the published safetensors; of the last one, which is ours, by hand."""
    assert model_shape(load_run_config(Path(preset)).config).num_parameters == published


def test_megatron_builds_the_small_llama_with_as_many_parameters(text_corpus: Path) -> None:
    config = load_run_config(Path("llama_10m"), [f"data.corpus={text_corpus}", "layout.num_groups=1"]).config
    prepare_index(config)
    [(number, _)] = run_group(parameters_of, config)
    assert number == 10_490_112
