"""The result of `spare plan`: what it holds, its figures for programs, and its tables."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.config.schema import RunConfig
from spare_megatron.formats.quantities import format_bytes, format_count, format_duration, format_steps
from spare_megatron.tools.plan.audit_costs import audit_curve, audit_price, num_judges
from spare_megatron.tools.plan.facts import ClusterFacts, HoldingLimits
from spare_megatron.tools.plan.partition_redundancy import PartitionPlan
from spare_megatron.tools.plan.plan import Plan, closed_form_redundancy
from spare_megatron.tools.plan.readmission import hardware_wait_s
from spare_megatron.tools.plan.sites_cost import SitesCost
from spare_megatron.tools.plan.slow_group_costs import SlowCost
from spare_megatron.tools.plan.width import WidthPlan

_DESCRIPTIONS = {
    "stack": "whole shards",
    "microbatch": "single microbatches",
    "rejoin": "microbatches, groups come back",
    "reform": "microbatches, groups re-formed",
}

_LONG_CADENCE_S = 86400.0
_LONG_STRETCH = 1.2
_NOTABLE_UPDATE = 0.01
_BITS = (32, 8, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    facts: ClusterFacts
    plan: Plan
    """The plan of the requested policy."""
    frugal: Plan
    """The same policy with the least redundancy at which training hardly takes longer."""
    partitions: PartitionPlan
    """How many groups should host each state partition."""
    alternatives: tuple[Plan, ...]
    """The best plan of each policy that the options allow."""
    limits: HoldingLimits | None
    assumed: frozenset[str]
    """Names of the facts that were not given."""
    preset: str = ""
    """The run preset that was asked about."""
    config: RunConfig | None = None
    """Its configuration."""
    num_nodes: int | None = None
    """Nodes that the groups of the preset fill."""
    gpus_per_node: int | None = None
    """Of these nodes; None: as the preset has it."""
    widths: tuple[WidthPlan, ...] = ()
    """The plan of the policy for groups of each number of lanes asked for."""
    update_share: float | None = None
    """Of a step, what Adam takes that updates all parameters in every group; None if not known, or not so."""
    whole: tuple[Plan, ...] = ()
    """Beside smaller groups: with whole ones alone, and with one spare machine more."""
    slow: SlowCost | None = None
    """What slow groups cost, if how often they are slow was given; beside the plan, which knows none."""
    sites: SitesCost | None = None
    """What outer steps cost, if the number of sites was given; the plan is that of each site."""


def as_figures(result: PlanResult) -> dict[str, Any]:
    """The figures of `--json`; the first five keys are a contract."""
    plan, limits = result.plan, result.limits
    figures: dict[str, Any] = {
        "redundancy": plan.redundancy,
        "cadence_s": plan.cadence_s,
        "endured_losses": plan.endured_losses,
        "time_to_train_ratio": plan.time_to_train_ratio,
        "availability": plan.availability,
        "policy": plan.policy,
        "stretch": plan.stretch,
        "time_to_wipe_out_s": plan.time_to_wipe_out_s,
        "frugal": asdict(result.frugal),
        "closed_form_redundancy": closed_form_redundancy(result.facts.num_groups),
        "stack_bytes": None if limits is None else plan.redundancy * limits.shard_bytes,
        "read_s_per_step": read_s(result),
        "alternatives": {other.policy: asdict(other) for other in result.alternatives},
        "slices": asdict(result.partitions),
        "update_share": result.update_share,
        "audits": None
        if num_judges(result.facts, plan.redundancy) == 1
        else asdict(audit_price(*_audited(result)))
        | {"curve": [asdict(one) for one in audit_curve(*_audited(result))]},
        "facts": _as_facts(result.facts),
        "assumed": sorted(result.assumed),
        "settings": settings_of(result),
    }
    if result.slow is not None:
        figures["slow"] = asdict(result.slow)
    if (sites := result.sites) is not None:
        by_bits = {bits: {"bytes": sites.sent_bytes(bits), "seconds": sites.exchange_s(bits)} for bits in _BITS}
        figures["sites"] = asdict(sites) | {"exchange": by_bits, "lost_s": sites.lost_s}
    if result.whole:
        figures["without_smaller_groups"] = [asdict(one) for one in result.whole]
    if result.widths:
        figures["widths"] = [asdict(one) for one in result.widths]
    return figures


def _as_facts(facts: ClusterFacts) -> dict[str, Any]:
    domain_interval_s = facts.domain_interval_s if facts.has_domains else None
    return asdict(facts) | {"domain_interval_s": domain_interval_s}


def settings_of(result: PlanResult) -> dict[str, Any]:
    """The settings of `spare train` that follow the plan."""
    facts, config = result.facts, result.config or RunConfig()
    settings: dict[str, Any] = {
        "layout.num_groups": facts.num_groups,
        "spare.redundancy": result.plan.redundancy,
        "spare.microbatches_per_shard": _microbatches_per_shard(facts, config),
        "checkpoint.cadence": "optimal",
        "checkpoint.group_life_s": round(facts.num_groups * facts.lost_group_interval_s) or 1,
    }
    rejoin, reform = facts.rejoin, facts.reform
    if result.plan.policy == "reform" and reform is not None:
        settings["checkpoint.group_absence_s"] = reform.absence_s
    elif result.plan.policy == "rejoin" and rejoin is not None:
        wait_s = hardware_wait_s(rejoin.num_spares, 1 / facts.times.loss_interval_s, rejoin.repair_s)
        settings["checkpoint.group_absence_s"] = wait_s + rejoin.transfer_s
    return settings | _changes(result, config)


def _microbatches_per_shard(facts: ClusterFacts, config: RunConfig) -> int:
    """The lanes of a group compute one each at a time; the preset's number may leave some without work at the end."""
    own, lanes = config.spare.microbatches_per_shard, config.layout.data_parallel
    return own if -(-own // lanes) == facts.num_microbatches else facts.num_microbatches * lanes


def _changes(result: PlanResult, config: RunConfig) -> dict[str, Any]:
    """What the plan needs, and the preset does not have."""
    facts, spare = result.facts, config.spare
    rows = [
        ("cluster.num_nodes", config.cluster.num_nodes, result.num_nodes or config.cluster.num_nodes),
        ("slurm.gpus_per_node", config.slurm.gpus_per_node, result.gpus_per_node or config.slurm.gpus_per_node),
        ("spare.granularity", spare.granularity, "stack" if result.plan.policy == "stack" else "microbatch"),
        ("data.access", config.data.access, "shared" if facts.last_resort else "stacked"),
    ]
    if facts.has_domains:
        rows.append(("spare.groups_per_domain", spare.groups_per_domain, facts.groups_per_domain))
    if config.optimizer.sharding == "stacked":
        most = min(config.optimizer.redundancy, facts.num_groups)
        rows.append(("optimizer.redundancy", config.optimizer.redundancy, most))
    return {name: planned for name, own, planned in rows if planned != own}


def read_s(result: PlanResult) -> float | None:
    """Seconds to read the stack of one step; None unless size and rate are given."""
    if result.limits is None or result.limits.read_bytes_per_s is None:
        return None
    return result.plan.redundancy * result.limits.shard_bytes / result.limits.read_bytes_per_s


def print_result(result: PlanResult) -> None:
    console = RunConsole()
    console.tables(
        Table(title="plan", rows=list(_plan_rows(result))),
        Table(title="partitioned optimizer state", rows=list(_partition_rows(result))),
        Table(title="for this cluster", rows=list(_fact_rows(result))),
        _alternatives(result),
        *([_widths(result)] if result.widths else []),
    )
    for text in _remarks(result):
        console.line(text)
    settings = " ".join(f"--set {name}={value}" for name, value in settings_of(result).items())
    console.line(f"Settings of this plan: spare train {result.preset or 'PRESET'} {settings}")


def _remarks(result: PlanResult) -> Iterator[str]:
    if result.facts.rejoin is None and result.facts.reform is None and result.plan.stretch > _LONG_STRETCH:
        yield "Lost groups never come back in this plan: give --repair or --reform if they do."
    if result.plan.redundancy == 1 and not result.facts.last_resort:
        yield "Restarting at every loss costs less here than going on without the lost groups."
    if (reform := result.facts.reform) is not None and result.whole:
        spared, num_machines = result.whole[1], result.facts.num_groups * reform.machines_per_group + reform.num_spares
        hours = spared.time_to_train_ratio * (1 + 1 / num_machines)
        better = "" if hours < result.plan.time_to_train_ratio else "not "
        yield f"One more spare machine is {better}the better answer here: {hours:.3f} x in machine hours."
    if result.plan.cadence_s > _LONG_CADENCE_S:
        yield "Restarts are so rare here that other failures (storage, software, the site) decide how often to save."
    if result.plan.cadence_s > result.plan.time_to_wipe_out_s:
        yield "Restarts come sooner than saves pay off: take a higher redundancy."
    share = result.update_share
    if share is not None and share >= _NOTABLE_UPDATE:
        stacked = share * (1 - result.partitions.redundancy / result.facts.num_groups)
        yield (
            f"Adam takes an estimated {share:.1%} of a step in every group: optimizer.sharding=stacked saves "
            f"{max(stacked, 0):.1%}, layout.data_parallel=8 {share * 7 / 8:.1%}; both save memory and traffic, too."
        )


def _plan_rows(result: PlanResult) -> Iterator[tuple[str, str]]:
    plan, limits = result.plan, result.limits
    yield "policy", f"{plan.policy} ({_DESCRIPTIONS[plan.policy]})"
    yield "redundancy", f"{_hosts(plan.redundancy)} per shard"
    frugal = result.frugal
    if frugal.redundancy < plan.redundancy:
        yield "hardly slower", f"{_hosts(frugal.redundancy)} per shard: {frugal.time_to_train_ratio:.2f} x"
    yield "save every", format_duration(plan.cadence_s)
    yield "time to train", f"{plan.time_to_train_ratio:.2f} x that without losses and saves"
    if plan.policy == "reform":
        without = min(other.time_to_train_ratio for other in result.alternatives if other.policy != "reform")
        yield "re-forming is worth", f"{without - plan.time_to_train_ratio:.2f} of it: {without:.2f} x without"
    if result.whole:
        alone, spared = (f"{one.time_to_train_ratio:.3f} x" for one in result.whole)
        yield "with smaller groups", f"{plan.time_to_train_ratio:.3f} x; whole ones alone {alone}, and a spare {spared}"
    if result.slow is not None:
        even, dealt, replaced = result.slow.even_ratio, result.slow.dealt_ratio, result.slow.replaced_ratio
        yield "slow groups", f"{even:.2f} x that without, and {dealt:.2f} x with work dealt by pace"
        if replaced is not None:
            yield "  machines replaced", f"{replaced:.3f} x, one at a time"
    if (sites := result.sites) is not None:
        yield "outer steps", f"every {format_steps(sites.every_steps)} between {sites.num_sites} sites"
        for bits in _BITS:
            size, seconds = format_bytes(round(sites.sent_bytes(bits))), format_duration(sites.exchange_s(bits))
            yield f"  with {bits} bits", f"{size} from each site in {seconds}: {sites.share(bits):.1%} of the time"
        lost = format_duration(sites.lost_s)
        yield "  a site is lost", f"samples of {lost}, and a wait of up to {format_duration(2 * sites.wait_s)} once"
    yield "mean step between restarts", f"{plan.stretch:.2f} x that without losses"
    yield "availability", f"{plan.availability:.1%}"
    yield "losses endured", f"{format_count(plan.endured_losses)} before a restart"
    yield "restart every", format_duration(plan.time_to_wipe_out_s)
    yield from _audit_rows(result)
    if plan.policy in ("rejoin", "reform") and not result.facts.last_resort:
        yield "pause for a host every", format_duration(plan.pause_interval_s)
    if limits is None:
        yield "memory for shards", f"{plan.redundancy} x that of one shard per group (--shard-size)"
        return
    of_limit = "" if limits.memory_bytes is None else f" of {format_bytes(limits.memory_bytes)}"
    yield "memory for shards", f"{format_bytes(plan.redundancy * limits.shard_bytes)}{of_limit} per group"
    reading_s = read_s(result)
    if reading_s is not None:
        yield "reading them", f"{format_duration(reading_s)} of a step of {format_duration(result.facts.times.step_s)}"


def _audited(result: PlanResult) -> tuple[int, int]:
    """Microbatches per shard, and the rounds to which an interleaved schedule pads."""
    return result.facts.num_microbatches, (result.config or RunConfig()).rounds.multiple


def _audit_rows(result: PlanResult) -> Iterator[tuple[str, str]]:
    judges = num_judges(result.facts, result.plan.redundancy)
    if judges == 1:
        yield "audits", "none: they need 2 hosts per shard, or data that all groups read (--last-resort)"
        return
    num_microbatches, multiple = _audited(result)
    audits = audit_price(num_microbatches, multiple)
    found = f"{audits.price / multiple:.1%} of those in one microbatch"
    every = f"{audits.every_steps} steps" if audits.every_steps > 1 else "step"
    yield "audits every", f"{every}: {audits.price:.1%} of a step more, which is not in the time to train"
    yield "they find", f"lasting faults of a group within {every}, {found}"
    if judges == 2:
        yield "a mismatch", "may halt the run: with 3 hosts per shard a third one says who is wrong"


def _partition_rows(result: PlanResult) -> Iterator[tuple[str, str]]:
    partitions = result.partitions
    copy = format_duration(partitions.copy_s) + (" (assumed)" if "slice_copy" in result.assumed else "")
    yield "redundancy", f"{_hosts(partitions.redundancy)} per partition"
    yield (
        "state wipe-out every",
        f"{format_duration(partitions.time_to_wipe_out_s)}, if a copy of a partition takes {copy}",
    )
    yield "without copies", format_duration(partitions.time_to_wipe_out_without_copies_s)
    yield "time to train", f"{partitions.time_to_train_ratio:.2f} x"


def _fact_rows(result: PlanResult) -> Iterator[tuple[str, str]]:
    facts = result.facts
    mark = dict.fromkeys(result.assumed, " (assumed)")
    yield "groups", str(facts.num_groups)
    yield "a group is lost every", format_duration(facts.times.loss_interval_s)
    yield "a given group every", format_duration(facts.num_groups * facts.times.loss_interval_s)
    yield "restart, save", f"{format_duration(facts.checkpoint.restart_s)}, {format_duration(facts.checkpoint.save_s)}"
    yield "compute of one shard", format_duration(facts.times.shard_s) + mark.get("step", "")
    yield "rest of a step", format_duration(facts.times.reduce_s) + mark.get("reduce", "")
    lanes = 1 if result.config is None else result.config.layout.data_parallel
    at_once = "" if lanes == 1 else f" for each of {lanes} lanes"
    yield "microbatches per shard", f"{facts.num_microbatches}{at_once}" + mark.get("microbatches", "")
    reform = facts.reform
    if reform is not None:
        least = "" if reform.least == reform.machines_per_group else f", at least {reform.least}"
        yield "machines per group", f"{reform.machines_per_group}{least}"
        yield "re-forming", f"{format_duration(reform.reform_s)} from the loss of a machine"
        yield "training without losses", format_duration(reform.run_s) + mark.get("steps", "")
        yield "spare machines", str(reform.num_spares)
    rejoin = facts.rejoin
    if rejoin is not None:
        yield "lost hardware is repaired after", format_duration(rejoin.repair_s)
        yield (
            "state transfer, join",
            (f"{format_duration(rejoin.transfer_s)}, {format_duration(rejoin.join_s)}" + mark.get("join", "")),
        )
        if reform is None:
            yield "spare groups", str(rejoin.num_spares)
    if facts.has_domains:
        yield "groups in a domain", str(facts.groups_per_domain)
        yield "a domain is lost every", format_duration(facts.domain_interval_s)
    if facts.notice_s:
        yield "notice of a loss", format_duration(facts.notice_s)
    if facts.last_resort:
        yield "last resort", f"any group, data there after {format_duration(facts.fetch_s)}"


def _alternatives(result: PlanResult) -> Table:
    rows = [
        (
            plan.policy,
            str(plan.redundancy),
            f"{plan.time_to_train_ratio:.2f} x",
            f"{plan.availability:.1%}",
            format_duration(plan.cadence_s),
            format_count(plan.endured_losses),
        )
        for plan in result.alternatives
    ]
    closed = closed_form_redundancy(result.facts.num_groups)
    return Table(
        title="best of each policy",
        columns=("policy", "hosts", "time to train", "availability", "save every", "endured"),
        rows=rows,
        caption=f"SPARe's closed form for stack: redundancy floor(log2 N + 0.833) = {closed}",
        has_numbers=True,
    )


def _widths(result: PlanResult) -> Table:
    rows = [
        (
            str(one.num_lanes),
            str(one.num_groups),
            str(one.plan.redundancy),
            f"{one.plan.time_to_train_ratio:.2f} x",
            f"{one.lost_share:.2%}",
            format_duration(one.plan.cadence_s),
            f"1/{one.num_lanes}",
            f"1/{one.num_lanes}",
        )
        for one in result.widths
    ]
    until = "until it is re-formed" if result.plan.policy == "reform" else "until a group is back"
    return Table(
        title="wide groups",
        columns=("lanes", "groups", "hosts", "time to train", "a loss takes", "save every", "over groups", "state"),
        rows=rows,
        caption=f"time to train: over that of one lane without losses and saves; a loss takes: of all ranks, {until}; "
        f"over groups, state: of each rank's gradients and optimizer state",
        has_numbers=True,
    )


def _hosts(number: int) -> str:
    return f"{number} {'host' if number == 1 else 'hosts'}"
