"""`spare plan`: which redundancy and cadence to train with on a cluster."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.command import explained_errors
from spare_megatron.cli.folders import check_plot_file, do_each
from spare_megatron.cli.printing import say, say_json
from spare_megatron.formats.quantities import format_duration
from spare_megatron.tools.plan import plan_options as options

if TYPE_CHECKING:
    from spare_megatron.tools.plan.plan_result import PlanResult

# Of `spare simulate`, too.
Repair = Annotated[
    str | None,
    typer.Option(help="Time from the loss of a group until its hardware is repaired, as in 10m. Makes groups rejoin."),
]
Join = Annotated[str | None, typer.Option(help="Time that all groups wait for an admission, as in 30s.")]
Reform = Annotated[
    str | None,
    typer.Option(
        help="Re-form groups from idle machines and those of broken groups: time from the loss of a machine until the "
        "group runs, as in 60s. A loss then takes one machine."
    ),
]
Machines = Annotated[int | None, typer.Option(help="Machines of a group, for --reform.")]
_Groups = Annotated[int, typer.Option(help="Number of data-parallel groups, and of shards.")]
_Restart = Annotated[str, typer.Option(help="Time from a wipe-out until training continues, as in 60m.")]
_Save = Annotated[str, typer.Option(help="Time that training stalls for one save, as in 60s.")]
_Mtbf = Annotated[str | None, typer.Option(help="Mean time between losses of any group, as in 300s, 5m or 2h.")]
_Rate = Annotated[
    float | None, typer.Option(help="Failure rate instead of --mtbf; needs --gpus-per-node and --gpus-per-group.")
]
_Gpus = Annotated[int | None, typer.Option(help="For --failures-per-node-day.")]
_Step = Annotated[
    str | None, typer.Option(help="Time to compute one shard on one group.", show_default=options.ASSUMED_STEP)
]
_Reduce = Annotated[
    str | None, typer.Option(help="Time of the rest of a step, mostly the reduction.", show_default="10ms per group")
]
_Microbatches = Annotated[
    int | None, typer.Option(help="Microbatches per shard.", show_default=str(options.ASSUMED_MICROBATCHES))
]
_Transfer = Annotated[
    str | None, typer.Option(help="Time that a repaired group needs to copy the state.", show_default="0s")
]
_Spares = Annotated[
    int | None,
    typer.Option(help="Spare groups, or machines with --reform, that replace lost ones at once.", show_default="0"),
]
_Steps = Annotated[
    int | None,
    typer.Option(
        help="Steps of the training, in which machines are lost for good.", show_default=str(options.ASSUMED_STEPS)
    ),
]
_PerDomain = Annotated[int | None, typer.Option(help="Groups in one rack or power domain, with consecutive ids.")]
_DomainMtbf = Annotated[
    str | None, typer.Option(help="Mean time between losses of any whole domain, as in 7d, in addition to --mtbf.")
]
_LastResort = Annotated[
    bool,
    typer.Option(
        "--last-resort", help="Let any group read any shard, so that only the loss of all groups is a wipe-out."
    ),
]
_Fetch = Annotated[
    str | None, typer.Option(help="Time until a group has data of shards outside its stack.", show_default="0s")
]
_PolicyName = Annotated[
    str | None,
    typer.Option(
        help="stack moves whole shards, as in the SPARe paper; microbatch is the default of `spare train`; rejoin is "
        "microbatch with lost groups that come back, reform with groups made of the machines of broken ones.",
        show_default="see above",
    ),
]
_Redundancy = Annotated[int | None, typer.Option(help="Hosts per shard. [default: the best]")]
_PartitionCopy = Annotated[
    str | None,
    typer.Option(
        "--slice-copy",
        help="Time to copy one partition of the optimizer state whose host is lost.",
        show_default=options.ASSUMED_PARTITION_COPY,
    ),
]
_ShardSize = Annotated[str | None, typer.Option(help="Size of one shard in memory, as in 64MiB.")]
_Memory = Annotated[str | None, typer.Option(help="Memory limit of a group for its shards, as in 2GB.")]
_ReadRate = Annotated[str | None, typer.Option(help="Rate at which a group reads shards, as in 1GB/s.")]

_Lanes = Annotated[
    str | None,
    typer.Option(
        "--widths", help="Compare groups of so many lanes, as in 1,2,4; all other options are for groups of one lane."
    ),
]
_OverGroups = Annotated[
    str | None,
    typer.Option(
        help="Of --reduce, the time in which gradients travel between groups, which falls with --widths. "
        "[default: all of an assumed --reduce, else 0s]",
    ),
]

_SlowEvery = Annotated[
    str | None, typer.Option(help="Mean time until a given group turns slow, as in 30d: what that costs is shown.")
]
_SlowFor = Annotated[
    str | None,
    typer.Option(help="Mean time for which a group is slow; for --slow-every.", show_default=options.ASSUMED_SLOW),
]
_SlowFactor = Annotated[
    float | None,
    typer.Option(
        help="Time per microbatch of a slow group over that of the others.",
        show_default=f"{options.ASSUMED_SLOW_FACTOR:g}",
    ),
]

_HOPELESS = 1e6
"""Time to train over that without losses from which on a plan is refused."""


def plan(
    groups: _Groups,
    restart: _Restart,
    save: _Save,
    mtbf: _Mtbf = None,
    failures_per_node_day: _Rate = None,
    gpus_per_node: _Gpus = None,
    gpus_per_group: _Gpus = None,
    step: _Step = None,
    reduce: _Reduce = None,
    microbatches: _Microbatches = None,
    repair: Repair = None,
    transfer: _Transfer = None,
    join: Join = None,
    spares: _Spares = None,
    reform: Reform = None,
    machines_per_group: Machines = None,
    steps: _Steps = None,
    groups_per_domain: _PerDomain = None,
    domain_mtbf: _DomainMtbf = None,
    last_resort: _LastResort = False,
    fetch: _Fetch = None,
    policy: _PolicyName = None,
    redundancy: _Redundancy = None,
    partition_copy: _PartitionCopy = None,
    shard_size: _ShardSize = None,
    memory: _Memory = None,
    read_rate: _ReadRate = None,
    widths: _Lanes = None,
    over_groups: _OverGroups = None,
    slow_every: _SlowEvery = None,
    slow_for: _SlowFor = None,
    slow_factor: _SlowFactor = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw time to train, endured losses and lost time into this PNG file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan redundancy and checkpoint cadence for a cluster.

    Estimates the fastest redundancy and cadence, and what to expect of them; nothing is measured. Without --policy,
    --reform implies reform, --repair rejoin, --microbatches or --last-resort microbatch, and otherwise it is stack, as
    in the SPARe paper. The table compares all policies that apply.

    Example: `spare plan --groups 600 --mtbf 300s --restart 60m --save 60s --microbatches 16`

    Exit code 2: invalid input.
    """
    given = options.PlanOptions(
        groups=groups,
        restart=restart,
        save=save,
        mtbf=mtbf,
        failures_per_node_day=failures_per_node_day,
        gpus_per_node=gpus_per_node,
        gpus_per_group=gpus_per_group,
        step=step,
        reduce=reduce,
        microbatches=microbatches,
        repair=repair,
        transfer=transfer,
        join=join,
        spares=spares,
        reform=reform,
        machines_per_group=machines_per_group,
        steps=steps,
        groups_per_domain=groups_per_domain,
        domain_mtbf=domain_mtbf,
        last_resort=last_resort,
        fetch=fetch,
        policy=policy,
        redundancy=redundancy,
        partition_copy=partition_copy,
        shard_size=shard_size,
        memory=memory,
        read_rate=read_rate,
        widths=widths,
        over_groups=over_groups,
        slow_every=slow_every,
        slow_for=slow_for,
        slow_factor=slow_factor,
    )
    _print_plan(given, plot, as_json=as_json)


