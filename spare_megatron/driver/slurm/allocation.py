"""The nodes of a job by rack, according to Slurm's topology, which supervisor runs on which of them, and the job's
steps: srun commands, the launcher of supervisors, and the end of a job without its batch script.

Groups use consecutive nodes, so that a domain of `spare.groups_per_domain` groups, no two of which host the same shard,
is in one rack if possible.
"""

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spare_megatron.config.schema import RunConfig, SlurmConfig, SpareConfig
from spare_megatron.driver.slurm.slurm_commands import JobId, call, cancel, job_fields, job_of, own_job
from spare_megatron.process.processes import say
from spare_megatron.stacking.layout import Layout


def this_job() -> JobId:
    """The job that this process belongs to. Raises ValueError if it belongs to none."""
    job_id = own_job()
    if job_id is None:
        raise ValueError(
            "cluster.launcher=srun starts steps of a Slurm job, and this process is in none: use `spare submit`, or "
            "set cluster.launcher to local or hand"
        )
    return job_id


def job_with(names: Sequence[str], run_dir: Path) -> JobId:
    """The job of this process or that of the run, whichever has all of these Slurm nodes. ValueError: neither has."""
    jobs, reasons = [own_job()], []
    with contextlib.suppress(ValueError):  # `spare submit` has not started the run
        jobs.append(job_of(run_dir.parent))
    for job_id in [job_id for job_id in dict.fromkeys(jobs) if job_id is not None]:
        try:
            present = nodes_of(job_id)
        except ValueError as error:
            reasons.append(str(error))
            continue
        missing = [name for name in names if name not in present]
        if not missing:
            return job_id
        reasons.append(f"job {job_id} does not have {', '.join(missing)}")
    raise ValueError(
        f"{'; '.join(reasons) or 'this process is in no Slurm job'}: start it in one that has {', '.join(names)}, as "
        f"by `salloc --nodelist={','.join(names)}`"
    )


def nodes_of(job_id: JobId) -> tuple[str, ...]:
    """Names of the job's present nodes, without lost ones. ValueError: Slurm cannot be asked, or there are none."""
    names = job_fields(job_id).get("NodeList", "(null)")
    if names in ("", "(null)"):
        raise ValueError(f"job {job_id} has no nodes: it has ended")
    return tuple(call("scontrol", "show", "hostnames", names).split())


