"""What is refused of parts of a configuration, with the reason, before any process starts; and what is warned of."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.requirements import EXPERTS, broken
from spare_megatron.config.checks.validate import MachineResources, problems, warnings
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.megatron_fields import field_problems
from spare_megatron.config.model.model_tensors import model_shape
from spare_megatron.config.schema import AuditConfig, ClusterConfig, FaultConfig, OptimizerConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig, SnapshotConfig
from spare_megatron.config.training.run_sizes import memory_by_length, rank_memory, ranks_per_machine, run_sizes
from spare_megatron.config.training.terms import differences, terms_of
from spare_megatron.faults.points import FaultPoint
from spare_megatron.stacking.layout import Slabs
from spare_megatron.tools.weights.megatron_args import args_of
from tests.unit.configured import CPU, GOLOMB, configured
from tests.unit.test_diagnosis import GPU, findings
from tests.unit.test_diagnosis import configured as on_h100


def only_problem(fault: FaultConfig | None = None, **settings: Any) -> str:
    (problem,) = problems(struck(*filter(None, [fault]), **settings), CPU)
    return problem


def struck(*trace: FaultConfig, **settings: Any) -> RunConfig:
    base = configured("layout.pipeline_parallel=2")
    return replace(base, checkpoint=CheckpointConfig(**settings), faults=replace(base.faults, trace=trace))


def fault(**fields: Any) -> FaultConfig:
    return FaultConfig(**{"phase": FaultPoint.SAVE_RENAME, "group": 1, "rank": 0, **fields})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"interval_steps": 0}, "checkpoint.interval_steps=0 must be at least 1"),
        ({"keep_last": 0}, "checkpoint.keep_last=0 must be at least 1"),
        ({"interval_s": 0.0}, "checkpoint.interval_s=0.0 must be above 0"),
        ({"timeout_s": -1.0}, "checkpoint.timeout_s=-1.0 must be above 0"),
        ({"interval_steps": 1, "keep_every_steps": 0}, "checkpoint.keep_every_steps=0 must be at least 1"),
        ({"keep_every_steps": 9}, "has no effect without checkpoints"),
    ],
)
def test_what_says_nothing_or_the_impossible_is_refused(settings: dict[str, Any], text: str) -> None:
    assert text in only_problem(**settings)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "raise"}, "faults.trace[0].kind=raise cannot strike a save; choose one of kill, stop"),
        ({"rank": 1}, "faults.trace[0].phase=save_rename is reached by rank 0 alone"),
        ({"group": None}, "set faults.trace[0].group"),
    ],
)
def test_faults_that_no_save_can_meet_are_refused(fields: dict[str, Any], text: str) -> None:
    assert text in only_problem(fault(**fields), interval_steps=2)


@pytest.mark.parametrize("phase", [FaultPoint.LOAD, FaultPoint.LOAD_SEARCH])
def test_a_fault_needs_a_load_to_strike(phase: FaultPoint) -> None:
    assert "is reached only when a checkpoint is loaded" in only_problem(fault(phase=phase))
    found = problems(struck(fault(phase=phase), load="runs/a/checkpoints"), CPU)
    assert len(found) == (phase is FaultPoint.LOAD_SEARCH), "at the start no group searches"
    wiped_out = struck(fault(), fault(phase=phase), load="runs/a/checkpoints")
    assert not [text for text in problems(wiped_out, CPU) if "is loaded" in text]


def test_a_fault_needs_a_save_to_strike() -> None:
    assert "is reached only when a checkpoint is taken" in only_problem(fault())


def test_a_save_may_be_struck_where_there_is_one() -> None:
    assert problems(struck(fault(), fault(phase=FaultPoint.SAVE, rank=1), interval_s=60.0), CPU) == []


MIXTURE = ("model.num_experts=8", "model.linear_bias=false")


def with_experts(*overrides: str) -> RunConfig:
    return load_run_config(None, overrides).config


@pytest.mark.parametrize("setting", ["expert_ffn_hidden_size=8", "experts_per_token=1", "num_dense_layers=1"])
def test_settings_of_experts_need_experts(setting: str) -> None:
    (found,) = broken(EXPERTS, with_experts(f"model.{setting}"))
    assert found.startswith(f"model.{setting} has no effect without experts")
    assert not list(broken(EXPERTS, with_experts(*MIXTURE, f"model.{setting}")))


def test_lanes_divide_nothing_without_experts() -> None:
    (found,) = broken(EXPERTS, with_experts("layout.data_parallel=2", "layout.expert_parallel=2"))
    assert found.startswith("layout.expert_parallel=2 has no effect without experts")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.experts_per_token=9"], "exceeds model.num_experts=8"),
        (["model.num_dense_layers=4"], "leaves none of model.num_layers=4"),
        (["model.linear_bias=true", "model.shared_expert_ffn_hidden_size=8"], "set model.linear_bias=false"),
        (["layout.tensor_parallel=2"], "megatron.sequence_parallel=true"),
        (
            ["layout.tensor_parallel=0", "model.linear_bias=true", "model.shared_expert_ffn_hidden_size=8"],
            "set model.linear_bias=false",
        ),
        (["layout.tensor_parallel=2", "model.expert_ffn_hidden_size=33"], "model.expert_ffn_hidden_size=33 is not a"),
        (["megatron.moe_expert_capacity_factor=1.0"], "whether a token is dropped would depend on"),
        (["megatron.moe_router_load_balancing_type=global_aux_loss"], "global_aux_loss depends on other microbatches"),
        (['megatron.moe_router_load_balancing_type=["aux_loss", "sinkhorn"]'], "'sinkhorn'] cannot be had"),
        (["megatron.moe_router_enable_expert_bias=true"], "moe_router_score_function=softmax: biases are added to"),
        (["megatron.moe_token_dispatcher_type=flex"], "choose alltoall or allgather"),
        (["megatron.moe_input_jitter_eps=0.1"], "its noise would not be that of the microbatch"),
        (["model.linear_bias=true", "megatron.bias_dropout_fusion=true"], "does not go with biases of experts"),
    ],
)
def test_what_no_mixture_can_have_is_refused_with_the_reason(overrides: list[str], message: str) -> None:
    config = with_experts(*MIXTURE, *overrides)
    found = [*field_problems(config), *broken(EXPERTS, config)]
    assert any(message in text for text in found), found


@pytest.mark.parametrize("field", ["moe_token_dispatcher_type=alltoall", "moe_grouped_gemm=true"])
def test_what_needs_gpus_is_refused_on_cpus(field: str) -> None:
    config = with_experts("data.corpus=c", "cluster.device=cpu", *MIXTURE, f"megatron.{field}")
    cpus, gpus = (MachineResources(num_gpus=number, num_cores=64, has_corpus=True) for number in (0, 64))
    assert any(f"megatron.{field.partition('=')[0]}" in text for text in problems(config, cpus))
    assert not any("megatron." in text for text in problems(with_experts("data.corpus=c", *MIXTURE), gpus))


@pytest.mark.parametrize(
    "setting",
    [
        "model.num_experts=4",
        "model.experts_per_token=3",
        "model.expert_ffn_hidden_size=8",
        "model.shared_expert_ffn_hidden_size=8",
        "model.num_dense_layers=1",
        "megatron.moe_router_score_function=sigmoid",
    ],
)
def test_other_experts_are_another_model(setting: str) -> None:
    one, other = with_experts(*MIXTURE), with_experts(*MIXTURE, setting)
    assert len(differences(terms_of(one), other)) == 1
    assert not differences(terms_of(one), with_experts(*MIXTURE, "megatron.moe_aux_loss_coeff=0.1"))


def test_exports_to_megatron_lm_refuse_mixtures() -> None:
    args_of(with_experts("model.linear_bias=false", "model.activation=swiglu"))
    with pytest.raises(ValueError, match=r"num_moe_experts=8"):
        args_of(with_experts(*MIXTURE, "model.activation=swiglu"))


SHAPES = ("layout.pipeline_parallel=4", "layout.least_pipeline_parallel=2", "cluster.num_nodes=16")
SHORT = (*SHAPES, "model.num_layers=8")
GPUS = MachineResources(num_gpus=16, num_cores=64, has_corpus=True)

REFUSED = {
    "one stage": (["layout.least_pipeline_parallel=1"], "least_pipeline_parallel=1 must be at least 2, and less than"),
    "as many": (["layout.least_pipeline_parallel=4"], "less than layout.pipeline_parallel=4; change it, or remove it"),
    "divided machines": (
        ["cluster.num_nodes=2"],
        "but each has 4 ranks, and each of cluster.num_nodes=2 machines 8; change cluster.num_nodes",
    ),
    "one machine each": (["cluster.num_nodes=4"], "each of cluster.num_nodes=4 machines 4; change cluster.num_nodes"),
    "no length": (
        ["cluster.num_nodes=8", "layout.least_pipeline_parallel=3"],
        "allows no pipeline below layout.pipeline_parallel=4 whose stages, of 1 ranks each, fill whole machines of 2",
    ),
    "no rejoins": (["spare.rejoins=0"], "has no effect with spare.rejoins=0, with which no group comes back; raise"),
    "chunks": (["layout.virtual_pipeline=2"], "needs stages of one chunk, but layout.virtual_pipeline=2; set the"),
    "partitions": (
        ["optimizer.sharding=stacked", "optimizer.redundancy=2"],
        "optimizer.sharding=stacked divides it over groups by rank; set the latter to replicated",
    ),
}
ON_GPUS = {
    "block": (["recompute_method=block"], "megatron.recompute_num_layers=1, or remove it"),
    "several layers": (["recompute_num_layers=2"], "cuts stages into parts of different sizes, each of which"),
    "delayed scaling": (["fp8=e4m3"], "megatron.fp8_recipe=delayed, the default, scales by values of earlier"),
}


@pytest.mark.parametrize(("overrides", "named"), REFUSED.values(), ids=REFUSED)
def test_what_groups_of_fewer_stages_cannot_have_is_refused(overrides: list[str], named: str) -> None:
    (text,) = problems(configured(*SHORT, *overrides), CPU)
    assert text.startswith("layout.least_pipeline_parallel=")
    assert named in text


@pytest.mark.parametrize(("fields", "named"), ON_GPUS.values(), ids=ON_GPUS)
def test_so_is_what_counts_the_layers_of_a_stage_or_remembers_microbatches(fields: list[str], named: str) -> None:
    all_recomputed = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
    overrides = [f"megatron.{field}" for field in (*all_recomputed, *fields)]
    (text,) = problems(configured(*SHORT, "cluster.device=gpu", "model.precision=bf16", *overrides), GPUS)
    assert named in text


def test_a_model_of_a_program_is_not_cut() -> None:
    programmed = replace(CPU, program=frozenset({"model_provider"}))
    (text,) = problems(configured(*SHORT, "program.file=mine.py"), programmed)
    assert text.startswith("layout.least_pipeline_parallel=2 cuts the GPT of [model], and program.file=mine.py defines")


@pytest.mark.parametrize(
    "overrides", [(), ("layout.tensor_parallel=2", "layout.data_parallel=2"), ("spare.rejoins=1",)]
)
def test_other_settings_go_with_fewer_stages(overrides: tuple[str, ...]) -> None:
    assert problems(configured(*SHORT, *overrides), CPU) == []
    assert problems(configured(*SHORT[:1], "model.num_layers=8", *overrides), CPU) == [], "nor is a rule for others"


def test_every_stage_of_every_length_has_layers() -> None:
    for whole in range(2, 17):
        for num_layers in range(whole, 4 * whole, whole):
            slabs = Slabs(num_layers, tuple(range(whole, 1, -1)))
            assert all(slabs.of_stage(stage, length) for length in slabs.lengths for stage in range(length))


def test_stages_have_the_layers_of_their_slabs() -> None:
    config = configured(*SHORT)
    shape = model_shape(config)
    (layer,) = set(shape.layers)
    assert shape.of_stages(3) == [  # 2, 3 and 3 layers
        shape.embedding + shape.positions + 2 * layer.num_parameters,
        3 * layer.num_parameters,
        3 * layer.num_parameters + shape.final_norm + shape.embedding,
    ]
    assert sum(shape.of_stages(3)) == sum(shape.of_stages(4)) == sum(shape.of_stages(2))


def test_a_rank_of_a_shorter_pipeline_holds_more() -> None:
    """States grow as parameters do; as many layers as before, or fewer, keep activations in flight."""
    config = configured(*SHORT, "model.vocab_size=128", "model.hidden_size=512", "spare.microbatches_per_shard=8")
    found = memory_by_length(config)
    assert list(found) == [4, 3, 2]
    assert found[4] == rank_memory(config)
    layers = model_shape(config).layers[0].num_parameters
    first = [found[4].weights_bytes, found[2].weights_bytes]
    assert first[1] - first[0] == 2 * layers * 4, "fp32, 4 layers in place of 2"
    kept = {4: 2 * 4, 3: max(2 * 3, 3 * 2, 3), 2: 4 * 2}  # layers in flight: of a stage, and microbatches
    assert found[3].activations_bytes * kept[4] == found[4].activations_bytes * kept[3]
    assert found[2].activations_bytes == found[4].activations_bytes


def test_ranks_of_one_machine_are_fewer_in_groups_of_fewer_stages_where_nodes_are_rehearsed() -> None:
    config = configured(*SHORT)
    assert [ranks_per_machine(config, stages) for stages in (4, 3, 2)] == [16, 12, 8]
    apart = replace(config, cluster=replace(config.cluster, launcher="hand"))
    assert [ranks_per_machine(apart, stages) for stages in (4, 3, 2)] == [1, 1, 1]


def test_a_shape_that_no_gpu_can_hold_is_refused_where_their_memory_is_known() -> None:
    config = configured(*SHORT, "cluster.device=gpu", "model.hidden_size=4096")
    fixed = {stages: one.total_bytes - one.activations_bytes for stages, one in memory_by_length(config).items()}
    assert fixed[4] < fixed[3] < fixed[2]
    for room, expected in (
        (fixed[2], ""),
        (fixed[2] - 1, "1 rank on one GPU (cluster.ranks_per_gpu=1) in groups of 2 stages need"),
        (fixed[3] - 1, "in groups of 3 stages need"),
        (fixed[4] - 1, "1 rank on one GPU (cluster.ranks_per_gpu=1) need"),
    ):
        found = problems(config, replace(GPUS, gpu_memory_bytes=room))
        assert [expected in text for text in found] == [True] * bool(expected)
    (text,) = problems(config, replace(GPUS, gpu_memory_bytes=fixed[2] - 1))
    assert text.endswith("of memory; raise layout.least_pipeline_parallel=2, or remove it")
    assert problems(config, GPUS) == [], "it may be unknown"


def test_a_machine_without_room_for_a_shorter_pipeline_is_refused_on_cpus() -> None:
    config = configured(*SHORT, "model.hidden_size=1024", "cluster.launcher=hand", "control.store=etcd")
    config = replace(config, control=replace(config.control, endpoints=("http://127.0.0.1:1",)))
    whole, _, shortest = (one.total_bytes - one.activations_bytes for one in memory_by_length(config).values())
    (text,) = problems(config, replace(CPU, memory_bytes=(whole + shortest) // 2))
    assert "1 rank on one machine (layout.num_groups=4) in groups of 2 stages need" in text


def test_a_node_whose_gpus_hold_ranks_of_whole_pipelines_alone_is_unfit() -> None:
    stages = ("layout.pipeline_parallel=4", "layout.least_pipeline_parallel=2", "layout.tensor_parallel=8")
    config = on_h100("layout.num_groups=4", *stages, "cluster.num_nodes=16")
    sizes = run_sizes(config)
    assert sizes.most_memory_bytes == sizes.memory_by_stages[2] > sizes.memory.total_bytes
    gpu = replace(GPU, memory_bytes=sizes.memory.total_bytes, free_bytes=sizes.memory.total_bytes)
    texts = [found.text for found in findings(config, gpus=(gpu,) * 8) if found.check == "gpus"]
    assert len(texts) == 8
    assert all(text.endswith("layout.pipeline_parallel or layout.least_pipeline_parallel") for text in texts)


def test_show_lists_the_memory_of_each_length() -> None:
    options = [word for text in SHORT for word in ("--set", text)]
    result = CliRunner().invoke(app, ["config", "show", "demo_cpu", *options])
    assert result.exit_code == 0, result.output
    assert "with 3 of 4 stages" in result.output
    assert "with 2 of 4 stages" in result.output
    result = CliRunner().invoke(app, ["config", "show", "demo_cpu", *options, "--json"])
    shown = json.loads(result.stdout)
    assert [*shown["memory_by_stages"]] == ["4", "3", "2"]


GOOD = replace(configured(), snapshot=SnapshotConfig(every_steps=10, redundancy=1), cluster=ClusterConfig(num_nodes=2))

REFUSED_SNAPSHOTS = {
    "negative redundancy": (replace(GOOD, snapshot=SnapshotConfig(redundancy=-1)), "snapshot.redundancy=-1"),
    "every step": (replace(GOOD, snapshot=SnapshotConfig(every_steps=1)), "snapshot.every_steps=1"),
    "negative steps": (replace(GOOD, snapshot=SnapshotConfig(every_steps=-5)), "snapshot.every_steps=-5"),
    "nothing to go back for": (
        replace(GOOD, checkpoint=CheckpointConfig(max_restarts=0), audit=AuditConfig(every_steps=0)),
        "checkpoint.max_restarts=0",
    ),
}


@pytest.mark.parametrize(("config", "named"), REFUSED_SNAPSHOTS.values(), ids=REFUSED_SNAPSHOTS)
def test_what_cannot_be_is_refused_with_the_setting_to_change(config: RunConfig, named: str) -> None:
    (text,) = problems(config, CPU)
    assert named in text


def test_good_settings_and_none_raise_neither_errors_nor_warnings() -> None:
    for config in (GOOD, configured(), replace(GOOD, snapshot=SnapshotConfig(every_steps=2, redundancy=0))):
        assert [*problems(config, CPU), *warnings(config, CPU)] == []


def test_more_copies_than_nodes_raise_a_warning() -> None:
    (text,) = warnings(replace(GOOD, cluster=ClusterConfig(num_nodes=1)), CPU)
    assert "snapshot.redundancy=1 needs 2 copies" in text
    assert "cluster.num_nodes=1" in text


def test_more_copies_of_partitions_than_they_have_hosts_raise_a_warning() -> None:
    (text,) = warnings(replace(GOOD, optimizer=OptimizerConfig(sharding="stacked", redundancy=1)), CPU)
    assert "snapshot.redundancy=1 needs 2 copies" in text
    assert "each is kept on only 1" in text
    stacked = replace(GOOD, optimizer=OptimizerConfig(sharding="stacked", redundancy=2))
    assert [*problems(stacked, CPU), *warnings(stacked, CPU)] == []


MACHINE = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)
LATENT = (
    "model.position_embedding=rope",
    "megatron.multi_latent_attention=true",
    "data.corpus=none",
    "cluster.device=cpu",
)
LATENT_ON_GPUS = ("cluster.device=gpu", "layout.num_groups=1", "spare.redundancy=1")


def found(*settings: str) -> list[str]:
    return problems(load_run_config(None, [*LATENT, *settings]).config, MACHINE)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("model.position_embedding=learned_absolute",), "has no effect without model.position_embedding=rope"),
        (("model.num_query_groups=2",), "remove num_query_groups"),
        (("megatron.num_query_groups=2",), "remove num_query_groups"),
        (("model.linear_bias=false", "model.qkv_bias=true"), "model.qkv_bias would be ignored; remove it"),
        (("model.rope_scaling_factor=8",), "stretches wavelengths by megatron.rotary_scaling_factor"),
        (
            ("megatron.softmax_scale=2.0",),
            "megatron.softmax_scale=2.0 does not go with megatron.multi_latent_attention",
        ),
        (("megatron.kv_channels=8",), "megatron.kv_channels=8 does not go with megatron.multi_latent_attention"),
        (("megatron.rope_type=linear",), "megatron.rope_type=linear cannot be had: Megatron has rope and yarn"),
        (("megatron.rope_type=rope", "megatron.beta_fast=8"), "has no effect without megatron.rope_type=yarn"),
        (("megatron.qk_pos_emb_head_dim=7",), "rotates pairs of values, but 7 of a head are"),
        (("megatron.v_head_dim=0",), "megatron.v_head_dim=0 must be at least 1"),
        (("layout.tensor_parallel=2",), "gathers latent queries over Megatron's global groups"),
        ((*LATENT_ON_GPUS, "layout.context_parallel=2"), "with layers of transformer-engine was not checked with"),
        (
            (*LATENT_ON_GPUS, "data.reset_attention_mask=true", "data.end_of_document=1"),
            "with layers of transformer-engine was not checked with",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(settings: tuple[str, ...], text: str) -> None:
    [problem] = found(*settings)
    assert text in problem


@pytest.mark.parametrize("more", [(), ("layout.context_parallel=2",)])
def test_what_goes_with_it_passes(more: tuple[str, ...]) -> None:
    assert found(*more) == []
    assert found(*more, *LATENT_ON_GPUS, "model.transformer_impl=local") == []


def test_deepseek_v3_has_as_many_parameters_as_it_has_published() -> None:
    """671B, of which 37B compute a token: arXiv 2412.19437, section 4.2. The published weights have as many numbers,
    with 256 biases in each of 58 routers, beside 11.5B of a further predicted token.
    """
    shape = model_shape(load_run_config(Path("deepseek_v3_like"), ["model.num_layers=61"]).config)
    further = sum(module.num_parameters for module in shape.future)
    assert further == pytest.approx(11.5e9, rel=0.01)
    assert shape.num_parameters - further == 671_026_419_200 - 58 * 256
    idle = sum(module.idle for module in shape.future)
    assert shape.num_active_parameters - (further - idle) == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "published", "active"),
    [((), 20_914_757_184, 3.61e9), (("model.num_layers=36", "model.num_experts=128"), 116_829_156_672, 5.13e9)],
)
def test_gpt_oss_has_as_many_parameters_as_it_has_published(
    sizes: tuple[str, ...], published: int, active: float
) -> None:
    """Of the 20b and the 120b: those of the published weights, and table 1 of arXiv 2508.10925, which counts one of
    the two tables as active.
    """
    shape = model_shape(load_run_config(Path("gpt_oss_20b"), list(sizes)).config)
    assert shape.num_parameters == published
    assert shape.num_active_parameters - shape.embedding == pytest.approx(active, rel=0.002)


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        ("0.75", ""),
        ("1.5", "megatron.rotary_percent=1.5 is the part of a head that is rotated, at most 1"),
        ("-1", "megatron.rotary_percent=-1 must be above 0"),
        ("0.4", "rotates pairs of values, but 3 of a head are to be rotated (model.hidden_size=64"),
        ("0.01", "rotates pairs of values, but 0 of a head are"),
        ("half", None),
    ],
)
def test_a_part_of_a_head_is_rotated(part: str, refusal: str | None) -> None:
    """What is no number is refused with all fields of wrong types, when Megatron's configuration is built."""
    given = ["model.position_embedding=rope", "model.num_attention_heads=8", f"megatron.rotary_percent={part}"]
    found = problems(load_run_config(None, [*given, "data.corpus=none", "cluster.device=cpu"]).config, MACHINE)
    assert any(refusal in one for one in found) if refusal else found == []


