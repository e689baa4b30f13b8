"""Every problem that validation knows."""

import dataclasses
from typing import Any

import pytest

from spare_megatron.config.checks.validate import MachineResources, problems, resolve_device, warnings
from spare_megatron.config.loader import load_and_judge
from spare_megatron.config.megatron_fields import COUNTED_WITH
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.schema_sections import DataConfig
from spare_megatron.config.training.corpus import CorpusFacts
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.supervisor.places.group_reforming import reform_after_s
from tests.unit.configured import CPU, configured

NO_RETURNS = ("spare.rejoins=0", "checkpoint.max_restarts=0")
STACKED = ("optimizer.sharding=stacked", "optimizer.redundancy=2")


def only_problem(*overrides: str, machine: MachineResources = CPU) -> str:
    found = problems(configured(*overrides), machine)
    assert len(found) == 1, found
    return found[0]


def corpus_with(**facts: Any) -> CorpusFacts:
    known: dict[str, Any] = {"digest": "ab12", "num_tokens": 9, "least_token": 0, "largest_token": 255}
    return CorpusFacts(**{**known, **facts})


def test_the_defaults_with_a_corpus_are_fine() -> None:
    assert problems(configured(), CPU) == []


@pytest.mark.parametrize("value", ["null", "x", "nan", "inf", "1.5", "[]", "[1]", "{a=1}", "1979-05-27"])
@pytest.mark.parametrize("name", COUNTED_WITH)
def test_a_field_that_sizes_are_computed_from_has_its_type(name: str, value: str) -> None:
    """The tokens of a corpus are compared with the sizes of the model."""
    machine = dataclasses.replace(CPU, corpus=corpus_with())
    overrides = ("data.corpus=a", "model.num_attention_heads=4", f"megatron.{name}={value}")
    loaded, found = load_and_judge(None, overrides, lambda config: problems(config, machine))
    if COUNTED_WITH[name] is not str or value not in ("null", "x"):
        assert len(found) == 1, found
        assert found[0].startswith(f"megatron.{name}=")
        assert found[0].endswith(f"(set by --set megatron.{name}={value})")
        assert name not in loaded.config.megatron


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["name=a$b"], "name='a$b' cannot be the name of a run: letters, digits and _.- only"),
        (["name="], "name='' cannot be the name of a run"),
        (["spare.redundancy=5"], "spare.redundancy=5 exceeds layout.num_groups=4"),
        (["spare.redundancy=0"], "spare.redundancy=0 must be at least 1"),
        (["spare.spares=-1"], "spare.spares=-1 must be at least 0; raise it"),
        (["spare.spares=5"], "spare.spares=5 exceeds the 4 groups of a node: no more can be lost at a time; lower it"),
        (["spare.spares=2", "cluster.num_nodes=4"], "spare.spares=2 exceeds the 1 groups of a node"),
        (
            ["spare.spares=1", *NO_RETURNS],
            "spare.spares=1 has no effect because no group comes back: spare.rejoins=0, checkpoint.max_restarts=0",
        ),
        (["spare.groups_per_domain=0"], "spare.groups_per_domain=0 must be at least 1"),
        (["spare.microbatches_per_shard=0"], "spare.microbatches_per_shard=0 must be at least 1"),
        (["spare.ramp_start=2", "spare.ramp_steps=2", "spare.ramp_increment=0"], "spare.ramp_increment=0 must be at"),
        (["spare.ramp_start=2"], "spare.ramp_start=2 has no effect without spare.ramp_steps; set both, or neither"),
        (
            ["spare.ramp_increment=2"],
            "spare.ramp_increment=2 has no effect without spare.ramp_start and spare.ramp_steps",
        ),
        (["spare.ramp_steps=9"], "spare.ramp_steps=9 has no effect without spare.ramp_start; set both, or neither"),
        (
            ["spare.ramp_start=1", "spare.ramp_increment=2", "spare.ramp_steps=9"],
            "spare.ramp_start=1 does not reach spare.microbatches_per_shard=4 by steps of spare.ramp_increment=2",
        ),
        (
            ["spare.ramp_start=1", "spare.ramp_steps=2"],
            "spare.ramp_steps=2 is below the 3 increases from spare.ramp_start=1 to spare.microbatches_per_shard=4",
        ),
        (
            ["layout.data_parallel=8"],
            "spare.microbatches_per_shard=4 is below layout.data_parallel=8, and some lanes would have nothing",
        ),
        (
            ["layout.data_parallel=2", "spare.ramp_start=1", "spare.ramp_steps=4"],
            "spare.ramp_start=1 is below layout.data_parallel=2",
        ),
        (
            ["layout.data_parallel=2", *STACKED],
            "optimizer.sharding=stacked divides the optimizer state over groups, and layout.data_parallel=2 already",
        ),
        (
            ["layout.data_parallel=2", "cluster.num_nodes=3"],
            "layout.context_parallel x layout.data_parallel x layout.pipeline_parallel=8 is not a multiple",
        ),
        (["train.micro_batch_size=0"], "train.micro_batch_size=0 must be at least 1"),
        (["train.steps=0"], "train.steps=0 must be at least 1"),
        (["layout.tensor_parallel=0"], "layout.tensor_parallel=0 must be at least 1"),
        (["faults.seed=-1"], "faults.seed=-1 must be at least 0"),
        (["model.num_layers=3", "layout.pipeline_parallel=2"], "model.num_layers=3 is not a multiple of"),
        (["model.num_attention_heads=3"], "model.hidden_size=64 is not a multiple of model.num_attention_heads=3"),
        (["layout.tensor_parallel=8"], "model.num_attention_heads=4 is not a multiple of layout.tensor_parallel=8"),
        (["model.ffn_hidden_size=9", "layout.tensor_parallel=2"], "model.ffn_hidden_size=9 is not a multiple"),
        (["model.hidden_dropout=1.0"], "model.hidden_dropout=1.0 lies outside [0, 1)"),
        (["model.attention_dropout=-0.1"], "model.attention_dropout=-0.1 lies outside [0, 1)"),
        (["optimizer.beta2=1"], "optimizer.beta2=1.0 lies outside [0, 1)"),
        (
            ["model.hidden_size=12", "model.position_embedding=rope"],
            "but 3 of a head are to be rotated (model.hidden_size=12 / model.num",
        ),
        (["layout.virtual_pipeline=2"], "layout.pipeline_parallel=1"),
        (
            ["layout.virtual_pipeline=2", "layout.pipeline_parallel=2", "megatron.batch_p2p_comm=true"],
            "silently wrong gradients",
        ),
        (["optimizer.learning_rate=0", "optimizer.min_learning_rate=0"], "optimizer.learning_rate=0.0 must be above 0"),
        (["optimizer.eps=0"], "optimizer.eps=0.0 must be above 0"),
        (["optimizer.clip_grad=-1"], "optimizer.clip_grad=-1.0 must be at least 0"),
        (["optimizer.weight_decay=nan"], "optimizer.weight_decay=nan must be at least 0"),
        (["optimizer.min_learning_rate=1"], "optimizer.min_learning_rate=1.0 exceeds optimizer.learning_rate=0.001"),
        (["optimizer.warmup_steps=20"], "optimizer.warmup_steps=20 must be below train.steps=20"),
        (
            ["optimizer.warmup_steps=5", "optimizer.decay_steps=5"],
            "optimizer.warmup_steps=5 must be below optimizer.decay_steps=5",
        ),
        (
            ["optimizer.rules=[{pattern='*.bias', weight_decay_factor=0}, {pattern='*.experts.*'}]"],
            "optimizer.rules[1].pattern='*.experts.*' matches no parameter of this model; names are like embedding.",
        ),
        (["optimizer.rules=[{pattern='output_layer.*'}]"], "pattern='output_layer.*' matches no parameter"),
        (
            ["optimizer.rules=[{pattern='*norm*'}, {pattern='*.input_layernorm.*'}]"],
            "optimizer.rules[1].pattern='*.input_layernorm.*' matches only parameters of earlier rules",
        ),
        (
            ["optimizer.rules=[{pattern='*', min_learning_rate_factor=0.5}]"],
            "optimizer.rules[0].min_learning_rate_factor has no effect without learning_rate_factor",
        ),
        (
            ["optimizer.rules=[{pattern='*', learning_rate_factor=-1}]"],
            "optimizer.rules[0].learning_rate_factor=-1.0 must be at least 0 and finite",
        ),
        (["megatron.optimizer=muon"], "megatron.optimizer cannot be set: optimizer.kind chooses it"),
        (
            ["optimizer.muon_nesterov=true"],
            "optimizer.muon_nesterov=true has no effect on optimizer.kind=adam; remove it, or set that to muon",
        ),
        (["optimizer.kind=muon", "optimizer.muon_num_ns_steps=0"], "optimizer.muon_num_ns_steps=0 must be at least 1"),
        (
            [*STACKED, "optimizer.kind=muon"],
            "optimizer.sharding=stacked divides parameters into ranges of elements, and optimizer.kind=muon",
        ),
        (["optimizer.decay_style=wsd"], "optimizer.decay_style=wsd needs optimizer.wsd_decay_steps"),
        (["optimizer.wsd_decay_steps=5"], "optimizer.wsd_decay_steps=5 has no effect on optimizer.decay_style=cosine"),
        (
            ["optimizer.decay_style=wsd", "optimizer.wsd_decay_steps=15", "optimizer.warmup_steps=6"],
            "optimizer.warmup_steps=6 and optimizer.wsd_decay_steps=15 together exceed train.steps=20",
        ),
        (["profile.steps=[3, 20]"], "profile.steps has 20, outside 0 to 19; train.steps is 20; change it"),
        (["profile.steps=[-1]"], "profile.steps has -1, outside 0 to 19"),
        (["profile.steps=[1]", "profile.groups=[4]"], "profile.groups has 4, outside 0 to 3; layout.num_groups is 4"),
        (
            ["profile.steps=[1]", "profile.ranks=[1]"],
            "profile.ranks has 1, outside 0 to 0; the number of ranks of a group is 1",
        ),
        (["profile.steps=[1]", "profile.ranks=[]"], "profile.ranks is empty, so profile.steps traces nothing; name"),
        (["metrics.peak_tflops=0"], "metrics.peak_tflops=0.0 must be above 0"),
        (["optimizer.redundancy=0"], "optimizer.redundancy=0 must be at least 1"),
        (
            ["optimizer.sharding=stacked", "optimizer.redundancy=5"],
            "optimizer.redundancy=5 exceeds layout.num_groups=4",
        ),
        (
            ["optimizer.sharding=stacked", "reduce.bucket_mib=0.001", "layout.num_groups=300"],
            "reduce.bucket_mib=0.001 must be at least 0.0092 with optimizer.sharding=stacked and layout.num_groups=300",
        ),
        (["reduce.mode=fast_bf16"], "reduce.mode=fast_bf16 rounds the gradients of model.precision=fp32 to bf16; set"),
        (["reduce.timeout_s=0"], "reduce.timeout_s=0.0 must be above 0"),
        (["control.store=etcd"], "control.store=etcd needs control.endpoints"),
        (["control.vote_fan_in=0"], "control.vote_fan_in=0 must be at least 1"),
        (['control.endpoints=["http://a:1"]'], "control.endpoints has no effect on control.store=embedded"),
        (["control.store=etcd", 'control.endpoints=["etcd-0:2379"]'], "'etcd-0:2379' is not of the form https://host"),
        (["control.store=etcd", 'control.endpoints=["https://etcd-0"]'], "is not of the form https://host:port"),
        (["control.store=etcd", 'control.endpoints=["http://a:1", "https://b:1"]'], "mix http and https"),
        (["control.store=etcd", 'control.endpoints=["https://a:1"]', "control.cert_file=c"], "go together"),
        (["control.store=etcd", 'control.endpoints=["http://a:1"]', "control.ca_file=c"], "no effect on http"),
        (["data.access=shared", "spare.granularity=stack"], "data.access=shared assigns single microbatches"),
        (["control.listen_address=0.0.0.0"], "control.listen_address=0.0.0.0 is not a single address"),
        (["control.listen_address=localhost"], "control.listen_address=localhost is not an IP address"),
        (["control.store_timeout_s=0"], "control.store_timeout_s=0.0 must be above 0"),
        (["control.startup_timeout_s=-1"], "control.startup_timeout_s=-1.0 must be above 0"),
        (["control.decision_timeout_s=240"], "must exceed reduce.timeout_s + control.group_timeout_s = 240.0"),
        (["megatron.num_layers=3"], "megatron.num_layers follows from model.num_layers"),
        (["megatron.calculate_per_token_loss=false"], "megatron.calculate_per_token_loss cannot be set"),
        (["megatron.num_query_groups=0"], "megatron.num_query_groups=0 must be at least 1; raise it"),
        (
            ["megatron.num_query_groups=3"],
            "model.num_attention_heads=4 is not a multiple of megatron.num_query_groups=3",
        ),
        (
            ["megatron.sequence_parallel=true", "layout.tensor_parallel=2"],
            "megatron.sequence_parallel=true does not work on CPUs",
        ),
        (
            ["megatron.batch_p2p_comm=false"],
            "batch_p2p_comm=false has no effect without layout.pipeline_parallel above",
        ),
        (["megatron.recompute_granularity=full"], "megatron.recompute_granularity=full does not work on CPUs"),
        (
            ["megatron.recompute_granularity=selective"],
            "megatron.recompute_granularity=selective does not work on CPUs",
        ),
        (
            ["megatron.fp8=hybrid", "megatron.fp8_recipe=mxfp8"],
            "megatron.fp8=hybrid does not work on CPUs; remove it or use cluster.device=gpu",
        ),
        (
            ["megatron.window_attn_skip_freq=[1,0,1]", "model.sliding_window=8"],
            "megatron.window_attn_skip_freq=[1, 0, 1] must be K from 2 on, where every K-th layer has no window, or a",
        ),
        (["megatron.glu_linear_offset=1.0"], "glu_linear_offset=1.0 has no effect without a gated model.activation"),
        (["megatron.is_hybrid_model=true"], "megatron.is_hybrid_model=True cannot be had: layers are those of a GPT"),
        (["model.norm_eps=0"], "model.norm_eps=0.0 must be above 0; raise it"),
        (["model.sliding_window=0"], "model.sliding_window=0 must be at least 1; raise it"),
        (
            ["model.num_query_groups=3"],
            "model.num_attention_heads=4 is not a multiple of model.num_query_groups=3; change one of them",
        ),
        (
            [f"model.{name}" for name in ("hidden_size=48", "num_attention_heads=12", "num_query_groups=6")]
            + ["layout.tensor_parallel=4"],
            "model.num_query_groups=6 is not a multiple of layout.tensor_parallel=4; change one of them",
        ),
        (["model.position_embedding=rope", "model.rope_base=0.5"], "model.rope_base=0.5 must be at least 1; raise it"),
        (["model.position_embedding=rope", "model.rope_scaling_factor=0"], "model.rope_scaling_factor=0.0 must be at"),
        (
            ["model.rope_base=5e5"],
            "model.rope_base=500000.0 has no effect on model.position_embedding=learned_absolute",
        ),
        (["model.rope_scaling_factor=8"], "model.rope_scaling_factor=8.0 has no effect on model.position_embedding="),
        (["model.transformer_impl=transformer_engine"], "needs cluster.device=gpu"),
        (
            ["faults.trace=[{phase='forward', step=20}]"],
            "faults.trace[0].step=20 lies outside 0 to 19; train.steps is 20",
        ),
        (["faults.trace=[{phase='forward', group=4}]"], "faults.trace[0].group=4 lies outside 0 to 3"),
        (
            ["layout.max_groups=6", "data.access=shared", "faults.trace=[{phase='forward', group=6}]"],
            "faults.trace[0].group=6 lies outside 0 to 5; layout.max_groups is 6",
        ),
        (["faults.trace=[{phase='forward', rank=-1}]"], "faults.trace[0].rank=-1 lies outside 0 to 0"),
        (["faults.trace=[{phase='send'}]"], "faults.trace[0].phase=send is never reached"),
        (
            [
                "control.store=etcd",
                "control.endpoints=['http://127.0.0.1:1']",
                "faults.trace=[{phase='forward', kind='kill_store'}]",
            ],
            "faults.trace[0].kind=kill_store needs the embedded control store, but control.store=etcd",
        ),
        (["faults.trace=[{phase='patch'}]"], "faults.trace[0].phase=patch is never reached"),
        (
            ["faults.trace=[{phase='forward'}, {phase='join', group=1}]", "spare.rejoins=0"],
            "faults.trace[1].phase=join is reached only when a lost group comes back",
        ),
        (["faults.trace=[{phase='forward'}, {phase='join'}]"], "set faults.trace[1].group"),
        (["faults.trace=[{phase='repair', group=1}]"], "faults.trace[0].phase=repair is never reached with optimizer"),
        (
            [*STACKED, "faults.trace=[{phase='repair', group=1}]"],
            "faults.trace[0].phase=repair is never reached: no group is lost before it",
        ),
        ([*STACKED, "faults.trace=[{phase='forward'}, {phase='repair'}]"], "set faults.trace[1].group"),
        (
            [*STACKED, "faults.trace=[{phase='forward'}, {phase='repair', group=1, kind='hang'}]"],
            "faults.trace[1].kind=hang at phase=repair stalls a background thread that no step waits for",
        ),
        (
            ["faults.trace=[{phase='forward'}, {phase='join_transfer', group=1, kind='raise'}]"],
            "faults.trace[1].kind=raise cannot strike the background transfer",
        ),
        (
            ["faults.trace=[{phase='forward', group=1}, {phase='forward', group=1}]", *NO_RETURNS],
            "faults.trace[1].group=1 is the group that faults.trace[0] hits",
        ),
        (
            [
                "layout.num_groups=1",
                "spare.redundancy=1",
                *NO_RETURNS,
                "faults.trace=[{phase='forward'}, {phase='forward'}]",
            ],
            "faults.trace has 2 faults for layout.num_groups=1",
        ),
        (["metrics.run_id='a b'"], "metrics.run_id='a b' is not a valid id"),
        (["checkpoint.max_restarts=-1"], "checkpoint.max_restarts=-1 must be at least 0"),
        (["checkpoint.restart_wait_s=601"], "checkpoint.restart_wait_s=601.0 exceeds control.decision_timeout_s=600.0"),
        (
            ["faults.trace=[{phase='in_reduce', kind='nan'}]"],
            "faults.trace[0].kind=nan strikes the local gradient sums, which are no longer read at phase=in_reduce",
        ),
        (["faults.trace=[{phase='backward', kind='kill', bit=3}]"], "faults.trace[0].bit=3 has no effect on kind=kill"),
        (
            ["faults.trace=[{phase='backward', kind='kill', seconds=3.0}]"],
            "faults.trace[0].seconds=3.0 has no effect on kind=kill, which is permanent; remove it",
        ),
        (
            ["faults.trace=[{phase='forward', kind='slow'}]"],
            "faults.trace[0].kind=slow needs faults.trace[0].factor, how many times slower it is; set it above 1",
        ),
        (
            ["faults.trace=[{phase='forward', kind='slow_data', factor=0.5}]"],
            "faults.trace[0].factor=0.5 must be above 1 and at most 1e+06; change it",
        ),
        (
            ["faults.trace=[{phase='forward', kind='hang', factor=2}]"],
            "faults.trace[0].factor=2.0 has no effect on kind=hang; remove it",
        ),
        (
            ["faults.trace=[{phase='forward', kind='slow_link', factor=2}]"],
            "faults.trace[0].kind=slow_link needs a network of the node's own; set cluster.isolate_nodes=true",
        ),
        (
            ["faults.trace=[{phase='backward', kind='hang', seconds=inf}]"],
            "faults.trace[0].seconds=inf must be above 0 and at most 1e+06; change it, or remove it for a permanent",
        ),
        (
            ["faults.trace=[{phase='backward', kind='clock_jump', seconds=nan}]"],
            "faults.trace[0].seconds=nan must lie within 1e+06 on either side of 0; change it",
        ),
        (["faults.trace=[{phase='backward', kind='bit_flip', bit=32}]"], "faults.trace[0].bit=32 lies outside 0 to 31"),
        (
            ["faults.trace=[{phase='forward', kind='product_flip', bit=16}]", "model.precision=bf16"],
            "faults.trace[0].bit=16 lies outside 0 to 15",
        ),
        (
            ["faults.trace=[{phase='in_reduce', kind='operation_flip'}]"],
            "faults.trace[0].kind=operation_flip strikes operations of a pass, and none begins at phase=in_reduce",
        ),
        (
            ["faults.trace=[{phase='backward', kind='product_drift', step=19}]"],
            "faults.trace[0].kind=product_drift at phase=backward may strike in the pass after",
        ),
        (
            ["reduce.mode=reproducible", "faults.trace=[{phase='backward', kind='bit_flip', bit=64}]"],
            "faults.trace[0].bit=64 lies outside 0 to 63",
        ),
        (
            ["faults.trace=[{phase='backward', kind='moment_flip', step=0}]"],
            "faults.trace[0].kind=moment_flip strikes moments, which the first update creates, but",
        ),
        (
            ["faults.trace=[{phase='in_reduce', kind='sum_flip'}]"],
            "faults.trace[0].kind=sum_flip strikes a bucket that is staged, and none is at phase=in_reduce; choose one",
        ),
        (
            [
                "reduce.mode=fast_bf16",
                "model.precision=bf16",
                "faults.trace=[{phase='staged', kind='sum_flip', bit=16}]",
            ],
            "faults.trace[0].bit=16 lies outside 0 to 15",
        ),
        (
            ["faults.trace=[{phase='backward', kind='data_flip', rank=0}]"],
            "faults.trace[0].kind=data_flip strikes the tokens that the first stage reads",
        ),
        (["train.gradient_outlier_factor=1"], "train.gradient_outlier_factor=1.0 must be above 1, or 0"),
        (["train.gradient_outlier_factor=nan"], "train.gradient_outlier_factor=nan must be above 1, or 0"),
        (["reduce.bucket_mib=0"], "reduce.bucket_mib=0.0 lies outside 0.00098 (1 KiB) to 1.04858e+06 (1 TiB); change"),
        (["reduce.bucket_mib=1e308"], "reduce.bucket_mib=1e+308 lies outside 0.00098 (1 KiB)"),
        (["reduce.bucket_mib=nan"], "reduce.bucket_mib=nan lies outside"),
        (["control.heartbeat_interval_s=1e-6"], "control.heartbeat_interval_s=1e-06 must be above 0.01; raise it"),
        (["control.startup_timeout_s=1e10"], "control.startup_timeout_s=1e+10 exceeds 1e+08 (three years), and longer"),
        (["optimizer.learning_rate=inf"], "optimizer.learning_rate=inf must be finite"),
        (["data.corpus="], "data.corpus is empty"),
        (
            ["data.reset_position_ids=true", "model.position_embedding=rope"],
            "data.reset_position_ids=true has no effect on model.position_embedding=rope, which ignores the ids of",
        ),
    ],
)
def test_a_problem_names_the_value_and_the_setting(overrides: list[str], expected: str) -> None:
    assert expected in only_problem(*overrides)


