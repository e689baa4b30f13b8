"""Memory of the fullest rank, also after losses, and `spare config show`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.training.run_sizes import MOST_CHANNELS, rank_memory
from spare_megatron.core.saves.survival import endured_losses

CONFIGS = Path(__file__).parents[2] / "configs"
EIGHT_STAGES = ("layout.num_groups=4", "layout.tensor_parallel=1", "layout.pipeline_parallel=8", "model.num_layers=16")
FEW_LOGITS = "model.vocab_size=128"  # so that the first stage is the fullest


def activations(*overrides: str) -> int:
    loaded = load_run_config(CONFIGS / "run/gpt_1p3b_node.toml", [*EIGHT_STAGES, FEW_LOGITS, *overrides])
    return rank_memory(loaded.config).activations_bytes


def most_in_flight(num_stages: int, num_microbatches: int) -> int:
    """Forward passes of the first stage whose backward pass has yet to come, at the most: 1F1B, pass by pass."""
    warm_up = min(num_stages - 1, num_microbatches)
    steady = num_microbatches - warm_up
    passes = [1] * warm_up + [1, -1] * steady + [-1] * warm_up
    assert sum(passes) == 0
    return max(sum(passes[: end + 1]) for end in range(len(passes)))


@pytest.mark.parametrize(
    ("microbatches", "redundancy", "access", "most_of_a_group"),
    [(2, 3, "stacked", 6), (2, 4, "stacked", 8), (8, 4, "stacked", 32), (2, 1, "shared", 8), (1, 2, "shared", 4)],
)
def test_activations_are_those_of_all_that_a_group_computes_after_losses(
    microbatches: int, redundancy: int, access: str, most_of_a_group: int
) -> None:
    """A survivor was reported to need what it needs while no group is lost: 2 of the 6 microbatches that came to it."""
    work = f"spare.microbatches_per_shard={microbatches}", f"spare.redundancy={redundancy}", f"data.access={access}"
    of_two = activations("spare.microbatches_per_shard=2", "spare.redundancy=1", "data.access=stacked")
    assert activations(*work) == most_in_flight(8, most_of_a_group) / 2 * of_two


@pytest.mark.parametrize(
    ("overrides", "num_communicators"),
    [
        (("cluster.device=gpu",), 2),
        (("cluster.device=gpu", "layout.num_groups=1", "spare.redundancy=1"), 0),
        (("cluster.device=cpu",), 0),
    ],
)
def test_communicators_between_groups_count_twice_as_one_is_rebuilt_beside_the_other(
    overrides: tuple[str, ...], num_communicators: int
) -> None:
    """Each has the 0.5 to 1.5 GiB that NCCL is known for at 16 to 32 channels."""
    memory = rank_memory(load_run_config(CONFIGS / "run/gpt_1p3b_node.toml", list(overrides)).config)
    assert memory.communicators_bytes == num_communicators * MOST_CHANNELS * 4 * 9_633_792
    assert 0.5 * 2**30 < MOST_CHANNELS * 4 * 9_633_792 < 1.5 * 2**30
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    others = states + memory.reduction_bytes + memory.activations_bytes
    assert memory.total_bytes - others == memory.communicators_bytes


def test_interleaved_schedules_are_shown_with_the_work_that_pads_them() -> None:
    """One microbatch is padded to as many as there are stages."""
    interleaved = ("layout.virtual_pipeline=2", "spare.redundancy=1", "data.access=stacked")
    padded = activations("spare.microbatches_per_shard=1", *interleaved)
    assert padded == activations("spare.microbatches_per_shard=8", *interleaved)


def test_with_muon_every_lane_has_all_optimizer_state() -> None:
    lanes = ("layout.num_groups=2", "layout.data_parallel=2", "spare.redundancy=2")
    adam, muon = (
        rank_memory(load_run_config(CONFIGS / "run/demo_cpu.toml", [*lanes, f"optimizer.kind={kind}"]).config)
        for kind in ("adam", "muon")
    )
    assert muon.optimizer_bytes == 2 * adam.optimizer_bytes
    assert muon.reduction_bytes == adam.reduction_bytes


@pytest.mark.parametrize("preset", ["gpt_7b_h100", "gpt_7b_node"])
def test_where_every_group_reads_all_data_one_group_is_enough(preset: str) -> None:
    path = CONFIGS / f"run/{preset}.toml"
    config = load_run_config(path, []).config
    result = CliRunner().invoke(app, ["config", "show", str(path), "--json"])
    assert result.exit_code == 0, result.output
    endured = json.loads(result.stdout)["endured_losses"]
    num_groups = config.layout.num_groups
    if preset == "gpt_7b_h100":
        assert config.data.access == "shared"
        assert endured == num_groups - 1
    else:
        assert endured == endured_losses(num_groups, config.spare.redundancy)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_keys_and_values_count_whole_sequences_in_every_layer(ranks: int) -> None:
    """Two of [2048 tokens, 16 heads of 128] in 16 bits: 16 MiB in each of two layers, of 4 microbatches in flight."""
    work = "spare.microbatches_per_shard=2", "spare.redundancy=2", "train.micro_batch_size=1"
    split = f"layout.context_parallel={ranks}", *work
    shape = "model.seq_length=2048", "model.hidden_size=2048", "model.num_attention_heads=16"
    exchanged, gathered = activations(*split, *shape), activations(*split, *shape, "model.transformer_impl=local")
    assert gathered - exchanged == 2 * 4 * 16 * 2**20
    assert gathered == activations(*split, *shape, "data.reset_attention_mask=true")
    fewer = activations(*split, *shape, "model.transformer_impl=local", "model.num_query_groups=4")
    assert fewer - exchanged == (gathered - exchanged) / 4
    again = [f"megatron.recompute_{word}" for word in ("granularity=full", "method=uniform", "num_layers=1")]
    of_one_layer = activations(*split, *shape, *again, "model.transformer_impl=local")
    assert of_one_layer - activations(*split, *shape, *again) == 16 * 2**20