FUTURE = ("model.position_embedding=rope", "megatron.mtp_num_layers=2", "data.corpus=none", "cluster.device=cpu")


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        ((), ""),
        (("megatron.mtp_num_layers=0",), "megatron.mtp_num_layers=0 must be at least 1"),
        (("megatron.mtp_loss_scaling_factor=-1",), "megatron.mtp_loss_scaling_factor=-1 must be at least 0"),
        (("data.eod_mask_loss=true",), "megatron.mtp_num_layers=2 does not go with settings of [data] that mask"),
        (("layout.context_parallel=2",), "megatron.mtp_num_layers=2 does not go with layout.context_parallel above 1"),
        (("layout.pipeline_parallel=2",), "megatron.mtp_num_layers=2 with several stages needs model.tie_embeddings"),
        (("layout.pipeline_parallel=2", "model.tie_embeddings=false"), ""),
        (("megatron.no_rope_freq=2",), "megatron.mtp_num_layers=2 does not go with megatron.no_rope_freq nor"),
    ],
)
def test_several_tokens_are_predicted_where_that_was_checked(overrides: tuple[str, ...], refusal: str) -> None:
    found = problems(load_run_config(None, [*FUTURE, *overrides]).config, MACHINE)
    assert any(refusal in one for one in found) if refusal else found == []


