"""Requirements between settings: a row has when it is broken, and the message, which names values, limit and remedy."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial, reduce
from ipaddress import IPv4Address, IPv6Address, ip_address
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from spare_megatron.config.model_fields import as_written, model_fields, rotated_width
from spare_megatron.config.schema import OptimizerConfig, RunConfig
from spare_megatron.config.supported_versions import installed_version, release
from spare_megatron.config.training.terms import global_batch
from spare_megatron.core.machines.reforming import can_reform, places_per_group
from spare_megatron.stacking.layout import GroupId, PlaceId

Subject = TypeVar("Subject")


class Rule(NamedTuple, Generic[Subject]):
    is_broken: Callable[[Subject], object]
    text: str
    """`[spare.redundancy]` becomes the setting with its value, `<spare.redundancy>` the value alone, `<rotated_width>`
    a value of `_DERIVED`; of a fault `[.phase]` is a setting, and `<where>` its place in the trace.
    """


def broken(rules: Iterable[Rule[Subject]], subject: Subject) -> Iterator[str]:
    """The messages of the requirements that are not met."""
    for rule in rules:
        if rule.is_broken(subject):
            yield _SETTING.sub(partial(_shown, subject), rule.text)


_SETTING = re.compile(r"\[(?=[a-z_]*\.)(?P<setting>[a-z_.]+)\]|<(?P<value>[a-z_.]+)(?P<form>!r|:[.0-9]*g)?>")


def _shown(subject: Any, match: re.Match[str]) -> str:
    """What stands for a name: of a fault an attribute of its own, else of its configuration."""
    name, config = match["setting"] or match["value"], getattr(subject, "config", subject)
    of_fault = name.startswith(".")
    path = f"fault{name}".split(".") if of_fault else name.split(".")
    derive = _DERIVED.get(name)
    value: Any = derive(config) if derive else reduce(getattr, path, subject if hasattr(subject, path[0]) else config)
    text = str(value).lower() if isinstance(value, bool) else f"{{{match['form'] or ''}}}".format(value)
    text = "absent" if value is None else text
    return f"{subject.where if of_fault else ''}{name}={text}" if match["setting"] else text


_DEFAULTS = RunConfig()


def _ignored(name: str, when: Callable[[RunConfig], object], text: str) -> Rule[RunConfig]:
    """A setting that differs from its default where it is not used; `*` in the text is its name."""
    value = attrgetter(name)
    return Rule(lambda c: when(c) and value(c) != value(_DEFAULTS), text.replace("*", name))


def _splits_windows(config: RunConfig) -> bool:
    """Whether layers of transformer-engine may get sequences in parts and have a window."""
    has_window = model_fields(config)["window_size"] is not None
    return has_window and config.layout.context_parallel > 1 and config.may_use_transformer_engine


def _has_sinks(config: RunConfig) -> bool:
    """Whether heads in layers of transformer-engine may attend to nothing."""
    return config.may_use_transformer_engine and config.megatron.get("softmax_type", "vanilla") != "vanilla"


def _exchanges(config: RunConfig) -> set[str]:
    """Those of context parallelism in the layers, which have one or a list."""
    given = config.megatron.get("cp_comm_type")
    return {*map(str, given if isinstance(given, list) else [given])}


def _has_early_transformer_engine(_: RunConfig) -> bool:
    """Whether this machine has a version without kernels for sinks in packed documents."""
    installed = installed_version("transformer-engine")
    return installed is not None and release(installed) < (2, 12)


def _divides_query_groups(config: RunConfig) -> bool:
    """Whether tensor-parallel ranks have parts of query groups; without `num_query_groups` every head is one."""
    num_groups = model_fields(config)["num_query_groups"]
    return isinstance(num_groups, int) and num_groups < config.layout.tensor_parallel


def _fills_nodes(config: RunConfig) -> bool:
    layout = config.parallel
    return min(layout.num_ranks, layout.num_nodes) >= 1 and not layout.num_ranks % layout.num_nodes


def _fitting_nodes(config: RunConfig) -> str:
    num_ranks, gpus = config.parallel.num_ranks, config.slurm.gpus_per_node
    return f" (cluster.num_nodes={num_ranks // gpus} fits)" if gpus > 0 and not num_ranks % gpus else ""


def _groups_per_node(config: RunConfig) -> int:
    layout = config.parallel
    return max(len(layout.groups_on(PlaceId(node))) for node in range(layout.num_nodes))


def _why_not_reformed(config: RunConfig) -> str:
    """Why machines of broken groups cannot make whole ones; empty if they can, or if every group stands on one."""
    layout = config.parallel
    if layout.num_nodes < 2 or layout.num_ranks % layout.num_nodes:  # the latter is a problem of its own
        return ""
    if all(len(layout.nodes_of(GroupId(group))) <= 1 for group in range(layout.num_groups)):
        return ""
    try:
        places_per_group(layout)
    except ValueError as error:
        return str(error)
    return ""


def _is_fewer(config: RunConfig) -> bool:
    return 2 <= (config.layout.least_pipeline_parallel or 0) < config.layout.pipeline_parallel


def _hosts_in_domain(config: RunConfig) -> int:
    """Most hosts of a shard that a better placement or a lower redundancy would keep out of one domain."""
    spare = config.spare
    if spare.redundancy in (1, config.layout.num_groups):
        return 1
    return config.placement.max_hosts_in_domain(spare.groups_per_domain)


def _ramp_increases(config: RunConfig) -> int:
    """Increases of the ramp; 0 without one, or if they do not end at `microbatches_per_shard`."""
    spare = config.spare
    if spare.ramp_start is None or spare.ramp_steps is None or spare.ramp_increment < 1:
        return 0
    rise = spare.microbatches_per_shard - spare.ramp_start
    return 0 if rise % spare.ramp_increment else rise // spare.ramp_increment


def _decay_end(config: RunConfig) -> int:
    return config.optimizer.decay_steps or config.train.steps


def _is_warmed_up(config: RunConfig) -> bool:
    return not 0 < config.optimizer.warmup_steps >= _decay_end(config)


def _least_bucket_mib(config: RunConfig) -> float:
    """The staging buffer of a gather holds at least eight bytes of each group, and their checksum."""
    return 32 * (config.layout.num_groups + 1) / 2**20


def _tokens_per_step(config: RunConfig) -> int:
    return global_batch(config) * config.model.seq_length


_DERIVED: Mapping[str, Callable[[RunConfig], object]] = {
    "decay_end": lambda c: f"{'optimizer.decay_' if c.optimizer.decay_steps else 'train.'}steps={_decay_end(c)}",
    "first_of_container": lambda c: c.slurm.container[0],
    "fitting_nodes": _fitting_nodes,
    "groups_per_node": _groups_per_node,
    "rotated_width": rotated_width,
    "hosts_in_domain": _hosts_in_domain,
    "idle_lanes": lambda c: -c.spare.microbatches_per_shard % c.layout.data_parallel,
    "least_bucket_mib": _least_bucket_mib,
    "linear_bias": partial(as_written, field="add_bias_linear"),
    "nodes_of_job": lambda c: c.cluster.num_nodes + c.slurm.num_spare_nodes,
    "query_groups": partial(as_written, field="num_query_groups"),
    "ramp_increases": _ramp_increases,
    "sharing_lanes": lambda c: f"layout.{'expert' if c.layout.expert_parallel else 'data'}_parallel={c.row_size}",
    "sink": lambda c: f"megatron.softmax_type={c.megatron['softmax_type']}",
    "snapshot_copies": lambda c: c.snapshot.redundancy + 1,
    "tokens_per_step": _tokens_per_step,
    "why_not_reformed": _why_not_reformed,
    "window": partial(as_written, field="window_size"),
}


def is_endpoint(endpoint: str, *schemes: str) -> bool:
    """Whether it names scheme, host and port; the scheme is one of etcd's by default."""
    try:
        url = urlsplit(endpoint)
        is_whole = bool(url.hostname and url.port)
    except ValueError:
        return False
    return url.scheme in (schemes or ("http", "https")) and is_whole and "@" not in url.netloc and url.path in ("", "/")