def test_all_problems_are_returned_at_once() -> None:
    found = problems(configured("train.steps=0", "layout.tensor_parallel=0", "megatron.bf16=true", "data.corpus="), CPU)
    assert len(found) == 4


def test_a_missing_corpus_comes_with_the_command_that_writes_it() -> None:
    text = only_problem(machine=dataclasses.replace(CPU, has_corpus=False))
    assert "spare preprocess --input DIR --output-prefix c --tokenizer byte" in text
    text = only_problem("data.corpus=x/c.bin", machine=dataclasses.replace(CPU, has_corpus=False))
    assert "data.corpus=x/c.bin is a file; set it to the common prefix of the two files, x/c" in text


def test_a_corpus_whose_sample_index_memory_has_no_room_for_is_a_problem() -> None:
    machine = dataclasses.replace(CPU, process_memory_bytes=2**33, corpus=corpus_with(num_tokens=2**36))
    text = only_problem(machine=machine)
    assert "data.corpus=c has 1073741824 sequences in an epoch, whose sample index takes 12 GiB to build, but" in text
    assert "this machine has 8 GiB of memory for it" in text
    assert problems(configured("train.steps=1000000000000", "model.seq_length=128"), machine) == []


def test_documents_are_kept_apart_by_all_layers_and_layouts() -> None:
    machine = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)
    masked, split = "data.reset_attention_mask=true", "layout.context_parallel=2"
    text = only_problem(masked, split, "megatron.cp_comm_type=a2a", machine=machine)
    assert "megatron.cp_comm_type=a2a has no effect with data.reset_attention_mask=true" in text
    for other in ("data.reset_position_ids=true", "model.position_embedding=rope", split):
        assert problems(configured(masked, other), machine) == []
    assert problems(configured(masked, "model.transformer_impl=transformer_engine"), machine) == []


