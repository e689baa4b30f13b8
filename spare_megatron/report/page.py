"""One self-contained HTML page of a run, or of two beside each other: it works from a file, without a network."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from spare_megatron.report.figures import (
    group_map,
    load_around,
    loss_curve,
    presence_map,
    step_times,
    waterfall,
)
from spare_megatron.report.history import History

MOST_LOADS = 12
"""Losses whose loads are drawn; the map of loads has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot with its heading and a sentence on how to read it."""

    title: str
    note: str
    html: str


def report(history: History, config: str) -> str:
    """The page of one run.

    Args:
        history: The run.
        config: Its resolved configuration as text, or what stands in its place.
    """
    return _render({history.run.name: history}, _plots_of(history), config)


def comparison(histories: Mapping[str, History]) -> str:
    """The page of two runs, by names that tell them apart."""
    plots = [_plot("Loss", "Crosses mark steps in which groups were lost.", loss_curve(histories))]
    for name, history in histories.items():
        if history.goodput is not None:
            plots.append(_plot(f"Where the time went: {name}", "", waterfall(history.goodput)))
        plots.append(_plot(f"Groups over time: {name}", "", presence_map(history)))
    return _render(histories, plots, "")


def _render(histories: Mapping[str, History], plots: list[Plot], config: str) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text())
    return template.render(
        name=" and ".join(histories),
        histories=histories,
        plots=plots,
        config=config,
        figures={name: dict(_figures_of(history)) for name, history in histories.items()},
        plotly=get_plotlyjs(),
    )


def _figures_of(history: History) -> Iterator[tuple[str, str]]:
    """What the table at the top says."""
    summary, goodput = history.summary, history.goodput
    yield "spare check", "; ".join((summary.verdict, *summary.reasons))
    yield "outcome", f"{summary.outcome} {summary.outcome_reason}".strip()
    yield "steps committed", f"{summary.steps_committed} of {history.run.num_steps}"
    yield "steps done again after a restart", str(summary.steps_lost)
    yield "groups", f"{history.run.num_groups} of {history.run.ranks_per_group} ranks, r = {history.run.redundancy}"
    yield "losses, and groups taken in again", f"{len(history.losses)}, {summary.groups_rejoined}"
    yield "microbatches computed again", str(summary.microbatches_recomputed)
    yield "last loss", "none" if summary.final_loss is None else f"{summary.final_loss:.4f}"
    if goodput is not None:
        yield "wall time", f"{goodput.wall_s:.1f} s"
        yield "goodput", f"{goodput.goodput:.1%} of the wall time was useful"
        yield "quiet step, longest pause", f"{goodput.step_s * 1e3:.0f} ms, {goodput.longest_pause_s * 1e3:.0f} ms"


def _plots_of(history: History) -> list[Plot]:
    plots = []
    if history.steps:
        plots += [
            _plot("Loss", "Crosses mark steps in which groups were lost.", loss_curve({history.run.name: history})),
            _plot("Step time", "From commit to commit.", step_times(history)),
        ]
    if history.goodput is not None:
        note = "A quiet step is the median one with all groups and no fault; what a step took beyond it is lost."
        plots.append(_plot("Where the time went", note, waterfall(history.goodput)))
    if history.steps:
        plots += [
            _plot("Groups over time", "", presence_map(history)),
            _plot("Step time of each group", "Slow groups stand out as rows.", group_map(history, "step_s")),
            _plot("Microbatches of each group", "What each group computed.", group_map(history, "load")),
        ]
    return plots + list(_loads_of(history))


def _loads_of(history: History) -> Iterator[Plot]:
    hit = [index for index, step in enumerate(history.steps) if step.lost and index > 0]
    for index in itertools.islice(hit, MOST_LOADS):
        step = history.steps[index]
        after = history.steps[index + 1] if index + 1 < len(history.steps) else None
        lost = ", ".join(map(str, sorted(step.lost)))
        figure = load_around(history.steps[index - 1], step, after, history.run.num_groups)
        yield _plot(f"Step {step.step}: groups {lost} lost", "What each group computed, patches included.", figure)


def _plot(title: str, note: str, figure: go.Figure) -> Plot:
    return Plot(title=title, note=note, html=figure.to_html(full_html=False, include_plotlyjs=False))
