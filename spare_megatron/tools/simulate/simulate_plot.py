"""The curves of `spare simulate --plot`. Lines are simulated; the paper's results are points without a line."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from spare_megatron.formats.output import printable, whole_file
from spare_megatron.formats.quantities import format_duration
from spare_megatron.tools.plan.plan_plot import INK, POLICY_STYLES, SETTINGS
from spare_megatron.tools.simulate.engine import Moment
from spare_megatron.tools.simulate.scenario import Scenario
from spare_megatron.tools.simulate.scenario_presets import published
from spare_megatron.tools.simulate.sweep import Estimate, SweepFigures, variant_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes


STYLES = {
    ("spare", "stack"): POLICY_STYLES["stack"],
    ("spare", "microbatch"): POLICY_STYLES["microbatch"],
    ("replication", "stack"): ("#CC79A7", "D"),
    ("checkpoint_only", "stack"): ("#E69F00", ""),
}
"""Okabe and Ito's palette, with markers so that colour is not needed."""

_MOST_SAVES_SHOWN = 200
_HIGHEST_RATIO = 3.0
"""Ratios up to this many times the least of the policies' best are always shown."""


def write_plot(path: Path, base: Scenario, figures: Sequence[SweepFigures], timeline: Sequence[Moment]) -> None:
    """Plots time to train, availability and one run, as one PNG. ValueError: no figures. OSError: not writable."""
    if not figures:
        raise ValueError(f"--plot {path}: all simulations were given up, so there is nothing to draw")
    with mpl.rc_context(SETTINGS):
        figure, axes = plt.subplot_mosaic(
            [["ratio", "availability"], ["groups", "groups"], ["steps", "steps"]],
            figsize=(13, 10),
            height_ratios=(2.2, 1, 1),
            layout="constrained",
        )
        _over_redundancy(axes["ratio"], base, figures, lambda one: one.time_to_train_ratio, is_ratio=True)
        _over_redundancy(axes["availability"], base, figures, lambda one: one.availability, is_ratio=False)
        _timeline(axes["groups"], axes["steps"], base, timeline)
        figure.suptitle(_describe(base, figures[0].seeds))
        with whole_file("--plot", path) as file:
            figure.savefig(file, dpi=130, format="png")
        plt.close(figure)


def _describe(base: Scenario, num_seeds: int) -> str:
    interval_s = base.failures.mean_interval_s(base.num_groups)
    repair = "" if base.repair_s is None else f", repair {format_duration(base.repair_s)}"
    return (
        f"{printable(base.name)}: {base.num_groups} groups, one lost every {format_duration(interval_s)}, "
        f"restart {format_duration(base.costs.restart_s)}, save {format_duration(base.costs.save_s)}{repair}, "
        f"{base.num_steps} steps (simulated, not measured; {num_seeds} {'seed' if num_seeds == 1 else 'seeds'})"
    )


