"""What the settings of `[model]` compute, against a GPT written in NumPy; and the vocabulary's padding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spare_megatron.config.model.model_tensors import model_shape
from spare_megatron.config.schema import LayoutConfig, ModelConfig, RunConfig
from spare_megatron.config.schema_sections import DataConfig, ValidationCorpus
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.mcore.model.attention import window_mask
from spare_megatron.mcore.model.training_samples import Corpus, prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration import numpy_gpt
from tests.integration.mcore_group import CPU, run_group
from tests.integration.numpy_gpt import Arrays
from tests.integration.whole_run import assert_masked, complete_run, kill, losses_of, params_of, tiny_config

LLAMA = {
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "linear_bias": False,
    "num_query_groups": 2,
    "position_embedding": "rope",
    "rope_base": 500000.0,
    "tie_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "rope_scaling_factor": 8.0, "norm_eps": 1e-3},
    "qwen3": {**LLAMA, "qk_norm": True, "rope_base": 100.0},
    "qwen2": {**LLAMA, "qkv_bias": True, "num_query_groups": 1, "tie_embeddings": True, "sliding_window": 5},
    "gpt2": {"activation": "gelu_tanh", "norm_eps": 1e-3},
    "gpt": {"num_query_groups": 2, "sliding_window": 1, "qk_norm": True},
    "squared": {"activation": "squared_relu", "linear_bias": False},
    "geglu": {"activation": "geglu", "normalization": "rmsnorm"},
    "mixture": {**LLAMA, "num_experts": 5, "experts_per_token": 3, "expert_ffn_hidden_size": 20},
    "shared": {
        "linear_bias": False,
        "num_experts": 3,
        "shared_expert_ffn_hidden_size": 28,
        "num_dense_layers": 1,
        "num_layers": 3,
    },
}


def config_of(corpus: Path, **model: Any) -> RunConfig:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "seq_length": 24}
    config = RunConfig(
        model=ModelConfig(**{**shape, "vocab_size": 260, **model}),
        layout=LayoutConfig(num_groups=1),
        data=DataConfig(corpus=str(corpus)),
    )
    prepare_index(config)
    return config


def computed(_first: RunConfig, configs: list[RunConfig]) -> list[tuple[int, Arrays, Arrays, np.ndarray, np.ndarray]]:
    """Of each model: parameters counted, their values, a batch, its losses, and the pairs' radians per position."""
    answers = []
    for config in configs:
        (chunk,) = GroupTrainer(config, CPU).chunks
        named = {name.removeprefix("module."): value for name, value in chunk.module.named_parameters()}
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for value in named.values():  # norms and biases, too, and padding that weighs as much as a token
                value += 0.2 * torch.randn(value.shape, generator=generator)
            batch = Corpus(config).microbatch(0, 0)
            losses = chunk.module(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        rotation = getattr(chunk.module.module, "rotary_pos_emb", None)
        answers.append(
            (
                sum(value.numel() for value in named.values()),
                {name: value.detach().numpy() for name, value in named.items()},
                {name: batch[name].numpy() for name in ("tokens", "labels")},
                losses.numpy(),
                np.array([]) if rotation is None else rotation.inv_freq.numpy(),
            )
        )
    return answers


def test_each_model_computes_what_its_settings_say(text_corpus: Path) -> None:
    configs = [config_of(text_corpus, **model) for model in MODELS.values()]
    (answers,) = run_group(computed, configs[0], configs)
    for name, config, (count, values, batch, losses, radians) in zip(MODELS, configs, answers, strict=True):
        expected = numpy_gpt.token_losses(config.model, values, batch["tokens"], batch["labels"])
        np.testing.assert_allclose(losses, expected, rtol=2e-5, err_msg=name)
        assert model_shape(config).num_parameters == count, name
        if config.model.position_embedding == "rope":
            np.testing.assert_allclose(radians, numpy_gpt.inverse_wavelengths(config.model, 8), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("model", [{}, {"num_query_groups": 2, "sliding_window": 5, "position_embedding": "rope"}])
def test_heads_may_attend_to_nothing(text_corpus: Path, model: dict[str, Any]) -> None:
    """By a learned offset, and by one of 0; also in windows of some layers, whose heads share keys."""
    plain = config_of(text_corpus, **model)
    windows = {"window_attn_skip_freq": [1, 0]} if model else {}
    configs = [replace(plain, megatron={"softmax_type": kind, **windows}) for kind in ("learnable", "off-by-one")]
    (answers,) = run_group(computed, plain, configs)
    for config, (count, values, batch, losses, _) in zip(configs, answers, strict=True):
        name = "decoder.layers.{}.self_attention.core_attention.softmax_offset"
        offsets = {name.format(layer): np.zeros(4) for layer in range(2)}
        learned = {key: values[key] for key in offsets if key in values}
        assert len(learned) == (2 if config.megatron["softmax_type"] == "learnable" else 0)
        assert all(values.any() for values in learned.values())
        given = (batch["tokens"], batch["labels"], (1, 0) if model else ())
        expected = numpy_gpt.token_losses(config.model, {**values, **offsets, **learned}, *given)
        np.testing.assert_allclose(losses, expected, rtol=2e-5)
        assert model_shape(config).num_parameters == count
        without = numpy_gpt.token_losses(config.model, values, *given) if not learned else 0.0
        assert not np.allclose(losses, without, rtol=1e-3)


def test_a_part_of_each_head_is_rotated(text_corpus: Path) -> None:
    plain = config_of(text_corpus, **MODELS["llama"])
    configs = [replace(plain, megatron={"rotary_percent": part}) for part in (0.25, 0.5)]
    (answers,) = run_group(computed, plain, configs)
    for part, (_, values, batch, losses, _) in zip((0.25, 0.5), answers, strict=True):
        given = (values, batch["tokens"], batch["labels"])
        expected = numpy_gpt.token_losses(plain.model, *given, part_rotated=part)
        np.testing.assert_allclose(losses, expected, rtol=2e-5)
        assert not np.allclose(losses, numpy_gpt.token_losses(plain.model, *given), rtol=1e-3)


def test_windows_of_some_layers(text_corpus: Path) -> None:
    """Given by number, the second of three has none; given as a list, the others."""
    patterns = {2: (1, 0, 1), (0, 1, 0): (0, 1, 0)}
    plain = config_of(text_corpus, num_layers=3, sliding_window=5, position_embedding="rope")
    fields: list[Any] = [list(field) if isinstance(field, tuple) else field for field in patterns]
    configs = [replace(plain, megatron={"window_attn_skip_freq": field}) for field in fields]
    (answers,) = run_group(computed, plain, configs)
    for windows, (_, values, batch, losses, _) in zip(patterns.values(), answers, strict=True):
        expected = numpy_gpt.token_losses(plain.model, values, batch["tokens"], batch["labels"], windows)
        np.testing.assert_allclose(losses, expected, rtol=2e-5)


@pytest.mark.parametrize(("length", "num_before"), [(7, 0), (7, 2), (6, 5), (6, 9), (1, 0)])
def test_the_window_mask_is_that_of_every_pair(length: int, num_before: int) -> None:
    pairs = [[0 <= query - key <= num_before for key in range(length)] for query in range(length)]
    assert window_mask(length, length, num_before, CPU).tolist() == pairs


def test_a_llama_ends_with_the_bits_of_the_run_without_failures(text_corpus: Path, tmp_path: Path) -> None:
    """Two stages, a padded vocabulary, a window, and documents apart in attention and loss, in reproducible mode."""
    layout = LayoutConfig(num_groups=3, pipeline_parallel=2)
    model = {**LLAMA, "num_query_groups": 1, "qk_norm": True, "sliding_window": 9, "vocab_size": 300}
    faults = [kill("backward", 1, 1), kill("in_reduce", 2, 2, 1)]
    data = {"eod_mask_loss": True, "reset_attention_mask": True, "end_of_document": ord("\n")}
    data["validation"] = (ValidationCorpus(name="same", corpus=str(text_corpus)),)
    runs = []
    for given in ([], faults):
        config = tiny_config(text_corpus, layout, mode="reproducible", faults=given, hidden_dropout=0.1, **model)
        config = replace(config, data=replace(config.data, **data))
        runs.append(complete_run(config, tmp_path / str(len(given))))
    for run in runs:
        assert_masked(run)
    whole, masked = runs
    (record,) = masked.journal.of(RunRecord)
    assert record.validation == f"same: {record.corpus}"
    assert record.masks == "data.eod_mask_loss=True, data.reset_attention_mask=True, data.end_of_document=10"
    assert losses_of(masked.journal) == losses_of(whole.journal)
    assert params_of(masked) == params_of(whole)
    assert masked.summary.params_sha256 == whole.summary.params_sha256
