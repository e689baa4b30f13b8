"""Every preset that comes with the package can be used as it is."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.cli.running import plan_of
from spare_megatron.config import loader
from spare_megatron.config.checks.validate import MachineResources, on_device, problems, resolve_device, warnings
from spare_megatron.config.loader import ConfigError, load_run_config
from spare_megatron.config.training.run_sizes import rank_memory
from spare_megatron.driver.planned_faults import draw_faults, resolve_trace
from tests.search_path import with_checkout

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(CONFIGS.rglob("*.toml"))
RUNS = sorted(CONFIGS.glob("run/*.toml"))


def test_presets_lie_in_the_three_folders() -> None:
    assert PRESETS
    assert {path.parent.name for path in PRESETS} == {"model", "cluster", "run"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_preset_loads(preset: Path) -> None:
    assert load_run_config(preset).provenance


@pytest.mark.parametrize("preset", RUNS, ids=lambda path: path.name)
def test_run_preset_is_valid_and_its_faults_can_be_drawn(preset: Path) -> None:
    config = load_run_config(preset).config
    num_ranks = config.parallel.num_ranks
    has_everything = MachineResources(num_gpus=num_ranks, num_cores=num_ranks, has_corpus=True, can_isolate=True)
    assert problems(config, has_everything) == []
    assert len(resolve_trace(config)) == len(config.faults.trace)


@pytest.mark.parametrize("preset", RUNS, ids=lambda path: path.name)
def test_a_run_preset_raises_no_warnings_even_on_a_machine_with_one_core(preset: Path) -> None:
    """The demo began with two warnings about itself."""
    config = load_run_config(preset).config
    machine = MachineResources(num_gpus=config.parallel.num_ranks, num_cores=1, has_corpus=True, can_isolate=True)
    assert resolve_device(config, machine) == config.cluster.device
    assert warnings(config, machine) == []


@pytest.mark.parametrize("preset", [path for path in RUNS if "cpu" not in path.stem], ids=lambda path: path.name)
def test_a_preset_for_gpus_fills_whole_nodes_of_eight_and_fits_into_80_gb(preset: Path) -> None:
    config = load_run_config(preset).config
    num_ranks, num_nodes = config.parallel.num_ranks, config.cluster.num_nodes
    assert num_ranks == 8 * num_nodes
    machine = MachineResources(num_gpus=num_ranks, num_cores=num_ranks, has_corpus=True)
    assert rank_memory(on_device(config, machine)).total_bytes < 0.9 * 80e9


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama3_70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama3p2_1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "qwen3_8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "mixtral_8x7b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "vocab_size": 32000, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Values of the published config.json of each model."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_shape_of_their_published_configuration(name: str) -> None:
    model = load_run_config(Path(name)).config.model
    assert PUBLISHED[name] == {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "rope_theta": model.rope_base,
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
    }
    assert (model.num_query_groups, model.activation, model.normalization) == (8, "swiglu", "rmsnorm")
    assert (model.position_embedding, model.linear_bias, model.qkv_bias) == ("rope", False, False)
    assert (model.num_experts, model.experts_per_token) == (8 if name == "mixtral_8x7b" else None, 2)
    assert model.qk_norm == name.startswith("qwen3")
    assert model.rope_scaling_factor == (32.0 if name == "llama3p2_1b" else 1.0)


def test_the_campaigns_draw_what_they_are_for() -> None:
    nodes, llama3 = (load_run_config(CONFIGS / f"run/campaign_{name}_cpu.toml").config for name in ("nodes", "llama3"))
    nodes, llama3 = (replace(config, train=replace(config.train, steps=5000)) for config in (nodes, llama3))
    early = [fault for fault in draw_faults(nodes) if fault.step < 1200]
    assert {"cut", "stop_node", "kill_supervisor"} <= {fault.kind for fault in early}
    assert {"patch", "rebuild"} <= {fault.phase for fault in early}
    missed_s = 2 * nodes.control.heartbeat_interval_s
    assert any(fault.kind in ("cut", "stop_node") and (fault.seconds or 0.0) > missed_s for fault in early)
    drawn = [fault for fault in draw_faults(llama3) if fault.step < 3000]
    pairs = Counter((fault.step, fault.phase, fault.kind, fault.group // 2) for fault in drawn)
    assert 2 in pairs.values(), "whole domains"
    assert Counter(fault.kind for fault in drawn).most_common(1)[0][0] in ("raise", "kill", "hang")


def test_the_demo_kills_two_groups_in_different_phases_of_different_steps() -> None:
    first, second = resolve_trace(load_run_config(CONFIGS / "run/demo_cpu.toml").config)
    assert (first.phase, second.phase) == ("backward", "in_reduce")
    assert (first.kind, second.kind) == ("kill", "kill")
    assert first.group != second.group
    assert first.step < second.step


def test_a_run_begins_with_what_it_is_going_to_show() -> None:
    assert plan_of(load_run_config(CONFIGS / "run/demo_cpu.toml").config) == (
        "demo_cpu, 60 steps in 4 groups of 2 ranks; faults to inject: kill of group 3 rank 0 in step 15, backward; "
        "kill of group 1 rank 1 in step 30, in_reduce"
    )
    healthy = plan_of(load_run_config(CONFIGS / "run/gpt_125m_node.toml").config)
    assert healthy == "gpt_125m_node, 20000 steps in 8 groups of 1 rank"
    campaign = plan_of(load_run_config(CONFIGS / "run/campaign_kills_cpu.toml").config)
    assert re.search(r"; and \d+ more$", campaign)


# ------------------------------------------------------------------------------------------------------------ by name


def test_the_checkout_has_the_presets_of_the_package() -> None:
    assert CONFIGS.samefile(loader.FOLDER)


def test_every_preset_has_a_name_of_its_own_and_says_what_it_is() -> None:
    assert sorted(loader.shipped_presets().values()) == sorted(loader.FOLDER.rglob("*.toml"))
    assert [name for name, file in loader.shipped_presets().items() if not loader.description(file)] == []


@pytest.mark.parametrize("name", ["demo_cpu", "gpt_7b"])
def test_a_name_is_as_good_as_the_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = (path for path in PRESETS if path.stem == name)
    monkeypatch.chdir(tmp_path)
    assert load_run_config(Path(name)).config == load_run_config(path).config
    (tmp_path / name).mkdir()
    assert load_run_config(Path(name)).config == load_run_config(path).config, "a run's directory may have the name"


def test_a_file_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_cpu").write_text("name = 'mine'")
    assert load_run_config(Path("demo_cpu")).config.name == "mine"


def test_presets_of_your_own_include_by_name(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('include = ["gpt_1p3b", "gpu_node"]\nname = "mine"')
    loaded = load_run_config(mine)
    assert (loaded.config.model.hidden_size, loaded.config.cluster.device) == (2048, "gpu")
    assert Path(loaded.provenance["model.hidden_size"]).samefile(CONFIGS / "model/gpt_1p3b.toml")


def test_a_cluster_goes_by_name(tmp_path: Path) -> None:
    assert load_run_config(Path("demo_cpu"), cluster=Path("cpu_nodes")).config.cluster.num_nodes == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo_gpu", r"no preset is named demo_gpu; did you mean .*demo_cpu.*\? `spare config list` lists all"),
        ("gpt_1b", r"did you mean .*gpt_1p3b"),
        ("zzz", r"no preset is named zzz; `spare config list` lists the presets that ship"),
        ("configs/run/demo_cpu.toml", r"No such file or directory; a preset named demo_cpu ships with the package"),
        ("demo_cpus.toml", r"cannot read the preset demo_cpus.toml: No such file or directory$"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_ones(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_run_config(Path(name))
    mine = tmp_path / "mine.toml"
    mine.write_text(f'include = ["{name}"]')
    with pytest.raises(ConfigError, match=r"included from .*mine.toml"):
        load_run_config(mine)


def test_the_package_alone_has_all_that_a_name_needs(tmp_path: Path) -> None:
    """A wheel holds this folder and nothing else of the checkout."""
    shutil.copytree(loader.FOLDER.parent, tmp_path / "spare_megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "spare_megatron", "config", "show", "llama3_8b_h100", "--json"],
        env=os.environ | {"PYTHONPATH": with_checkout(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=True,
    )
    hidden_size = json.loads(shown.stdout)["settings"]["model.hidden_size"]
    assert hidden_size == {"value": 4096, "origin": str(tmp_path / "spare_megatron/configs/model/llama3_8b.toml")}
