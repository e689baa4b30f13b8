"""Reports all problems of a configuration at once, and warns about doubtful settings. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from spare_megatron.config.checks import requirements, validate_faults, validate_training
from spare_megatron.config.checks.requirements import JOB, SEVERAL_MACHINES, STORE, broken, is_endpoint
from spare_megatron.config.limits import violations
from spare_megatron.config.loader import settings as settings_of
from spare_megatron.config.megatron_fields import ON_GPUS_ALONE, field_problems, field_warnings, fields_set
from spare_megatron.config.model.model_tensors import rule_problems
from spare_megatron.config.model_fields import as_written, model_fields, num_future_tokens
from spare_megatron.config.object_stores import refusal_of_address
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.training.audits_and_evaluations import audit_problems, evaluation_problems
from spare_megatron.config.training.corpus import CorpusFacts, named_corpora
from spare_megatron.config.training.run_sizes import run_sizes
from spare_megatron.faults.kinds import KINDS
from spare_megatron.formats.quantities import format_binary_bytes, format_bytes

_MOST_THREADS_PER_CORE = 8
"""Limit up to which ranks of small models that share cores meet their heartbeats; the demo runs 8 on one machine."""
_WAITS = ("heartbeat_interval_s", "store_timeout_s", "startup_timeout_s", "decision_timeout_s", "group_timeout_s")
_LEAST_HEARTBEAT_S = 0.01
"""A healthy thread may wait this long for a processor."""
_MOST_WAIT_S = 1e8
"""Libraries count nanoseconds since boot in 64 bits; longer waits overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What the system allows each process that is started here."""

    open_files: int
    open_files_most: int
    """Value to which the limit of open files can be raised."""
    address_space_bytes: int | None = None
    """None if there is no limit, or it is not known."""
    file_bytes: int | None = None
    """The longest file that may be written; None as above."""
    temp_folder: str = ""
    """Where Python puts temporary files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResources:
    """Resources of the machine that a run starts on; None stands for unknown."""

    num_gpus: int
    """Accelerators, as `num_cores` CPU cores, for the run, over all its nodes."""
    num_cores: int
    has_corpus: bool
    can_isolate: bool = False
    """The process is root and has `ip`, `bridge` and `nsenter`, so it can give nodes separate networks."""
    no_slow_host: str = ""
    """Why a fault cannot limit the processors of ranks; empty if it can, or if no fault of the run does so."""
    no_slow_link: str = ""
    """Likewise for the link of a node."""
    can_listen: bool = True
    """`control.listen_address` is an address of this machine."""
    can_serve_metrics: bool = True
    """It can listen at `metrics.prometheus_address` and `metrics.prometheus_port`."""
    corpus_failure: str = ""
    """Why the corpus cannot be used; empty if it can."""
    corpus: CorpusFacts | None = None
    program: frozenset[str] = frozenset()
    """Names that the program of the run defines."""
    program_failure: str = ""
    """Why the program cannot be used; empty if it can, or there is none."""
    memory_bytes: int | None = None
    """Memory of one machine."""
    gpu_memory_bytes: int | None = None
    """Of the smallest GPU."""
    process_memory_bytes: int | None = None
    """Memory that one process may use."""
    limits: ProcessLimits | None = None
    """None on a machine that is not this one."""


def resolve_device(config: RunConfig, machine: MachineResources) -> Literal["cpu", "gpu"]:
    if config.cluster.device == "auto":
        return "gpu" if machine.num_gpus > 0 else "cpu"
    return config.cluster.device


def on_device(config: RunConfig, machine: MachineResources) -> RunConfig:
    return replace(config, cluster=replace(config.cluster, device=resolve_device(config, machine)))


