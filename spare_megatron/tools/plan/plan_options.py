"""The options of `spare plan`, and the cluster that they describe."""

import math
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spare_megatron.cli.command import option
from spare_megatron.formats.quantities import parse_bytes, parse_duration_s

if TYPE_CHECKING:
    from spare_megatron.tools.plan.facts import ClusterFacts, HoldingLimits, Policy
    from spare_megatron.tools.plan.overhead import StepTimes
    from spare_megatron.tools.plan.readmission import RejoinTimes
    from spare_megatron.tools.plan.reforming_costs import ReformTimes
    from spare_megatron.tools.plan.sites_cost import SitesCost
    from spare_megatron.tools.plan.slow_group_costs import SlowRate

ASSUMED_STEP = "64s"
ASSUMED_REDUCE_S_PER_GROUP = 0.01
ASSUMED_MICROBATCHES = 16
ASSUMED_PARTITION_COPY = "60s"
ASSUMED_STEPS = 10_000
ASSUMED_SLOW = "1h"
ASSUMED_SLOW_FACTOR = 2.0
SECONDS_PER_DAY = 86400.0
ASSUMED_SITE_LINK_GBITS = 10.0
_MOST_GROUPS = 10_000_000
_MOST_GROUPS_TIMES_DOMAINS = 8_000_000
"""The planner holds this many counts for each redundancy that it tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `spare plan` as the user wrote them; None where absent."""

    groups: int | None = option("Number of data-parallel groups, and of shards; needed without --preset.")
    restart: str = option("Time from a wipe-out until training continues, as in 60m.", default=MISSING)
    save: str = option("Time that training stalls for one save, as in 60s.", default=MISSING)
    mtbf: str | None = option("Mean time between losses of any group, as in 300s, 5m or 2h.")
    failures_per_node_day: float | None = option(
        "Failure rate instead of --mtbf; needs --gpus-per-node and --gpus-per-group."
    )
    node_mtbf: str | None = option(
        "Mean time between failures of one node, as in 2y, instead of --mtbf; needs the same two, or --preset."
    )
    gpus_per_node: int | None = option("For --failures-per-node-day or --node-mtbf.")
    gpus_per_group: int | None = option("For --failures-per-node-day or --node-mtbf.")
    preset: Path | None = option(
        "Run preset, as in llama3_70b_h100: its GPUs of a node and a group, groups, microbatches and access to data, "
        "where no option says otherwise."
    )
    nodes: int | None = option("Nodes of the cluster: as many groups of --preset as fit.")
    step: str | None = option("Time to compute one shard on one group.", shown=ASSUMED_STEP)
    reduce: str | None = option("Time of the rest of a step, mostly the reduction.", shown="10ms per group")
    microbatches: int | None = option("Microbatches per shard.", shown=str(ASSUMED_MICROBATCHES))
    repair: str | None = option(
        "Time from the loss of a group until its hardware is repaired, as in 10m. Makes groups rejoin."
    )
    transfer: str | None = option("Time that a repaired group needs to copy the state.", shown="0s")
    join: str | None = option("Time that all groups wait for an admission, as in 30s.")
    spares: int | None = option("Spare groups, or machines with --reform, that replace lost ones at once.", shown="0")
    reform: str | None = option(
        "Re-form groups from idle machines and those of broken groups: time from the loss of a machine until the "
        "group runs, as in 60s. A loss then takes one machine."
    )
    machines_per_group: int | None = option("Machines of a group, for --reform.")
    least_machines: int | None = option(
        "Fewest machines with which a group goes on, with fewer pipeline stages; for --reform.", shown="all"
    )
    steps: int | None = option("Steps of the training, in which machines are lost for good.", shown=str(ASSUMED_STEPS))
    groups_per_domain: int | None = option("Groups in one rack or power domain, with consecutive ids.")
    domain_mtbf: str | None = option("Mean time between losses of any whole domain, as in 7d, in addition to --mtbf.")
    last_resort: bool = option(
        "Let any group read any shard, so that only the loss of all groups is a wipe-out.",
        "--last-resort",
        default=False,
    )
    fetch: str | None = option("Time until a group has data of shards outside its stack.", shown="0s")
    notice: str | None = option(
        "Notice of each loss, as spot machines have it: a group that learns of its own leaves at the next commit.",
        shown="0s",
    )
    policy: str | None = option(
        "stack moves whole shards, as in the SPARe paper; microbatch is the default of `spare train`; rejoin "
        "is microbatch with lost groups that come back, reform with groups made of the machines of broken ones.",
        shown="see above",
    )
    redundancy: int | None = option("Hosts per shard. [default: the best]")
    partition_copy: str | None = option(
        "Time to copy one partition of the optimizer state whose host is lost.",
        "--slice-copy",
        shown=ASSUMED_PARTITION_COPY,
    )
    shard_size: str | None = option("Size of one shard in memory, as in 64MiB.")
    memory: str | None = option("Memory limit of a group for its shards, as in 2GB.")
    read_rate: str | None = option("Rate at which a group reads shards, as in 1GB/s.")
    widths: str | None = option(
        "Compare groups of so many lanes, as in 1,2,4; all other options are for groups of one lane."
    )
    over_groups: str | None = option(
        "Of --reduce, the time in which gradients travel between groups, which falls with --widths. "
        "[default: all of an assumed --reduce, else 0s]"
    )
    slow_every: str | None = option("Mean time until a given group turns slow, as in 30d: what that costs is shown.")
    slow_for: str | None = option("Mean time for which a group is slow; for --slow-every.", shown=ASSUMED_SLOW)
    slow_factor: float | None = option(
        "Time per microbatch of a slow group over that of the others.", shown=f"{ASSUMED_SLOW_FACTOR:g}"
    )
    sites: int | None = option("Sites that train together by outer steps: what these cost is shown. Needs --preset.")
    site_link: float | None = option(
        "Gbit/s from a site to the others; for --sites.", shown=f"{ASSUMED_SITE_LINK_GBITS:g}"
    )
    plot: Path | None = option("Draw time to train, endured losses and lost time into this PNG file.")
    as_json: bool = option("Print the plan as JSON.", "--json", default=False)

    @property
    def num_groups(self) -> int:
        assert self.groups is not None, "completed"
        return self.groups


