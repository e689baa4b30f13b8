"""Rows as unit of work: what deals, records and checks work counts them; data, batch and tokens count microbatches."""

import pytest

from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.audits_and_evaluations import units_per_shard
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.config.training.run_terms import terms_of_run
from spare_megatron.config.training.terms import sequences_before
from spare_megatron.core.controller.controller import Controller
from spare_megatron.core.log.actions import ComputePatch, ComputeStep
from spare_megatron.core.log.entries import Fence, Retry
from spare_megatron.core.log.events import EntryRead, RunStarted
from spare_megatron.driver.planned_faults import least_passes, resolve_trace
from spare_megatron.journal.run_record import RunRecord, digest_of_terms
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.plans import share_of
from spare_megatron.voting.log_follower import controller_setup

WIDE = ("layout.data_parallel=2", "spare.microbatches_per_shard=6")
EXPERTS = ("model.num_experts=4", "model.linear_bias=false")


def configured(*overrides: str) -> RunConfig:
    return load_run_config(None, ["data.corpus=c", *overrides]).config


def run_record(config: RunConfig) -> RunRecord:
    return RunRecord(**terms_of_run(config), faults=[])


def test_a_batch_of_rows_is_that_of_its_microbatches() -> None:
    """Through a loss: the groups' lanes compute each microbatch of the step once."""
    config = configured(*WIDE, *EXPERTS)
    controller = Controller(controller_setup(config))
    actions = [*controller.handle(RunStarted(), now_s=0.0)]
    for entry in (Fence(group=GroupId(1), incarnation=0), Retry(step=0, attempt=0)):
        actions += controller.handle(EntryRead(index=controller.head, entry=entry), now_s=0.0)
    plans = [action.plan for action in actions if isinstance(action, ComputeStep | ComputePatch)]
    assert [plan.work.num_microbatches for plan in plans] == [4 * 3, 3]
    computed = [
        one.number
        for plan in plans
        for group in (0, 2, 3)
        for lane in range(2)
        for one in share_of(plan.work.of(GroupId(group)), lane=lane, num_lanes=2, row_size=2, units_per_shard=3)
    ]
    assert sorted(computed) == list(range(run_sizes(config).microbatches_per_step)) == list(range(24))


def test_records_count_rows_and_figures_count_tokens() -> None:
    config = configured(*WIDE, *EXPERTS, "spare.ramp_start=2", "spare.ramp_increment=2", "spare.ramp_steps=4")
    run, sizes = run_record(config), run_sizes(config)
    assert (run.microbatches_per_shard, run.row_size, run.ramp) == (3, 2, [1, 1, 4])
    assert [run.microbatches_of_a_shard(step) for step in range(6)] == [1, 1, 2, 2, 3, 3]
    assert run.tokens_per_step == sizes.tokens_per_step == 4 * 6 * 2 * 64
    sequences = [sequences_before(config, step + 1) - sequences_before(config, step) for step in range(6)]
    assert [run.size_of_step(step) * 4 * 6 * 2 for step in range(6)] == pytest.approx(sequences)


def test_groups_that_disagree_about_rows_have_other_terms() -> None:
    terms = terms_of_run(configured())
    assert digest_of_terms(terms) != digest_of_terms(terms | {"row_size": 2})


def test_the_pipeline_of_each_lane_fills_while_the_lanes_could_compute() -> None:
    config = configured(*WIDE, "layout.pipeline_parallel=2")
    assert (run_record(config).row_size, run_record(config).pipeline_fill) == (1, 2.0)


def test_lanes_fill_their_pipelines_with_rows_together() -> None:
    assert run_record(configured(*WIDE, *EXPERTS, "layout.pipeline_parallel=2")).pipeline_fill == 1.0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["spare.microbatches_per_shard=5"], "spare.microbatches_per_shard=5 is no multiple of layout.data_parallel=2"),
        (["spare.ramp_start=3", "spare.ramp_increment=3", "spare.ramp_steps=4"], "ramp_start=3 is no multiple of"),
        (["spare.ramp_start=2", "spare.ramp_steps=4"], "spare.ramp_increment=1 is no multiple of layout.data"),
        (["model.num_experts=5"], "model.num_experts=5 is no multiple of layout.data_parallel=2, and each lane"),
        (["layout.expert_parallel=4"], "spare.microbatches_per_shard=6 is no multiple of layout.expert_parallel=4"),
        (
            ["layout.expert_parallel=3", "model.num_experts=6"],
            "layout.data_parallel=2 is no multiple of layout.expert_p",
        ),
        (["layout.expert_parallel=6", "model.num_experts=6"], "lanes of one group divide the experts, never groups"),
    ],
)
def test_lanes_that_share_experts_need_whole_rows(overrides: list[str], expected: str) -> None:
    found = problems(
        configured(*WIDE, *EXPERTS, *overrides), MachineResources(num_gpus=0, num_cores=64, has_corpus=True)
    )
    assert expected in found[0]