def test_a_mask_of_the_loss_needs_the_token_that_ends_a_document() -> None:
    machine = dataclasses.replace(CPU, corpus=corpus_with())
    text = only_problem("data.eod_mask_loss=true", machine=machine)
    assert "no note of `spare preprocess` names one for all of data.corpus=c; write it anew, or set" in text
    assert problems(configured("data.eod_mask_loss=true", "data.end_of_document=255"), machine) == []
    assert "data.end_of_document=256 is not below model.vocab_size=256" in only_problem(
        "data.eod_mask_loss=true", "data.end_of_document=256", machine=machine
    )
    noted = dataclasses.replace(CPU, corpus=corpus_with(end_of_document=0))
    assert problems(configured("data.eod_mask_loss=true"), noted) == []
    assert "by its note data.corpus=c ends documents with token 0; clear the setting" in only_problem(
        "data.eod_mask_loss=true", "data.end_of_document=1", machine=noted
    )


def test_documents_to_be_filled_in_need_three_tokens_and_the_one_that_ends_a_document() -> None:
    noted = dataclasses.replace(CPU, corpus=corpus_with(end_of_document=0))
    rate, tokens = "data.fim_rate=0.5", "data.fim_tokens=253,254,255"
    assert problems(configured(rate, tokens), noted) == []
    for wrong in ("data.fim_tokens=253,254", "data.fim_tokens=253,254,254", "data.fim_tokens=a,254,255", ""):
        text = only_problem(rate, *filter(None, [wrong]), machine=noted)
        assert "has to be three different token ids below model.vocab_size=256 for data.fim_rate=0.5" in text
    assert "below model.vocab_size=256" in only_problem(rate, "data.fim_tokens=254,255,256", machine=noted)
    assert "data.fim_rate=1.5 lies outside [0, 1]" in only_problem("data.fim_rate=1.5", tokens, machine=noted)
    for setting in (tokens, "data.fim_spm_rate=0.1"):
        assert "has no effect with data.fim_rate=0.0" in only_problem(setting, machine=noted)
    unnoted = dataclasses.replace(CPU, corpus=corpus_with())
    assert "data.fim_rate needs the token that ends a document" in only_problem(rate, tokens, machine=unnoted)