def _is_encrypted(*endpoints: str) -> bool:
    return any(urlsplit(endpoint).scheme == "https" for endpoint in endpoints if is_endpoint(endpoint))


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host == "localhost" or getattr(_address(host), "is_loopback", False)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _has_outer_etcd(config: RunConfig) -> bool:
    """Whether the outer store is an etcd, whose certificates and credentials `[control]` has."""
    return any(map(is_endpoint, config.sites.endpoints))


def _is_outer_store(endpoints: tuple[str, ...]) -> bool:
    """Whether these are members of one etcd, or the address of one embedded store."""
    schemes = {urlsplit(one).scheme if is_endpoint(one) or is_endpoint(one, "tcp") else "" for one in endpoints}
    return len(schemes) == 1 and "" not in schemes and (schemes != {"tcp"} or len(endpoints) == 1)


# fmt: off
LAYOUT: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: c.spare.redundancy > c.layout.num_groups,
         "[spare.redundancy] exceeds [layout.num_groups]: a shard cannot have more hosts than there are groups; lower "
         "spare.redundancy or raise layout.num_groups"),
    Rule(lambda c: c.layout.max_groups is not None and c.layout.max_groups < c.layout.num_groups,
         "[layout.max_groups] is less than [layout.num_groups], with which the run begins; raise the former or leave "
         "it out"),
    Rule(lambda c: c.layout.most_groups > c.layout.num_groups and c.data.access != "shared",
         "[layout.max_groups] exceeds [layout.num_groups], and groups beyond that host no shard: they need "
         "data.access=shared, but it is <data.access>; set it or lower the former"),
    Rule(lambda c: c.data.access == "shared" and c.spare.granularity == "stack",
         "[data.access] assigns single microbatches of shards without a host, but [spare.granularity] moves whole "
         "shards; set data.access=stacked or spare.granularity=microbatch"),
    Rule(lambda c: c.layout.virtual_pipeline != 1 and c.layout.pipeline_parallel == 1,
         "[layout.virtual_pipeline] needs more than one pipeline stage, but [layout.pipeline_parallel]; raise the one "
         "or set the other to 1"),
    Rule(lambda c: c.layout.virtual_pipeline != 1 and c.megatron.get("batch_p2p_comm"),
         "megatron.batch_p2p_comm=true with [layout.virtual_pipeline] computes silently wrong gradients in the "
         "interleaved schedule; set the first to false or the second to 1"),
    Rule(lambda c: c.cluster.isolate_nodes and c.control.store != "embedded",
         "[control.store] cannot be reached with [cluster.isolate_nodes]; set the first to embedded or the second to "
         "false"),
    Rule(lambda c: c.spare.spares > 0 and _fills_nodes(c) and not (c.spare.rejoins or c.checkpoint.max_restarts),
         "[spare.spares] has no effect because no group comes back: [spare.rejoins], [checkpoint.max_restarts]; raise "
         "one of them, or set spare.spares to 0"),
    Rule(lambda c: c.spare.reform_after_s is not None and not c.spare.rejoins,
         "spare.reform_after_s=<spare.reform_after_s:g> has no effect with [spare.rejoins], with which no group comes "
         "back; raise it, or remove spare.reform_after_s"),
    Rule(lambda c: c.spare.ramp_start is None and c.spare.ramp_steps is not None,
         "[spare.ramp_steps] has no effect without spare.ramp_start; set both, or neither"),
    Rule(lambda c: c.spare.ramp_start is not None and c.spare.ramp_steps is None,
         "[spare.ramp_start] has no effect without spare.ramp_steps; set both, or neither"),
    Rule(lambda c: c.spare.ramp_start is None and c.spare.ramp_steps is None and c.spare.ramp_increment != 1,
         "[spare.ramp_increment] has no effect without spare.ramp_start and spare.ramp_steps; set all, or none"),
    Rule(lambda c: c.spare.ramp_start is not None and c.spare.ramp_steps is not None
         and (c.spare.ramp_start >= c.spare.microbatches_per_shard
              or (c.spare.microbatches_per_shard - c.spare.ramp_start) % (c.spare.ramp_increment or 1)),
         "[spare.ramp_start] does not reach [spare.microbatches_per_shard] by steps of [spare.ramp_increment]; change "
         "one of them"),
    Rule(lambda c: _ramp_increases(c) > max(c.spare.ramp_steps or 0, 0),
         "[spare.ramp_steps] is below the <ramp_increases> increases from [spare.ramp_start] to "
         "[spare.microbatches_per_shard]; raise it, or spare.ramp_increment"),
    Rule(lambda c: c.spare.spares > 0 and _fills_nodes(c) and c.spare.spares > _groups_per_node(c),
         "[spare.spares] exceeds the <groups_per_node> groups of a node: no more can be lost at a time; lower it"),
    Rule(lambda c: c.spare.reform_after_s is not None and _why_not_reformed(c),
         "spare.reform_after_s=<spare.reform_after_s:g> has no effect: <why_not_reformed>"),
    Rule(lambda c: c.row_size > 1 and (c.model.num_experts or 0) % c.row_size,
         "[model.num_experts] is no multiple of <sharing_lanes>, and each lane holds as many experts; change one of "
         "them"),
    Rule(lambda c: c.row_size > 1 and c.layout.data_parallel % c.row_size,
         "[layout.data_parallel] is no multiple of <sharing_lanes>: lanes of one group divide the experts, never "
         "groups, any of which may be lost; change one of them"),
)