def problems(config: RunConfig, machine: MachineResources) -> list[str]:
    """Every reason why the configuration cannot run on the machine."""
    unusable = dict(_unusable_paths(config))
    found = [
        *violations(config),
        *broken(requirements.TRAINING, config),
        *validate_training.lane_problems(config),
        *broken(requirements.LAYOUT, config),
        *broken(requirements.SHAPES if config.layout.least_pipeline_parallel is not None else (), config),
        *_infinite(config),
        *audit_problems(on_device(config, machine)),
        *_indivisible(config),
        *rule_problems(config),
        *evaluation_problems(config),
        *_timeouts(config),
        *store_problems(config, can_listen=machine.can_listen),
        *launcher_problems(config),
        *field_problems(config),
        *broken(requirements.EXPERTS, config),
        *validate_faults.fault_problems(config),
        *validate_faults.rate_problems(config),
        *broken(requirements.CHECKPOINTS, config),
        *broken(requirements.SITES, config),
        *validate_training.metrics_problems(config.metrics, can_serve=machine.can_serve_metrics),
        *_profile(config),
        *_machine(config, machine),
        *broken(requirements.ON_A_DEVICE, on_device(config, machine)),
        *validate_training.data_problems(
            config,
            has_corpus=machine.has_corpus,
            corpus_failure=machine.corpus_failure,
            corpus=machine.corpus,
            program=machine.program,
            memory_bytes=machine.process_memory_bytes,
        ),
    ]
    found = [text for text in found if not any(name in text for name in unusable)]
    found += [f"{name}: {reason}" for name, reason in unusable.items()]
    # The sizes are those of the GPT of [model], not of a program's own model.
    if not found and "model_provider" not in machine.program:
        known = {"cpu": machine.memory_bytes, "gpu": machine.gpu_memory_bytes}[resolve_device(config, machine)]
        found = list(validate_training.memory_problems(on_device(config, machine), known))
    return found


def beyond_limits(config: RunConfig, machine: MachineResources) -> list[str]:
    """Every limit of the machine's processes that a configuration without problems exceeds."""
    if machine.limits is None:
        return []
    is_cpu = resolve_device(config, machine) == "cpu" and "model_provider" not in machine.program
    rank_bytes = run_sizes(on_device(config, machine)).most_memory_bytes if is_cpu else 0
    return list(limit_problems(config, machine.limits, rank_bytes))


def warnings(config: RunConfig, machine: MachineResources) -> list[str]:
    """Doubtful settings of a configuration that has no problems."""
    return [*_oversubscribed(config, machine), *broken(requirements.DOUBTS, config), *field_warnings(config)]