def test_an_evaluation_needs_held_out_text_that_all_shards_share_evenly() -> None:
    assert "eval.every_steps=5 needs a validation set, and data.split=empty holds no text out" in only_problem(
        "eval.every_steps=5"
    )
    evaluated = ("eval.every_steps=5", "data.split=9,1")
    assert problems(configured(*evaluated), CPU) == []
    text = only_problem(*evaluated, "eval.sequences=20")
    assert "eval.sequences=20 is no multiple of layout.num_groups x train.micro_batch_size=8; set it to 24" in text
    fault = '{phase="evaluation", step=%d}'
    assert problems(configured(*evaluated, f"faults.trace=[{fault % 10}]"), CPU) == []
    unreached = "is reached only after as many steps as eval.every_steps=5 divides"
    assert unreached in only_problem(*evaluated, f"faults.trace=[{fault % 7}]")
    patch = '{phase="evaluation_patch", step=5}'
    assert "no group is lost before it" in only_problem(*evaluated, f"faults.trace=[{patch}]")


def test_more_groups_or_tokens_than_fp32_counts_are_refused_where_tokens_are_counted() -> None:
    counted = ("data.eod_mask_loss=true", "data.end_of_document=0", "train.micro_batch_size=4294967296")
    text = only_problem(*counted, machine=dataclasses.replace(CPU, corpus=corpus_with()))
    assert "reduce.mode=fast in up to 4096 groups and 68719476736 tokens of a step, not in 4 groups and" in text
    assert problems(configured(*counted, "reduce.mode=reproducible"), CPU) == []