SHAPES: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: not _is_fewer(c),
         "[layout.least_pipeline_parallel] must be at least 2, and less than [layout.pipeline_parallel]; change it, or "
         "remove it"),
    Rule(lambda c: _fills_nodes(c) and not can_reform(c.parallel),
         "[layout.least_pipeline_parallel] is for groups that fill several machines each and can lose some of them, "
         "but each has <parallel.ranks_per_group> ranks, and each of [cluster.num_nodes] machines "
         "<parallel.ranks_per_node>; change cluster.num_nodes, or remove the former"),
    Rule(lambda c: _is_fewer(c) and _fills_nodes(c) and can_reform(c.parallel) and len(c.parallel.lengths) == 1,
         "[layout.least_pipeline_parallel] allows no pipeline below [layout.pipeline_parallel] whose stages, of "
         "<parallel.ranks_per_stage> ranks each, fill whole machines of <parallel.ranks_per_node>; lower it, or change "
         "cluster.num_nodes"),
    Rule(lambda c: not c.spare.rejoins,
         "[layout.least_pipeline_parallel] has no effect with [spare.rejoins], with which no group comes back; raise "
         "the latter, or remove the former"),
    Rule(lambda c: c.layout.virtual_pipeline != 1,
         "[layout.least_pipeline_parallel] needs stages of one chunk, but [layout.virtual_pipeline]; set the latter to "
         "1, or remove the former"),
    Rule(lambda c: c.optimizer.sharding == "stacked",
         "[layout.least_pipeline_parallel] needs the whole optimizer state of a layer in each group, but "
         "[optimizer.sharding] divides it over groups by rank; set the latter to replicated, or remove the former"),
    Rule(lambda c: c.megatron.get("recompute_method") == "block" or c.megatron.get("recompute_num_layers", 1) != 1,
         "[layout.least_pipeline_parallel] cuts stages into parts of different sizes, each of which recomputes its "
         "layers one by one; set megatron.recompute_method=uniform and megatron.recompute_num_layers=1, or remove it"),
)
"""Of `layout.least_pipeline_parallel`, if it is set. Delayed scaling is refused in any layout (`field_problems`)."""

ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

