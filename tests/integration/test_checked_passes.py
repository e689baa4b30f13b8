"""Passes that are checked as they are computed, and the faults that are injected into them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spare_megatron.config.schema import AuditConfig, LayoutConfig, ModelConfig, ReduceConfig, RunConfig, SpareConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.core.audits.audits import is_checked
from spare_megatron.faults.kinds import KINDS as KINDS_OF_FAULTS
from spare_megatron.faults.points import Fault, FaultKind, FaultPoint
from spare_megatron.mcore.corruption import flip_bit, site_of
from spare_megatron.mcore.model.training_samples import prepare_index
from spare_megatron.stacking.layout import GroupId
from tests.integration import checked_group
from tests.integration.checked_group import Strike
from tests.integration.corruption_group import Found, steps_with
from tests.integration.mcore_group import run_group
from tests.integration.whole_run import tiny_config

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


KINDS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.int64: np.uint64}


@pytest.mark.parametrize("dtype", KINDS)
def test_one_bit_of_one_element_is_inverted(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    original = torch.randn(3, 5, generator=generator)
    original = (original * 1000).to(dtype) if dtype is torch.int64 else original.to(dtype)
    num_bits = 8 * original.element_size()
    for bit in range(num_bits):
        flipped = original.clone()
        flip_bit([flipped, original], bit)
        before, after = (np.frombuffer(_bytes(values), KINDS[dtype]) for values in (original, flipped))
        [changed] = np.flatnonzero(before != after)
        assert before[changed] ^ after[changed] == KINDS[dtype](1) << KINDS[dtype](bit)
        clear = (before >> KINDS[dtype](bit)) & KINDS[dtype](1) == 0
        if clear.any():
            sizes = np.where(clear, original.abs().double().numpy().ravel(), -1.0)
            assert sizes[changed] == sizes.max()


def test_the_default_bit_makes_a_number_huge() -> None:
    values = torch.tensor([0.0, 0.5, -0.25])
    flip_bit([values], None)
    assert values.tolist() == [0.0, 0.5 * 2.0**128, -0.25]


def _bytes(values: torch.Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


BETWEEN_OPERATIONS = {
    "activation_flip": 13,
    "stuck_bit": 13,
    "drift": None,
    "data_flip": 3,
    "bit_flip": 13,
    "param_flip": 13,
}
"""Kinds that strike memory, with a bit."""
NUM_TOKENS = 32
"""Of a microbatch."""


def _faults() -> Iterator[Fault]:
    for kind, row in KINDS_OF_FAULTS.items():
        for phase in row.phases if row.in_operations else ():
            for ordinal in (1, 2, 3):
                yield _fault(kind, phase, 13, ordinal)
    for kind, bit in BETWEEN_OPERATIONS.items():
        yield _fault(kind, FaultPoint.FORWARD, bit)
    yield _fault("bit_flip", FaultPoint.BACKWARD, 13)


def _fault(kind: str, phase: FaultPoint, bit: int | None, ordinal: int = 1) -> Fault:
    return Fault(step=1, group=GroupId(0), rank=0, phase=phase, kind=FaultKind(kind), ordinal=ordinal, bit=bit)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_faults_of_operations_show_in_these_and_faults_of_memory_between_them(text_corpus: Path, mode: str) -> None:
    """Of the model, with its attention kernels, in both passes; all but one of them change the sums."""
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), mode=mode)
    prepare_index(config)
    faults = list(_faults())
    [[calm, *found]] = run_group(steps_with, config, [None, *faults])
    assert not calm.wrong
    for fault, one in zip(faults, found, strict=True):
        _check(fault, one)
    assert sum(not np.array_equal(one.sums, calm.sums) for one in found) >= len(found) - 1


def _check(fault: Fault, found: Found) -> None:
    if fault.kind in BETWEEN_OPERATIONS:
        assert not found.wrong, fault
        return
    (is_product, site), _ = site_of(fault)
    is_single = KINDS_OF_FAULTS[fault.kind].duration == "lasts"
    assert len(found.wrong) == 1 if is_single else found.wrong, fault
    for name, is_backward, shape in found.wrong:
        assert ((name == "mm"), is_backward) == (is_product, fault.phase is FaultPoint.BACKWARD)
        weights = {(96, 32), (32, 32), (128, 32), (32, 128), (256, 32)}
        assert site != "weights" or shape in weights
        assert site != "inputs" or not is_product or shape[0] == NUM_TOKENS