def test_ranks_that_the_kernel_would_kill_for_memory_are_a_problem_on_cpus_only() -> None:
    large = ("model.hidden_size=4096", "model.num_layers=32")  # 6.4 billion parameters of 16 bytes, 4 times
    machine = dataclasses.replace(CPU, memory_bytes=2**38)
    text = only_problem(*large, machine=machine)
    assert "4 ranks on one machine (layout.num_groups=4) need 385 GiB for parameters, gradients, buckets and" in text
    assert "but it has 256 GiB of memory; lower layout.num_groups" in text
    assert problems(configured(*large, "cluster.device=gpu"), dataclasses.replace(machine, num_gpus=4)) == []
    by_hand = ("cluster.launcher=hand", "cluster.num_nodes=2", "control.store=etcd", "control.endpoints=['http://a:1']")
    assert problems(configured(*large, *by_hand), machine) == [], "two of them on each machine"
    assert problems(configured(*large), CPU) == [], "that of the machine may be unknown"
    programmed = dataclasses.replace(machine, program=frozenset({"model_provider"}))
    assert problems(configured(*large), programmed) == [], "a program has a model of another size"


def test_an_address_of_another_machine_is_no_place_for_the_store() -> None:
    machine = dataclasses.replace(CPU, can_listen=False)
    text = only_problem("control.listen_address=192.0.2.7", machine=machine)
    assert "control.listen_address=192.0.2.7 is not an address of this machine" in text
    etcd = ("control.store=etcd", 'control.endpoints=["http://192.0.2.8:2379"]')
    assert problems(configured(*etcd), machine) == []


