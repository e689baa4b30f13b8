"""Output of `spare plan`: tables, the figures of `--json`, and the plot."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table

from spare_megatron.cli.detached_view import RunConsole
from spare_megatron.journal.output import whole_file
from spare_megatron.journal.quantities import format_bytes, format_count, format_duration
from spare_megatron.planner.endurance import coverage_probabilities
from spare_megatron.planner.facts import ClusterFacts
from spare_megatron.planner.plan import Plan, availability, candidates, closed_form_redundancy

if TYPE_CHECKING:
    from spare_megatron.planner.facts import ClusterFacts, HoldingLimits
    from spare_megatron.planner.partition_redundancy import PartitionPlan
    from spare_megatron.planner.plan import Plan
if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of `spare plan`.

    Attributes:
        plan: The plan of the requested policy.
        frugal: The same policy with the least redundancy at which training hardly takes longer.
        slices: How many groups should host each state partition.
        alternatives: The best plan of each policy that the options allow.
        limits: Limits on stacks; None if not given.
        assumed: Names of the facts that were not given.
    """

    facts: "ClusterFacts"
    plan: "Plan"
    frugal: "Plan"
    slices: "PartitionPlan"
    alternatives: tuple["Plan", ...]
    limits: "HoldingLimits | None"
    assumed: frozenset[str]


def as_figures(answer: Answer) -> dict[str, Any]:
    """The figures of `--json`; the first five keys are a contract."""
    from spare_megatron.planner.plan import closed_form_redundancy

    plan, limits = answer.plan, answer.limits
    figures: dict[str, Any] = {
        "redundancy": plan.redundancy,
        "cadence_s": plan.cadence_s,
        "endured_losses": plan.endured_losses,
        "time_to_train_ratio": plan.time_to_train_ratio,
        "availability": plan.availability,
        "policy": plan.policy,
        "stretch": plan.stretch,
        "time_to_wipe_out_s": plan.time_to_wipe_out_s,
        "frugal": asdict(answer.frugal),
        "closed_form_redundancy": closed_form_redundancy(answer.facts.num_groups),
        "stack_bytes": None if limits is None else plan.redundancy * limits.shard_bytes,
        "read_s_per_step": read_s(answer),
        "alternatives": {other.policy: asdict(other) for other in answer.alternatives},
        "slices": asdict(answer.slices),
        "facts": _as_facts(answer.facts),
        "assumed": sorted(answer.assumed),
    }
    return figures


def _as_facts(facts: "ClusterFacts") -> dict[str, Any]:
    """The cluster, with infinity as null, for JSON."""
    domain_interval_s = facts.domain_interval_s if facts.has_domains else None
    return asdict(facts) | {"domain_interval_s": domain_interval_s}


def read_s(answer: Answer) -> float | None:
    """Seconds to read the stack of one step; None unless size and rate are given."""
    if answer.limits is None or answer.limits.read_bytes_per_s is None:
        return None
    return answer.plan.redundancy * answer.limits.shard_bytes / answer.limits.read_bytes_per_s


_DESCRIPTIONS = {
    "stack": "whole shards",
    "microbatch": "single microbatches",
    "rejoin": "microbatches, groups come back",
}

_LONG_CADENCE_S = 86400.0


def print_answer(answer: Answer) -> None:
    console = RunConsole()
    console.print(_two_columns("plan", _plan_rows(answer)))
    console.print(_two_columns("optimizer state in slices", _slice_rows(answer)))
    console.print(_two_columns("for this cluster", _fact_rows(answer)))
    console.print(_alternatives(answer))
    if answer.plan.redundancy == 1 and not answer.facts.last_resort:
        console.print("Restarting at every loss costs less here than going on without the lost groups.")
    if answer.plan.cadence_s > _LONG_CADENCE_S:
        console.print(
            "Wipe-outs are so rare here that other failures (storage, software, the site) decide how often to save."
        )
    if answer.plan.cadence_s > answer.plan.time_to_wipe_out_s:
        console.print("Wipe-outs come sooner than saves pay off: take a higher redundancy.")


