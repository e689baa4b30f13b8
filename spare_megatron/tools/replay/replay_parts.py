"""Which machines compute a replay, with which devices, and how the ranks on them come together."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.places import Assignment, Holding, Places
from spare_megatron.driver.slurm import allocation
from spare_megatron.driver.slurm.slurm_commands import job_fields
from spare_megatron.journal.journal_view import JournalView
from spare_megatron.journal.records import PlacesRecord
from spare_megatron.machine.gpus import gpus_of_machine, list_file, maker, read_list
from spare_megatron.machine.lock import locked
from spare_megatron.process.processes import set_environment_of_ranks
from spare_megatron.process.specs import gpu_of
from spare_megatron.stacking.layout import GroupId, MachineId, PlaceId
from spare_megatron.store import tcp_store
from spare_megatron.tools.doctor.node_processes import (
    Meeting,
    NodeProcesses,
    StartNode,
    connected,
    own_address,
    served_here,
    steps_of,
)
from spare_megatron.tools.replay.replay_ranks import (
    ComputePart,
    DescribeMachine,
    MachineFacts,
    OfRank,
    PartRank,
    Wanted,
    answer_requests,
)
from spare_megatron.version import NUM_DIGITS, code_digest

_FACTS_S = 120.0
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """On which machines a replay is computed."""

    group: int | None = None
    """On those of this group, with its devices; None: on this machine."""
    machine: int | None = None
    """On those of the group that this machine, or its replacement, was last in; then `group` is None."""
    wait_s: float = 300.0
    """Longest wait for other machines."""
    on_awaited: Callable[[str], None] = lambda _: None
    """Called with what a user has to do for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPart:
    """The ranks on one machine. `node` is the number of its supervisor, `stages` are those of the group."""

    node: int
    ranks: tuple[PartRank, ...]
    stages: int


def folder_of_replay(run_dir: Path) -> Path:
    return run_dir / "replay"


# --------------------------------------------------------------------------------------------------------- the parts


def parts_of(config: RunConfig, view: JournalView, group: int | None) -> tuple[ReplayPart, ...]:
    """The group's ranks on the machines that hold its places at the end of the journal; with None those of a group that
    is alone on this machine. ValueError: there is no such group, or no machine holds a place of it.
    """
    if group is None:
        layout, cluster = replace(config.layout, num_groups=1, max_groups=None), replace(config.cluster, num_nodes=1)
        alone = replace(config, layout=layout, cluster=cluster)
        return (_part(alone, GroupId(0), PlaceId(0), node=0, stages=layout.pipeline_parallel),)
    num_groups = config.parallel.num_groups
    if not 0 <= group < num_groups:
        raise ValueError(f"--group={group}: the run has groups 0 to {num_groups - 1}")
    return _parts_by(_places(config, _assignments(view)), config, GroupId(group))


def parts_of_machine(config: RunConfig, view: JournalView, machine: int) -> tuple[GroupId, tuple[ReplayPart, ...]]:
    """The last group that was whole with the machine, or its replacement, and the group's ranks on its machines of
    that time. ValueError: there is no such machine, or it is in several groups.
    """
    layout, assignments = config.parallel, _assignments(view)
    if not 0 <= machine < layout.num_nodes:
        raise ValueError(f"--group=machine:{machine}: the run has machines 0 to {layout.num_nodes - 1}")
    for end in range(len(assignments), -1, -1):
        places = _places(config, assignments[:end])
        holding = places.held_by(MachineId(machine))
        group, *others = layout.groups_on(machine if holding is None else holding.place)
        if others:
            named = ", ".join(map(str, (group, *others)))
            raise ValueError(f"--group=machine:{machine}: it has groups {named}; name one of them")
        needed = layout.nodes_of(group, places.stages_of(group))
        if holding is not None and holding.place in needed and None not in map(places.holder_of, map(PlaceId, needed)):
            return group, _parts_by(places, config, group)
    raise AssertionError("every machine begins in a group that is whole")