def test_several_tokens_are_not_predicted_by_the_model_or_the_loss_of_a_program() -> None:
    programmed = replace(MACHINE, program=frozenset({"forward_step", "model_provider"}))
    found = problems(load_run_config(None, [*FUTURE, "program.file=mine.py"]).config, programmed)
    assert "program.file=mine.py defines forward_step and model_provider; remove the setting" in found[-1]


def test_a_training_may_go_on_with_other_wavelengths_and_with_no_other_widths() -> None:
    config = load_run_config(None, [*LATENT, "megatron.rope_type=rope"]).config
    yarn: dict[str, Any] = {"multi_latent_attention": True, "rotary_scaling_factor": 8.0, "mscale_all_dim": 1.0}
    longer = replace(config, megatron=yarn)
    names = ("megatron.mscale_all_dim", "megatron.rope_type", "megatron.rotary_scaling_factor")
    assert len(differences(terms_of(config), longer)) == len(names)
    allowed = replace(longer, checkpoint=replace(longer.checkpoint, allow_changes=names))
    assert differences(terms_of(config), allowed) == []
    wider = replace(allowed, megatron={**yarn, "v_head_dim": 64})
    assert len(differences(terms_of(config), wider)) == 1


def test_a_training_without_latent_attention_may_go_on_with_yarn() -> None:
    config = load_run_config(None, ["model.position_embedding=rope"]).config
    same = replace(config, megatron={"rope_type": "rope"})
    assert differences(terms_of(config), same) == []
    longer = replace(config, megatron={"rope_type": "yarn", "rotary_scaling_factor": 8.0})
    names = ("megatron.rope_type", "megatron.rotary_scaling_factor")
    assert len(differences(terms_of(config), longer)) == len(differences(terms_of(longer), config)) == len(names)
    allowed = replace(longer, checkpoint=replace(longer.checkpoint, allow_changes=names))
    assert differences(terms_of(config), allowed) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("model.position_embedding=learned_absolute",), "has no effect without model.position_embedding=rope"),
        (("megatron.rope_type=rope", "megatron.mscale=2"), "has no effect without megatron.rope_type=yarn"),
        (("model.rope_scaling_factor=8",), "stretches wavelengths by megatron.rotary_scaling_factor"),
        (("layout.context_parallel=2", "layout.num_groups=2"), "does not go with layout.context_parallel above 1"),
        (("megatron.rotary_interleaved=true",), "does not go with megatron.rope_type=yarn"),
    ],
)
def test_what_yarn_does_not_go_with_is_refused(settings: tuple[str, ...], text: str) -> None:
    config = load_run_config(None, ["model.position_embedding=rope", "megatron.rope_type=yarn", *settings]).config
    assert any(text in problem for problem in problems(config, MACHINE))


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (("model.num_query_groups=2",), "but model.num_query_groups=2 is below layout.tensor_parallel=4"),
        (("megatron.num_query_groups=1",), "but megatron.num_query_groups=1 is below layout.tensor_parallel=4"),
        (("model.num_query_groups=2", "optimizer.muon_split_qkv=false"), ""),
        (("model.num_query_groups=2", "optimizer.kind=adam"), ""),
        (("model.num_query_groups=4",), ""),
        ((), ""),
    ],
)
def test_muon_splits_matrices_of_whole_query_groups(settings: tuple[str, ...], refused: str) -> None:
    found = problems(
        configured("optimizer.kind=muon", "layout.tensor_parallel=4", "model.num_attention_heads=8", *settings), CPU
    )
    assert len(found) == bool(refused)
    assert all(text.startswith("optimizer.muon_split_qkv=true needs") and refused in text for text in found)