def facts_of(given: PlanOptions) -> "ClusterFacts":
    """The described cluster; raises ValueError if a value is out of range or the loss rate is missing or ambiguous."""
    from spare_megatron.tools.plan.facts import CheckpointTimes, ClusterFacts
    from spare_megatron.tools.plan.overhead import StepTimes

    for name, value in (("--groups", given.num_groups), ("--microbatches", given.microbatches)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} is below 1")
    if given.num_groups > _MOST_GROUPS:
        raise ValueError(
            f"--groups {given.num_groups}: at most {_MOST_GROUPS} groups are planned for; it counts data-parallel "
            f"groups, not accelerators"
        )
    reduce_s = (
        ASSUMED_REDUCE_S_PER_GROUP * given.num_groups
        if given.reduce is None
        else parse_duration_s("--reduce", given.reduce, is_zero_fine=True)
    )
    if not given.last_resort:
        _refuse(given, ("fetch",), "needs --last-resort: without it no group reads other shards")
    groups_per_domain, domain_mtbf = _domains(given)
    if domain_mtbf is not None and given.spares and given.reform is None:
        raise ValueError(
            f"--spares {given.spares} plans for groups that are lost one by one, --groups-per-domain "
            f"{groups_per_domain} for groups lost together; leave out one of them"
        )
    times = StepTimes(
        shard_s=parse_duration_s("--step", given.step or ASSUMED_STEP),
        reduce_s=reduce_s,
        loss_interval_s=_loss_interval_s(given),
    )
    return ClusterFacts(
        num_groups=given.num_groups,
        times=times,
        checkpoint=CheckpointTimes(
            save_s=parse_duration_s("--save", given.save),
            restart_s=parse_duration_s("--restart", given.restart, is_zero_fine=True),
        ),
        num_microbatches=given.microbatches or ASSUMED_MICROBATCHES,
        rejoin=_rejoin(given),
        reform=_reform(given, times),
        groups_per_domain=groups_per_domain,
        domain_interval_s=math.inf if domain_mtbf is None else parse_duration_s("--domain-mtbf", domain_mtbf),
        last_resort=given.last_resort,
        fetch_s=_duration_or_0("--fetch", given.fetch),
        notice_s=_duration_or_0("--notice", given.notice),
    )