TRAINING: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: not re.fullmatch(r"[A-Za-z0-9_.-]+", c.name),  # it becomes part of paths, keys and the batch script
         "name=<name!r> cannot be the name of a run: letters, digits and _.- only; change it"),
    Rule(lambda c: not 2.0**-10 <= c.bucket_mib <= 2.0**20,
         "reduce.bucket_mib=<bucket_mib> lies outside 0.00098 (1 KiB) to 1.04858e+06 (1 TiB); change it"),
    Rule(lambda c: c.reduce.mode == "fast_bf16" and c.model.precision == "fp32",
         "[reduce.mode] rounds the gradients of [model.precision] to bf16; set reduce.mode=fast or "
         "model.precision=bf16"),
    Rule(lambda c: not (c.train.gradient_outlier_factor == 0.0 or c.train.gradient_outlier_factor > 1.0),
         "[train.gradient_outlier_factor] must be above 1, or 0 to disable the check; change it"),
    Rule(lambda c: c.model.position_embedding == "rope" and isinstance(rotated_width(c), int)
         and (rotated_width(c) < 2 or rotated_width(c) % 2),
         "[model.position_embedding] rotates pairs of values, but <rotated_width> of a head are to be rotated "
         "([model.hidden_size] / [model.num_attention_heads] or megatron.kv_channels, times megatron.rotary_percent, "
         "or megatron.qk_pos_emb_head_dim); make that an even number"),
    Rule(lambda c: c.metrics.run_id and not ID.fullmatch(c.metrics.run_id),
         "metrics.run_id=<metrics.run_id!r> is not a valid id for Weights & Biases; use at most 64 letters, digits, "
         "hyphens and underscores"),
    Rule(lambda c: _address(c.metrics.prometheus_address) is None,
         "[metrics.prometheus_address] is not an IP address; name one of the driver's machine"),
    _ignored("metrics.prometheus_address", lambda c: c.metrics.prometheus_port is None,
         "[*] has no effect without metrics.prometheus_port; remove it, or set that"),
    *(_ignored(f"model.{name}", lambda c: c.model.position_embedding != "rope",
         "[*] has no effect on [model.position_embedding]; remove it, or set that to rope")
      for name in ("rope_base", "rope_scaling_factor")),
    Rule(lambda c: c.data.reset_position_ids and c.model.position_embedding == "rope",
         "[data.reset_position_ids] has no effect on [model.position_embedding], which ignores the ids of positions "
         "and depends on their distances alone; set data.reset_attention_mask=true, and this to false"),
    Rule(lambda c: c.optimizer.min_learning_rate > c.optimizer.learning_rate,
         "[optimizer.min_learning_rate] exceeds [optimizer.learning_rate]; lower the first or raise the second"),
    Rule(lambda c: c.optimizer.decay_style == "wsd" and c.optimizer.wsd_decay_steps is None,
         "[optimizer.decay_style] needs optimizer.wsd_decay_steps, the steps of its decay; set it"),
    Rule(lambda c: c.optimizer.decay_style != "wsd" and c.optimizer.wsd_decay_steps is not None,
         "[optimizer.wsd_decay_steps] has no effect on [optimizer.decay_style]; remove it, or set that to wsd"),
    *(_ignored(f"optimizer.{name}", lambda c: c.optimizer.kind != "muon",
         "[*] has no effect on [optimizer.kind]; remove it, or set that to muon")
      for name in (one.name for one in fields(OptimizerConfig) if one.name.startswith("muon_"))),
    Rule(lambda c: c.optimizer.sharding == "stacked" and c.optimizer.kind == "muon",
         "[optimizer.sharding] divides parameters into ranges of elements, and [optimizer.kind] orthogonalizes whole "
         "matrices; set the former to replicated or the latter to adam"),
    Rule(lambda c: c.optimizer.kind == "muon" and c.optimizer.muon_split_qkv and _divides_query_groups(c),
         "[optimizer.muon_split_qkv] needs whole query groups on each tensor-parallel rank, but <query_groups> is "
         "below [layout.tensor_parallel], and megatron-core would orthogonalize queries, keys and values together; set "
         "the first to false, or lower the last"),
    Rule(lambda c: c.optimizer.sharding == "stacked" and not c.layout.data_parallel == c.row_size == 1,
         "[optimizer.sharding] divides the optimizer state over groups, and [layout.data_parallel] already over the "
         "lanes of each; set the former to replicated or the latter to 1"),
    Rule(lambda c: c.optimizer.sharding == "stacked" and c.optimizer.redundancy > c.layout.num_groups,
         "[optimizer.redundancy] exceeds [layout.num_groups]: a partition cannot have more hosts than there are "
         "groups; lower optimizer.redundancy or raise layout.num_groups"),
    Rule(lambda c: c.optimizer.sharding == "stacked" and c.bucket_mib < _least_bucket_mib(c),
         "reduce.bucket_mib=<bucket_mib> must be at least <least_bucket_mib:.2g> with [optimizer.sharding] and "
         "[layout.num_groups]; raise it"),
    Rule(lambda c: not _is_warmed_up(c),
         "[optimizer.warmup_steps] must be below <decay_end>; lower the first or raise the second"),
    Rule(lambda c: _is_warmed_up(c) and c.optimizer.decay_style == "wsd" and c.optimizer.wsd_decay_steps is not None
         and c.optimizer.warmup_steps + c.optimizer.wsd_decay_steps > _decay_end(c),
         "[optimizer.warmup_steps] and [optimizer.wsd_decay_steps] together exceed <decay_end>; lower one of the "
         "former or raise the latter"),
)