def test_more_ranks_than_gpus_is_a_problem_on_gpus_only() -> None:
    machine = MachineResources(num_gpus=3, num_cores=64, has_corpus=True)
    assert "4 ranks" in only_problem("cluster.device=gpu", machine=machine)
    assert "there are 3" in only_problem("cluster.device=auto", machine=machine)
    assert problems(configured("cluster.device=cpu"), machine) == []


def test_ranks_that_share_a_gpu_need_fewer() -> None:
    machine = MachineResources(num_gpus=1, num_cores=64, has_corpus=True)
    text = only_problem("cluster.device=gpu", "cluster.ranks_per_gpu=3", machine=machine)
    assert "4 ranks (layout.num_groups=4 x 1 ranks) need 2 GPUs, and there are 1" in text
    assert problems(configured("cluster.device=gpu", "cluster.ranks_per_gpu=4"), machine) == []


def test_what_cpus_lack_is_allowed_on_gpus() -> None:
    machine = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)
    config = configured("megatron.sequence_parallel=true", "layout.tensor_parallel=2", "layout.context_parallel=1")
    assert problems(config, machine) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([], "megatron.fp8_recipe=delayed, the default, scales by values of earlier microbatches"),
        (["fp8_recipe=delayed"], "megatron.fp8_recipe=delayed scales by values of earlier microbatches, which"),
        (["fp8_recipe=custom"], "megatron.fp8_recipe=custom may keep values of earlier microbatches; set megatron.fp8"),
        (["fp8_recipe=tensorwise", "fp8_dot_product_attention=true"], "megatron.fp8_dot_product_attention=True cannot"),
        (["fp8_recipe=mxfp8", "fp8_param=true"], "megatron.fp8_param=True cannot be had: groups and checkpoints copy"),
    ],
)
def test_fp8_that_depends_on_earlier_microbatches_is_refused(fields: list[str], expected: str) -> None:
    """Delayed scaling was accepted: a group that came back had another history of largest values."""
    machine = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)
    words = [f"megatron.{field}" for field in ("fp8=hybrid", *fields)]
    assert expected in only_problem(*words, machine=machine)
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        assert problems(configured("megatron.fp8=hybrid", f"megatron.fp8_recipe={recipe}"), machine) == []