def test_a_comfortable_run_raises_no_warning() -> None:
    assert warnings(configured(*GOLOMB), CPU) == []


def test_lanes_that_wait_for_others_raise_a_warning() -> None:
    overrides = ("layout.data_parallel=3", "layout.num_groups=2", "spare.redundancy=2")
    (warning,) = warnings(configured(*overrides), CPU)
    assert "spare.microbatches_per_shard=4 is no multiple of layout.data_parallel=3" in warning
    assert "2 lanes of each group wait" in warning
    assert warnings(configured(*overrides, "spare.microbatches_per_shard=6"), CPU) == []


def test_tensor_ranks_on_several_machines_raise_a_warning() -> None:
    by_hand = ("cluster.launcher=hand", "cluster.num_nodes=4", "layout.tensor_parallel=2", "layout.data_parallel=2")
    several = ("layout.num_groups=3", "layout.tensor_parallel=4", "cluster.num_nodes=4", "cluster.launcher=hand")
    texts = [[one for one in warnings(configured(*run), CPU) if "tensor" in one] for run in (by_hand, several)]
    assert texts[0] == []
    assert "layout.tensor_parallel=4 does not divide the 3 ranks of a node" in texts[1][0]


def test_more_threads_than_cores_raise_a_warning() -> None:
    config, few = configured(*GOLOMB, "cluster.threads_per_rank=3"), dataclasses.replace(CPU, num_cores=2)
    (text,) = warnings(config, few)
    assert "7 ranks with cluster.threads_per_rank=3 share 2 cores" in text
    assert warnings(config, dataclasses.replace(CPU, num_cores=3)) == [], "as ranks of the demo share cores"


