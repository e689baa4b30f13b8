"""Weights in Megatron-LM's format: Megatron's own classes compute what this model computes, in both directions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.tools.weights.megatron_args import args_of
from tests.integration import megatron_group
from tests.integration.hf_group import outputs_of, save_random, save_state
from tests.integration.mcore_group import run_group, run_ranks
from tests.integration.test_hf_weights import alone, assert_same_weights, invoke
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)

VOCAB = 250

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu_tanh", "norm_eps": 1e-3, "tie_embeddings": True},
    "qwen3": {
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "position_embedding": "rope",
        "rope_base": 5e5,
        "rope_scaling_factor": 8.0,
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "linear_bias": False,
        "qk_norm": True,
        "tie_embeddings": False,
    },
}

FLAGS = {"gpt2": ["--norm-epsilon=0.001"], "qwen3": ["--qk-layernorm", "--use-rope-scaling"]}

LAYOUT = LayoutConfig(num_groups=2, tensor_parallel=2, pipeline_parallel=2)


def config_of(corpus: Path, name: str) -> RunConfig:
    config = tiny_config(corpus, LAYOUT, num_layers=4, vocab_size=VOCAB, **MODELS[name])
    prepare_index(config)
    return config


def tokens_of(config: RunConfig) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, size=(2, config.model.seq_length))


def export(run_dir: Path, out: Path, *options: str) -> str:
    code, output = invoke("export", run_dir, "--format", "megatron", "--out", out, *options)
    assert code == 0, output
    return output


def import_(folder: Path, out: Path) -> Path:
    code, output = invoke("import", folder, "--format", "megatron", "--out", out)
    assert code == 0, output
    assert invoke("verify", out)[0] == 0
    return out / "checkpoints" / "step-00000000"


def assert_equal_outputs(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 5e-6 * np.abs(ours).max()  # attention has other kernels


@pytest.mark.parametrize("name", MODELS)
def test_megatron_computes_the_same_logits_from_an_export_and_weights_come_back_bitwise(
    text_corpus: Path, tmp_path: Path, name: str
) -> None:
    config, checkpoint = config_of(text_corpus, name), tmp_path / "run" / "checkpoints" / "step-00000003"
    run_group(save_random, config, tmp_path / "run")
    printed = export(tmp_path / "run", tmp_path / "stacked")
    assert (
        " ".join(["--load", str(tmp_path / "stacked"), "--use-checkpoint-args", "--finetune", *FLAGS[name]]) in printed
    )
    export(tmp_path / "run", tmp_path / "per_layer", "--per-layer")
    tokens = tokens_of(config)
    folders = [tmp_path / "stacked", tmp_path / "per_layer"]
    [theirs] = run_ranks(1, megatron_group.outputs, config, folders, tokens, {})
    [[padded]] = run_ranks(1, megatron_group.outputs, config, folders[:1], tokens, {"padded_vocab_size": 384})
    [(ours, _)] = run_group(outputs_of, alone(config), checkpoint, tokens)
    for logits in (*theirs, padded[..., :VOCAB]):
        assert_equal_outputs(ours, logits)
    assert not padded[..., VOCAB:].any(), "rows that pad are zero"
    for folder in folders:
        assert_same_weights(checkpoint, import_(folder, tmp_path / f"{folder.name}_back"))


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_megatron_at_any_layout_becomes_weights_with_the_same_logits(
    text_corpus: Path, tmp_path: Path, name: str
) -> None:
    config = config_of(text_corpus, name)
    args = {**args_of(config), "padded_vocab_size": 256}
    folders = {
        tmp_path / "stacked": {"singleton_local_shards": False},
        tmp_path / "per_layer": {"singleton_local_shards": True},
    }
    run_ranks(4, megatron_group.save, config, args, (2, 2), folders)
    tokens = tokens_of(config)
    [[theirs, _]] = run_ranks(1, megatron_group.outputs, config, list(folders), tokens, {})
    stacked, per_layer = (import_(folder, tmp_path / f"{folder.name}_imported") for folder in folders)
    assert_same_weights(stacked, per_layer)
    imported = load_run_config(tmp_path / "stacked_imported" / "config.toml").config.model
    assert imported == replace(config.model, vocab_size=256, ffn_hidden_size=imported.ffn_hidden_size)
    begun = replace(config, model=imported, checkpoint=replace(config.checkpoint, load_weights=str(stacked)))
    prepare_index(begun)
    run_group(save_state, begun, tmp_path / "begun")
    checkpoint = tmp_path / "begun" / "checkpoints" / "step-00000003"
    assert_same_weights(stacked, checkpoint)
    [(ours, _)] = run_group(outputs_of, alone(begun), checkpoint, tokens)
    assert_equal_outputs(ours, theirs)


def test_names_of_layers_are_no_choice_in_the_format_of_hugging_face(tmp_path: Path) -> None:
    code, output = invoke("export", tmp_path, "--format", "hf", "--out", tmp_path / "out", "--per-layer")
    assert (code, "--per-layer goes with --format megatron" in output) == (2, True)
