"""Muon: its state through a loss, a return, checkpoints and layouts, and where it is refused."""

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

from spare_megatron.config.schema import LayoutConfig, OptimizerConfig, ParameterRule, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.mcore.model import compatibility
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.mcore.optimizer.optimizer import optimizer_config
from spare_megatron.process.reports import GroupRejoined
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path
from tests.integration import expert_group, mcore_state_group, test_experts
from tests.integration.checkpoint_group import load_and_train, train_and_save
from tests.integration.mcore_group import run_group
from tests.integration.test_run_layouts import (
    BACK,
    DIVIDED_STEPS,
    LANES,
    ONE_LANE,
    SAVED,
    assert_same_tensors,
    divided_config,
)
from tests.integration.watched_rank import Watch
from tests.integration.whole_run import MUON, assert_masked, complete_run, kill, losses_of, needs_muon, tiny_config

pytestmark = pytest.mark.timeout(180)


@needs_muon
def test_a_run_with_lanes_goes_on_through_a_loss_a_return_and_without_lanes_and_changes_no_bit(
    text_corpus: Path, tmp_path: Path
) -> None:
    """In bf16, with a checkpoint that both lanes hold."""

    def with_muon(config: RunConfig) -> RunConfig:
        return replace(config, optimizer=MUON)

    whole = complete_run(with_muon(divided_config(text_corpus, ONE_LANE)), tmp_path / "whole")
    assert_masked(whole)
    faults = [kill(FaultPoint.BACKWARD, 1, 1, rank=1)]
    watch = Watch(awaited=frozenset({(BACK, Member(GroupId(1), 1))}))
    lanes = complete_run(with_muon(divided_config(text_corpus, LANES, faults)), tmp_path / "lanes", watch)
    assert_masked(lanes)
    assert [event.member for event in lanes.events if isinstance(event, GroupRejoined)] == [Member(GroupId(1), 1)]
    assert losses_of(lanes.journal) == losses_of(whole.journal)

    path = checkpoint_path(tmp_path / "lanes" / "checkpoints", SAVED)
    resumed = complete_run(with_muon(divided_config(text_corpus, ONE_LANE, load=str(path))), tmp_path / "resumed")
    assert (resumed.summary.verdict, resumed.summary.steps_committed) == ("valid", DIVIDED_STEPS - SAVED)
    assert resumed.summary.params_sha256 == whole.summary.params_sha256
    ours, theirs = (checkpoint_path(tmp_path / name / "checkpoints", DIVIDED_STEPS) for name in ("lanes", "whole"))
    assert_same_tensors(ours, theirs)


@needs_muon
@pytest.mark.parametrize(("precision", "layout"), [("fp32", LANES), ("bf16", LayoutConfig(pipeline_parallel=2))])
def test_a_state_in_pieces_is_the_same_state_and_its_digest_covers_it(
    text_corpus: Path, tmp_path: Path, precision: str, layout: LayoutConfig
) -> None:
    """So is one from a file, as in an emergency."""
    config = tiny_config(text_corpus, layout, steps=8, precision=precision, optimizer=MUON)
    prepare_index(config)
    for rank in run_group(mcore_state_group.take_over, config, 2):
        assert rank.later[0] == rank.later[1]
        assert rank.states[0] == rank.states[1]
    for saved, loaded in run_group(mcore_state_group.through_a_file, config, 2, tmp_path):
        assert saved == loaded
    for rests, params in run_group(mcore_state_group.rests, config, 2):
        assert len(set(params)) == 1
        assert rests[0] == rests[1] == rests[2]
        assert len(set(rests)) == 3


@needs_muon
def test_tensor_parallel_ranks_go_on_from_a_checkpoint_bit_for_bit(text_corpus: Path, tmp_path: Path) -> None:
    """With rates by parameter, of matrices and of others."""
    rules = (
        ParameterRule(pattern="*.linear_fc1.*", learning_rate_factor=0.5, weight_decay_factor=2.0),
        ParameterRule(pattern="embedding.*", learning_rate_factor=0.25),
    )
    layout = LayoutConfig(num_groups=2, tensor_parallel=2)
    optimizer = replace(MUON, muon_tp_mode="duplicated", rules=rules)
    config = tiny_config(text_corpus, layout, steps=6, optimizer=optimizer)
    prepare_index(config)
    went_on, resumed = (run_group(task, config, tmp_path, 3, 3) for task in (train_and_save, load_and_train))
    for (curve, values), (expected, expected_values, _) in zip(resumed, went_on, strict=True):
        assert curve == expected
        assert all(np.array_equal(values[name][0], expected_values[name][0]) for name in expected_values)


@needs_muon
def test_a_checkpoint_of_divided_experts_loads_in_other_layouts(text_corpus: Path, tmp_path: Path) -> None:
    """Also where a stage has none. Sums have another order there, which products in bf16 would enlarge."""
    layouts = [
        LayoutConfig(num_groups=2, data_parallel=4, expert_parallel=2),
        LayoutConfig(num_groups=2, data_parallel=2, pipeline_parallel=2),
    ]
    config = test_experts.config_of(text_corpus, {"data_parallel": 4}, num_dense_layers=2)
    config = replace(config, optimizer=replace(MUON, muon_fp32_matmul_prec="highest"))
    for ways in run_group(expert_group.moved, config, layouts, tmp_path):
        for going_on, loaded, _ in ways:
            np.testing.assert_allclose(loaded, going_on, rtol=1e-6)


@needs_muon
def test_coefficients_are_those_of_the_installed_package() -> None:
    from megatron.core.optimizer.emerging_optimizers import get_supported_coefficient_types

    named = get_args(get_type_hints(OptimizerConfig)["muon_coefficient_type"])
    assert {*named, "custom"} == {*get_supported_coefficient_types()}


@pytest.mark.parametrize(
    ("megatron_core", "package", "reason"),
    [
        ("0.16.1", None, "megatron-core 0.16.1 is installed: pip install 'megatron-core>=0.19,<0.20' with Python 3.12"),
        ("0.18.2", "0.3.0", "megatron-core 0.18.2 is installed: pip install 'megatron-core>=0.19,<0.20'"),
        ("0.19.2", None, "emerging-optimizers>=0.3,<0.4 is not installed: pip install 'emerging-optimizers>=0.3,<0.4'"),
        ("0.19.2", "0.2.0", "emerging-optimizers 0.2.0 is installed, spare_megatron needs >=0.3,<0.4"),
    ],
)
def test_other_versions_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, megatron_core: str, package: str | None, reason: str
) -> None:
    installed = {"megatron-core": megatron_core, "emerging-optimizers": package}
    monkeypatch.setattr(compatibility, "installed_version", installed.get)
    with pytest.raises(ValueError, match=r"^optimizer\.kind=muon needs .*; or set optimizer\.kind=adam") as caught:
        optimizer_config(RunConfig(optimizer=MUON))
    assert reason in str(caught.value)
