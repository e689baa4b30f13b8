"""The curves of `spare plan --plot`, all computed from closed forms, none measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from spare_megatron.core.saves.survival import coverage_probabilities
from spare_megatron.formats.output import whole_file
from spare_megatron.formats.quantities import format_count, format_duration
from spare_megatron.tools.plan.facts import ClusterFacts
from spare_megatron.tools.plan.plan import Plan, availability, candidates

if TYPE_CHECKING:
    from matplotlib.axes import Axes


POLICY_STYLES = {
    "stack": ("#0072B2", "o"),
    "microbatch": ("#D55E00", "s"),
    "rejoin": ("#009E73", "^"),
    "reform": ("#CC79A7", "D"),
}
"""Okabe and Ito's palette; each policy also has a marker, so that colour is not needed."""

INK = "#444444"

SETTINGS: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "text.parse_math": False,  # names are not formulas
}

_AXIS_UNITS = ((31557600.0, "years"), (86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (0.0, "seconds"))
_MOST_REDUNDANCY = 24
_FEW_COUNTS = 40
_HIGHEST_RATIO = 2.5
"""Ratios above this many times the plan's or the worst alternative's are cut off: r = 1 may be far above."""


def write_plot(path: Path, facts: ClusterFacts, plan: Plan, alternatives: tuple[Plan, ...]) -> None:
    """Plots time to train over redundancy, endured losses, and lost time over cadence, as one PNG. Raises OSError."""
    with mpl.rc_context(SETTINGS):
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
    title = "Losses endured" if plan.policy not in ("rejoin", "reform") else "Losses endured if no group came back"
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