def _reform(given: PlanOptions, times: "StepTimes") -> "ReformTimes | None":
    from spare_megatron.tools.plan.reforming_costs import ReformTimes

    if given.reform is None:
        _refuse(
            given,
            ("machines_per_group", "least_machines", "steps"),
            "needs --reform, the time to re-form a group, as in 60s",
        )
        return None
    if given.machines_per_group is None:
        raise ValueError(f"--reform {given.reform} needs --machines-per-group, of which a loss takes one")
    for name, value in (("machines-per-group", given.machines_per_group), ("steps", given.steps)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} is below 1")
    return ReformTimes(
        machines_per_group=given.machines_per_group,
        least_machines=given.least_machines,
        reform_s=parse_duration_s("--reform", given.reform, is_zero_fine=True),
        run_s=(given.steps or ASSUMED_STEPS) * times.step_s,
        repair_s=None if given.repair is None else parse_duration_s("--repair", given.repair),
        transfer_s=_duration_or_0("--transfer", given.transfer),
        join_s=_duration_or_0("--join", given.join),
        num_spares=given.spares or 0,
    )


def _rejoin(given: PlanOptions) -> "RejoinTimes | None":
    from spare_megatron.tools.plan.readmission import RejoinTimes

    if given.spares is not None and given.spares < 0:
        raise ValueError(f"--spares {given.spares} is below 0")
    if given.repair is None:
        if given.reform is None:
            needs = "needs --repair, the time from a loss until the group is repaired"
            _refuse(given, ("transfer", "join", "spares"), needs)
        return None
    return RejoinTimes(
        repair_s=parse_duration_s("--repair", given.repair),
        transfer_s=_duration_or_0("--transfer", given.transfer),
        join_s=_duration_or_0("--join", given.join),
        num_spares=given.spares or 0,
    )


def _domains(given: PlanOptions) -> tuple[int, str | None]:
    """Groups per domain, and the time between losses of domains; 1 and None without domains."""
    size, mtbf, num_groups = given.groups_per_domain, given.domain_mtbf, given.num_groups
    if (size is None) != (mtbf is None):
        missing = "--domain-mtbf, as in 30d" if mtbf is None else "--groups-per-domain, as in 4"
        raise ValueError(f"domains that are lost together need both: give {missing}")
    if size is not None and not 1 <= size <= num_groups:
        raise ValueError(f"--groups-per-domain {size} has to be from 1 to {num_groups} (--groups)")
    num_domains = -(-num_groups // (size or 1))
    if size is not None and num_groups * num_domains > _MOST_GROUPS_TIMES_DOMAINS:
        raise ValueError(
            f"--groups {num_groups} in {num_domains} domains (--groups-per-domain {size}): groups x domains may be "
            f"{_MOST_GROUPS_TIMES_DOMAINS} at most, as the hosts of every shard are looked at; plan for fewer groups, "
            f"or leave out --groups-per-domain and --domain-mtbf"
        )
    return size or 1, mtbf


def _refuse(given: PlanOptions, names: Sequence[str], why: str) -> None:
    """Raises ValueError for the first of these options that is given."""
    for name in names:
        if (value := getattr(given, name)) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} {why}")


def _duration_or_0(option: str, text: str | None) -> float:
    return 0.0 if text is None else parse_duration_s(option, text, is_zero_fine=True)


