"""Problems and warnings about the launcher, the Slurm job, spares and the control store."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from spare_megatron.config.checks.requirements import (
    JOB,
    SEVERAL_MACHINES,
    STORE,
    broken,
    is_endpoint,
)
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.reforming import places_per_group
from spare_megatron.faults.kinds import KINDS
from spare_megatron.formats.quantities import format_bytes
from spare_megatron.formats.store_space import gib
from spare_megatron.stacking.layout import GroupId

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
        yield from _layout_problems(config)
        yield from _job_problems(config)


def _layout_problems(config: RunConfig) -> Iterator[str]:
    layout, gpus = config.parallel, config.slurm.gpus_per_node
    if min(layout.num_ranks, layout.num_nodes) < 1 or layout.num_ranks % layout.num_nodes:
        return  # reported by `problems`
    per_node = layout.ranks_per_node
    if config.cluster.device == "gpu" and per_node != gpus:
        fits = gpus > 0 and layout.num_ranks % gpus == 0
        yield (
            f"each of cluster.num_nodes={layout.num_nodes} has {per_node} of {layout.num_ranks} ranks, which do not "
            f"fill slurm.gpus_per_node={gpus}; change one of them or layout.num_groups"
            + (f" (cluster.num_nodes={layout.num_ranks // gpus} fits)" if fits else "")
        )


def _job_problems(config: RunConfig) -> Iterator[str]:
    slurm, num_nodes = config.slurm, config.cluster.num_nodes
    if config.control.store == "embedded" and num_nodes + slurm.num_spare_nodes > 1:
        yield (
            f"control.store=embedded serves one machine, but cluster.num_nodes + slurm.num_spare_nodes = "
            f"{num_nodes + slurm.num_spare_nodes}; set control.store=etcd"
        )
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


def reforming_problems(config: RunConfig) -> Iterator[str]:
    """Why groups cannot be re-formed as configured."""
    if config.spare.reform_after_s is None:
        return
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
    start, most, end, step = spare.ramp_start, spare.microbatches_per_shard, spare.ramp_steps, spare.ramp_increment
    if start is None or end is None or start >= most or (most - start) % step:
        return
    if end < (most - start) // step:
        yield (
            f"spare.ramp_steps={end} is below the {(most - start) // step} increases from spare.ramp_start={start} to "
            f"spare.microbatches_per_shard={most}; raise it, or spare.ramp_increment"
        )


def store_problems(config: RunConfig, *, can_listen: bool = True) -> Iterator[str]:
    """Every reason why the control store cannot be reached."""
    control = config.control
    yield from broken(STORE, config)
    if control.store == "embedded" and not can_listen:
        yield (
            f"control.listen_address={control.listen_address} is not an address of this machine, or its network is "
            f"down; name one that `ip address` shows"
        )
    if control.store != "embedded" and (control.endpoints or config.cluster.launcher != "srun"):
        yield from _endpoint_problems(control.endpoints)


def _endpoint_problems(endpoints: tuple[str, ...]) -> Iterator[str]:
    if not endpoints:
        yield 'control.store=etcd needs control.endpoints, such as ["https://etcd-0:2379"]'
    for endpoint in endpoints:
        if not is_endpoint(endpoint):
            yield f"control.endpoints: {_without_user(endpoint)!r} is not of the form https://host:port; correct it"
    if len({urlsplit(endpoint).scheme for endpoint in endpoints if is_endpoint(endpoint)}) > 1:
        yield "control.endpoints mix http and https; use https for all"


def _without_user(endpoint: str) -> str:
    """Hides credentials that were put into an endpoint by mistake."""
    return endpoint.rpartition("@")[2]
