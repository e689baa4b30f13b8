"""The tables of `spare simulate`."""

from collections.abc import Iterator, Sequence

from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.formats.quantities import format_count, format_duration
from spare_megatron.tools.simulate.failures import UNNAMED
from spare_megatron.tools.simulate.scenario_presets import published
from spare_megatron.tools.simulate.sweep import Estimate, SweepFigures, variant_name

_SMALLEST_TERM = 5e-4
"""Smaller terms of the ratio round to zero and are left out."""


def print_figures(listed: Sequence[SweepFigures], console: RunConsole) -> None:
    """Prints one scenario in full, or one line for each of several and the best in full."""
    best = min(listed, key=lambda figures: figures.time_to_train_ratio.mean)
    tables = [_comparison(listed, best)] if len(listed) > 1 else []
    name = f"{best.name}, {variant_name(best.policy, best.granularity)}"
    tables.append(Table(title=f"best: {name}" if tables else name, rows=list(_rows(best))))
    tables.append(Table(title="terms of the ratio", rows=list(_term_rows(best))))
    if best.losses_by_cause.keys() - {UNNAMED}:
        tables.append(Table(title="losses by cause", rows=list(_cause_rows(best))))
    console.tables(*tables)


def _rows(figures: SweepFigures) -> Iterator[tuple[str, str]]:
    yield "groups, hosts per shard", f"{figures.num_groups}, {figures.redundancy}"
    yield "seeds", str(figures.seeds)
    yield "time to train", f"{_with_interval(figures.time_to_train_ratio, 3)} x failure-free"
    yield "availability", f"{percent_with_bounds(figures.availability, 2)} %"
    yield "goodput of all machines", f"{percent_with_bounds(figures.goodput, 2)} %"
    yield "restarts", format_count(figures.restarts)
    if figures.state_wipe_outs:
        yield "of them for lost optimizer state", format_count(figures.state_wipe_outs)
    if figures.pauses:
        yield "pauses for the host of a shard", format_count(figures.pauses)
    yield "losses", format_count(figures.losses)
    for point in published(figures.name):
        if point.policy == figures.policy:
            ratios = f"{point.time_to_train_ratio} x, {point.availability:.2%} at r = {point.redundancy}"
            yield f"the paper's {point.policy}", f"{ratios}, at its settings"
    yield "simulated in", f"{format_duration(figures.wall_s)}, {format_duration(figures.decision_s)} of it deciding"


def _term_rows(figures: SweepFigures) -> Iterator[tuple[str, str]]:
    yield "without losses and saves", " 1.000"
    for name, share in sorted(figures.terms.items(), key=lambda item: -item[1]):
        if abs(share) >= _SMALLEST_TERM:
            yield name.replace("_", " "), f"{share:+.3f}"


def _cause_rows(figures: SweepFigures) -> Iterator[tuple[str, str]]:
    for name, count in sorted(figures.losses_by_cause.items(), key=lambda item: -item[1]):
        yield name.replace("_", " "), f"{count:.1f} ({count / figures.losses:.1%})"


def _comparison(listed: Sequence[SweepFigures], best: SweepFigures) -> Table:
    rows = [
        (
            variant_name(figures.policy, figures.granularity),
            str(figures.redundancy),
            _with_interval(figures.time_to_train_ratio, 2),
            percent_with_bounds(figures.availability, 1),
            format_count(figures.restarts),
            format_count(figures.losses),
        )
        for figures in listed
    ]
    columns = ("policy", "hosts", "time to train", "availability %", "restarts", "losses")
    return Table(title="simulated", columns=columns, rows=rows, has_numbers=True, bold_row=listed.index(best))


def _with_interval(found: Estimate, digits: int) -> str:
    text = f"{found.mean:.{digits}f}"
    return text if found.ci95 is None else f"{text} +- {found.ci95:.{digits}f}"


def percent_with_bounds(found: Estimate, digits: int) -> str:
    """A share in percent with the bounds of its interval, which is asymmetric for few, widely differing seeds."""
    text = f"{100 * found.mean:.{digits}f}"
    if found.ci95 is None:
        return text
    low, high = found.share_interval()
    return f"{text} ({100 * low:.{digits}f} to {100 * high:.{digits}f})"
