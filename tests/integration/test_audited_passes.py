"""Digests of audited microbatches in real groups: equal wherever they are computed, and in no sum."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.audit_groups import Case, Played, PlayedGroups
from spare_megatron.config.schema import LayoutConfig, ModelConfig, ReduceConfig, RunConfig, SpareConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.core.audits.audits import combined_digest, first_difference
from spare_megatron.mcore import audited_passes
from spare_megatron.mcore.audited_passes import digest64
from spare_megatron.mcore.gradients.digests import words_of
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import audited_group
from tests.integration.mcore_group import run_group, run_ranks
from tests.integration.whole_run import tiny_config

MakeConfig = Callable[..., RunConfig]

LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "two stages": {"pipeline_parallel": 2},
    "two tensor-parallel ranks": {"tensor_parallel": 2},
    "interleaved": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "two lanes": {"data_parallel": 2},
    "two lanes of two stages": {"data_parallel": 2, "pipeline_parallel": 2},
    "experts on one rank": {"num_experts": 4},
    "experts divided by two lanes": {"num_experts": 4, "data_parallel": 2},
    "experts divided by two of four lanes": {"num_experts": 4, "data_parallel": 4, "expert_parallel": 2},
}


@pytest.fixture
def make_config(random_corpus: Path) -> MakeConfig:
    def make(mode: str = "fast", num_experts: int | None = None, **layout: Any) -> RunConfig:
        rows = row_size_of({"num_experts": num_experts or 0, **layout})
        fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        config = RunConfig(
            model=ModelConfig(num_layers=4, hidden_size=32, seq_length=32, hidden_dropout=0.1, num_experts=num_experts),
            layout=LayoutConfig(num_groups=2, **layout),
            spare=SpareConfig(redundancy=2, microbatches_per_shard=3 * rows),
            data=DataConfig(corpus=str(random_corpus)),
            reduce=ReduceConfig(mode=mode),  # type: ignore[arg-type]
            megatron={"moe_aux_loss_coeff": 0.1, **fields} if num_experts else {},
        )
        if num_experts:
            config = replace(config, model=replace(config.model, linear_bias=False))
        config = replace(config, train=replace(config.train, steps=audited_group.STEP + 1))
        prepare_index(config)
        return config

    return make


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_audit_has_the_digests_of_the_owner_and_is_in_no_sum(
    make_config: MakeConfig, layout: dict[str, int], mode: str
) -> None:
    of_ranks = run_group(audited_group.computed_on_both_sides, make_config(mode, **layout))
    for is_unchanged, is_ready, *_ in of_ranks:
        assert is_unchanged
        assert is_ready, "all buckets are complete once the last counted microbatch is"
    here, there, again = ([ranks[place] for ranks in of_ranks] for place in (2, 3, 4))
    losses = [one for *_, of_rank in of_ranks for one in of_rank]
    assert len(losses) == len({*losses}) == 2 * row_size_of(layout), "each on one rank"
    for microbatch in here[0]:
        digests = {combined_digest(one for rank in found for one in rank[microbatch]) for found in (here, there, again)}
        assert len(digests) == 1
        one = [boundary for rank in here for boundary in rank[microbatch]]
        assert all(len({b.digest for b in rank[microbatch]}) >= len(rank[microbatch]) - 1 for rank in here)
        num_ranks = len(of_ranks) // (layout.get("data_parallel", 1) // row_size_of(layout))
        assert len(one) == 3 * layout.get("virtual_pipeline", 1) * num_ranks, "of one set of lanes"
        places = {(boundary.kind, boundary.stage, boundary.position) for boundary in one}
        assert len(places) == len(one)
        positions = {boundary.position for boundary in one}
        assert positions == set(range(num_ranks)) or layout.get("pipeline_parallel", 1) > 1
    if "data_parallel" in layout and row_size_of(layout) < layout["data_parallel"]:
        offsets = {
            boundary.offset for found in (here, there) for rank in found for some in rank.values() for boundary in some
        }
        assert len(offsets) == 2, "on other lanes in one than in the other"


def row_size_of(layout: dict[str, int]) -> int:
    return layout.get("expert_parallel", layout.get("data_parallel", 1)) if layout.get("num_experts") else 1


def test_digests_see_every_bit_and_every_exchange() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3 * (1 << 14) + 77, generator=generator)
    known = {int(digest64(values)), int(digest64(values, salt=1))}
    places = torch.randperm(len(values), generator=generator)[:50].tolist()
    for number, place in enumerate(places):
        for bit in (0, number % 31, 31):
            changed = values.clone().view(torch.int32)
            changed[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            known.add(int(digest64(changed.view(torch.float32))))
    exchanged = values.clone()
    exchanged[:2] = values[[1, 0]]
    blocks = values.clone()
    blocks[: 1 << 14], blocks[1 << 14 : 2 << 14] = values[1 << 14 : 2 << 14], values[: 1 << 14]
    cancelling = values.clone().view(torch.int32)
    cancelling[:2] ^= -(1 << 31)
    known |= {int(digest64(one)) for one in (exchanged, blocks, cancelling)}
    num_same = sum(1 for number in range(50) if number % 31 == 0)  # bit 0 once more
    assert len(known) == 2 + 150 - num_same + 3
    assert int(digest64(values.to(torch.bfloat16)[:7])) != int(digest64(values.to(torch.bfloat16)[:6]))


@pytest.mark.parametrize("num_values", [0, 1, 7, 1 << 14, 5 * (1 << 14) + 3])
@pytest.mark.parametrize("salt", [0, -(1 << 60)])
def test_numpy_and_torch_compute_the_same_digest(num_values: int, salt: int) -> None:
    """Those of groups on CPUs and on GPUs are never compared, but what holds for one has to hold for both."""
    values = torch.randn(num_values, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    words, multipliers = words_of(values.view(torch.uint8)), audited_passes._multipliers_on(values.device)
    blocks = audited_passes._mixed_blocks(words, multipliers, 2, torch.cat, torch.arange, salt)
    assert int(digest64(values, salt)) == int(blocks.sum() + salt)


def test_the_first_difference_names_the_stage_and_the_rank(make_config: MakeConfig) -> None:
    config = make_config(pipeline_parallel=2)
    for rank in (0, 1):
        found = run_group(audited_group.spoiled, config, rank, _flip_a_weight)
        before, after = ([one for ranks in found for one in ranks[index]] for index in (0, 1))
        assert str(first_difference(after, before)) == f"stage {rank}, forward pass, rank {rank}"


def _flip_a_weight(trainer: Any) -> None:
    chunk = trainer.chunks[0].module.module
    weight = next(p for name, p in chunk.named_parameters() if name.endswith("linear_fc1.weight"))
    with torch.no_grad():
        weight.view(-1)[3] += 1.0


STEPS = 12


def play(config: RunConfig, case: Case | None) -> Played:
    return PlayedGroups(config, seed=5).through_losses(0, STEPS, Random(5), case)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["", "drift"])
def test_steps_through_losses_show_a_dispute_exactly_if_a_layer_drifts(text_corpus: Path, kind: str) -> None:
    config = tiny_config(text_corpus, LayoutConfig(num_groups=4), redundancy=3, mode="reproducible", steps=STEPS)
    prepare_index(config)
    case = Case(step=0, group=2, rank=0, kind=kind, bit=0) if kind else None
    (played,) = run_ranks(1, play, config, case, timeout_s=60.0)
    assert (played.num_steps, played.num_losses > 0, played.num_compared > 0) == (STEPS, True, True)
    assert played.num_disputes == 0 if case is None else played.num_disputes > 0
    assert {int(fence.group) for fence in played.fences} == ({2} if case else set())