def _plan_rows(answer: Answer) -> Iterator[tuple[str, str]]:
    plan, limits = answer.plan, answer.limits
    yield "policy", f"{plan.policy} ({_DESCRIPTIONS[plan.policy]})"
    yield "redundancy", f"{_hosts(plan.redundancy)} per shard"
    frugal = answer.frugal
    if frugal.redundancy < plan.redundancy:
        yield "hardly slower", f"{_hosts(frugal.redundancy)} per shard: {frugal.time_to_train_ratio:.2f} x"
    yield "save every", format_duration(plan.cadence_s)
    yield "time to train", f"{plan.time_to_train_ratio:.2f} x that without losses and saves"
    yield "mean step between wipe-outs", f"{plan.stretch:.2f} x that without losses"
    yield "availability", f"{plan.availability:.1%}"
    yield "losses endured", f"{format_count(plan.endured_losses)} before a wipe-out"
    yield "wipe-out every", format_duration(plan.time_to_wipe_out_s)
    if limits is None:
        yield "memory for shards", f"{plan.redundancy} x that of one shard per group (--shard-size)"
        return
    of_limit = "" if limits.memory_bytes is None else f" of {format_bytes(limits.memory_bytes)}"
    yield "memory for shards", f"{format_bytes(plan.redundancy * limits.shard_bytes)}{of_limit} per group"
    reading_s = read_s(answer)
    if reading_s is not None:
        yield "reading them", f"{format_duration(reading_s)} of a step of {format_duration(answer.facts.times.step_s)}"


def _slice_rows(answer: Answer) -> Iterator[tuple[str, str]]:
    slices = answer.slices
    copy = format_duration(slices.copy_s) + (" (assumed)" if "slice_copy" in answer.assumed else "")
    yield "redundancy", f"{_hosts(slices.redundancy)} per slice"
    yield "state wipe-out every", f"{format_duration(slices.time_to_wipe_out_s)}, a copy of a slice taking {copy}"
    yield "without copies", format_duration(slices.time_to_wipe_out_without_copies_s)
    yield "time to train", f"{slices.time_to_train_ratio:.2f} x"


def _fact_rows(answer: Answer) -> Iterator[tuple[str, str]]:
    facts = answer.facts
    mark = dict.fromkeys(answer.assumed, " (assumed)")
    yield "groups", str(facts.num_groups)
    yield "a group is lost every", format_duration(facts.times.loss_interval_s)
    yield "restart, save", f"{format_duration(facts.checkpoint.restart_s)}, {format_duration(facts.checkpoint.save_s)}"
    yield "compute of one shard", format_duration(facts.times.shard_s) + mark.get("step", "")
    yield "rest of a step", format_duration(facts.times.reduce_s) + mark.get("reduce", "")
    yield "microbatches per shard", str(facts.num_microbatches) + mark.get("microbatches", "")
    rejoin = facts.rejoin
    if rejoin is not None:
        yield "lost hardware is repaired after", format_duration(rejoin.repair_s)
        yield (
            "state transfer, join",
            (f"{format_duration(rejoin.transfer_s)}, {format_duration(rejoin.join_s)}" + mark.get("join", "")),
        )
        yield "spare groups", str(rejoin.num_spares)
    if facts.has_domains:
        yield "groups in a domain", str(facts.groups_per_domain)
        yield "a domain is lost every", format_duration(facts.domain_interval_s)
    if facts.last_resort:
        yield "last resort", f"any group, reading a shard in {format_duration(facts.fetch_s)}"