def _parts_by(places: Places, config: RunConfig, group: GroupId) -> tuple[ReplayPart, ...]:
    parts, stages = [], places.stages_of(group)
    for place in map(PlaceId, config.parallel.nodes_of(group, stages)):
        holder = places.holder_of(place)
        if holder is None:
            raise ValueError(
                f"--group={group}: no machine holds its place {place} at the end of the journal, since the last one "
                f"has taken another; choose another group, or name a machine that was in it, as machine:N"
            )
        parts.append(_part(config, group, place, node=holder % config.parallel.num_nodes, stages=stages))
    return tuple(parts)


def _assignments(view: JournalView) -> list[Assignment]:
    """Of machines to places, in their order; every supervisor concerned journals each."""
    records = {line.record.index: line.record for line in view.rare if isinstance(line.record, PlacesRecord)}
    return [
        Assignment(
            holdings=tuple(Holding(*holding) for holding in record.holdings),  # type: ignore[arg-type]
            stages=tuple((GroupId(group), stages) for group, stages in record.stages),
        )
        for _, record in sorted(records.items())
    ]


def _places(config: RunConfig, assignments: Sequence[Assignment]) -> Places:
    places = Places(config.parallel)
    for assignment in assignments:
        places.apply(assignment)
    return places


def _part(config: RunConfig, group: GroupId, place: PlaceId, node: int, stages: int) -> ReplayPart:
    layout = config.parallel
    ranks = [rank for on_place, rank in layout.ranks_on(place) if on_place == group]
    return ReplayPart(
        node=node,
        stages=stages,
        ranks=tuple(
            PartRank(rank=rank, gpu=gpu_of(config, group, rank), number=group * layout.ranks_per_group + rank)
            for rank in ranks
        ),
    )


# ------------------------------------------------------------------------------------------------------- the machines


def compute(
    config: RunConfig, run_dir: Path, parts: Sequence[ReplayPart], wanted: Wanted, where: Where
) -> tuple[list[OfRank], dict[int, str]]:
    """What each rank of the group has found, and node -> host of the machines that have computed; no process is left.

    ValueError: a machine is not there, does not fit or fails; no rank has started before all of them are found fit.
    """
    set_environment_of_ranks()
    remote = _remote(config, parts, where)
    if where.group is not None and config.cluster.launcher == "hand":
        where.on_awaited(f"this machine acts as node {parts[0].node} of group {where.group}")
    with contextlib.ExitStack() as held:
        nodes, host = NodeProcesses(), "127.0.0.1"
        for node in (part.node for part in parts if part.node not in remote):
            nodes.connections[node] = held.enter_context(served_here(answer_requests))
        held.callback(nodes.close)
        if remote:
            meeting = _meeting(config, run_dir, remote, where)
            held.enter_context(locked(meeting.folder))
            held.enter_context(connected(nodes, remote, meeting))
            host = meeting.host
        facts = nodes.ask({part.node: DescribeMachine() for part in parts}, _FACTS_S)
        if nodes.failures:
            raise ValueError("; ".join(f"node {node}: {why}" for node, why in sorted(nodes.failures.items())))
        lists = {part.node: _gpus_of(run_dir, part.node, facts[part.node], where) for part in parts}
        _check(parts, facts, lists, where)
        store = tcp_store.listen(host, timedelta(seconds=config.control.startup_timeout_s))
        text, address = dump_run_config(config), (host, store.port)
        orders = {
            part.node: ComputePart(
                config=text,
                store=address,
                stages=part.stages,
                wanted=wanted,
                ranks=part.ranks,
                gpus=lists[part.node],
            )
            for part in parts
        }
        found = _collect(nodes, orders, facts, where)
        return [found[rank] for rank in range(len(found))], {part.node: facts[part.node].host for part in parts}


def _remote(config: RunConfig, parts: Sequence[ReplayPart], where: Where) -> tuple[int, ...]:
    """The nodes that other processes than this one are for."""
    nodes = tuple(part.node for part in parts)
    if where.group is None or config.cluster.launcher == "local":
        return ()
    return nodes if config.cluster.launcher == "srun" else nodes[1:]


