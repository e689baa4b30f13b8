"""Whole runs against the training loop of Megatron itself, which the newest versions of megatron-core contain."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import convert_reduced
from spare_megatron.config.schema import LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.trainer import GroupTrainer
from tests.integration import megatron_training
from tests.integration.mcore_group import CPU, Arrays, run_group, run_ranks
from tests.integration.stacked_groups import values_by_name
from tests.integration.whole_run import Run, assert_masked, complete_run, needs_muon, tiny_config

STEPS = 20

pytestmark = pytest.mark.skipif(
    find_spec("megatron.training") is None, reason="megatron-core contains megatron.training from 0.19 on"
)

SETTINGS = OptimizerConfig(learning_rate=3e-3, min_learning_rate=1e-4, warmup_steps=5, clip_grad=0.5)
ARGUMENTS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--vocab-size", "255"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--calculate-per-token-loss"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", str(STEPS)),
    *("--lr", "3e-3", "--min-lr", "1e-4", "--lr-warmup-iters", "5", "--lr-decay-style", "cosine"),
    *("--clip-grad", "0.5", "--adam-beta2", "0.95", "--weight-decay", "0.01"),
)
CASES: dict[str, tuple[dict[str, int], dict[str, Any], tuple[str, ...]]] = {
    "dense": ({}, {}, ()),
    "tensor parallel": ({"tensor_parallel": 2}, {}, ("--tensor-model-parallel-size", "2")),
    "two stages": ({"pipeline_parallel": 2}, {}, ("--pipeline-model-parallel-size", "2")),
    "experts": (
        {},
        {"num_experts": 4, "linear_bias": False},
        (
            *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "allgather"),
            *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.02", "--disable-bias-linear"),
        ),
    ),
}
"""Layout and model of a run, and Megatron's arguments for them."""


@pytest.mark.parametrize(("layout", "model", "arguments"), CASES.values(), ids=CASES)
def test_20_steps_are_those_of_megatrons_own_loop_bit_for_bit(
    layout: dict[str, int], model: dict[str, Any], arguments: tuple[str, ...], text_corpus: Path, tmp_path: Path
) -> None:
    """Two groups with a shard each, and two data-parallel ranks of Megatron: both add two fp32 sums of the same two
    microbatches.
    """
    assert_bitwise(config_of(text_corpus, layout, model), arguments, tmp_path)


ALL_OF_MUON = replace(
    SETTINGS,
    kind="muon",
    muon_momentum=0.9,
    muon_nesterov=True,
    muon_split_qkv=False,
    muon_scale_mode="unit_rms_norm",
    muon_extra_scale_factor=0.5,
    muon_num_ns_steps=4,
    muon_coefficient_type="polar_express",
    muon_fp32_matmul_prec="high",
)
MUON_CASES: dict[str, tuple[str, OptimizerConfig, tuple[str, ...]]] = {
    "all settings": (
        "dense",
        ALL_OF_MUON,
        (
            *("--muon-momentum", "0.9", "--muon-nesterov", "--muon-no-split-qkv", "--muon-scale-mode", "unit_rms_norm"),
            *("--muon-extra-scale-factor", "0.5", "--muon-num-ns-steps", "4", "--muon-fp32-matmul-prec", "high"),
            *("--muon-coefficient-type", "polar_express"),
        ),
    ),
    "tensor parallel": (
        "tensor parallel",
        replace(SETTINGS, kind="muon", muon_tp_mode="distributed"),
        ("--muon-momentum", "0.95", "--muon-tp-mode", "distributed"),
    ),
    "experts": ("experts", replace(SETTINGS, kind="muon"), ("--muon-momentum", "0.95")),
}
"""The case above, the optimizer, and Megatron's arguments for it."""


@needs_muon
@pytest.mark.parametrize(("case", "settings", "further"), MUON_CASES.values(), ids=MUON_CASES)
def test_20_steps_with_muon_are_those_of_megatrons_own_loop_bit_for_bit(
    case: str, settings: OptimizerConfig, further: tuple[str, ...], text_corpus: Path, tmp_path: Path
) -> None:
    layout, model, arguments = CASES[case]
    config = config_of(text_corpus, layout, model, settings)
    assert_bitwise(config, (*arguments, "--optimizer", "muon", *further), tmp_path)


def assert_bitwise(config: RunConfig, arguments: Sequence[str], tmp_path: Path) -> None:
    initial = run_group(initial_values, config)
    size = config.parallel.ranks_per_group
    ranks = run_ranks(2 * size, megatron_training.pretrain, config, (*ARGUMENTS, *arguments), initial)
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    losses = losses_of(run)
    assert len(losses) == STEPS
    width = config.layout.tensor_parallel
    assert [rank.losses for rank in ranks if rank.losses] == [losses] * 2 * width
    for group in range(2):
        of_group = [rank for place, rank in enumerate(ranks) if place // width % 2 == group]
        digest = sha256(b"".join(bytes.fromhex(rank.params_sha256) for rank in of_group)).hexdigest()
        assert digest == run.summary.params_sha256


def test_losses_are_those_of_megatrons_own_attention_up_to_rounding(text_corpus: Path, tmp_path: Path) -> None:
    """Nothing of the model is ours then; Megatron adds the products of scores and values in another order."""
    config = config_of(text_corpus, {}, {})
    initial = run_group(initial_values, config)
    task = partial(megatron_training.pretrain, has_own_attention=True)
    ranks = run_ranks(2, task, config, ARGUMENTS, initial)
    run = complete_run(config, tmp_path / "run")
    assert_masked(run)
    for rank in ranks:
        assert rank.losses == pytest.approx(losses_of(run), rel=1e-5)
        assert rank.params_sha256


def test_a_reduced_configuration_of_megatrons_tests_trains_as_in_its_own_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Path(__file__).parents[1] / "megatron_launches"
    monkeypatch.setattr("sys.argv", ["convert_reduced", str(launches), "--configurations", "1", "--json"])
    convert_reduced.main()
    result = json.loads(capsys.readouterr().out)
    assert {"machine", "commit", "date"} <= result.keys()
    assert (result["configurations"], result["equal_parameters"], result["bitwise"]) == (1, 1, 1)


def config_of(
    corpus: Path, layout: dict[str, int], model: dict[str, Any], settings: OptimizerConfig = SETTINGS
) -> RunConfig:
    groups = LayoutConfig(num_groups=2, **layout)
    config = tiny_config(corpus, groups, steps=STEPS, optimizer=settings, redundancy=1, **model)
    if model:
        config = replace(config, megatron={"moe_aux_loss_coeff": 0.02})
    prepare_index(config)
    return config


def initial_values(config: RunConfig) -> Arrays:
    return values_by_name(GroupTrainer(config, CPU))


def losses_of(run: Run) -> list[float]:
    """The loss of each step, on which all groups agree."""
    found = {(record.step, record.loss) for record in run.journal.of(UpdateRecord)}
    return [loss for _, loss in sorted(found)]
