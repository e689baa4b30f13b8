"""`spare plan`: which redundancy and cadence to train with on a cluster."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spare_megatron.cli.command import do_each, with_options
from spare_megatron.cli.folders import check_plot_file
from spare_megatron.cli.printing import say, say_json
from spare_megatron.formats.quantities import format_duration, parse_duration_s
from spare_megatron.tools.plan import plan_options as options

if TYPE_CHECKING:
    from spare_megatron.tools.plan.facts import ClusterFacts
    from spare_megatron.tools.plan.plan_result import PlanResult
    from spare_megatron.tools.plan.slow_group_costs import SlowCost

_HOPELESS = 1e6
"""Time to train over that without losses from which on a plan is refused."""


@with_options(options.PlanOptions)
def plan(given: options.PlanOptions) -> None:
    """Plan redundancy and checkpoint cadence for a cluster.

    Estimates the fastest redundancy and cadence, and what to expect of them; nothing is measured. Without --policy,
    --reform implies reform, --repair rejoin, --microbatches or --last-resort microbatch, and otherwise it is stack, as
    in the SPARe paper. The table compares all policies that apply.

    Examples: `spare plan --groups 600 --mtbf 300s --restart 60m --save 60s --microbatches 16`,
    `spare plan --preset llama3_70b_h100 --nodes 512 --node-mtbf 2y --restart 20m --save 30s`

    Exit code 2: invalid input.
    """
    if given.plot is not None:
        check_plot_file(given.plot)
    result = result_of(options.completed(given))
    outputs: list[Callable[[], None]] = [partial(_show, result, as_json=given.as_json)]
    if given.plot is not None:
        outputs.append(partial(_draw, result, given.plot, as_json=given.as_json))
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
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.tools.plan.partition_redundancy import plan_partitions, update_share
    from spare_megatron.tools.plan.plan import FRUGAL_TOLERANCE, optimize, predict, without_smaller_groups
    from spare_megatron.tools.plan.plan_result import PlanResult
    from spare_megatron.tools.plan.width import plans_by_width

    facts = options.facts_of(given)
    limits, chosen = options.limits_of(given), options.policy_of(given)
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
    config = None if given.preset is None else load_run_config(given.preset).config
    copy_s = parse_duration_s("--slice-copy", given.partition_copy or options.ASSUMED_PARTITION_COPY)
    return PlanResult(
        facts=facts,
        plan=best,
        frugal=optimize(facts, chosen, limits, FRUGAL_TOLERANCE),
        partitions=plan_partitions(facts, best, copy_s),
        alternatives=tuple(optimize(facts, policy, limits) for policy in options.policies_of(given)),
        limits=limits,
        preset="" if given.preset is None else str(given.preset),
        config=config,
        num_nodes=given.nodes,
        gpus_per_node=None if config is None else given.gpus_per_node,
        assumed=frozenset(name for name, value in names.items() if value is None),
        widths=plans_by_width(facts, chosen, lanes, over_groups_s=over_groups_s, redundancy=fixed, limits=limits),
        update_share=None if config is None or given.step is None else update_share(config, facts.times.step_s),
        whole=without_smaller_groups(facts, best.redundancy) if chosen == "reform" else (),
        sites=options.sites_of(given, facts.times.step_s),
        slow=_slow(given, facts, 1 if chosen == "stack" else facts.num_microbatches),
    )


def _slow(given: options.PlanOptions, facts: "ClusterFacts", num_microbatches: int) -> "SlowCost | None":
    from spare_megatron.tools.plan.slow_group_costs import replaced_ratio, slow_cost

    rate, back = options.slow_rate_of(given), facts.reform or facts.rejoin
    if rate is None:
        return None
    found = slow_cost(facts.num_groups, num_microbatches, facts.times, rate)
    if facts.num_groups == 1:
        return found
    join_s, has_spare = None if given.join is None or back is None else back.join_s, bool(back and back.num_spares)
    ratio = replaced_ratio(facts.num_groups, num_microbatches, facts.times, rate, join_s=join_s, has_spare=has_spare)
    return replace(found, replaced_ratio=ratio)
