"""Passes that are checked as they are computed, in real groups."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import AuditConfig, LayoutConfig, ModelConfig, ReduceConfig, RunConfig, SpareConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.core.audits.audits import is_checked
from spare_megatron.mcore.model.training_samples import prepare_index
from tests.integration import checked_group
from tests.integration.checked_group import Strike
from tests.integration.mcore_group import run_group

MakeConfig = Callable[..., RunConfig]
STEPS = 6

MODELS: dict[str, dict[str, Any]] = {
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bf16": {"precision": "bf16", "position_embedding": "rope"},
    "experts": {"num_experts": 4, "linear_bias": False},
}
LAYOUTS: dict[str, dict[str, int]] = {
    "two stages": {"pipeline_parallel": 2},
    "interleaved": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "two tensor-parallel ranks": {"tensor_parallel": 2},
    "two lanes": {"data_parallel": 2},
    "two context-parallel ranks": {"context_parallel": 2},
}


@pytest.fixture
def make_config(random_corpus: Path) -> MakeConfig:
    def make(share: float = 1.0, mode: str = "fast", layout: dict[str, int] | None = None, **model: Any) -> RunConfig:
        experts = {"moe_aux_loss_coeff": 0.1, "moe_router_score_function": "sigmoid"}
        sizes = {"num_layers": 4, "hidden_size": 32, "seq_length": 32} | model
        config = RunConfig(
            model=ModelConfig(**sizes),
            layout=LayoutConfig(num_groups=2, **(layout or {})),
            spare=SpareConfig(redundancy=2, microbatches_per_shard=2),
            data=DataConfig(corpus=str(random_corpus)),
            reduce=ReduceConfig(mode=mode),  # type: ignore[arg-type]
            audit=AuditConfig(products=share),
            megatron=experts if "num_experts" in model else {},
        )
        config = replace(config, train=replace(config.train, steps=STEPS))
        prepare_index(config)
        return config

    return make


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_checks_find_nothing_and_change_no_bit(make_config: MakeConfig, model: dict[str, Any]) -> None:
    [(found, *checked)] = run_group(checked_group.steps_of, make_config(1.0, **model), STEPS)
    [(nothing, *unchecked)] = run_group(checked_group.steps_of, make_config(0.0, **model), STEPS)
    assert found == nothing == ""
    assert checked == unchecked
    assert len(set(checked[0])) == STEPS, "it trains"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_checks_find_nothing_and_change_no_bit_in_every_layout(make_config: MakeConfig, layout: dict[str, int]) -> None:
    made = {share: make_config(share, "reproducible", layout, hidden_dropout=0.1) for share in (0.0, 0.5, 1.0)}
    of_shares = [run_group(checked_group.steps_of, config, 2) for config in made.values()]
    for ranks in zip(*of_shares, strict=True):
        assert len({repr(rank) for rank in ranks}) == 1
        assert not ranks[0][0]


FAULTS = {
    "a product": (
        Strike("mm", 3),
        "mm of [",
        "in the forward pass of microbatch 0 of shard 0 at stage 0: its sums differ",
    ),
    "a gradient of weights": (Strike("mm", 40), "mm of [", "in the backward pass of microbatch 0"),
    "a norm": (Strike("native_layer_norm", 1), "native_layer_norm of [", "computed twice, it is different"),
    "its gradient": (
        Strike("native_layer_norm_backward", 2),
        "native_layer_norm_backward of [",
        "in the backward pass of microbatch 0 of shard 0 at stage 0: computed twice, it is different",
    ),
    "what an activation function takes": (
        Strike("gelu", 1, of_input=True),
        "gelu of [",
        "in the forward pass of microbatch 0 of shard 0 at stage 0: an input is not the result that was computed",
    ),
    "what is saved": (
        Strike("gelu_backward", 1, of_input=True),
        "gelu_backward of [",
        "in the backward pass of microbatch 0 of shard 0 at stage 0: an input is not the result that was computed",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_number_is_found_and_named(make_config: MakeConfig, fault: tuple[Strike, str, str]) -> None:
    strike, operation, words = fault
    [(num_changed, found, later)] = run_group(checked_group.struck, make_config(), strike, 0)
    assert num_changed == 1
    assert found.startswith(operation)
    assert words in found
    assert later == ""


@pytest.mark.parametrize("layout", [LAYOUTS["two stages"], LAYOUTS["interleaved"]])
def test_the_rank_that_is_wrong_finds_it(make_config: MakeConfig, layout: dict[str, int]) -> None:
    config = make_config(layout=layout)
    for rank in (0, 1):
        ranks = run_group(checked_group.struck, config, Strike("gelu_backward", 2), rank)
        assert [bool(found) for _, found, _ in ranks] == [number == rank for number in (0, 1)]
        stages = (rank, rank + 2) if "virtual_pipeline" in layout else (rank,)
        assert any(f"at stage {stage}: computed twice" in ranks[rank][1] for stage in stages)


def test_faults_below_see_the_same_operations_whatever_is_checked(make_config: MakeConfig) -> None:
    config = make_config()
    for operation in ("mm", "sum", "clone", "abs"):
        [unchecked] = run_group(checked_group.num_operations, config, 0.0, operation)
        [checked] = run_group(checked_group.num_operations, config, 1.0, operation)
        assert checked == unchecked * 2


def test_a_token_that_changes_on_its_way_is_found_in_every_pass(make_config: MakeConfig) -> None:
    [found] = run_group(checked_group.with_wrong_tokens, make_config(), [0.0, 1e-9, 1.0])
    assert found[0] == ""
    assert found[1] == found[2] == "tokens of [2, 32] in the batch of microbatch 0 of shard 0: it is not what was read"


def test_the_draw_is_as_large_as_its_share_and_nested() -> None:
    places = [(step, number) for step in range(200) for number in range(50)]
    drawn = {share: {place for place in places if is_checked(share, 7, *place)} for share in (0.0, 0.01, 0.1, 1.0)}
    assert not drawn[0.0]
    assert len(drawn[1.0]) == len(places)
    assert drawn[0.01] < drawn[0.1]
    assert len(drawn[0.01]) == pytest.approx(100, abs=35)
    assert len(drawn[0.1]) == pytest.approx(1000, abs=120)
    assert drawn[0.1] != {place for place in places if is_checked(0.1, 8, *place)}
