"""`spare bench throughput`: ours beside plain Megatron in turn, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.bench.throughput import NUM_WARMUP
from spare_megatron.cli.main import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model_shape import flops_per_token

pytestmark = pytest.mark.timeout(180)

STEPS = NUM_WARMUP + 3
PRESETS = Path(__file__).parents[2] / "configs/run"
DEMO = PRESETS / "demo_cpu.toml"
FOR_GPUS = PRESETS / "gpt_1p3b_node.toml"
SMALL = [
    "cluster.device=cpu",
    "layout.num_groups=2",
    "spare.redundancy=2",
    "spare.microbatches_per_shard=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.num_layers=2",
    "model.seq_length=16",
    "model.vocab_size=256",
    "metrics.peak_tflops=0.01",
]


def run(preset: Path, *words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "throughput", "--config", str(preset), *words])
    return result.exit_code, result.stdout, result.stderr


def test_both_train_the_same_and_the_figures_follow_from_the_steps(text_corpus: Path, tmp_path: Path) -> None:
    settings = [*SMALL, f"data.corpus={text_corpus}"]
    out = tmp_path / "figures.json"
    words = [word for setting in settings for word in ("--set", setting)]
    code, shown, told = run(FOR_GPUS, *words, "--steps", str(STEPS), "--pairs", "1", "--json", "--out", str(out))
    assert code == 0, told
    found = json.loads(shown)
    assert found == json.loads(out.read_text())
    config = load_run_config(FOR_GPUS, settings).config
    tokens = 2 * config.spare.microbatches_per_shard * config.train.micro_batch_size * 16
    for way in ("ours", "plain"):
        speed = found["speeds"][way]
        assert speed["num_steps"] == STEPS - NUM_WARMUP - 1
        assert speed["tokens_per_s"] == pytest.approx(tokens / speed["step_s"])
        assert speed["mfu"] == pytest.approx(flops_per_token(config) * tokens / speed["step_s"] / 2 / 0.01e12)
        assert speed["memory"]["host_bytes"] > 2**20
    assert found["ratio"] == found["speeds"]["ours"]["step_s"] / found["speeds"]["plain"]["step_s"]
    assert found["ratios"] == [found["ratio"]]
    split_s = found["speeds"]["ours"]["split_s"]
    assert 0 < split_s["compute"] < found["speeds"]["ours"]["step_s"]
    assert [found[name] for name in ("layers", "adam", "adam_of_plain")] == ["megatron-core", "torch", "torch"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "6"], "train.steps=6: the first 5 steps are not measured"),
        (["--set", "cluster.num_nodes=2"], "cluster.num_nodes=2"),
        (["--set", "layout.pipeline_parallel=2", "--set", "layout.virtual_pipeline=2"], "layout.virtual_pipeline=2"),
        (["--out", "/nowhere/figures.json"], "--out /nowhere/figures.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    text_corpus: Path, words: list[str], message: str
) -> None:
    code, _, told = run(DEMO, "--set", f"data.corpus={text_corpus}", *words)
    assert code == 2
    assert message in told