_MOST_COUNTED_GROUPS, _MOST_COUNTED_TOKENS = 2**12, 2**36
"""Limits of the two digits in fp32 that `mcore.gradients.gradients` counts tokens with."""

TOKENS: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: c.data.fim_rate and max(c.data.fim_ids, default=c.model.vocab_size) >= c.model.vocab_size,
         "[data.fim_tokens] has to be three different token ids below [model.vocab_size] for [data.fim_rate]; set "
         "them as in 256,257,258, or raise model.vocab_size"),
    *(_ignored(name, lambda c: not c.data.fim_rate, "[*] has no effect with [data.fim_rate]; remove it, or raise that")
      for name in ("data.fim_spm_rate", "data.fim_tokens")),
    Rule(lambda c: c.data.eod_mask_loss and c.reduce.mode != "reproducible"
         and (c.layout.num_groups > _MOST_COUNTED_GROUPS or _tokens_per_step(c) > _MOST_COUNTED_TOKENS),
         f"[data.eod_mask_loss] counts tokens exactly with [reduce.mode] in up to {_MOST_COUNTED_GROUPS} groups and "
         f"{_MOST_COUNTED_TOKENS} tokens of a step, not in <layout.num_groups> groups and <tokens_per_step>; set "
         f"reduce.mode=reproducible, or lower layout.num_groups or the batch"),
)
"""Of a run that trains on corpora."""

EXPERTS: tuple[Rule[RunConfig], ...] = (
    *(_ignored(name, lambda c: c.model.num_experts is None, "[*] has no effect without experts; remove it, or set "
         "model.num_experts")
      for name in ("model.experts_per_token", "model.expert_ffn_hidden_size", "model.shared_expert_ffn_hidden_size",
         "model.num_dense_layers", "layout.expert_parallel")),
    Rule(lambda c: c.model.num_experts is not None and c.model.experts_per_token > c.model.num_experts,
         "[model.experts_per_token] exceeds [model.num_experts]; lower the first or raise the second"),
    Rule(lambda c: c.model.num_experts is not None and c.model.num_dense_layers >= c.model.num_layers,
         "[model.num_dense_layers] leaves none of [model.num_layers] for [model.num_experts]; lower the first, or "
         "remove the last"),
    Rule(lambda c: c.model.num_experts is not None and c.layout.tensor_parallel > 1
     and not c.megatron.get("sequence_parallel"),
         "[layout.tensor_parallel] with [model.num_experts] needs megatron.sequence_parallel=true, which works on GPUs "
         "alone: without it every tensor-parallel rank would route all tokens; set it, or layout.tensor_parallel=1"),
    Rule(lambda c: c.model.shared_expert_ffn_hidden_size is not None and model_fields(c)["add_bias_linear"],
         "<linear_bias> with [model.shared_expert_ffn_hidden_size]: megatron-core's shared experts have no biases; set "
         "model.linear_bias=false, or remove the second"),
    Rule(lambda c: c.model.num_experts is not None and c.model.expert_width % (c.layout.tensor_parallel or 1),
         "model.expert_ffn_hidden_size=<model.expert_width> is not a multiple of [layout.tensor_parallel]; change one "
         "of them"),
    Rule(lambda c: c.model.num_experts is not None
         and (c.model.shared_expert_ffn_hidden_size or 0) % (c.layout.tensor_parallel or 1),
         "[model.shared_expert_ffn_hidden_size] is not a multiple of [layout.tensor_parallel]; change one of them"),
)
"""Of a mixture of experts, and of settings that only mixtures have."""