def _unusable_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Each setting whose path is an address or cannot be written down, as messages name it, and why that cannot be."""
    named = dict(named_corpora(config.data))
    named |= {f"{key}={value}": value for key, value in settings_of(config) if isinstance(value, str)}
    for name, path in named.items():
        if reason := refusal_of_address(path):
            yield name, reason
        elif path != path.encode(errors="replace").decode():
            yield name, "it is not UTF-8, in which settings are written down; rename it"


def _profile(config: RunConfig) -> Iterator[str]:
    profile = config.profile
    limits = (
        ("steps", profile.steps, "train.steps", config.train.steps),
        ("groups", profile.groups, "layout.num_groups", config.layout.num_groups),
        ("ranks", profile.ranks, "the number of ranks of a group", config.parallel.ranks_per_group),
    )
    for name, values, limit_text, limit in limits:
        if profile.steps and not values:
            yield f"profile.{name} is empty, so profile.steps traces nothing; name at least one, or empty profile.steps"
        for value in values if profile.steps else ():
            if not 0 <= value < limit:
                yield f"profile.{name} has {value}, outside 0 to {limit - 1}; {limit_text} is {limit}; change it"


def _infinite(config: RunConfig) -> Iterator[str]:
    for key, value in settings_of(config):
        if isinstance(value, float) and math.isinf(value):
            yield f"{key}={value} must be finite; choose a number"


def _indivisible(config: RunConfig) -> Iterator[str]:
    model, layout = config.model, config.layout
    stages = layout.pipeline_parallel * layout.virtual_pipeline
    stages_text = "layout.pipeline_parallel x layout.virtual_pipeline"
    tensor, tensor_text = layout.tensor_parallel, "layout.tensor_parallel"
    divisions = [
        ("model.num_layers", model.num_layers, stages_text, stages),
        ("model.hidden_size", model.hidden_size, "model.num_attention_heads", model.num_attention_heads),
        ("model.num_attention_heads", model.num_attention_heads, tensor_text, tensor),
        ("model.ffn_hidden_size", model.ffn_width, tensor_text, tensor),
    ]
    if layout.context_parallel > 1:
        # Each context-parallel rank takes an early and a late piece of the sequence, which balances causal attention.
        pieces = 2 * layout.context_parallel
        divisions.append(("model.seq_length", model.seq_length, "2 x layout.context_parallel", pieces))
    query_groups = model_fields(config)["num_query_groups"]
    if type(query_groups) is int:
        text = as_written(config, "num_query_groups").partition("=")[0]
        divisions.append(("model.num_attention_heads", model.num_attention_heads, text, query_groups))
        larger, smaller = ((text, query_groups), (tensor_text, tensor))[:: 1 if query_groups > tensor else -1]
        divisions.append((*larger, *smaller))
    if config.megatron.get("sequence_parallel"):
        parts, parts_text = tensor * layout.context_parallel, f"{tensor_text} x layout.context_parallel"
        divisions.append(("model.seq_length", model.seq_length, parts_text, parts))
    groups = "layout.num_groups" if layout.max_groups is None else "layout.max_groups"
    ranks = "layout.tensor_parallel x layout.context_parallel x layout.data_parallel x layout.pipeline_parallel"
    divisions.append((f"{groups} x {ranks}", config.parallel.num_ranks, "cluster.num_nodes", config.cluster.num_nodes))
    for key, value, divisor_key, divisor in divisions:
        if divisor > 0 and value % divisor:
            yield f"{key}={value} is not a multiple of {divisor_key}={divisor}; change one of them"


def _timeouts(config: RunConfig) -> Iterator[str]:
    """All timeouts are positive, and each outlasts the events it has to wait through."""
    waits = {f"control.{name}": getattr(config.control, name) for name in _WAITS}
    waits["reduce.timeout_s"] = config.reduce.timeout_s
    for key, value in waits.items():
        least_s = _LEAST_HEARTBEAT_S if key == "control.heartbeat_interval_s" else 0.0
        if not value > least_s:
            yield f"{key}={value} must be above {least_s:g}; raise it"
        elif value > _MOST_WAIT_S:
            yield f"{key}={value:g} exceeds {_MOST_WAIT_S:g} (three years), and longer waits overflow; lower it"
    if not min(waits.values()) > 0.0:
        return
    found_s, away = 2 * config.control.heartbeat_interval_s, "control.store_timeout_s"
    for inner, inner_s, outer, reason in (
        ("2 x control.heartbeat_interval_s", found_s, away, "before a lost rank is detected"),
        (away, waits[away], "reduce.timeout_s", "while the store may still come back"),
        (away, waits[away], "control.group_timeout_s", "while the store may still come back"),
    ):
        if inner_s > waits[outer]:
            yield (
                f"{inner} = {inner_s:g} exceeds {outer}={waits[outer]:g}: waits would time out {reason}; lower the "
                f"first or raise the second"
            )
    needed_s = config.reduce.timeout_s + config.control.group_timeout_s
    if not config.control.decision_timeout_s > needed_s:
        yield (
            f"control.decision_timeout_s={config.control.decision_timeout_s} must exceed reduce.timeout_s + "
            f"control.group_timeout_s = {needed_s}: a decision may wait until another group's pipeline and reduction "
            f"have timed out; raise control.decision_timeout_s or lower one of the others"
        )


def _machine(config: RunConfig, machine: MachineResources) -> Iterator[str]:
    if config.cluster.isolate_nodes and not machine.can_isolate:
        yield (
            "cluster.isolate_nodes=true needs root, and `ip`, `bridge` and `nsenter` (Debian: iproute2, util-linux); "
            "set it to false"
        )
    for kind, reason in (("slow_host", machine.no_slow_host), ("slow_link", machine.no_slow_link)):
        if reason:
            yield f"faults of kind {kind} are not possible on this machine: {reason}; choose others"
    if machine.program_failure:
        yield machine.program_failure
    if "model_provider" in machine.program and (least := config.layout.least_pipeline_parallel) is not None:
        yield (
            f"layout.least_pipeline_parallel={least} cuts the GPT of [model], and program.file={config.program.file} "
            f"defines a model of its own (model_provider); remove the setting"
        )
    if num_future_tokens(config) and (own := machine.program & {"model_provider", "forward_step"}):
        yield (
            f"megatron.mtp_num_layers={num_future_tokens(config)} belongs to the GPT and the loss of [model], and "
            f"program.file={config.program.file} defines {' and '.join(sorted(own))}; remove the setting"
        )
    if resolve_device(config, machine) == "cpu":
        for field in fields_set(config, ON_GPUS_ALONE):
            yield f"{field} does not work on CPUs; remove it or use cluster.device=gpu"
        return
    num_needed = -(-config.parallel.num_ranks // max(config.cluster.ranks_per_gpu, 1))
    if num_needed > machine.num_gpus:
        yield (
            f"{config.parallel.num_ranks} ranks (layout.num_groups={config.layout.num_groups} x "
            f"{config.parallel.ranks_per_group} ranks) need {num_needed} GPUs, and there are {machine.num_gpus}; "
            f"reduce the layout or set cluster.device=cpu"
        )


def _oversubscribed(config: RunConfig, machine: MachineResources) -> Iterator[str]:
    threads = config.parallel.num_ranks * config.cluster.threads_per_rank
    if resolve_device(config, machine) == "cpu" and threads > _MOST_THREADS_PER_CORE * machine.num_cores:
        yield (
            f"{config.parallel.num_ranks} ranks with cluster.threads_per_rank={config.cluster.threads_per_rank} share "
            f"{machine.num_cores} cores; steps will be slow and their times uneven"
        )


_ETCD_MEMBERS = 3
_OWN_FILES, _LEAST_OWN_FILES = 256, 128
"""Files for libraries, logs, the corpus and the store, with room for what a rank inherits; without that."""
_FILES_PER_PEER = 4
"""gloo keeps a socket per member of a communicator, and dropped communicators may still be closing."""
_FILES_PER_RANK = 5
"""Of a supervisor for each of its ranks, which later ones inherit; of the embedded store for each of all ranks."""
_ADDRESS_SPACE_BYTES = 7 * 2**28
"""Of a rank on CPUs beside its model: its libraries, and the stacks and memory pools of its threads."""
_FILE_BYTES = 2**24
"""Of the longest file beside those of the model's state, such as a journal's."""
_LONGEST_SOCKET_PATH = 107
_SOCKET_IN_FOLDER = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""What Python adds to its temporary folder for the socket of a fork server."""


