"""Which nodes stand in one rack, as Slurm's topology has it, and in which order a run takes them.

What a rack or a block of the topology takes along when it is lost is a domain of `spare.groups_per_domain` groups, no
two of which host the same shard. Groups have consecutive nodes, so the nodes of a domain are to be those of one rack.
"""

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.slurm.commands import call

_RACK = re.compile(r"^(?:SwitchName=(\S+) Level=0\b|BlockName=(\S+)).*?\bNodes=(\S+)", re.MULTILINE)


def find_racks() -> Mapping[str, str]:
    """Node -> the lowest switch or the block that it stands at; empty where Slurm knows of none, or does not tell."""
    racks: dict[str, str] = {}
    try:
        for switch, block, names in _RACK.findall(call("scontrol", "show", "topology")):
            racks |= dict.fromkeys(call("scontrol", "show", "hostnames", names).split(), switch or block)
    except ValueError as error:  # a job can do without
        print(f"warning: nodes are taken in Slurm's order, whatever racks they stand in: {error}", file=sys.stderr)
        return {}
    return racks


def nodes_per_domain(config: RunConfig) -> int:
    """Nodes that the groups of a domain stand on, the last one maybe in part."""
    layout = config.parallel
    return -(-config.spare.groups_per_domain * layout.ranks_per_group // layout.ranks_per_node)


def order_by_rack(names: Sequence[str], racks: Mapping[str, str], num_nodes: int, domain_nodes: int) -> tuple[str, ...]:
    """The nodes of a job in the order in which a run takes them, those to spare last.

    Each domain stands in one rack, and in one where no other does, as far as there are such racks. Domains that share
    one are neighbours. What no rack has room for as a whole is dealt out to what is left.

    Args:
        names: The nodes, at least as many as the run has.
        racks: Node -> its rack. Nodes that are not in it stand alone.
        num_nodes: Nodes of the run.
        domain_nodes: Nodes of a domain.

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
    """The same nodes, those first that stand in racks of their own: what takes the first few is not lost at once.

    >>> spread(["a1", "a2", "b1", "c1"], {"a1": "a", "a2": "a", "b1": "b", "c1": "c"})
    ('a1', 'b1', 'c1', 'a2')
    """
    by_rack: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_rack[racks.get(name, name)].append(name)
    rounds = itertools.zip_longest(*by_rack.values())
    return tuple(name for name in itertools.chain.from_iterable(rounds) if name is not None)


def shared_racks(config: RunConfig, nodes: Sequence[str], racks: Mapping[str, str]) -> str:
    """A warning of racks with groups that the placement of shards takes to be lost independently; empty if none has.

    Args:
        config: Of the run.
        nodes: The nodes of the run, in its order.
        racks: Node -> its rack.
    """
    spare, layout = config.spare, config.parallel
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
        f"some of them may be all hosts of a shard, which its loss would wipe out (so it is with {len(shared)} of "
        f"{len(groups)} racks); spare.groups_per_domain={len(found)} keeps hosts apart"
    )