def _meeting(config: RunConfig, run_dir: Path, remote: Sequence[int], where: Where) -> Meeting:
    """How the processes of these nodes come. ValueError: a node's machine is not known, or in no job."""

    def words(node: int) -> tuple[str, ...]:
        return ("replay", str(run_dir.absolute()), "--node", str(node))

    start: StartNode | None = None
    if config.cluster.launcher == "srun":
        job, names = _nodes_in_job(run_dir, remote)
        start = steps_of(config.slurm, names, words, where.wait_s, job)
        host = own_address(config, remote, names)
    else:
        host = own_address(config, remote, None)
        where.on_awaited("\n".join(f"on node {node}: spare {' '.join(words(node))}" for node in remote))
    folder = folder_of_replay(run_dir)
    return Meeting(folder=folder, host=host, logs=folder / "logs", words=words, start=start, wait_s=where.wait_s)


def _nodes_in_job(run_dir: Path, nodes: Sequence[int]) -> tuple[str, dict[int, str]]:
    """The number of a job that has these nodes' machines, and their names in Slurm."""
    claims = allocation.Claims(run_dir)
    names = {node: claims.last_of(node) for node in nodes}
    for node, name in names.items():
        if not name:
            raise ValueError(
                f"--group: {run_dir / 'nodes'} does not say which machine node {node} is, as none of its supervisors "
                f"has started; choose another group, or start this without --group on a machine of it"
            )
    job_id = allocation.job_with(list(names.values()), run_dir.absolute())
    return job_fields(job_id)["JobId"], names


def _gpus_of(run_dir: Path, node: int, facts: MachineFacts, where: Where) -> tuple[str, ...]:
    """The machine's GPUs as its ranks had them in the run, if it was in it as this node."""
    return gpus_of_machine(() if where.group is None else read_list(list_file(run_dir, node)), facts.gpus)


def _check(
    parts: Sequence[ReplayPart],
    facts: Mapping[int, MachineFacts],
    lists: Mapping[int, Sequence[str]],
    where: Where,
) -> None:
    """ValueError: a machine has another code, or lacks the devices of its ranks."""
    for part in parts:
        found = facts[part.node]
        machine = "this machine" if where.group is None else f"node {part.node} ({found.host})"
        group = "a group" if where.group is None else f"group {where.group}"
        if found.code != code_digest():
            raise ValueError(
                f"{machine} has code {found.code[:NUM_DIGITS]} of spare_megatron, and this process "
                f"{code_digest()[:NUM_DIGITS]}: install the same on all nodes"
            )
        needed = [rank.gpu for rank in part.ranks if rank.gpu is not None]
        gpus = lists[part.node]
        if needed and max(needed) >= len(gpus):
            raise ValueError(
                f"the run has computed on GPUs, and CPUs give other bits: {group} needs {1 + max(needed)}, and "
                f"{machine} shows {len(gpus)}; use a machine of the run, or show more in {maker().VARIABLES[0]}"
            )
        if lost := [gpus[number] for number in needed if gpus[number] not in found.gpus]:
            raise ValueError(
                f"{group} has computed on {', '.join(dict.fromkeys(lost))}, which {machine} does not show now; repair "
                f"it (`{maker().LIST_COMMAND}`), show it in {maker().VARIABLES[0]}, or replay without --group"
            )


def _collect(
    nodes: NodeProcesses, orders: Mapping[int, ComputePart], facts: Mapping[int, MachineFacts], where: Where
) -> dict[int, OfRank]:
    """What each rank has found. ValueError: a rank or a machine has failed, or all are too slow."""
    found: dict[int, OfRank] = {}
    for node, answer in nodes.answers(orders, _TIMEOUT_S, late="name one --microbatch"):
        failure = answer if isinstance(answer, ValueError) else nodes.failures.get(node)
        if failure is not None:
            raise ValueError(f"{'' if where.group is None else f'node {node} ({facts[node].host}): '}{failure}")
        found |= answer
    return found