def test_smaller_groups_that_get_as_much_work_as_others_raise_a_warning() -> None:
    groups = ("layout.num_groups=3", "layout.pipeline_parallel=4", "cluster.num_nodes=12", "spare.redundancy=2")
    config = configured(*groups, "layout.least_pipeline_parallel=3", "spare.deal_by_pace=false")
    (text,) = warnings(config, CPU)
    assert "layout.least_pipeline_parallel=3 with spare.deal_by_pace=false" in text


def test_redundancy_of_one_masks_nothing() -> None:
    (text,) = warnings(configured("spare.redundancy=1"), CPU)
    assert "masks nothing" in text


def test_hosts_that_share_a_domain_raise_a_warning() -> None:
    crowded = configured("layout.num_groups=12", "spare.redundancy=3", "spare.groups_per_domain=6")
    [text, *_] = [text for text in warnings(crowded, CPU) if "domain" in text]
    assert "2 of the spare.redundancy=3 hosts of some shard stand in one domain" in text
    apart = configured("layout.num_groups=12", "spare.redundancy=3", "spare.groups_per_domain=4")
    assert not any("domain" in text for text in warnings(apart, CPU))


def test_groups_that_all_host_every_shard_cannot_do_better() -> None:
    assert warnings(configured("layout.num_groups=5", "spare.redundancy=5"), CPU) == []
    assert warnings(configured("layout.num_groups=5", "spare.redundancy=4"), CPU) == []
    in_twos = configured("layout.num_groups=6", "spare.redundancy=6", "spare.groups_per_domain=2")
    assert warnings(in_twos, CPU) == []


def test_a_store_that_others_can_reach_without_a_secret_raises_a_warning() -> None:
    (text,) = warnings(configured(*GOLOMB, "control.listen_address=10.0.0.5"), CPU)
    assert "control.listen_address=10.0.0.5: the embedded store has no authentication" in text
    etcd = (*GOLOMB, "control.store=etcd")
    (text,) = warnings(configured(*etcd, 'control.endpoints=["http://etcd-0:2379"]'), CPU)
    assert "passwords and decisions travel unencrypted" in text
    assert warnings(configured(*etcd, 'control.endpoints=["http://127.0.0.1:2379"]'), CPU) == []
    assert warnings(configured(*etcd, 'control.endpoints=["https://etcd-0:2379"]'), CPU) == []