def _over_redundancy(
    axes: "Axes",
    base: Scenario,
    figures: Sequence[SweepFigures],
    value_of: Callable[[SweepFigures], Estimate],
    *,
    is_ratio: bool,
) -> None:
    factor = 1.0 if is_ratio else 100.0
    for (policy, granularity), (colour, marker) in STYLES.items():
        found = [one for one in figures if (one.policy, one.granularity) == (policy, granularity)]
        if not found:
            continue
        best = (min if is_ratio else max)(found, key=lambda one: value_of(one).mean)
        text = f"{value_of(best).mean:.2f}" if is_ratio else f"{value_of(best).mean:.1%}"
        name = variant_name(policy, granularity)
        if policy == "checkpoint_only":
            if not is_ratio or value_of(best).mean <= _ceiling(figures):
                axes.axhline(factor * value_of(best).mean, color=colour, label=f"{name}: {text}")
            else:
                axes.plot([], [], color=colour, label=f"{name}: {text}, above the axis")
            continue
        values = [value_of(one) for one in found]
        halves = [(one.ci95 or 0.0, one.ci95 or 0.0) for one in values]
        if not is_ratio:
            halves = [(one.mean - low, high - one.mean) for one in values for low, high in [one.share_interval()]]
        axes.errorbar(
            [one.redundancy for one in found],
            [factor * one.mean for one in values],
            yerr=[[factor * side for side in sides] for sides in zip(*halves, strict=True)],
            color=colour,
            marker=marker,
            markersize=4,
            capsize=2,
            label=f"{name}: best {text} at r = {best.redundancy}",
        )
    _published_points(axes, base, is_ratio=is_ratio)
    axes.set_ylim(*((0.95, _ceiling(figures)) if is_ratio else (0, 101)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ratio, share = "time / time without losses and saves", "time outside saves, restarts and what they undo (%)"
    axes.set(
        title="Time to train (simulated)" if is_ratio else "Availability (simulated)",
        xlabel="redundancy r (hosts per shard; groups in a replication set)",
        ylabel=ratio if is_ratio else share,
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def _ceiling(figures: Sequence[SweepFigures]) -> float:
    """Upper axis limit: above each policy's best but checkpoint_only's, which may be far off, and the paper's."""
    best: dict[tuple[str, str], float] = {}
    for one in figures:
        kind, ratio = (one.policy, one.granularity), one.time_to_train_ratio.mean
        if one.policy != "checkpoint_only":
            best[kind] = min(best.get(kind, ratio), ratio)
    ratios = list(best.values()) or [one.time_to_train_ratio.mean for one in figures]
    paper = [point.time_to_train_ratio for point in published(figures[0].name)]
    return max(_HIGHEST_RATIO * min(ratios), 1.3 * max(ratios), *(1.1 * ratio for ratio in paper), 1.5)


def _published_points(axes: "Axes", base: Scenario, *, is_ratio: bool) -> None:
    for point in published(base.name):
        colour, _ = STYLES[point.policy, "stack"]
        value = point.time_to_train_ratio if is_ratio else 100 * point.availability
        axes.plot(
            point.redundancy,
            value,
            marker="*",
            markersize=15,
            linestyle="none",
            color=colour,
            markeredgecolor=INK,
            label=f"the paper's {point.policy} at its settings: {value:.2f}" + ("" if is_ratio else "%"),
        )


def _timeline(groups: "Axes", steps: "Axes", base: Scenario, moments: Sequence[Moment]) -> None:
    """Groups taking part and steps done over the time of one run, with restarts shaded."""
    unit_s, unit = (3600.0, "hours") if moments[-1].at_s < 5 * 86400 else (86400.0, "days")
    policy = "checkpoint_only" if base.policy == "checkpoint_only" else "spare"
    colour, _ = STYLES[policy, "stack" if policy == "checkpoint_only" else base.granularity]
    at = [0.0, *(moment.at_s / unit_s for moment in moments)]
    groups.step(at, [base.num_groups, *(m.num_alive for m in moments)], where="post", color=colour, linewidth=1.2)
    steps.step(at, [0, *(m.num_steps for m in moments)], where="post", color=colour, linewidth=1.2)
    ideal_s = base.costs.compute_s + base.costs.reduce_s
    last = min(moments[-1].at_s / ideal_s, base.num_steps)
    steps.plot([0, last * ideal_s / unit_s], [0, last], color=INK, linestyle=":", label="without losses and saves")
    restarts = [moment.at_s for moment in moments if moment.what == "restart"]
    for index, at_s in enumerate(restarts):
        for axes in (groups, steps):
            label = f"restart ({len(restarts)})" if index == 0 else None
            axes.axvspan((at_s - base.costs.restart_s) / unit_s, at_s / unit_s, color="#999999", alpha=0.5, label=label)
    saves = [moment for moment in moments if moment.what == "save"]
    if len(saves) <= _MOST_SAVES_SHOWN:
        label = f"save ({len(saves)})"
        steps.plot([m.at_s / unit_s for m in saves], [m.num_steps for m in saves], "|", color=INK, label=label)
    name = variant_name(policy, base.granularity)
    groups.set(
        title=f"One run: {name}, r = {base.redundancy}, seed 0 (simulated)",
        ylabel="groups taking part",
        xlim=(0, at[-1]),
    )
    groups.set_ylim(0, 1.05 * base.num_groups)
    steps.set(xlabel=f"time ({unit})", ylabel="steps done", xlim=(0, at[-1]), ylim=(0, None))
    for axes in (groups, steps):
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9, loc="lower right")