def nodes_for_run(job_id: JobId, config: RunConfig, racks: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the job's nodes in the order of the run, by rack if known, spares last: fewer than `cluster.num_nodes`
    if groups may have fewer stages. ValueError: they are too few.
    """
    names, num_nodes = nodes_of(job_id), config.cluster.num_nodes
    if len(names) < num_nodes and len(config.parallel.lengths) == 1:
        raise ValueError(
            f"job {job_id} has {len(names)} nodes ({', '.join(names)}), too few for cluster.num_nodes={num_nodes}; ask "
            f"for more (sbatch --nodes), lower cluster.num_nodes and the layout, or set layout.least_pipeline_parallel "
            f"for groups that go on with fewer nodes"
        )
    return order_by_rack(names, racks, num_nodes, nodes_per_domain(config.spare, config.parallel))


def address_of(name: str) -> str:
    """The node's address, according to slurmctld."""
    fields = dict(item.partition("=")[::2] for item in call("scontrol", "--oneliner", "show", "node", name).split())
    return fields.get("NodeAddr", name)


def choose_node(present: Sequence[str], taken: Collection[str], last: str) -> str | None:
    """The node for a supervisor that is started again; None while there is none. Prefers another node than the last
    one, which may be faulty or lost without anyone having noticed yet.

    >>> choose_node(["n1", "n2", "n3"], taken={"n1"}, last="n2")
    'n3'
    >>> choose_node(["n1", "n2"], taken={"n1"}, last="n2")
    'n2'
    >>> choose_node(["n1"], taken={"n1"}, last="n2") is None
    True
    """
    free = [name for name in present if name not in taken]
    return next((name for name in free if name != last), free[0] if free else None)


class Claims:
    """Records which supervisor uses which Slurm node, in files that the run's launchers share."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "nodes"

    def claim(self, name: str, node: int) -> bool:
        """Claims a Slurm node for this node's supervisor. Returns False if it is taken."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(fd, "w") as file:
            file.write(str(node))
        with contextlib.suppress(OSError):  # a disk that is full
            self._last(node).write_text(name)
        return True

    def release(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def taken(self) -> tuple[str, ...]:
        return tuple(sorted(path.name.removeprefix("on-") for path in self._folder.glob("on-*")))

    def last_of(self, node: int) -> str:
        """The Slurm node that this node's supervisor has used last; empty if it has used none."""
        try:
            return self._last(node).read_text()
        except FileNotFoundError:
            return ""

    def _last(self, node: int) -> Path:
        return self._folder / f"last-{node}"

    def _path(self, name: str) -> Path:
        return self._folder / f"on-{name}"


_RACK = re.compile(r"^(?:SwitchName=(\S+) Level=0\b|BlockName=(\S+)).*?\bNodes=(\S+)", re.MULTILINE)


def find_racks() -> Mapping[str, str]:
    """Node -> its lowest switch or block; empty if Slurm knows or reports no topology."""
    racks: dict[str, str] = {}
    try:
        for switch, block, names in _RACK.findall(call("scontrol", "show", "topology")):
            racks |= dict.fromkeys(call("scontrol", "show", "hostnames", names).split(), switch or block)
    except ValueError as error:  # a job works without racks
        say(f"warning: nodes are taken in Slurm's order, regardless of racks: {error}", err=True)
        return {}
    return racks


def nodes_per_domain(spare: SpareConfig, layout: Layout) -> int:
    """Nodes that the groups of a domain use; the last one possibly in part."""
    return -(-spare.groups_per_domain * layout.ranks_per_group // layout.ranks_per_node)


def order_by_rack(names: Sequence[str], racks: Mapping[str, str], num_nodes: int, domain_nodes: int) -> tuple[str, ...]:
    """Orders the nodes of a job for a run, spare nodes last. A node that is not in `racks` has a rack of its own. Each
    domain gets nodes of one rack, and of one without another domain while there are such racks. Domains in one rack are
    adjacent. Domains that fit into no rack take the remaining nodes, first those of racks with the most.

    >>> names = ["a1", "b1", "a2", "b2", "b3"]
    >>> order_by_rack(names, {name: name[0] for name in names}, 4, 2)
    ('a1', 'a2', 'b1', 'b2', 'b3')
    """
    free: dict[str, list[str]] = defaultdict(list)
    for name in names:
        free[racks.get(name, name)].append(name)
    domains: dict[str, list[str]] = {rack: [] for rack in free}
    num_left = num_nodes
    while num_left >= domain_nodes and (whole := [rack for rack in free if len(free[rack]) >= domain_nodes]):
        rack = min(whole, key=lambda rack: len(domains[rack]))
        domains[rack] += free[rack][:domain_nodes]
        del free[rack][:domain_nodes]
        num_left -= domain_nodes
    by_room = sorted(free.values(), key=len, reverse=True)
    chosen = [*itertools.chain(*domains.values()), *list(itertools.chain(*by_room))[:num_left]]
    return (*chosen, *(name for name in names if name not in chosen))


def spread(names: Sequence[str], racks: Mapping[str, str]) -> tuple[str, ...]:
    """Reorders nodes so that the first ones are in different racks: whatever uses them is not lost at once.

    >>> spread(["a1", "a2", "b1", "c1"], {"a1": "a", "a2": "a", "b1": "b", "c1": "c"})
    ('a1', 'b1', 'c1', 'a2')
    """
    by_rack: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_rack[racks.get(name, name)].append(name)
    rounds = itertools.zip_longest(*by_rack.values())
    return tuple(name for name in itertools.chain.from_iterable(rounds) if name is not None)


def shared_racks(spare: SpareConfig, layout: Layout, nodes: Sequence[str], racks: Mapping[str, str]) -> str:
    """A warning of racks with groups that the placement takes to be independent; empty if there are none."""
    groups: dict[str, set[int]] = defaultdict(set)
    for node, name in enumerate(nodes):
        if name in racks:
            groups[racks[name]].update(int(group) for group, _ in layout.ranks_on(node))
    shared = {
        rack: found for rack, found in groups.items() if len({group // spare.groups_per_domain for group in found}) > 1
    }
    if not shared or spare.redundancy == 1:
        return ""
    rack, found = max(shared.items(), key=lambda item: len(item[1]))
    numbers = ", ".join(map(str, sorted(found)))
    return (
        f"rack {rack} has {len(found)} groups ({numbers}), and with spare.groups_per_domain={spare.groups_per_domain} "
        f"all hosts of a shard may be among them, so the loss of the rack may be a wipe-out (as in {len(shared)} of "
        f"{len(groups)} racks); spare.groups_per_domain={len(found)} keeps hosts apart"
    )


def end_orphaned_job(*, wants_more: bool) -> None:
    """Ends the job of this step, whose batch script was lost with its node; every remaining node calls this, the first
    has an effect. Requeues it if steps (`wants_more`) and requeues are left, else cancels it.
    """
    job_id, requeues = own_job(), os.environ.get("SPARE_REQUEUES", "")
    if job_id is None or not requeues.isdigit():  # only the script of `spare submit` says how often
        return
    num_left = int(requeues) - int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with contextlib.suppress(ValueError):
        call("scontrol", "requeue", str(job_id)) if wants_more and num_left > 0 else cancel(job_id)


def step_command(name: str, on: str, command: Sequence[str]) -> tuple[str, ...]:
    """The srun command that runs once on this node, beside other steps, and survives the loss of other nodes."""
    options = (
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={on}",
        f"--job-name={name}",
        "--overlap",
        "--no-kill",
        "--mem=0",
        "--cpu-bind=none",
        "--input=none",
    )
    return ("srun", *options, *command)


def node_step(slurm: SlurmConfig, name: str, on: str, words: Sequence[str], job: str | None = None) -> tuple[str, ...]:
    """The srun command of a step `name` that runs a `spare` command on this node, in the container if any; of this
    `job`.
    """
    command = (*slurm.container, slurm.python or sys.executable, "-P", "-m", "spare_megatron", *words)
    srun, *rest = step_command(name, on, command)
    return (srun, *(() if job is None else (f"--jobid={job}",)), *slurm.step_options, *rest)


def start_step(step: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Starts a step with its output in the file."""
    with log.open("wb") as file:
        return subprocess.Popen(step, start_new_session=True, stdout=file, stderr=file)


@dataclass(slots=True)
class SrunLauncher:
    """Starts the supervisors of one run as steps of its job. `job_id`: the job that the driver belongs to. `nodes`: the
    Slurm nodes that the run begins on, in the order of its own.
    """

    job_id: JobId
    slurm: SlurmConfig
    nodes: tuple[str, ...]
    replaces: bool = True
    _held: str = field(default="", init=False)
    _last: str = field(default="", init=False)

    def lacks(self, node: int) -> bool:
        return node >= len(self.nodes)

    def start(self, run_dir: Path, node: int, incarnation: int) -> subprocess.Popen[bytes] | None:
        """Starts the supervisor with srun. Returns None if no node is free now."""
        name = self._choose(run_dir, node, incarnation)
        if name is None:
            return None
        say(f"node {node}: its supervisor is started on {name}")
        step = node_step(self.slurm, f"node-{node}", name, ("supervise", str(run_dir), "--node", str(node)))
        return subprocess.Popen(step, start_new_session=True)

    def release(self, run_dir: Path, node: int) -> None:  # noqa: ARG002  (it knows what it has taken)
        if self._held:
            Claims(run_dir).release(self._held)
            self._last, self._held = self._held, ""

    def _choose(self, run_dir: Path, node: int, incarnation: int) -> str | None:
        claims = Claims(run_dir)
        name = self.nodes[node] if incarnation == 0 else choose_node(nodes_of(self.job_id), claims.taken(), self._last)
        if name is None or not claims.claim(name, node):
            return None
        self._held = name
        return name