def test_an_evaluation_is_divided_into_rows() -> None:
    config = configured(*WIDE, *EXPERTS, "eval.every_steps=4", "data.split=9,1", "eval.sequences=32")
    assert units_per_shard(config) == 32 // (4 * 2 * 2)
    uneven = configured(*WIDE, *EXPERTS, "eval.every_steps=4", "data.split=9,1", "eval.sequences=24")
    found = problems(uneven, MachineResources(num_gpus=0, num_cores=64, has_corpus=True))
    assert "layout.num_groups x layout.data_parallel x train.micro_batch_size=16; set it to 32" in found[0]


def test_faults_strike_microbatches_that_every_lane_computes() -> None:
    config = configured(*WIDE, "layout.data_parallel=4", "faults.trace=[{phase='forward', step=3}]")
    assert least_passes(config, 3) == 1
    assert [fault.ordinal for fault in resolve_trace(config)] == [1]


def test_a_rank_holds_its_lanes_experts_and_a_lanes_part_of_the_optimizer_state() -> None:
    """Mixtral 8x7B by its published config.json, 46.7B parameters, in 4 stages of 8 lanes."""
    hidden, ffn, vocabulary = 4096, 14336, 32000
    shape = (f"hidden_size={hidden}", f"ffn_hidden_size={ffn}", f"vocab_size={vocabulary}", "num_layers=32")
    heads = ("num_attention_heads=32", "num_query_groups=8", "num_experts=8", "experts_per_token=2")
    kind = ("activation=swiglu", "normalization=rmsnorm", "linear_bias=false", "tie_embeddings=false", "precision=bf16")
    layout = ("layout.data_parallel=8", "layout.pipeline_parallel=4", "spare.microbatches_per_shard=8")
    others = ("position_embedding=rope", "seq_length=4096")
    config = configured(*(f"model.{one}" for one in (*shape, *heads, *kind, *others)), *layout)
    expert = 3 * hidden * ffn
    layer = hidden * hidden * (1 + 1 + 2 / 4) + 8 * hidden + 2 * hidden
    whole = 2 * vocabulary * hidden + hidden + 32 * (layer + 8 * expert)
    assert run_sizes(config).num_parameters == whole == pytest.approx(46.7e9, rel=1e-3)
    last = 8 * (layer + expert) + vocabulary * hidden + hidden
    memory = run_sizes(config).memory
    assert memory.weights_bytes == 2 * last
    assert memory.optimizer_bytes == pytest.approx(12 * (8 * (layer / 8 + expert) + vocabulary * hidden / 8), rel=1e-4)


def test_lanes_of_a_dense_model_divide_its_optimizer_state_alone() -> None:
    one, two = (run_sizes(configured(f"layout.data_parallel={lanes}")).memory for lanes in (1, 2))
    assert two.optimizer_bytes == pytest.approx(one.optimizer_bytes / 2, rel=1e-4)
    assert (two.weights_bytes, two.gradients_bytes) == (one.weights_bytes, one.gradients_bytes)


def test_the_fullest_rank_is_that_with_most_state() -> None:
    """The first stage has more parameters, dense ones whose state the lanes divide, the others have experts."""
    model = ("num_layers=4", "num_dense_layers=1", "hidden_size=256", "ffn_hidden_size=512", "num_experts=16")
    shape = (*model, "expert_ffn_hidden_size=256", "linear_bias=false", "vocab_size=256", "precision=bf16")
    layout = ("layout.data_parallel=16", "layout.pipeline_parallel=4", "spare.microbatches_per_shard=16")
    memory = run_sizes(configured(*(f"model.{one}" for one in shape), *layout)).memory
    expert = 2 * 256 * 256
    assert memory.optimizer_bytes > 12 * expert