CHECKPOINTS: tuple[Rule[RunConfig], ...] = (
    *(_ignored(f"checkpoint.{name}", lambda c: c.checkpoint.cadence == "optimal",
         "[*] is not used with [checkpoint.cadence]; remove one") for name in ("interval_s", "interval_steps")),
    Rule(lambda c: c.checkpoint.keep_every_steps is not None and not c.checkpoint.is_wanted,
         "[checkpoint.keep_every_steps] has no effect without checkpoints; set checkpoint.interval_steps or "
         "checkpoint.interval_s"),
    Rule(lambda c: c.checkpoint.max_restarts and c.checkpoint.restart_wait_s > c.control.decision_timeout_s,
         "[checkpoint.restart_wait_s] exceeds [control.decision_timeout_s], for which ranks wait for a log entry; "
         "lower the first or raise the second"),
    Rule(lambda c: c.snapshot.every_steps < 0 or c.snapshot.every_steps == 1,
         "[snapshot.every_steps] must be at least 2, so that each is complete before the next begins, or 0 to take "
         "none; change it"),
    Rule(lambda c: c.snapshot.every_steps and not c.checkpoint.max_restarts and c.audit.every_steps == 0,
         "[snapshot.every_steps] has no effect with [checkpoint.max_restarts], which allows no restart, and without "
         "audits, whose findings undo steps; raise the second, or set the first to 0"),
)

_UNUSED_BY_STORE = "* has no effect on [control.store]; remove it or set control.store=etcd"

STORE: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: _address(c.control.listen_address) is None,
         "[control.listen_address] is not an IP address; name one of this machine"),
    Rule(lambda c: getattr(_address(c.control.listen_address), "is_unspecified", False),
         "[control.listen_address] is not a single address that ranks can connect to; name one address of this "
         "machine"),
    _ignored("control.endpoints", lambda c: c.control.store == "embedded", _UNUSED_BY_STORE),
    *(_ignored(f"control.{name}", lambda c: c.control.store == "embedded" and not _has_outer_etcd(c), _UNUSED_BY_STORE)
      for name in ("ca_file", "cert_file", "key_file", "credentials_file")),
    Rule(lambda c: c.control.store != "embedded" and not c.control.endpoints and c.cluster.launcher != "srun",
         'control.store=etcd needs control.endpoints, such as ["https://etcd-0:2379"]'),
    Rule(lambda c: c.control.store != "embedded"
         and len({urlsplit(one).scheme for one in c.control.endpoints if is_endpoint(one)}) > 1,
         "control.endpoints mix http and https; use https for all"),
    Rule(lambda c: c.control.store != "embedded" and bool(c.control.cert_file) != bool(c.control.key_file),
         "control.cert_file and control.key_file go together; set both or neither"),
    *(_ignored(f"control.{name}", lambda c: c.control.store != "embedded"
         and not _is_encrypted(*c.control.endpoints, *c.sites.endpoints),
         "* has no effect on http endpoints; use https in control.endpoints") for name in ("ca_file", "cert_file")),
)

SITES: tuple[Rule[RunConfig], ...] = (
    *(_ignored(f"sites.{name}", lambda c: not c.sites.is_used,
         "[*] has no effect without sites.endpoints; remove it, or set that")
      for name in ("num_sites", "site", "every_steps", "learning_rate", "momentum", "bits", "wait_s")),
    Rule(lambda c: c.sites.is_used and not _is_outer_store(c.sites.endpoints),
         "sites.endpoints=<sites.endpoints> are neither client URLs of one etcd, as in https://etcd-0:2379, nor one "
         "tcp://ADDRESS:PORT; correct them"),
    Rule(lambda c: c.cluster.launcher == "srun" and c.control.store == "etcd" and not c.control.endpoints
         and _is_encrypted(*c.sites.endpoints),
         "sites.endpoints=<sites.endpoints> need the certificates of [control], which a job that starts an etcd of its "
         "own replaces by those of that one; name an etcd in control.endpoints, or use http over a tunnel"),
    Rule(lambda c: c.sites.is_used and c.sites.site >= c.sites.num_sites,
         "[sites.site] must be below [sites.num_sites]: sites are numbered from 0; lower the first or raise the "
         "second"),
    Rule(lambda c: c.sites.is_used and c.optimizer.sharding == "stacked",
         "[optimizer.sharding] leaves each group a part of the parameters that the optimizer keeps, and sites exchange "
         "all; set it to replicated, or remove sites.endpoints"),
    Rule(lambda c: c.sites.is_used and c.layout.least_pipeline_parallel is not None,
         "[layout.least_pipeline_parallel] gives groups ranks that hold different parameters, and ranks of one "
         "position exchange theirs between sites; remove it, or sites.endpoints"),
    Rule(lambda c: c.sites.is_used and c.layout.data_parallel > 1,
         "[layout.data_parallel] divides what the optimizer keeps over lanes, and sites exchange all of it; set it to "
         "1, or remove sites.endpoints"),
    Rule(lambda c: c.sites.is_used and c.megatron.get("moe_router_enable_expert_bias"),
         "megatron.moe_router_enable_expert_bias=true keeps biases beside the parameters, and sites exchange these "
         "alone: each would select experts by its own biases; set it to false, or remove sites.endpoints"),
    Rule(lambda c: c.sites.is_used and c.data.phases,
         "sites read one order of samples, and [data.phases] has several; begin a new training, or remove "
         "sites.endpoints"),
    Rule(lambda c: c.sites.is_used and c.snapshot.every_steps,
         "[snapshot.every_steps] lets a run go back behind an outer step that other sites have taken; set it to 0, or "
         "remove sites.endpoints"),
    Rule(lambda c: c.sites.is_used and c.cluster.isolate_nodes,
         "[cluster.isolate_nodes] cuts nodes off from other sites; set it to false, or remove sites.endpoints"),
    Rule(lambda c: c.sites.is_used and 4 * c.sites.wait_s > c.control.decision_timeout_s,
         "4 x [sites.wait_s] exceeds [control.decision_timeout_s], for which ranks wait for a log entry, also for that "
         "of an outer step; lower the first or raise the second"),
)

