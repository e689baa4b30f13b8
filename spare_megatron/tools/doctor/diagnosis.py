"""Facts collected on the nodes of a run before it starts, and their judgement. Pure: from facts to findings."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from spare_megatron.config.checks.validate import ProcessLimits, limit_problems, num_etcd_members
from spare_megatron.config.schema import RunConfig
from spare_megatron.config.supported_versions import SUPPORTED, version_problem
from spare_megatron.config.training.audits_and_evaluations import audit_policy
from spare_megatron.config.training.corpus import corpus_files, input_files, named_corpora
from spare_megatron.config.training.run_sizes import ranks_per_machine, run_sizes
from spare_megatron.formats.quantities import format_binary_bytes
from spare_megatron.formats.store_space import StoreSpace, shortage
from spare_megatron.machine.gpus import Gpu, maker
from spare_megatron.machine.gpus.gpu import PLATFORMS
from spare_megatron.stacking import slowness
from spare_megatron.stacking.slowness import excess

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts(ProcessLimits):
    """What a node says of itself, its limits of a process among it."""

    host: str
    versions: Mapping[str, str]
    """Package -> version; empty if absent."""
    torch_failure: str
    """Why torch cannot be loaded, or use the GPUs; empty if it can."""
    gpus: tuple[Gpu, ...]
    gpu_driver: str
    locked_memory_bytes: int | None
    """Limit on locked memory of a process; None if unlimited."""
    has_infiniband: bool
    """InfiniBand adapters, which need locked memory, are present."""
    busy_ports: tuple[int, ...]
    store_failures: Mapping[str, str]
    """etcd endpoint -> why it does not answer here."""
    store_refusal: str
    """Why etcd does not report its size; empty if it does, or is unreachable."""
    store_space: StoreSpace | None
    """Size of etcd's database; None if not reported."""
    corpus_bytes: tuple[int | None, ...]
    """Sizes of `input_files`; None for one that cannot be read."""
    sees_folder: bool
    """The file that the driver wrote to the checkpoint folder is visible."""
    folder_free_bytes: int
    nccl_cumem: str = ""
    """NCCL_CUMEM_ENABLE in the environment; empty if it is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A measured transfer rate, or why the measurement failed."""

    bytes_per_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Offset of a node's clock from the driver's, with its uncertainty."""

    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasurements:
    """Facts of one node and measurements between it and others."""

    name: str
    failure: str = ""
    facts: NodeFacts | None = None
    clock: ClockOffset | None = None
    write: Rate | None = None
    """Rate into the checkpoint folder while the other nodes of a group write too."""
    link_to: str = ""
    """The node to which `link` was measured; empty for a single node."""
    link: Rate | None = None
    """Rate to that node while all nodes send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    """A problem of one node, or only a warning; `text` has the value, the limit and what to change."""

    node: str
    check: str
    text: str
    is_problem: bool = True


class WarningText(str):
    """Text of a finding that is only a warning."""


def diagnose(config: RunConfig, folder: str, nodes: Sequence[NodeMeasurements]) -> list[NodeFinding]:
    """Findings about these nodes, ordered by node; the nodes of the run come first in `nodes`, then its spare ones."""
    whole = [(node, node.facts) for node in nodes if node.facts is not None]
    found = [NodeFinding(node=node.name, check="node", text=node.failure) for node in nodes if node.facts is None]
    for name, check, text in _alike(whole):
        found += _findings(name, check, [text])
    byte_s = {node.name: _byte_s(node.link) for node in nodes if node.link is not None and not node.link.failure}
    for index, node in enumerate(nodes):
        facts = node.facts
        if facts is not None:
            checks = (
                ("versions", _versions(config, facts)),
                ("gpus", _gpus(config, facts)),
                ("clock", _clock(config, node.clock)),
                ("limits", _limits(config, facts)),
                ("ports", _ports(config, facts, own_etcd_ports(config, index, len(nodes)))),
                ("store", _store(config, facts)),
                ("store", _store_room(config, facts) if index == 0 else ()),  # all nodes see the same store
                ("corpus", _corpus(config, facts)),
                ("storage", _folder(config, folder, node, facts)),
            )
            for check, texts in checks:
                found += _findings(node.name, check, texts)
        if node.link is not None:
            found += _findings(node.name, "network", _link(config, node, node.link, byte_s))
    place = {node.name: index for index, node in enumerate(nodes)}
    return sorted(found, key=lambda finding: place[finding.node])


