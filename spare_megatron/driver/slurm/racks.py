"""Orders a job's nodes by rack, according to Slurm's topology. Groups use consecutive nodes, so that a domain of
`spare.groups_per_domain` groups, no two of which host the same shard, is in one rack if possible.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from spare_megatron.config.schema import SpareConfig
from spare_megatron.driver.slurm.slurm_commands import call
from spare_megatron.process.processes import say
from spare_megatron.stacking.layout import Layout

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