SEVERAL_MACHINES: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: c.cluster.ranks_per_gpu > 1,
         "[cluster.ranks_per_gpu] is for tests on one machine, but [cluster.launcher] uses several; set the first to 1 "
         "or the second to local"),
    Rule(lambda c: c.cluster.isolate_nodes,
         "[cluster.isolate_nodes] emulates nodes on one machine, but [cluster.launcher] uses real ones; set the first "
         "to false or the second to local"),
)
"""Of `cluster.launcher` other than local."""

_DIVIDED_TENSOR_RANKS = (
         "[layout.tensor_parallel] does not divide the <parallel.ranks_per_node> ranks of a node, but tensor-parallel "
         "ranks must share one; lower it or [cluster.num_nodes]"
)

_NAME = re.compile(r"[A-Za-z0-9_.,-]*")

JOB: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: not _NAME.fullmatch(c.slurm.partition),
         "slurm.partition=<slurm.partition!r> is not a valid name in Slurm: letters, digits and _.,- only; correct it"),
    Rule(lambda c: not _NAME.fullmatch(c.slurm.account),
         "slurm.account=<slurm.account!r> is not a valid name in Slurm: letters, digits and _.,- only; correct it"),
    Rule(lambda c: c.slurm.etcd_port + 5 > 65535,  # each of three members has two
         "[slurm.etcd_port] leaves fewer than 6 ports up to 65535; lower it"),
    Rule(lambda c: c.cluster.device == "auto",
         "[cluster.device] cannot be resolved before the job runs; set it to gpu or cpu"),
    Rule(lambda c: c.control.store == "embedded" and c.cluster.num_nodes + c.slurm.num_spare_nodes > 1,
         "[control.store] serves one machine, but cluster.num_nodes + slurm.num_spare_nodes = <nodes_of_job>; set "
         "control.store=etcd"),
    Rule(lambda c: c.slurm.container and c.slurm.container[0].startswith("-"),
         "slurm.container begins with <first_of_container!r>, but must begin with a command, such as apptainer; put "
         "options of srun into slurm.step_options"),
    Rule(lambda c: _fills_nodes(c) and c.parallel.ranks_per_node % c.parallel.ranks_per_group
     and c.parallel.ranks_per_group % c.parallel.ranks_per_node,
         "groups of <parallel.ranks_per_group> ranks do not fill whole nodes of <parallel.ranks_per_node>: a group "
         "would share a node with a part of another; change [cluster.num_nodes] or the layout"),
    Rule(lambda c: c.cluster.device == "gpu" and _fills_nodes(c) and c.parallel.ranks_per_node != c.slurm.gpus_per_node,
         "each of [cluster.num_nodes] has <parallel.ranks_per_node> of <parallel.num_ranks> ranks, which do not fill "
         "[slurm.gpus_per_node]; change one of them or layout.num_groups<fitting_nodes>"),
    Rule(lambda c: _fills_nodes(c) and c.parallel.ranks_per_node % c.layout.tensor_parallel, _DIVIDED_TENSOR_RANKS),
    Rule(lambda c: c.slurm.time_limit_minutes is not None
     and 0 < 60 * c.slurm.time_limit_minutes <= c.slurm.end_before_limit_s,
         "[slurm.end_before_limit_s] uses up all of [slurm.time_limit_minutes]; lower the first or raise the second"),
)
"""Of a Slurm job."""