def _findings(node: str, check: str, texts: Iterable[str]) -> Iterator[NodeFinding]:
    for text in texts:
        yield NodeFinding(node=node, check=check, text=str(text), is_problem=not isinstance(text, WarningText))


def own_etcd_ports(config: RunConfig, node: int, num_nodes: int) -> tuple[int, ...]:
    """Ports that the job's own etcd uses on this node; empty if it runs none there."""
    brings_etcd = config.cluster.launcher == "srun" and config.control.store == "etcd" and not config.control.endpoints
    if not brings_etcd or node >= num_etcd_members(num_nodes):
        return ()
    first = config.slurm.etcd_port + 2 * node
    return (first, first + 1)


def nodes_per_group(config: RunConfig) -> int:
    return -(-config.parallel.ranks_per_group // ranks_per_machine(config))


def _alike(nodes: Sequence[tuple[NodeMeasurements, NodeFacts]]) -> Iterator[tuple[str, str, str]]:
    """Node, check and text of what must be equal on all nodes and is not the most frequent value, or the first such."""

    def version_of(package: str, facts: NodeFacts) -> str:
        return facts.versions.get(package, "")

    packages = {package for _, facts in nodes for package in facts.versions}
    for package in sorted(packages):
        for node, own, usual in _deviants(nodes, partial(version_of, package)):
            text = f"{package} is {own or 'absent'}, and {usual or 'absent'} on most nodes; install the same on all"
            yield node.name, "versions", text
    for node, own, usual in _deviants(nodes, lambda facts: facts.gpu_driver):
        yield node.name, "gpus", WarningText(f"NVIDIA's driver is {own or 'absent'}, and {usual or 'absent'} elsewhere")
    for node, models, usual_models in _deviants(nodes, lambda facts: tuple(gpu.name for gpu in facts.gpus)):
        yield node.name, "gpus", WarningText(f"its GPUs are {_counts(models)}, and elsewhere {_counts(usual_models)}")
    for node, sizes, usual_sizes in _deviants(nodes, lambda facts: facts.corpus_bytes):
        if None not in sizes and None not in usual_sizes:
            text = (
                f"the corpora have {sizes} bytes (.bin, .idx), and {usual_sizes} on most nodes: one is another; "
                f"copy it, or put all of [data] on storage that all nodes share"
            )
            yield node.name, "corpus", text


def _deviants(
    nodes: Sequence[tuple[NodeMeasurements, NodeFacts]], value: Callable[[NodeFacts], T]
) -> Iterator[tuple[NodeMeasurements, T, T]]:
    """Yields each node whose value is not the most frequent one, with its value and the most frequent one."""
    values = [value(facts) for _, facts in nodes]
    if not values:
        return
    usual = Counter(values).most_common(1)[0][0]  # on ties, the first one
    yield from ((node, own, usual) for (node, _), own in zip(nodes, values, strict=True) if own != usual)


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items()) or "none"


def _versions(config: RunConfig, facts: NodeFacts) -> Iterator[str]:
    """What is outside the supported versions or cannot be used; what is absent shows elsewhere."""
    needs_gpus = config.cluster.device != "cpu" and bool(facts.gpus)
    for package in SUPPORTED:
        installed = facts.versions.get(package, "")
        if not installed or (package in ("NCCL", "RCCL", "transformer-engine") and not needs_gpus):
            continue
        if problem := version_problem(package, installed, facts.versions.get("megatron-core")):
            yield problem
    if facts.torch_failure:
        yield f"torch cannot be used: {facts.torch_failure}"
    elif needs_gpus and not any(facts.versions.get(platform) for platform in PLATFORMS):
        needed = " or ".join(PLATFORMS)
        yield (
            f"torch {facts.versions.get('torch')} is built without {needed}, and there are {len(facts.gpus)} GPUs; "
            f"install its build for {needed}, or set cluster.device=cpu"
        )


