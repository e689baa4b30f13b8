"""Problems and warnings about the launcher, the Slurm job, spares and the control store."""

from collections.abc import Iterator
from dataclasses import dataclass

from spare_megatron.config.checks.requirements import JOB, SEVERAL_MACHINES, STORE, broken, is_endpoint
from spare_megatron.config.schema import RunConfig
from spare_megatron.faults.kinds import KINDS
from spare_megatron.formats.quantities import format_binary_bytes, format_bytes

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
