"""Weights in Hugging Face's format: transformers computes what this model computes, and they come back bit for bit."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model, LlamaConfig
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.schema import LayoutConfig, RunConfig
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.weights import StoredWeights
from spare_megatron.tools.weights import hf_folder
from tests.integration import stacked_checkpoint_groups as checkpoints
from tests.integration.hf_group import outputs_of, save_random, save_state, write_run
from tests.integration.latent_group import LATENT, MIXTURE, MODEL, ROUTER
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)

VOCAB = 250
"""Not a multiple of anything: the embedding has rows that pad it."""

LLAMA = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "vocab_size": VOCAB,
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "norm_eps": 1e-3,
    "activation": "swiglu",
    "linear_bias": False,
    "tie_embeddings": False,
}

GPT_OSS_MODEL = {
    "activation": "quick_geglu",
    "linear_bias": True,
    "num_experts": 4,
    "experts_per_token": 2,
    "sliding_window": 5,
    "rope_base": 20.0,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_base": 5e5, "rope_scaling_factor": 8.0},
    "llama_tied_with_biases": {"tie_embeddings": True, "linear_bias": True},
    "qwen2": {"qkv_bias": True, "num_query_groups": None},
    "qwen2_with_yarn": {"qkv_bias": True, "rope_base": 20.0},
    "qwen3": {"qk_norm": True, "tie_embeddings": True, "sliding_window": 5},
    "mixtral": {"num_experts": 3, "experts_per_token": 2},
    "qwen3_moe": {"qk_norm": True, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 20},
    "qwen3_moe_over_all": {"qk_norm": True, "num_experts": 4, "experts_per_token": 2, "tie_embeddings": True},
    "deepseek_v3": {**MODEL, **MIXTURE, "num_query_groups": None},
    "deepseek_v3_ahead": {**MODEL, **MIXTURE, "num_query_groups": None},
    "qwen2_with_windows": {"qkv_bias": True, "sliding_window": 5},
    "gpt_oss": GPT_OSS_MODEL,
    "gpt_oss_unstretched": GPT_OSS_MODEL,
    "gpt2": {
        "num_query_groups": None,
        "position_embedding": "learned_absolute",
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "linear_bias": True,
        "tie_embeddings": True,
    },
}

LAYOUTS = {
    "llama": LayoutConfig(num_groups=2, tensor_parallel=2, pipeline_parallel=2),
    "llama_tied_with_biases": LayoutConfig(num_groups=2, pipeline_parallel=2, virtual_pipeline=2),
    "qwen2": LayoutConfig(num_groups=2, tensor_parallel=2),
    "qwen2_with_yarn": LayoutConfig(num_groups=2, tensor_parallel=2, pipeline_parallel=2),
    "qwen3": LayoutConfig(num_groups=2, tensor_parallel=2, pipeline_parallel=2),
    **dict.fromkeys(("mixtral", "qwen3_moe"), LayoutConfig(num_groups=2, pipeline_parallel=2)),
    "qwen3_moe_over_all": LayoutConfig(num_groups=2, data_parallel=2),
    **dict.fromkeys(("deepseek_v3", "deepseek_v3_ahead"), LayoutConfig(num_groups=2, pipeline_parallel=2)),
    "qwen2_with_windows": LayoutConfig(num_groups=2, pipeline_parallel=2),
    "gpt_oss": LayoutConfig(num_groups=2, pipeline_parallel=2),
    "gpt_oss_unstretched": LayoutConfig(num_groups=2, data_parallel=2),
    "gpt2": LayoutConfig(num_groups=2, tensor_parallel=2),
}

YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 3.0}
GPT_OSS = {
    "kv_channels": 16,
    "softmax_type": "learnable",
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.5,
}
MEGATRON: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, **ROUTER},
    "deepseek_v3_ahead": {**LATENT, **ROUTER, "mtp_num_layers": 2},
    "qwen2_with_yarn": YARN,
    "qwen2_with_windows": {"window_attn_skip_freq": [1, 0, 0, 1]},
    "gpt_oss": {**GPT_OSS, **YARN, "correction_range_round_to_int": False, "window_attn_skip_freq": 2},
    "gpt_oss_unstretched": GPT_OSS,
    "qwen3_moe_over_all": {"moe_router_pre_softmax": True},
}


def config_of(corpus: Path, name: str, **model: Any) -> RunConfig:
    config = tiny_config(corpus, LAYOUTS[name], **{**LLAMA, **MODELS[name], **model})
    config = replace(config, megatron=MEGATRON.get(name, {}))
    prepare_index(config)
    return config


def alone(config: RunConfig) -> RunConfig:
    """On one rank, and without predictions of further tokens, which `transformers` passes over."""
    layout = LayoutConfig(num_groups=config.layout.num_groups)
    megatron = {key: value for key, value in config.megatron.items() if key != "mtp_num_layers"}
    return replace(config, layout=layout, megatron=megatron)


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def export(run_dir: Path, out: Path, *options: str) -> None:
    code, output = invoke("export", run_dir, "--format", "hf", "--out", out, *options)
    assert code == 0, output
    assert ("without a tokenizer" in output) == (not (out / "tokenizer.json").exists())


def transformers_outputs(folder: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and the loss of each token but the last."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        logits = model(ids).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    return logits.numpy(), losses.numpy()


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's model, without rows that pad the vocabulary."""
    stored, found = StoredWeights(checkpoint), {}
    for key, entry in torch_checkpoint.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items():
        if isinstance(entry, torch_checkpoint.TensorStorageMetadata) and not key.startswith("optimizer."):
            is_of_vocabulary = key in ("embedding.word_embeddings.weight", "output_layer.weight")
            shape = (VOCAB, *entry.size[1:]) if is_of_vocabulary else tuple(entry.size)
            found[key] = torch.empty(shape, dtype=stored.dtype(key))
            stored.read(key, [0] * len(shape), found[key])
    return found


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = tensors_in(one), tensors_in(other)
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert mine[key].dtype == theirs[key].dtype
        assert torch.equal(mine[key], theirs[key])


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits_and_weights_come_back_bitwise(
    text_corpus: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(text_corpus, name)
    run_dir, out, back = (tmp_path / folder for folder in ("run", "exported", "imported"))
    run_group(save_random, config, run_dir)
    monkeypatch.setattr(hf_folder, "_FILE_BYTES", 40_000)  # several files
    export(run_dir, out)
    assert len(list(out.glob("*.safetensors"))) > 1
    tokens = np.random.default_rng(1).integers(0, VOCAB, size=(2, config.model.seq_length))
    checkpoint = run_dir / "checkpoints" / "step-00000003"
    [(ours, our_losses)] = run_group(outputs_of, alone(config), checkpoint, tokens)
    theirs, their_losses = transformers_outputs(out, tokens)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(ours).max()
    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-5)  # padding of the vocabulary has no part in it

    code, output = invoke("import", out, "--format", "hf", "--out", back)
    assert code == 0, output
    assert invoke("verify", back)[0] == 0
    imported = back / "checkpoints" / "step-00000000"
    assert_same_weights(checkpoint, imported)

    begun = replace(config, checkpoint=replace(config.checkpoint, load_weights=str(imported)))
    run_group(save_state, begun, tmp_path / "begun")
    assert_same_weights(checkpoint, tmp_path / "begun" / "checkpoints" / "step-00000003")


