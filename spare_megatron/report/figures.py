"""The plots of a report. Colours are Okabe and Ito's, which the colour-blind tell apart; patterns survive print."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from spare_megatron.journal.goodput import Goodput
from spare_megatron.report.history import History, Presence, Step, presence

BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#BBBBBB"
LINES = (BLUE, VERMILION)
_STATES: Mapping[Presence, tuple[str, str]] = {
    "training": (GREEN, ""),
    "lost": (VERMILION, "x"),
    "away": (GREY, "/"),
}
MOST_COLUMNS, MOST_ROWS = 1000, 250
"""Of a map; of what exceeds it, the largest of neighbours is drawn."""


def loss_curve(histories: Mapping[str, History]) -> go.Figure:
    """Loss over steps, for one run or several; steps that lost a group are marked."""
    figure = go.Figure()
    for (name, history), colour in zip(histories.items(), LINES, strict=False):
        steps = [step for step in history.steps if not step.is_undone]
        figure.add_scatter(
            x=[step.step for step in steps], y=[step.loss for step in steps], name=name, line={"color": colour}
        )
        hit = [step for step in steps if step.lost]
        figure.add_scatter(
            x=[step.step for step in hit],
            y=[step.loss for step in hit],
            name=f"{name}: groups lost",
            mode="markers",
            marker={"color": colour, "symbol": "x", "size": 9},
            text=[f"lost: groups {', '.join(map(str, sorted(step.lost)))}" for step in hit],
        )
    return _titled(figure, "step", "loss, nats per token")


def step_times(history: History) -> go.Figure:
    """The time from commit to commit, and how many groups took part, over the time of the run."""
    ends = [0.0, *(step.ended_s for step in history.steps)]
    x = ends[1:]
    figure = go.Figure()
    names = [f"step {step.step}{', done again later' if step.is_undone else ''}" for step in history.steps]
    figure.add_scatter(
        x=x, y=list(np.diff(ends)), name="from commit to commit, s", line={"color": BLUE}, text=names, mode="lines"
    )
    figure.add_scatter(
        x=x,
        y=[len(step.members) for step in history.steps],
        name="groups",
        yaxis="y2",
        line={"color": ORANGE, "shape": "hv", "dash": "dot"},
    )
    figure.update_layout(yaxis2={"title": "groups", "overlaying": "y", "side": "right", "rangemode": "tozero"})
    return _titled(figure, "s since the start", "s")


def waterfall(goodput: Goodput) -> go.Figure:
    """From the wall time down to the useful time, each loss by its name."""
    lost = {name: spent for name, spent in sorted(goodput.lost_s.items(), key=lambda item: -item[1]) if spent > 0}
    figure = go.Figure(
        go.Waterfall(
            x=["wall time", *(name.replace("_", " ") for name in lost), "useful"],
            y=[goodput.wall_s, *(-spent for spent in lost.values()), 0.0],
            measure=["absolute", *["relative"] * len(lost), "total"],
            text=[f"{value:.3g} s" for value in (goodput.wall_s, *lost.values(), goodput.useful_s)],
            decreasing={"marker": {"color": VERMILION}},
            totals={"marker": {"color": BLUE}},
        )
    )
    return _titled(figure, "", "s")


def presence_map(history: History) -> go.Figure:
    """Groups over time: training, lost in the step under way, away."""
    intervals = presence(history)
    figure = go.Figure()
    for state, (colour, pattern) in _STATES.items():
        chosen = [item for item in intervals if item.presence == state]
        figure.add_bar(
            base=[item.from_s for item in chosen],
            x=[item.to_s - item.from_s for item in chosen],
            y=[item.group for item in chosen],
            orientation="h",
            name=state,
            marker={"color": colour, "pattern": {"shape": pattern}},
            customdata=[(item.from_s, item.to_s) for item in chosen],
            hovertemplate="group %{y}, %{customdata[0]:.2f} to %{customdata[1]:.2f} s",
        )
    figure.add_scatter(
        x=[loss.found_s for loss in history.losses],
        y=[loss.group for loss in history.losses],
        text=[loss.cause for loss in history.losses],
        name="found lost",
        mode="markers",
        marker={"color": "black", "symbol": "x-thin-open", "size": 9},
    )
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_yaxes(autorange="reversed", dtick=1 if history.run.num_groups <= 30 else None)
    return _titled(figure, "s since the start", "group")


def group_map(history: History, values: str) -> go.Figure:
    """Groups over commits in the order of the log, as colours; without a restart the n-th commit is step n.

    Args:
        history: The run.
        values: "step_s", seconds from a step's start to its update; "load", microbatches computed.
    """
    of_groups = [getattr(step, values) for step in history.steps]
    table = np.full((history.run.num_groups, len(history.steps)), np.nan)
    for column, of_group in enumerate(of_groups):
        for group, value in of_group.items():
            table[group, column] = value
    binned, by_group, by_step = shrink(table)
    figure = go.Figure(
        go.Heatmap(
            z=binned,
            x=[index * by_step for index in range(binned.shape[1])],
            y=[index * by_group for index in range(binned.shape[0])],
            colorscale="Cividis",
            colorbar={"title": "s" if values == "step_s" else "microbatches"},
            hovertemplate="group %{y}, commit %{x}: %{z}<extra></extra>",
        )
    )
    return _titled(figure, "commit", "group")


def shrink(table: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], int, int]:
    """The largest of neighbours where there are more rows or columns than can be told apart; absent values are NaN.

    Returns:
        The smaller table, and how many rows and columns became one.
    """
    by_row, by_column = -(-table.shape[0] // MOST_ROWS), -(-table.shape[1] // MOST_COLUMNS)
    height, width = -(-table.shape[0] // by_row), -(-table.shape[1] // by_column)
    padded = np.full((height * by_row, width * by_column), -np.inf)
    padded[: table.shape[0], : table.shape[1]] = np.where(np.isnan(table), -np.inf, table)
    largest = padded.reshape(height, by_row, width, by_column).max(axis=(1, 3))
    return np.where(np.isneginf(largest), np.nan, largest), by_row, by_column


def load_around(before: Step, hit: Step, after: Step | None, num_groups: int) -> go.Figure:
    """Microbatches of each group in the step before a loss, in the step that was hit, and in the one after it."""
    figure = go.Figure()
    shown: Sequence[tuple[str, Step | None, str, str]] = (
        ("before", before, GREY, ""),
        ("hit", hit, VERMILION, "x"),
        ("after", after, BLUE, "/"),
    )
    for name, step, colour, pattern in shown:
        if step is not None:
            figure.add_bar(
                x=list(range(num_groups)),
                y=[step.load.get(group, 0) for group in range(num_groups)],
                name=f"{name}: step {step.step}",
                marker={"color": colour, "pattern": {"shape": pattern}},
            )
    return _titled(figure, "group", "microbatches")


def _titled(figure: go.Figure, x: str, y: str) -> go.Figure:
    figure.update_layout(
        template="simple_white",
        height=360,
        margin={"l": 60, "r": 60, "t": 20, "b": 50},
        legend={"orientation": "h", "y": 1.12},
        xaxis_title=x,
        yaxis_title=y,
    )
    return figure