def test_pieces_of_the_sequence_must_come_out_even() -> None:
    machine = MachineResources(num_gpus=8, num_cores=64, has_corpus=True)
    text = only_problem("layout.context_parallel=2", "model.seq_length=66", machine=machine)
    assert "model.seq_length=66 is not a multiple of 2 x layout.context_parallel=4" in text
    text = only_problem(
        "layout.tensor_parallel=2", "model.seq_length=65", "megatron.sequence_parallel=true", machine=machine
    )
    assert "model.seq_length=65 is not a multiple of layout.tensor_parallel x layout.context_parallel=2" in text


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_ranks_divide_the_part_of_a_context_rank(tensor: int) -> None:
    machine = MachineResources(num_gpus=32, num_cores=64, has_corpus=True)
    split = (f"layout.tensor_parallel={tensor}", "layout.context_parallel=2", "model.num_attention_heads=4")
    config = configured(*split, "model.seq_length=68", "megatron.sequence_parallel=true")
    refused = ["model.seq_length=68 is not a multiple of layout.tensor_parallel x layout.context_parallel=8"]
    found = [text.partition(";")[0] for text in problems(config, machine)]
    assert found == (refused if tensor == 4 else [])


def test_auto_takes_gpus_when_there_are_any() -> None:
    assert resolve_device(configured(), CPU) == "cpu"
    assert resolve_device(configured(), dataclasses.replace(CPU, num_gpus=1)) == "gpu"
    assert resolve_device(configured("cluster.device=cpu"), dataclasses.replace(CPU, num_gpus=1)) == "cpu"


