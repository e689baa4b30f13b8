"""The nodes of a job by rack, according to Slurm's topology, and which supervisor runs on which of them.

Groups use consecutive nodes, so that a domain of `spare.groups_per_domain` groups, no two of which host the same shard,
is in one rack if possible.
"""

import contextlib
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from spare_megatron.config.schema import RunConfig, SpareConfig
from spare_megatron.driver.slurm.slurm_commands import JobId, call, job_fields, job_of, own_job
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