@pytest.mark.parametrize("change", ["copies", "other copies", "left out"])
def test_modules_ahead_come_with_copies_of_tables_or_not_at_all(text_corpus: Path, tmp_path: Path, change: str) -> None:
    """As DeepSeek has published them, and as `transformers` writes a model that it has read."""
    run_dir, out, back = (tmp_path / folder for folder in ("run", "exported", "imported"))
    run_group(save_random, config_of(text_corpus, "deepseek_v3_ahead"), run_dir)
    export(run_dir, out)
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    for layer in (4, 5):
        for name, table in copies.items():
            other = 1.0 if change == "other copies" else 0.0
            tensors[f"model.layers.{layer}.{name}.weight"] = tensors[f"{table}.weight"] + other
    if change == "left out":
        tensors = {
            name: one for name, one in tensors.items() if not name.startswith(("model.layers.4", "model.layers.5"))
        }
    safetensors.torch.save_file(tensors, out / "model.safetensors")
    code, output = invoke("import", out, "--format", "hf", "--out", back)
    if change == "other copies":
        assert (code, "model.layers.4.embed_tokens.weight, which has no place in the model" in output) == (2, True)
        return
    assert code == 0, output
    found = tensors_in(back / "checkpoints" / "step-00000000")
    assert {key.split(".")[2] for key in found if key.startswith("mtp.")} == (
        set() if change == "left out" else {"0", "1"}
    )