def _alternatives(answer: Answer) -> Table:
    table = Table(title="best of each policy", box=box.SIMPLE, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("policy", "hosts", "time to train", "availability", "save every", "endured"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for plan in answer.alternatives:
        table.add_row(
            plan.policy,
            str(plan.redundancy),
            f"{plan.time_to_train_ratio:.2f} x",
            f"{plan.availability:.1%}",
            format_duration(plan.cadence_s),
            format_count(plan.endured_losses),
        )
    closed = closed_form_redundancy(answer.facts.num_groups)
    table.caption = f"SPARe's closed form for stack: redundancy floor(log2 N + 0.833) = {closed}"
    table.caption_justify = "left"
    return table


def _hosts(number: int) -> str:
    return f"{number} {'host' if number == 1 else 'hosts'}"


def _two_columns(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, box=box.SIMPLE, title_justify="left", padding=(0, 1, 0, 0))
    for name, value in rows:
        table.add_row(name, value)
    return table


mpl.use("agg")


POLICY_STYLES = {"stack": ("#0072B2", "o"), "microbatch": ("#D55E00", "s"), "rejoin": ("#009E73", "^")}
"""Okabe and Ito's palette; each policy also has a marker, so that colour is not needed."""

INK = "#444444"

_AXIS_UNITS = ((31557600.0, "years"), (86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (0.0, "seconds"))

_MOST_REDUNDANCY = 24

_FEW_COUNTS = 40

_HIGHEST_RATIO = 2.5
"""Ratios above this many times the plan's or the worst alternative's are cut off: r = 1 may be far above."""


def write_plot(path: Path, facts: ClusterFacts, plan: Plan, alternatives: tuple[Plan, ...]) -> None:
    """Plots time to train over redundancy, endured losses, and lost time over cadence, as one PNG. Raises OSError."""
    settings: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
        _time_to_train(axes[0], facts, plan, alternatives)
        _endured(axes[1], facts, plan)
        _cadence(axes[2], facts, plan)
        figure.suptitle(
            f"{facts.num_groups} groups, one lost every {format_duration(facts.times.loss_interval_s)}, "
            f"restart {format_duration(facts.checkpoint.restart_s)}, save {format_duration(facts.checkpoint.save_s)}; "
            f"policy {plan.policy} (computed, not measured)"
        )
        with whole_file("--plot", path) as file:
            figure.savefig(file, dpi=130, format="png")
        plt.close(figure)


def _time_to_train(axes: "Axes", facts: ClusterFacts, plan: Plan, alternatives: tuple[Plan, ...]) -> None:
    most = max(_MOST_REDUNDANCY, plan.redundancy)
    ceiling = _HIGHEST_RATIO * max(plan.time_to_train_ratio, *(best.time_to_train_ratio for best in alternatives))
    for best in alternatives:
        colour, marker = POLICY_STYLES[best.policy]
        shown = [p for p in candidates(facts, best.policy) if p.redundancy <= most and p.time_to_train_ratio < ceiling]
        axes.plot(
            [p.redundancy for p in shown],
            [p.time_to_train_ratio for p in shown],
            color=colour,
            marker=marker,
            markersize=4,
            label=f"{best.policy}: best {best.time_to_train_ratio:.2f} at r = {best.redundancy}",
        )
    axes.plot(
        plan.redundancy,
        plan.time_to_train_ratio,
        "o",
        markersize=13,
        fillstyle="none",
        color=INK,
        markeredgewidth=1.5,
        linestyle="none",
        label=f"the plan: {plan.time_to_train_ratio:.2f} at r = {plan.redundancy}",
    )
    axes.set_ylim(bottom=1 - 0.06 * (axes.get_ylim()[1] - 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        title="Time to train", xlabel="redundancy r (hosts per shard)", ylabel="time / time without losses and saves"
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _endured(axes: "Axes", facts: ClusterFacts, plan: Plan) -> None:
    """Distribution of losses endured one by one without rejoins: the wipe-out is loss k + 1."""
    covered = coverage_probabilities(facts.num_groups, plan.redundancy)
    chance = 100 * (covered[:-1] - covered[1:])
    mean = float(covered[1:].sum())
    counts = np.arange(facts.num_groups)
    last = int(np.searchsorted(-covered, -1e-4)) + 1
    colour = POLICY_STYLES[plan.policy][0]
    if last < _FEW_COUNTS:
        axes.bar(counts[:last], chance[:last], color=colour, alpha=0.6)
    else:
        axes.fill_between(counts[:last], chance[:last], step="mid", color=colour, alpha=0.3)
        axes.step(counts[:last], chance[:last], where="mid", color=colour)
    axes.axvline(mean, color=INK, linestyle="--")
    axes.annotate(
        f"mean {format_count(mean)} of {facts.num_groups}",
        (mean, float(chance.max())),
        xytext=(6, 6),
        textcoords="offset points",
        color=INK,
    )
    axes.set_ylim(0, 1.15 * float(chance.max()))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = "Losses endured" if plan.policy != "rejoin" else "Losses endured if no group came back"
    if facts.has_domains or facts.last_resort:
        title = "Losses endured one by one, by hosts alone"
    axes.set(title=title, xlabel="losses before a wipe-out (groups)", ylabel="probability of exactly so many (%)")
    axes.grid(alpha=0.25)


def _cadence(axes: "Axes", facts: ClusterFacts, plan: Plan) -> None:
    """Lost time over cadence on log axes: it ranges from a billionth to nearly all."""
    save_s, restart_s = facts.checkpoint.save_s, facts.checkpoint.restart_s
    cadences_s = np.geomspace(max(plan.cadence_s / 20, 1.2 * save_s), plan.cadence_s * 20, 300)
    lost = [100 * (1 - availability(float(c), save_s, plan.time_to_wipe_out_s, restart_s)) for c in cadences_s]
    unit_s, unit = next((size, name) for size, name in _AXIS_UNITS if plan.cadence_s >= size)
    unit_s = unit_s or 1.0
    best = (plan.cadence_s / unit_s, 100 * (1 - plan.availability))
    axes.loglog(cadences_s / unit_s, lost, color=POLICY_STYLES[plan.policy][0])
    axes.plot(*best, "o", color=INK)
    axes.annotate(
        f"best: every {format_duration(plan.cadence_s)},\n{best[1]:.2g}% lost",
        best,
        xytext=(0, 90),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=INK,
    )
    axes.set(
        title="Time lost to saves and wipe-outs",
        xlabel=f"time from save to save ({unit})",
        ylabel="100% - availability (%)",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.grid(alpha=0.25, which="both")