def _gpus(config: RunConfig, facts: NodeFacts) -> Iterator[str]:
    if facts.torch_failure or _is_cpu(config, facts):
        return
    if facts.nccl_cumem == "0":
        # By CUDA's IPC handles (CUDA Runtime API): the use of memory that its owner has freed is undefined. Memory that
        # is shared by the functions that NCCL takes otherwise stays until the last process unmaps it.
        yield WarningText(
            "NCCL_CUMEM_ENABLE=0 is set: GPUs of this node then share memory in a way that lets a killed rank break "
            "its peers; unset it"
        )
    ranks, sharing = ranks_per_machine(config), config.cluster.ranks_per_gpu
    num_needed = -(-ranks // sharing)
    if len(facts.gpus) < num_needed:
        yield (
            f"{len(facts.gpus)} GPUs are visible, and its {ranks} ranks need {num_needed}; see "
            f"`{maker().LIST_COMMAND}` and {maker().VARIABLES[0]} there, take the node out, or change layout or "
            f"cluster.num_nodes"
        )
    needed = sharing * run_sizes(config).most_memory_bytes
    for index, gpu in enumerate(facts.gpus[:num_needed]):
        if gpu.memory_bytes < needed:
            yield (
                f"GPU {index} ({gpu.uuid}) has {format_binary_bytes(gpu.memory_bytes)}, and its ranks need "
                f"{format_binary_bytes(needed)}; see `spare config show`, and raise layout.tensor_parallel, "
                f"layout.pipeline_parallel or layout.least_pipeline_parallel"
            )
        elif gpu.free_bytes < needed:
            yield (
                f"GPU {index} has {format_binary_bytes(gpu.free_bytes)} of {format_binary_bytes(gpu.memory_bytes)} "
                f"free, and its ranks need {format_binary_bytes(needed)}: others use it; `nvidia-smi` there names them"
            )


def _clock(config: RunConfig, clock: ClockOffset | None) -> Iterator[str]:
    """Warns about clock skew: journals compare times of nodes, though no decision does."""
    limit_s = 2 * config.control.heartbeat_interval_s
    if clock is not None and abs(clock.ahead_s) - clock.error_s > limit_s:
        yield WarningText(
            f"its clock is {abs(clock.ahead_s):.3g} s {'ahead of' if clock.ahead_s > 0 else 'behind'} the driver's, "
            f"more than 2 x control.heartbeat_interval_s = {limit_s:g} s: times of recoveries will be wrong; see "
            f"`chronyc tracking` there"
        )


def _is_cpu(config: RunConfig, facts: NodeFacts) -> bool:
    return config.cluster.device == "cpu" or (config.cluster.device == "auto" and not facts.gpus)


def _limits(config: RunConfig, facts: NodeFacts) -> Iterator[str]:
    yield from limit_problems(config, facts, run_sizes(config).most_memory_bytes if _is_cpu(config, facts) else 0)
    if facts.has_infiniband and config.cluster.device != "cpu" and facts.locked_memory_bytes is not None:
        yield WarningText(
            f"a process may lock {format_binary_bytes(facts.locked_memory_bytes)} of memory, and NCCL over InfiniBand "
            f"wants no limit; `ulimit -l unlimited` there, in a job by slurm.setup"
        )


def _ports(config: RunConfig, facts: NodeFacts, ports: Collection[int]) -> Iterator[str]:
    for port in sorted({*ports} & {*facts.busy_ports}):
        yield (
            f"port {port} is taken, and the job's etcd needs it; change slurm.etcd_port="
            f"{config.slurm.etcd_port}, or name an etcd in control.endpoints"
        )


def _store(config: RunConfig, facts: NodeFacts) -> Iterator[str]:
    kind = str if len(facts.store_failures) == len(config.control.endpoints) else WarningText
    for endpoint, failure in sorted(facts.store_failures.items()):
        yield kind(f"{endpoint} of control.endpoints does not answer from here: {failure}")
    if facts.store_refusal:
        yield f"control.endpoints can be connected to, but {facts.store_refusal}"


def _store_room(config: RunConfig, facts: NodeFacts) -> Iterator[str]:
    space = facts.store_space
    if space is not None and (text := shortage(space, config.train.steps)):
        yield text if space.is_full else WarningText(text)


def _corpus(config: RunConfig, facts: NodeFacts) -> Iterator[str]:
    names = [named for named, prefix in named_corpora(config.data) for _ in corpus_files(prefix)]
    for named, file, size in zip(names, input_files(config.data), facts.corpus_bytes, strict=True):
        if size is None:
            yield f"{named}: {file} cannot be read; put it on storage that all nodes share"


def _folder(config: RunConfig, folder: str, node: NodeMeasurements, facts: NodeFacts) -> Iterator[str]:
    if not facts.sees_folder:
        yield (
            f"{folder} is not the folder that the driver's node has by this name: a file from there is not here; "
            f"set checkpoint.folder and --run-dir to storage that all nodes share"
        )
        return
    if node.write is not None and node.write.failure:
        yield f"{folder} cannot be written: {node.write.failure}; change its owner or checkpoint.folder"
        return
    checkpoint = config.checkpoint
    if not checkpoint.is_wanted:
        return
    size = run_sizes(config).checkpoint_bytes
    has_audits = audit_policy(config) is not None
    room = (checkpoint.keep_last + 2 + has_audits) * size
    if facts.folder_free_bytes < size:
        yield (
            f"{folder} has {format_binary_bytes(facts.folder_free_bytes)} free, and a checkpoint takes "
            f"{format_binary_bytes(size)}; make room or change checkpoint.folder"
        )
    elif facts.folder_free_bytes < room:
        yield WarningText(
            f"{folder} has {format_binary_bytes(facts.folder_free_bytes)} free, and "
            f"checkpoint.keep_last={checkpoint.keep_last}, one that has yet to be "
            f"confirmed{', the newest audited one' if has_audits else ''} and one that is being written take "
            f"{format_binary_bytes(room)}; make room or lower checkpoint.keep_last"
        )
    if node.write is not None:
        yield from _write_time(config, folder, size / nodes_per_group(config), node.write.bytes_per_s)


def _write_time(config: RunConfig, folder: str, share: float, bytes_per_s: float) -> Iterator[str]:
    """Compares the time to write a node's share of a checkpoint with the configured timeout and interval."""
    write_s = share / max(bytes_per_s, 1.0)
    speed = (
        f"{folder} takes {format_binary_bytes(bytes_per_s)} a second, which makes {write_s:.3g} s for this node's part "
        f"of a checkpoint"
    )
    timeout_s, interval_s = config.checkpoint.timeout_s, config.checkpoint.interval_s
    if write_s > timeout_s:
        yield f"{speed}, and checkpoint.timeout_s={timeout_s:g}; raise that or change checkpoint.folder"
    elif interval_s is not None and write_s > interval_s:
        yield WarningText(f"{speed}, and checkpoint.interval_s={interval_s:g}; raise that")


def _byte_s(link: Rate) -> float:
    return 1.0 / max(link.bytes_per_s, 1.0)


def _link(config: RunConfig, node: NodeMeasurements, link: Rate, byte_s: Mapping[str, float]) -> Iterator[str]:
    """Judges a node's link; `byte_s` has the seconds per byte of all that were measured."""
    if link.failure:
        yield f"{node.link_to} cannot be reached from here: {link.failure}; nodes need all ports of each other"
        return
    bucket_s = 2 * config.bucket_mib * 2**20 * ranks_per_machine(config) * _byte_s(link)
    likes = [seconds for name, seconds in byte_s.items() if name != node.name]
    if config.cluster.device == "cpu" and bucket_s > config.reduce.timeout_s:
        yield (
            f"{format_binary_bytes(link.bytes_per_s)} a second to {node.link_to}: a bucket of all its ranks would take "
            f"{bucket_s:.3g} s, and reduce.timeout_s={config.reduce.timeout_s:g}; lower reduce.bucket_mib or raise "
            f"reduce.timeout_s"
        )
    elif len(likes) > 1 and (found := excess(_byte_s(link), likes)).exceeds(slowness.LINK):
        yield WarningText(
            f"{format_binary_bytes(link.bytes_per_s)} a second to {node.link_to} over TCP, and "
            f"{format_binary_bytes(1.0 / found.like)} between most nodes; one of the two has a bad link, or another "
            f"interface (GLOO_SOCKET_IFNAME)"
        )