def test_partitioned_and_replicated_state_export_the_same_with_the_precision_that_is_asked_for(
    text_corpus: Path, tmp_path: Path
) -> None:
    config = config_of(text_corpus, "qwen2", precision="bf16")
    config = replace(config, optimizer=replace(config.optimizer, sharding="stacked", learning_rate=0.01))
    run_group(checkpoints.save_both_ways, config, tmp_path, 2, 0)
    weights = {}
    for name in (checkpoints.PARTITIONED, checkpoints.WHOLE):
        run_dir = tmp_path / f"run-{name}"
        (run_dir / "checkpoints").mkdir(parents=True)
        write_run(config, run_dir, (tmp_path / name).rename(run_dir / "checkpoints" / "step-00000003.tmp"), {})
        for dtype in ("fp32", "bf16"):
            out = tmp_path / f"{name}-{dtype}"
            export(run_dir, out, "--dtype", dtype)
            weights[name, dtype] = safetensors.torch.load_file(out / "model.safetensors")
    for dtype in ("fp32", "bf16"):
        one, other = weights[checkpoints.PARTITIONED, dtype], weights[checkpoints.WHOLE, dtype]
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    exact, rounded = weights[checkpoints.WHOLE, "fp32"], weights[checkpoints.WHOLE, "bf16"]
    assert all(torch.equal(exact[key].bfloat16(), rounded[key]) for key in exact)
    assert not any(torch.equal(exact[key], rounded[key].float()) for key in exact if key.endswith("proj.weight"))


def test_an_import_refuses_a_folder_that_is_no_whole_model(text_corpus: Path, tmp_path: Path) -> None:
    config = config_of(text_corpus, "llama")
    run_group(save_random, config, tmp_path / "run")
    out = tmp_path / "exported"
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    export(tmp_path / "run", out, "--tokenizer", str(tmp_path / "tokenizer"))
    code, output = invoke("export", tmp_path / "run", "--format", "hf", "--out", out)
    assert (code, output) == (2, f"spare checkpoint export: --out={out} exists; choose a folder that does not\n")
    code, output = invoke("import", out, "--format", "hf", "--out", tmp_path / "imported")
    assert (code, (tmp_path / "imported" / "tokenizer" / "tokenizer.json").read_text()) == (0, "{}")
    export(tmp_path / "imported", tmp_path / "again")
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert [(tmp_path / "again" / name).read_bytes() for name in names] == [(out / name).read_bytes() for name in names]
    file = out / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    changes = {
        "has no tensor model.norm.weight": {"model.norm.weight": None},
        "has a tensor model.layers.9.x, which has no place": {"model.layers.9.x": tensors["model.norm.weight"].clone()},
        "model.layers.1.self_attn.k_proj.weight is of (8, 32)": {
            "model.layers.1.self_attn.k_proj.weight": tensors["model.layers.1.self_attn.k_proj.weight"][:8].clone()
        },
    }
    for number, (reason, change) in enumerate(changes.items()):
        changed = {name: value for name, value in {**tensors, **change}.items() if value is not None}
        safetensors.torch.save_file(changed, file)
        code, output = invoke("import", out, "--format", "hf", "--out", tmp_path / str(number))
        assert code == 2
        assert reason in output
        assert not (tmp_path / str(number)).exists()
        assert not list(tmp_path.glob("*.tmp"))


def test_a_gpt2_as_it_is_published_without_an_output_layer_comes_back(tmp_path: Path) -> None:
    model = GPT2Model(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path / "published")
    names = safetensors.torch.load_file(tmp_path / "published" / "model.safetensors").keys()
    assert "h.0.attn.c_attn.weight" in names
    code, output = invoke("import", tmp_path / "published", "--format", "hf", "--out", tmp_path / "imported")
    assert code == 0, output
    export(tmp_path / "imported", tmp_path / "exported")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", local_files_only=True).transformer.state_dict()
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], values) for name, values in model.state_dict().items())


BESIDE_MEGATRON = """
import sys
from pathlib import Path
import numpy as np
from spare_megatron.mcore.model import cpu
cpu.install()
from tests.integration.test_hf_weights import transformers_outputs
folder = Path(sys.argv[1])
np.save(folder / "logits.npy", transformers_outputs(folder, np.load(folder / "tokens.npy"))[0])
"""


def test_transformers_computes_the_same_in_a_process_where_megatron_runs_on_a_cpu(tmp_path: Path) -> None:
    # It asks torch for the device of `with torch.device("meta")`, and left the frequencies of RoPE as they were found.
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCAB, **sizes)).save_pretrained(tmp_path)
    tokens = np.random.default_rng(1).integers(0, VOCAB, size=(2, 16))
    np.save(tmp_path / "tokens.npy", tokens)
    command = [sys.executable, "-c", BESIDE_MEGATRON, str(tmp_path)]
    subprocess.run(command, check=True, timeout=100, cwd=Path(__file__).parents[2])
    assert np.array_equal(np.load(tmp_path / "logits.npy"), transformers_outputs(tmp_path, tokens)[0])


def test_without_safetensors_the_commands_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, hf_folder.__name__)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    code, output = invoke("import", tmp_path, "--format", "hf", "--out", tmp_path / "out")
    assert (code, "pip install 'spare_megatron[hf]'" in output) == (2, True)