def test_a_vocabulary_smaller_than_that_of_the_corpus_is_refused() -> None:
    machine = dataclasses.replace(CPU, corpus=corpus_with(vocab_size=300))
    (problem,) = problems(RunConfig(data=DataConfig(corpus="text")), machine)
    assert "model.vocab_size=256 is below the vocabulary of data.corpus=text, 300 tokens" in problem


def test_a_password_in_an_endpoint_is_refused_and_not_shown() -> None:
    problem = only_problem("control.store=etcd", 'control.endpoints=["https://user:secret@etcd-0:2379"]')
    assert "'etcd-0:2379' is not of the form https://host:port" in problem
    assert "secret" not in problem


def test_groups_that_do_not_fill_machines_are_not_reformed_and_the_reason_is_given_once() -> None:
    """An error only for those who ask for it."""
    divided = ("layout.num_groups=4", "layout.pipeline_parallel=3", "model.num_layers=6", "cluster.num_nodes=6")
    (text,) = [text for text in warnings(configured(*divided), CPU) if "re-formed" in text]
    assert "groups of 3 ranks on machines of 2 do not fill whole machines" in text
    assert problems(configured(*divided), CPU) == []
    (problem,) = problems(configured(*divided, "spare.reform_after_s=5"), CPU)
    assert problem.startswith("spare.reform_after_s=5 has no effect: groups of 3 ranks on machines of 2")
    filled = (*divided[:3], "cluster.num_nodes=12", "spare.reform_after_s=5")
    assert problems(configured(*filled), CPU) == []
    (problem,) = problems(configured(*filled, "spare.rejoins=0"), CPU)
    assert "has no effect with spare.rejoins=0" in problem


def test_what_tensor_parallel_sums_lose_without_nvlink_sharp() -> None:
    shared = ("layout.num_groups=4", "layout.tensor_parallel=4", "model.num_attention_heads=4", "cluster.num_nodes=2")
    gpu = "cluster.device=gpu"
    assert run_sizes(configured(*shared, gpu)).nvlink_traffic == 1.2
    for others in (shared, (*shared[:3], gpu, "cluster.num_nodes=4"), (shared[0], gpu)):
        assert run_sizes(configured(*others)).nvlink_traffic == 1.0


def test_a_replacement_is_waited_for_where_the_job_has_spare_nodes() -> None:
    job = ("cluster.launcher=srun", "slurm.num_spare_nodes=1")
    assert [reform_after_s(configured(*sets)) for sets in ((), job, (*job, "spare.reform_after_s=5"))] == [0, 60, 5]