def _print_plan(given: options.PlanOptions, plot: Path | None, *, as_json: bool) -> None:
    with explained_errors("plan"):
        if plot is not None:
            check_plot_file(plot)
        result = result_of(given)
        outputs: list[Callable[[], None]] = [partial(_show, result, as_json=as_json)]
        if plot is not None:
            outputs.append(partial(_draw, result, plot, as_json=as_json))
        do_each(outputs)


def _show(result: "PlanResult", *, as_json: bool) -> None:
    from spare_megatron.tools.plan.plan_result import as_figures, print_result

    if as_json:
        say_json(as_figures(result))
    else:
        print_result(result)


def _draw(result: "PlanResult", plot: Path, *, as_json: bool) -> None:
    from spare_megatron.tools.plan.plan_plot import write_plot

    write_plot(plot, result.facts, result.plan, result.alternatives)
    if not as_json:
        say(f"curves in {plot}")


def result_of(given: options.PlanOptions) -> "PlanResult":
    """The plan for what was asked, and the best of every policy. ValueError: out of range, or contradictory."""
    from spare_megatron.tools.plan.partition_redundancy import plan_partitions
    from spare_megatron.tools.plan.plan import FRUGAL_TOLERANCE, optimize, predict
    from spare_megatron.tools.plan.plan_result import PlanResult
    from spare_megatron.tools.plan.slow_group_costs import slow_cost
    from spare_megatron.tools.plan.width import plans_by_width

    facts = options.facts_of(given)
    limits = options.limits_of(given)
    chosen = options.policy_of(given)
    options.check_redundancy_asked(given, facts, limits)
    fixed = given.redundancy
    best = optimize(facts, chosen, limits) if fixed is None else predict(facts, chosen, fixed)
    if not best.time_to_train_ratio < _HOPELESS or best.time_to_wipe_out_s < facts.times.step_s:
        raise ValueError(
            f"no training at redundancy {best.redundancy}: with a loss every "
            f"{format_duration(facts.times.loss_interval_s)} a step of {format_duration(facts.times.step_s)} and a "
            f"save of {format_duration(facts.checkpoint.save_s)} rarely complete; check --mtbf (or the failure "
            f"rate), --step and --save"
        )
    names = {
        "step": given.step,
        "reduce": given.reduce,
        "microbatches": given.microbatches,
        "slice_copy": given.partition_copy,
    }
    if given.repair is not None or given.reform is not None:
        names["join"] = given.join
    if given.reform is not None:
        names["steps"] = given.steps
    lanes, over_groups_s = options.widths_of(given, facts.times.reduce_s)
    rate, units = options.slow_rate_of(given), 1 if chosen == "stack" else facts.num_microbatches
    return PlanResult(
        facts=facts,
        plan=best,
        frugal=optimize(facts, chosen, limits, FRUGAL_TOLERANCE),
        partitions=plan_partitions(facts, best, options.partition_copy_s_of(given)),
        alternatives=tuple(optimize(facts, policy, limits) for policy in options.policies_of(given)),
        limits=limits,
        assumed=frozenset(name for name, value in names.items() if value is None),
        widths=plans_by_width(facts, chosen, lanes, over_groups_s=over_groups_s, redundancy=fixed, limits=limits),
        slow=None if rate is None else slow_cost(facts.num_groups, units, facts.times, rate),
    )
