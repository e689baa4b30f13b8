"""Groups with fewer stages: which settings are refused, and the memory of their ranks."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.checks.validate import MachineResources, problems
from spare_megatron.config.model.model_shape import model_shape
from spare_megatron.config.training.run_sizes import memory_by_length, rank_memory, ranks_per_machine, run_sizes
from spare_megatron.stacking.layout import Slabs
from tests.unit.configured import CPU, configured
from tests.unit.test_diagnosis import GPU, findings
from tests.unit.test_diagnosis import configured as on_h100

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