ON_A_DEVICE: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: c.cluster.device == "cpu" and c.megatron.get("moe_token_dispatcher_type") == "alltoall",
         "megatron.moe_token_dispatcher_type=alltoall needs cluster.device=gpu; remove it"),
    Rule(lambda c: c.cluster.device == "cpu" and c.model.transformer_impl == "transformer_engine",
         "[model.transformer_impl] needs cluster.device=gpu; set it to auto or local"),
    Rule(lambda c: _splits_windows(c) and c.data.reset_attention_mask,
         "<window> with [layout.context_parallel] and [data.reset_attention_mask] needs other layers than those of "
         "transformer-engine, whose windows begin in more than one way where there are more keys than queries; set "
         "model.transformer_impl=local, or one of the three to its default"),
    Rule(lambda c: _splits_windows(c) and not c.data.reset_attention_mask
         and not _exchanges(c) <= {"a2a", "all_gather"},
         "<window> with [layout.context_parallel] needs an exchange of transformer-engine that knows windows; set "
         "megatron.cp_comm_type to a2a or all_gather, or model.transformer_impl=local"),
    Rule(lambda c: _has_sinks(c) and c.megatron.get("attention_backend") == "flash",
         "<sink> with megatron.attention_backend=flash leaves transformer-engine no attention; remove the latter"),
    Rule(lambda c: _has_sinks(c) and c.data.reset_attention_mask and _has_early_transformer_engine(c),
         "<sink> with [data.reset_attention_mask] needs kernels that transformer-engine has from 2.12 on; install "
         "that, or set model.transformer_impl=local, or one of the two to its default"),
    Rule(lambda c: _has_sinks(c) and not c.data.reset_attention_mask and c.layout.context_parallel > 1
         and _exchanges(c) != {"a2a"},
         "<sink> with [layout.context_parallel] needs the one exchange of transformer-engine that knows it; set "
         "megatron.cp_comm_type=a2a, or model.transformer_impl=local"),
)
"""Of a configuration whose device is resolved."""

DOUBTS: tuple[Rule[RunConfig], ...] = (
    Rule(lambda c: c.spare.redundancy == 1,
         "[spare.redundancy] masks nothing: every lost group sends the run back to its newest checkpoint"),
    Rule(lambda c: c.layout.least_pipeline_parallel is not None and not c.spare.deal_by_pace,
         "[layout.least_pipeline_parallel] with [spare.deal_by_pace]: a group with fewer stages gets as much work "
         "as the others, and every step lasts as long as it needs; set the latter to true"),
    Rule(lambda c: c.cluster.launcher == "hand" and c.parallel.ranks_per_node % c.layout.tensor_parallel,
     _DIVIDED_TENSOR_RANKS),
    Rule(lambda c: c.cluster.launcher == "srun" and c.slurm.max_requeues and not c.checkpoint.is_wanted,
         "[slurm.max_requeues], but no checkpoints are taken: the job would start over each time; set "
         "checkpoint.cadence or checkpoint.interval_steps, or slurm.max_requeues=0"),
    Rule(lambda c: c.control.store == "embedded"
         and not getattr(_address(c.control.listen_address), "is_loopback", True),
         "[control.listen_address]: the embedded store has no authentication, and anyone who reaches this address can "
         "end or falsify the run; keep the network private, or use control.store=etcd with TLS"),
    Rule(lambda c: c.sites.is_used and not all(map(_is_loopback, c.sites.endpoints))
         and not all(one.startswith("https:") for one in c.sites.endpoints),
         "sites.endpoints=<sites.endpoints>: tokens and decisions travel unencrypted between sites; use https and "
         "etcd, or a tunnel"),
    Rule(lambda c: c.control.store == "etcd" and not _is_encrypted(*c.control.endpoints)
         and not all(map(_is_loopback, c.control.endpoints)),
         "control.endpoints are http: passwords and decisions travel unencrypted; use https"),
    Rule(lambda c: _hosts_in_domain(c) > 1,
         "<hosts_in_domain> of the [spare.redundancy] hosts of some shard stand in one domain and may be lost "
         "together: spare.redundancy x [spare.groups_per_domain] exceeds [layout.num_groups]; lower one of the former"),
    Rule(lambda c: c.spare.microbatches_per_shard % c.layout.data_parallel,
         "[spare.microbatches_per_shard] is no multiple of [layout.data_parallel]: in every step <idle_lanes> lanes of "
         "each group wait for the time of a microbatch; change one of them"),
    Rule(lambda c: c.snapshot.every_steps and c.snapshot.redundancy >= c.cluster.num_nodes,
         "[snapshot.redundancy] needs <snapshot_copies> copies on different nodes, but [cluster.num_nodes]: each "
         "rank's state is kept on only <cluster.num_nodes>"),
    Rule(lambda c: c.snapshot.every_steps and c.optimizer.sharding == "stacked"
         and c.snapshot.redundancy >= c.optimizer.redundancy,
         "[snapshot.redundancy] needs <snapshot_copies> copies on different nodes, but with [optimizer.redundancy] "
         "only so many groups hold a partition of the optimizer state: each is kept on only <optimizer.redundancy>"),
    Rule(lambda c: c.spare.rejoins and c.spare.reform_after_s is None and _why_not_reformed(c),
         "groups are not re-formed after losses of machines: <why_not_reformed>"),
)
"""What warnings are about, in a configuration without problems."""
# fmt: on
