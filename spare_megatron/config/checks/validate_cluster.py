"""Problems and warnings about the launcher, the Slurm job, spares and the control store."""

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from spare_megatron.config.schema import ControlConfig, RunConfig
from spare_megatron.core.machines.reforming import places_per_group
from spare_megatron.formats.store_space import gib
from spare_megatron.stacking.layout import GroupId

_NAME = re.compile(r"[A-Za-z0-9_.,-]+")

_STRIKING_ONE_MACHINE = ("cut", "stop_node", "stop_store", "kill_store")
"""Faults that the driver injects into processes of its own machine."""

_ETCD_MEMBERS = 3

_ETCD_PORTS = 2 * _ETCD_MEMBERS


_OWN_FILES, _LEAST_OWN_FILES = 256, 128
"""Files for libraries, logs, the corpus and the store, with room for what a rank inherits; without that."""
_FILES_PER_PEER = 4
"""gloo keeps a socket per member of a communicator, and dropped communicators may still be closing."""
_FILES_PER_RANK = 5
"""Of a supervisor for each of its ranks, which later ones inherit; of the embedded store for each of all ranks."""
_ADDRESS_SPACE_BYTES = 7 * 2**28
"""Of a rank on CPUs beside its model: its libraries, and the stacks and memory pools of its threads."""
_LONGEST_SOCKET_PATH = 107
_SOCKET_IN_FOLDER = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""What Python adds to its temporary folder for the socket of a fork server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What the system allows each process that is started here."""

    open_files: int
    open_files_most: int
    """Value to which the limit of open files can be raised."""
    address_space_bytes: int | None = None
    """None if there is no limit, or it is not known."""
    temp_folder: str = ""
    """Where Python puts temporary files."""


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
            f"a process may use {gib(limits.address_space_bytes)} of address space, and a rank needs {gib(needed)}; "
            f"raise it by `ulimit -v {needed >> 10}`, or `ulimit -v unlimited`"
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
    if config.cluster.ranks_per_gpu > 1:
        yield (
            f"cluster.ranks_per_gpu={config.cluster.ranks_per_gpu} is for tests on one machine, but "
            f"cluster.launcher={launcher} uses several; set the first to 1 or the second to local"
        )
    if config.cluster.isolate_nodes:
        yield (
            f"cluster.isolate_nodes=true emulates nodes on one machine, but cluster.launcher={launcher} uses real "
            f"ones; set the first to false or the second to local"
        )
    faults = config.faults
    random = faults.kinds or _STRIKING_ONE_MACHINE if faults.mean_steps is not None else ()
    for kind in sorted({*random, *(fault.kind for fault in faults.trace)} & set(_STRIKING_ONE_MACHINE)):
        yield (
            f"faults of kind {kind} strike processes of one machine and do not reach nodes of "
            f"cluster.launcher={launcher}; leave {kind} out of faults.trace and faults.kinds"
        )
    if launcher == "srun":
        yield from _layout_problems(config)
        yield from _job_problems(config)


def launcher_warnings(config: RunConfig) -> Iterator[str]:
    """Doubtful settings of several machines. Only for a configuration without problems."""
    layout = config.parallel
    if config.cluster.launcher == "hand" and layout.ranks_per_node % layout.tensor_parallel:
        yield _divided_tensor_ranks(config)
    if config.cluster.launcher != "srun":
        return
    if config.slurm.max_requeues and not config.checkpoint.is_wanted:
        yield (
            f"slurm.max_requeues={config.slurm.max_requeues}, but no checkpoints are taken: the job would start over "
            f"each time; set checkpoint.cadence or checkpoint.interval_steps, or slurm.max_requeues=0"
        )


def _layout_problems(config: RunConfig) -> Iterator[str]:
    """Groups must fill whole nodes, and tensor-parallel ranks must share a node."""
    layout, gpus = config.parallel, config.slurm.gpus_per_node
    if config.cluster.device == "auto":
        yield "cluster.device=auto cannot be resolved before the job runs; set it to gpu or cpu"
    if min(layout.num_ranks, layout.num_nodes) < 1 or layout.num_ranks % layout.num_nodes:
        return  # reported by `problems`
    per_node, per_group = layout.ranks_per_node, layout.ranks_per_group
    if config.cluster.device == "gpu" and per_node != gpus:
        fits = gpus > 0 and layout.num_ranks % gpus == 0
        yield (
            f"each of cluster.num_nodes={layout.num_nodes} has {per_node} of {layout.num_ranks} ranks, which do not "
            f"fill slurm.gpus_per_node={gpus}; change one of them or layout.num_groups"
            + (f" (cluster.num_nodes={layout.num_ranks // gpus} fits)" if fits else "")
        )
    if per_node % per_group and per_group % per_node:
        yield (
            f"groups of {per_group} ranks do not fill whole nodes of {per_node}: a group would share a node with a "
            f"part of another; change cluster.num_nodes={layout.num_nodes} or the layout"
        )
    if per_node % layout.tensor_parallel:
        yield _divided_tensor_ranks(config)


def _divided_tensor_ranks(config: RunConfig) -> str:
    layout = config.parallel
    return (
        f"layout.tensor_parallel={layout.tensor_parallel} does not divide the {layout.ranks_per_node} ranks of a node, "
        f"but tensor-parallel ranks must share one; lower it or cluster.num_nodes={layout.num_nodes}"
    )


def _job_problems(config: RunConfig) -> Iterator[str]:
    slurm, num_nodes = config.slurm, config.cluster.num_nodes
    limit = slurm.time_limit_minutes
    if config.control.store == "embedded" and num_nodes + slurm.num_spare_nodes > 1:
        yield (
            f"control.store=embedded serves one machine, but cluster.num_nodes + slurm.num_spare_nodes = "
            f"{num_nodes + slurm.num_spare_nodes}; set control.store=etcd"
        )
    for key, value in (("partition", slurm.partition), ("account", slurm.account)):
        if value and not _NAME.fullmatch(value):
            yield f"slurm.{key}={value!r} is not a valid name in Slurm: letters, digits and _.,- only; correct it"
    for key, command, example, options in (
        ("options", "sbatch", "--qos=high", slurm.options),
        ("step_options", "srun", "--container-image=IMAGE", slurm.step_options),
    ):
        for option in options:
            if not option.startswith("-") or "\n" in option:
                yield f"slurm.{key}: {option!r} is not an option of {command}, such as {example}; correct it"
    if slurm.container and slurm.container[0].startswith("-"):
        yield (
            f"slurm.container begins with {slurm.container[0]!r}, but must begin with a command, such as apptainer; "
            f"put options of srun into slurm.step_options"
        )
    for key, number, least in (
        ("end_before_limit_s", slurm.end_before_limit_s, 1),
        ("max_requeues", slurm.max_requeues, 0),
        ("gpus_per_node", slurm.gpus_per_node, 1),
        ("num_spare_nodes", slurm.num_spare_nodes, 0),
        ("etcd_port", slurm.etcd_port, 1),
        ("time_limit_minutes", 1 if limit is None else limit, 1),
    ):
        if number < least:
            yield f"slurm.{key}={number} must be at least {least}; raise it"
    if slurm.etcd_port + _ETCD_PORTS - 1 > 65535:
        yield f"slurm.etcd_port={slurm.etcd_port} leaves fewer than {_ETCD_PORTS} ports up to 65535; lower it"
    if limit is not None and 0 < 60 * limit <= slurm.end_before_limit_s:
        yield (
            f"slurm.end_before_limit_s={slurm.end_before_limit_s} uses up all of "
            f"slurm.time_limit_minutes={limit}; lower the first or raise the second"
        )


def spare_problems(config: RunConfig) -> Iterator[str]:
    """Why the configured spare groups would never be used."""
    spare, layout = config.spare, config.parallel
    if spare.spares <= 0 or layout.num_nodes < 1 or layout.num_ranks % layout.num_nodes:
        return
    groups_per_node = max(len(layout.groups_on(node)) for node in range(layout.num_nodes))
    if spare.spares > groups_per_node:
        yield (
            f"spare.spares={spare.spares} exceeds the {groups_per_node} groups of a node: no more can be lost at a "
            f"time; lower it"
        )
    if not (spare.rejoins or config.checkpoint.max_restarts):
        yield (
            f"spare.spares={spare.spares} has no effect because no group comes back: spare.rejoins={spare.rejoins}, "
            f"checkpoint.max_restarts=0; raise one of them, or set spare.spares to 0"
        )


def reforming_problems(config: RunConfig) -> Iterator[str]:
    """Why groups cannot be re-formed as configured."""
    if config.spare.reform_after_s is None:
        return
    if not config.spare.rejoins:
        yield (
            f"spare.reform_after_s={config.spare.reform_after_s:g} has no effect with spare.rejoins=0, with which no "
            f"group comes back; raise it, or remove spare.reform_after_s"
        )
    for reason in _why_not_reformed(config):
        yield f"spare.reform_after_s={config.spare.reform_after_s:g} has no effect: {reason}"


def reforming_warnings(config: RunConfig) -> Iterator[str]:
    """Says that no other machine can take the place of one that is lost for good, if groups stand on several."""
    if config.spare.rejoins and config.spare.reform_after_s is None:
        for reason in _why_not_reformed(config):
            yield f"groups are not re-formed after losses of machines: {reason}"


def _why_not_reformed(config: RunConfig) -> Iterator[str]:
    layout = config.parallel
    if layout.num_nodes < 2 or layout.num_ranks % layout.num_nodes:
        return  # one machine, or reported by `problems`
    if max(len(layout.nodes_of(GroupId(group))) for group in range(layout.num_groups)) > 1:
        try:
            places_per_group(layout)
        except ValueError as error:
            yield str(error)


def ramp_problems(config: RunConfig) -> Iterator[str]:
    """Why microbatches per shard cannot grow as configured."""
    spare = config.spare
    start, most, end = spare.ramp_start, spare.microbatches_per_shard, spare.ramp_steps
    if (start is None) != (end is None):
        lacks, has = ("ramp_start", f"ramp_steps={end}") if start is None else ("ramp_steps", f"ramp_start={start}")
        yield f"spare.{has} has no effect without spare.{lacks}; set both, or neither"
    step = spare.ramp_increment
    if start is None and end is None and step != 1:
        yield (
            f"spare.ramp_increment={step} has no effect without spare.ramp_start and spare.ramp_steps; set all, or none"
        )
    if start is None or end is None:
        return
    if start >= most or (most - start) % step:
        yield (
            f"spare.ramp_start={start} does not reach spare.microbatches_per_shard={most} by steps of "
            f"spare.ramp_increment={step}; change one of them"
        )
    elif end < (most - start) // step:
        yield (
            f"spare.ramp_steps={end} is below the {(most - start) // step} increases from spare.ramp_start={start} to "
            f"spare.microbatches_per_shard={most}; raise it, or spare.ramp_increment"
        )


def store_problems(control: ControlConfig, *, brings_etcd: bool = False, can_listen: bool = True) -> Iterator[str]:
    """Every reason why the control store cannot be reached; `brings_etcd` if the run can start an etcd of its own."""
    try:
        if ipaddress.ip_address(control.listen_address).is_unspecified:
            yield (
                f"control.listen_address={control.listen_address} is not a single address that ranks can connect "
                f"to; name one address of this machine"
            )
    except ValueError:
        yield f"control.listen_address={control.listen_address} is not an IP address; name one of this machine"
    if control.store == "embedded":
        if not can_listen:
            yield (
                f"control.listen_address={control.listen_address} is not an address of this machine, or its network is "
                f"down; name one that `ip address` shows"
            )
        for key in ("endpoints", "ca_file", "cert_file", "key_file", "credentials_file"):
            if getattr(control, key):
                yield f"control.{key} has no effect on control.store=embedded; remove it or set control.store=etcd"
        return
    if control.endpoints or not brings_etcd:
        yield from _endpoint_problems(control.endpoints)
    if bool(control.cert_file) != bool(control.key_file):
        yield "control.cert_file and control.key_file go together; set both or neither"
    if not _is_encrypted(control):
        for key in ("ca_file", "cert_file"):
            if getattr(control, key):
                yield f"control.{key} has no effect on http endpoints; use https in control.endpoints"


def store_warnings(control: ControlConfig) -> Iterator[str]:
    """Warns if others may read or write the control store."""
    if control.store == "embedded":
        if not ipaddress.ip_address(control.listen_address).is_loopback:
            yield (
                f"control.listen_address={control.listen_address}: the embedded store has no authentication, and "
                f"anyone who reaches this address can end or falsify the run; keep the network private, or use "
                f"control.store=etcd with TLS"
            )
    elif (
        control.endpoints
        and not _is_encrypted(control)
        and not all(_is_loopback(endpoint) for endpoint in control.endpoints)
    ):
        yield "control.endpoints are http: passwords and decisions travel unencrypted; use https"


def _endpoint_problems(endpoints: tuple[str, ...]) -> Iterator[str]:
    if not endpoints:
        yield 'control.store=etcd needs control.endpoints, such as ["https://etcd-0:2379"]'
    for endpoint in endpoints:
        if not _is_endpoint(endpoint):
            yield f"control.endpoints: {_without_user(endpoint)!r} is not of the form https://host:port; correct it"
    if len({urlsplit(endpoint).scheme for endpoint in endpoints if _is_endpoint(endpoint)}) > 1:
        yield "control.endpoints mix http and https; use https for all"


def _is_endpoint(endpoint: str) -> bool:
    try:
        url = urlsplit(endpoint)
        is_whole = bool(url.hostname and url.port)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and is_whole and "@" not in url.netloc and url.path in ("", "/")


def _without_user(endpoint: str) -> str:
    """Hides credentials that were put into an endpoint by mistake."""
    return endpoint.rpartition("@")[2]


def _is_encrypted(control: ControlConfig) -> bool:
    return any(urlsplit(endpoint).scheme == "https" for endpoint in control.endpoints if _is_endpoint(endpoint))


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