def completed(given: PlanOptions) -> PlanOptions:
    """With what the preset says where no option does. ValueError: it cannot be read, or no group fits the nodes."""
    from spare_megatron.config.loader import load_run_config

    if given.preset is None:
        _refuse(given, ("nodes",), "needs --preset, which says how many GPUs a node and a group have")
        if given.groups is None:
            raise ValueError("how many groups? give --groups, as in 600, or a run preset with --preset")
        return given
    config = load_run_config(given.preset).config
    per_gpu = config.cluster.ranks_per_gpu
    per_node = config.slurm.gpus_per_node if given.gpus_per_node is None else given.gpus_per_node
    per_group = given.gpus_per_group
    if per_group is None:
        per_group = -(-config.parallel.ranks_per_group // per_gpu)
    counts = ("--nodes", given.nodes), ("--gpus-per-node", per_node), ("--gpus-per-group", per_group)
    for name, number in (*counts, ("--microbatches", given.microbatches)):
        if number is not None and number < 1:
            raise ValueError(f"{name} {number} is below 1")
    stages, size = config.layout.pipeline_parallel, given.machines_per_group
    least = config.layout.least_pipeline_parallel or stages
    groups = config.layout.num_groups if given.groups is None else given.groups
    if given.nodes is not None:
        if given.groups is not None:
            raise ValueError(f"--groups {given.groups} and --nodes {given.nodes} both say how many groups; give one")
        groups = given.nodes * per_node // per_group
        if groups < 1:
            raise ValueError(
                f"--nodes {given.nodes}: {per_node} GPUs of each do not make a group of {per_group}, as "
                f"--preset {given.preset} has them; take more nodes"
            )
    num_nodes, cluster = -(-groups * per_group // per_node), config.cluster
    if given.nodes is None and (cluster.launcher, cluster.device) != ("srun", "gpu"):  # tests, on one machine
        num_nodes = 1 if cluster.num_nodes == 1 else -(-groups * cluster.num_nodes // config.layout.num_groups)
    return replace(
        given,
        groups=groups,
        nodes=num_nodes,
        gpus_per_node=per_node if given.mtbf is None else given.gpus_per_node,
        gpus_per_group=per_group if given.mtbf is None else given.gpus_per_group,
        least_machines=-(-size * least // stages) if given.least_machines is None and size else given.least_machines,
        microbatches=-(-(given.microbatches or config.spare.microbatches_per_shard) // config.layout.data_parallel),
        last_resort=given.last_resort or (config.data.access == "shared" and given.policy != "stack"),
    )


def sites_of(given: PlanOptions, step_s: float) -> "SitesCost | None":
    """What outer steps cost; None without --sites. ValueError: out of range, or without --preset."""
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.config.model.model_tensors import model_shape
    from spare_megatron.tools.plan.sites_cost import SitesCost

    if given.sites is None:
        _refuse(given, ("site_link",), "belongs to --sites; give that, or leave it out")
        return None
    if given.preset is None:
        raise ValueError(f"--sites {given.sites} needs --preset, which says how many parameters the model has")
    link = ASSUMED_SITE_LINK_GBITS if given.site_link is None else given.site_link
    if given.sites < 2 or not 0 < link < math.inf:
        raise ValueError(f"--sites {given.sites} has to be at least 2, and --site-link {link:g} above 0")
    config = load_run_config(given.preset).config
    return SitesCost(
        num_sites=given.sites,
        num_parameters=model_shape(config).num_parameters,
        every_steps=config.sites.every_steps,
        step_s=step_s,
        bits_per_s=link * 1e9,
        wait_s=config.sites.wait_s,
    )


def _loss_interval_s(given: PlanOptions) -> float:
    rates = ("mtbf", "failures_per_node_day", "node_mtbf")
    named = [f"--{name.replace('_', '-')} {value}" for name in rates if (value := getattr(given, name)) is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} both say how often groups are lost; give one")
    if not named:
        raise ValueError("how often are groups lost? give --mtbf, as in 300s, --node-mtbf or --failures-per-node-day")
    if given.mtbf is not None:
        belongs = "belongs to --failures-per-node-day or --node-mtbf, not to --mtbf; leave it out"
        _refuse(given, ("gpus_per_node", "gpus_per_group"), belongs)
        return parse_duration_s("--mtbf", given.mtbf)
    rate = given.failures_per_node_day
    if rate is None:
        node_mtbf_s = parse_duration_s("--node-mtbf", str(given.node_mtbf))
    elif rate > 0 and math.isfinite(rate):
        node_mtbf_s = SECONDS_PER_DAY / rate
    else:
        raise ValueError(f"--failures-per-node-day {rate} has to be above 0")
    per_node = _gpus("--gpus-per-node", given.gpus_per_node, named[0])
    return node_mtbf_s / (given.num_groups * _gpus("--gpus-per-group", given.gpus_per_group, named[0]) / per_node)


def _gpus(option: str, count: int | None, rate: str) -> int:
    if count is None or count < 1:
        problem = "is missing" if count is None else f"{count} is below 1"
        raise ValueError(f"{option} {problem}; {rate.partition(' ')[0]} needs it to count the nodes of a group")
    return count


def widths_of(given: PlanOptions, reduce_s: float) -> tuple[list[int], float]:
    """The numbers of lanes to compare, and the seconds of `reduce_s` in which gradients travel between groups.

    An assumed reduction is all of that kind. Raises ValueError for what are no numbers of lanes.
    """
    lanes, over_groups = given.widths, given.over_groups
    if lanes is None:
        _refuse(given, ("over_groups",), "needs --widths, the numbers of lanes to compare, as in 1,2,4")
        return [], 0.0
    if not re.fullmatch(r"\d{1,8}(,\d{1,8})*", lanes):
        raise ValueError(f"--widths {lanes} has to be numbers of lanes in a group, as in 1,2,4")
    over_groups_s = _duration_or_0("--over-groups", over_groups) if given.reduce or over_groups else reduce_s
    if over_groups_s > reduce_s:
        raise ValueError(f"--over-groups {over_groups} exceeds the rest of a step, --reduce, of {reduce_s:g} s")
    return [int(number) for number in lanes.split(",")], over_groups_s


def slow_rate_of(given: PlanOptions) -> "SlowRate | None":
    """How often groups turn slow; None if that was not asked. ValueError: out of range, or --slow-every is missing."""
    from spare_megatron.tools.plan.slow_group_costs import SlowRate

    every, lasting, factor = given.slow_every, given.slow_for, given.slow_factor
    if every is None:
        if lasting is not None or factor is not None:
            raise ValueError(
                "--slow-for and --slow-factor need --slow-every, the mean time until a given group is slow"
            )
        return None
    if factor is not None and not 1 <= factor < math.inf:
        raise ValueError(f"--slow-factor {factor:g} has to be 1 or more: how often as long a microbatch takes")
    return SlowRate(
        group_interval_s=parse_duration_s("--slow-every", every),
        duration_s=parse_duration_s("--slow-for", lasting or ASSUMED_SLOW),
        factor=ASSUMED_SLOW_FACTOR if factor is None else factor,
    )


def policy_of(given: PlanOptions) -> "Policy":
    """The requested policy, or the one that the other options imply; raises ValueError if they contradict it."""
    repair, is_last_resort = given.repair, given.last_resort
    if given.policy is None and given.reform is not None:
        return "reform"
    if given.policy is None:
        return "rejoin" if repair else "microbatch" if given.microbatches or is_last_resort else "stack"
    match given.policy:
        case "stack" if is_last_resort:
            raise ValueError("--last-resort shares out single microbatches, --policy stack moves whole shards")
        case "rejoin" if repair is None:
            raise ValueError("--policy rejoin needs --repair, the time until a lost group is back, as in 10m")
        case "reform" if given.reform is None:
            raise ValueError("--policy reform needs --reform, the time to re-form a group, as in 60s")
        case "stack" | "microbatch" | "rejoin" | "reform":
            return given.policy
        case _:
            raise ValueError(f"--policy {given.policy} is unknown; known: stack, microbatch, rejoin, reform")


def policies_of(given: PlanOptions) -> "tuple[Policy, ...]":
    found: list[Policy] = [] if given.last_resort else ["stack"]
    found.append("microbatch")
    if given.repair is not None:
        found.append("rejoin")
    if given.reform is not None:
        found.append("reform")
    return tuple(found)


def limits_of(given: PlanOptions) -> "HoldingLimits | None":
    """Limits on stacks; None if no shard size is given. Raises ValueError for a limit without one."""
    from spare_megatron.tools.plan.facts import HoldingLimits

    if given.shard_size is None:
        _refuse(given, ("memory", "read_rate"), "limits nothing without --shard-size, as in 64MiB")
        return None
    return HoldingLimits(
        shard_bytes=parse_bytes("--shard-size", given.shard_size),
        memory_bytes=None if given.memory is None else parse_bytes("--memory", given.memory),
        read_bytes_per_s=None if given.read_rate is None else parse_bytes("--read-rate", given.read_rate),
    )


def check_redundancy_asked(given: PlanOptions, facts: "ClusterFacts", limits: "HoldingLimits | None") -> None:
    """Raises ValueError if the requested redundancy, or 1 if none is, exceeds the number of groups or the limits."""
    wanted, num_groups = given.redundancy, given.num_groups
    if wanted is not None and not 1 <= wanted <= num_groups:
        raise ValueError(
            f"--redundancy {wanted} has to be from 1 to {num_groups} (--groups): hosts are different groups"
        )
    largest = num_groups if limits is None else limits.largest_redundancy(num_groups, facts.times)
    if largest < (wanted or 1):
        raise ValueError(
            f"--redundancy {wanted or 1}: shards of {given.shard_size} allow at most {largest} with "
            f"--memory {given.memory or 'unlimited'} and --read-rate {given.read_rate or 'unlimited'}"
        )