def limit_problems(config: RunConfig, limits: ProcessLimits, rank_bytes: int = 0) -> Iterator[str]:
    """Every limit of its processes that the run exceeds, with the command that raises it. `rank_bytes`: memory that
    the model takes on a rank; 0 if it is not in main memory.
    """
    needed = open_files_needed(config)
    if limits.open_files < needed:
        first = "limits.conf, as root, and " if limits.open_files_most < needed else ""
        yield (
            f"a process may have {limits.open_files} files open, and the processes of {config.layout.num_groups} "
            f"groups need {needed}; raise it by {first}`ulimit -n {needed}` there, in a job by slurm.setup"
        )
    needed = _ADDRESS_SPACE_BYTES + rank_bytes
    if rank_bytes and limits.address_space_bytes is not None and limits.address_space_bytes < needed:
        yield (
            f"a process may use {format_binary_bytes(limits.address_space_bytes)} of address space, and a rank needs "
            f"{format_binary_bytes(needed)}; raise it by `ulimit -v {needed >> 10}`, or `ulimit -v unlimited`"
        )
    needed = _FILE_BYTES + rank_bytes
    if limits.file_bytes is not None and limits.file_bytes < needed:
        yield (
            f"a process may write files of {format_bytes(limits.file_bytes)}, and a run needs {format_bytes(needed)}; "
            f"raise it by `ulimit -f unlimited`"
        )
    path = len(limits.temp_folder.encode(errors="surrogateescape")) + _SOCKET_IN_FOLDER
    if path > _LONGEST_SOCKET_PATH:
        yield (
            f"TMPDIR={limits.temp_folder} has {path - _SOCKET_IN_FOLDER} bytes, and a socket in it may have "
            f"{_LONGEST_SOCKET_PATH - _SOCKET_IN_FOLDER}: set TMPDIR to a shorter path, such as `TMPDIR=/tmp`"
        )


