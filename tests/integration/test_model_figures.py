"""Norms by layer, of the parameters, and loads of experts, against one process that holds the full model."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spare_megatron.config.schema import LayoutConfig, MetricsConfig, OptimizerConfig, RunConfig
from spare_megatron.devices import gpu
from spare_megatron.journal.step_values import model_figures
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import expert_group
from tests.integration import mcore_group as group
from tests.integration.mcore_group import Arrays, all_work, run_group
from tests.integration.step_values_group import figures_of
from tests.integration.test_experts import config_of, with_all_experts
from tests.integration.test_mcore_gradients import only_rank, whole_model
from tests.integration.whole_run import tiny_config

pytestmark = pytest.mark.timeout(120)

STACKED = OptimizerConfig(sharding="stacked", redundancy=2)
DENSE: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "two by two, tied": ({"tensor_parallel": 2, "pipeline_parallel": 2}, "fast", {}),
    "interleaved": ({"pipeline_parallel": 2, "virtual_pipeline": 2}, "reproducible", {"tie_embeddings": False}),
    "lanes with gradients of own strips": ({"data_parallel": 2, "pipeline_parallel": 2}, "fast", {}),
    "lanes with all gradients": ({"data_parallel": 2, "tensor_parallel": 2}, "reproducible", {}),
    "state in partitions": ({"pipeline_parallel": 2}, "reproducible", {"optimizer": STACKED}),
}
MIXTURES = {
    "two stages": {"pipeline_parallel": 2},
    "twice, divided": {"data_parallel": 4, "expert_parallel": 2},
}


def expected_norms(values: Arrays, gradients: Arrays, num_tokens: int) -> Counter[str]:
    """By metric, of the gradient's sums over so many tokens."""
    squares: Counter[str] = Counter()
    for name, gradient in gradients.items():
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        part = f"layer_{layer[1]}" if layer else re.split(r"\.", name.removeprefix("decoder."))[0]
        squares[f"train/grad_norm/{part}"] += float(np.sum((gradient.astype(np.float64) / num_tokens) ** 2))
        squares["train/params_norm"] += float(np.sum(values[name].astype(np.float64) ** 2))
    return Counter({key: math.sqrt(value) for key, value in squares.items()})


def compare(found: Mapping[str, float], expected: Mapping[str, float], norms: Sequence[float]) -> None:
    of_gradient = {key: value for key, value in found.items() if key.startswith("train/grad_norm/")}
    assert math.hypot(*of_gradient.values()) == pytest.approx(norms[0], rel=1e-5)
    assert len(set(norms)) == 1
    assert found == {key: pytest.approx(value, rel=2e-5) for key, value in expected.items()}


@pytest.mark.parametrize(("layout", "mode", "model"), DENSE.values(), ids=DENSE)
def test_norms_are_those_of_the_full_model(
    text_corpus: Path, layout: dict[str, int], mode: str, model: dict[str, Any]
) -> None:
    settings = {"num_layers": 4, "num_microbatches": 4, "mode": mode, **model}
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2, **layout), **settings)
    prepare_index(config)
    ranks = run_group(figures_of, config)
    values, _ = whole_model([rank[:2] for rank in ranks], config)
    work = all_work(config)
    alone = only_rank(replace(config, optimizer=OptimizerConfig()))
    [(_, gradients)] = run_group(group.reference_sums, alone, values, work)
    num_tokens = len(work) * config.model.seq_length
    found = model_figures(rank[2] for rank in ranks)
    compare(found, expected_norms(values, gradients, num_tokens), [rank[3] for rank in ranks])
    assert {f"train/grad_norm/layer_{layer}" for layer in range(4)} <= found.keys()


@pytest.mark.parametrize("layout", MIXTURES.values(), ids=MIXTURES)
def test_experts_count_once_in_norms_and_their_loads_are_those_of_all_tokens(
    text_corpus: Path, layout: dict[str, int]
) -> None:
    plain = config_of(text_corpus, layout)
    config = replace(plain, megatron={"moe_router_score_function": "sigmoid"})
    ranks = run_group(figures_of, config)
    values, _ = whole_model(with_all_experts([rank[:2] for rank in ranks], config), config)
    alone = replace(only_rank(config), layout=LayoutConfig(num_groups=2))
    numbers = range(2 * 4)
    [(_, gradients)] = run_group(expert_group.reference_sums, alone, "aux_loss", values, numbers, (0.0, 0.0))
    start = {layer: np.zeros(4, np.float32) for layer in range(1, 5)}
    [chosen] = run_group(expert_group.chosen_experts, only_rank(plain), values, numbers, start)
    loads = {f"train/expert_load/layer_{layer - 1}": of.max() / of.mean() for layer, of in chosen.items()}
    num_tokens = len(numbers) * config.train.micro_batch_size * config.model.seq_length
    expected = {**expected_norms(values, gradients, num_tokens), **loads}
    compare(model_figures(rank[2] for rank in ranks), expected, [rank[3] for rank in ranks])
    assert all(load > 1.0 for load in loads.values())


def test_memory_of_a_gpu_is_what_torchs_allocator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: no GPU is needed."""
    stats = {"allocated_bytes.all.current": 3, "reserved_bytes.all.current": 8, "allocated_bytes.all.peak": 5}
    monkeypatch.setattr(gpu, "memory_stats", lambda _: stats)
    rank: Any = SimpleNamespace(_device=torch.device("cuda"))
    assert group.GroupTrainer.memory(rank) == (3, 8, 5)


def test_steps_between_have_no_figures(text_corpus: Path) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=5)
    prepare_index(config)
    for every, steps in ((2, [0, 2, 4]), (0, [])):
        changed = replace(config, metrics=MetricsConfig(model_every_steps=every))
        (found,) = run_group(steps_with_figures, changed)
        assert found == steps


def steps_with_figures(config: RunConfig) -> list[int]:
    trainer = group.GroupTrainer(config, group.CPU)
    found = []
    for step in range(config.train.steps):
        group._whole_step(trainer, config, step)
        if trainer.update(group.agreed_loss(trainer)).figures is not None:
            found.append(step)
    return found