def open_files_needed(config: RunConfig) -> int:
    """The most files that a process of the run may have open: a rank, or the embedded store."""
    layout = config.parallel
    is_local = config.cluster.launcher == "local"
    num_ranks_here = layout.num_ranks if is_local else -(-layout.num_ranks // max(layout.num_nodes, 1))
    served = layout.num_ranks if config.control.store == "embedded" else 0
    own = max(_OWN_FILES, _LEAST_OWN_FILES + _FILES_PER_RANK * num_ranks_here)
    rank = own + _FILES_PER_PEER * (layout.num_groups + layout.ranks_per_group)
    return max(rank, _LEAST_OWN_FILES + _FILES_PER_RANK * served)


def num_etcd_members(num_nodes: int) -> int:
    """Members of the etcd that a job starts on its nodes: three survive the loss of one, two would not."""
    return _ETCD_MEMBERS if num_nodes >= _ETCD_MEMBERS else 1


def launcher_problems(config: RunConfig) -> Iterator[str]:
    """Every reason why `cluster.launcher` cannot start supervisors, if it is not local."""
    launcher = config.cluster.launcher
    if launcher == "local":
        return
    yield from broken(SEVERAL_MACHINES, config)
    faults = config.faults
    random = faults.kinds or KINDS if faults.mean_steps is not None else ()
    kinds = {*random, *(fault.kind for fault in faults.trace)}
    for kind in sorted(kind for kind in kinds if "one_machine" in KINDS[kind].needs):
        yield (
            f"faults of kind {kind} strike processes of one machine and do not reach nodes of "
            f"cluster.launcher={launcher}; leave {kind} out of faults.trace and faults.kinds"
        )
    if launcher == "srun":
        yield from broken(JOB, config)
        for key, command, example, options in (
            ("options", "sbatch", "--qos=high", config.slurm.options),
            ("step_options", "srun", "--container-image=IMAGE", config.slurm.step_options),
        ):
            for option in options:
                if not option.startswith("-") or "\n" in option:
                    yield f"slurm.{key}: {option!r} is not an option of {command}, such as {example}; correct it"


def store_problems(config: RunConfig, *, can_listen: bool = True) -> Iterator[str]:
    control = config.control
    yield from broken(STORE, config)
    if control.store == "embedded" and not can_listen:
        yield (
            f"control.listen_address={control.listen_address} is not an address of this machine, or its network is "
            f"down; name one that `ip address` shows"
        )
    for endpoint in control.endpoints if control.store != "embedded" else ():
        if not is_endpoint(endpoint):  # shown without credentials, which are there by mistake
            yield f"control.endpoints: {endpoint.rpartition('@')[2]!r} is not of the form https://host:port; correct it"
