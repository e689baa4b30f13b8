"""The plots of a report. Colours are Okabe and Ito's, safe for colour blindness; patterns survive print."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from spare_megatron.formats.quantities import format_duration
from spare_megatron.journal.event_texts import groups_named
from spare_megatron.journal.records import SaveOutcome
from spare_megatron.journal.state.goodput import Goodput
from spare_megatron.tools.report.history import Floats, History, Interval, Presence, presence

BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#BBBBBB"
SKY_BLUE = "#56B4E9"
_NAMED = (BLUE, ORANGE, GREEN, VERMILION, SKY_BLUE, "#CC79A7")
MOST_NAMED = 2 * len(_NAMED)
"""Limit of lines of a plot by names."""
_STATES: Mapping[Presence, tuple[str, str]] = {"training": (GREEN, ""), "lost": (VERMILION, "x"), "away": (GREY, "/")}
MOST_COLUMNS, MOST_ROWS = 1000, 250
"""Limits of a map. Beyond them neighbours are merged into their maximum."""
MOST_PACE_COLUMNS = 96
"""Limit of a map of paces. Beyond it neighbours are merged into their median, which hides scatter."""
LEAST_PACE, MOST_PACE = 0.9, 1.2
MOST_DEALT = 20
"""Limit of groups whose paces are drawn as lines: those that deviate most."""
MOST_POINTS = 2000
"""Limit of a line. Beyond it the minimum and the maximum of neighbours are drawn."""
MOST_MARKS = 1000
_UNITS = ((3, 86400.0, "d"), (3, 3600.0, "h"), (10, 60.0, "min"))
"""Units of time axes: least count, seconds, name. The largest unit that fits is used; seconds, if none does."""
_BAR = 0.85
"""Fraction of a group's row that its bar takes."""
_MOST_TICKS = 10
"""Limit of a colour scale of whole numbers."""
MOST_INTERVALS = 500
"""Limit of bars of groups over time. Beyond it a map is drawn."""
HIGH, LOW = 360, 260
"""Heights of plots, in pixels."""
_SAVES: Mapping[SaveOutcome, tuple[str, str]] = {
    "saved": (GREEN, "triangle-up"),
    "failed": (VERMILION, "x"),
    "skipped": (GREY, "circle-open"),
}


@dataclass(frozen=True, slots=True)
class Unit:
    name: str
    seconds: float

    @classmethod
    def for_up_to(cls, longest_s: float) -> "Unit":
        """The unit in which times up to this one are short numbers."""
        found = (cls(name, seconds) for least, seconds, name in _UNITS if longest_s >= least * seconds)
        return next(found, cls("s", 1.0))

    @classmethod
    def of(cls, history: History) -> "Unit":
        """The unit for times since the start of the run."""
        return cls.for_up_to(float(np.max(history.steps.ended_s, initial=0.0)))

    def values(self, times_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The times in this unit, rounded."""
        return np.round(np.asarray(times_s, np.float64) / self.seconds, 3 if self.seconds == 1 else 5)


def step_curves(curves: Mapping[str, tuple[History, Floats]], label: str) -> go.Figure:
    """Values over committed steps, of one run or of two. Steps that a restart discarded are left out."""
    figure = go.Figure()
    for (name, (history, values)), (colour, width) in zip(curves.items(), _lines(len(curves)), strict=True):
        kept = np.flatnonzero(~history.steps.is_undone)
        drawn = kept[extremes(values[kept], MOST_POINTS)]
        figure.add_scatter(
            x=history.steps.step[drawn],
            y=values[drawn],
            name=name,
            mode="lines",
            line={"color": colour, "width": width},
        )
    figure.update_layout(showlegend=len(curves) > 1)
    return _titled(figure, "step", label, LOW)


def _lines(num_runs: int) -> Sequence[tuple[str, float]]:
    """Colours and widths. Of two equal curves, the narrow one leaves both edges of the wide one visible."""
    return ((BLUE, 2.0),) if num_runs == 1 else ((SKY_BLUE, 8.0), (VERMILION, 2.0))


def named_curves(curves: Mapping[str, tuple[npt.NDArray[np.int64], Floats]], label: str) -> go.Figure:
    """Values over steps, by names: as lines, and more than `MOST_NAMED` as a map."""
    figure = go.Figure()
    if len(curves) > MOST_NAMED:
        steps = np.unique(np.concatenate([at for at, _ in curves.values()]))
        table = np.full((len(curves), len(steps)), np.nan)
        for row, (at, values) in zip(table, curves.values(), strict=True):
            row[np.searchsorted(steps, at)] = values
        binned, by_name, by_step = shrink(table)
        figure.add_heatmap(
            z=binned.astype(np.float32),
            x=steps[::by_step],
            y=list(curves)[::by_name],
            colorscale="Cividis",
            colorbar={"title": label},
            hovertemplate="%{y}, step %{x}: %{z}<extra></extra>",
        )
        return _titled(figure, "step", "")
    for (name, (at, values)), colour in zip(curves.items(), itertools.cycle(_NAMED)):
        drawn = extremes(values, MOST_POINTS)
        line = {"color": colour, "dash": "solid" if len(figure.data) < len(_NAMED) else "dot"}
        figure.add_scatter(x=at[drawn], y=values[drawn], name=name, mode="lines", line=line)
    figure.update_layout(showlegend=len(curves) > 1)
    return _titled(figure, "step", label, LOW)


def loss_curves(curves: Mapping[str, tuple[History, Floats]]) -> go.Figure:
    """Loss over steps as in `step_curves`, with marks at steps that lost a group, and the losses of evaluations."""
    figure = step_curves(curves, "loss, nats per token")
    for (name, (history, loss)), (colour, width) in zip(curves.items(), _lines(len(curves)), strict=True):
        steps = history.steps
        hit = np.flatnonzero(~steps.is_undone & np.array([bool(lost) for lost in steps.lost], np.bool_)).tolist()
        marks = [(steps.step[at], loss[at], f"lost: {groups_named(steps.lost[at])}") for at in hit]
        _add_marks(figure, f"{name}: groups lost", marks, {"color": colour, "symbol": "x", "size": 8 + width})
        for of_set, losses in history.evaluations.items():
            figure.add_scatter(
                x=[step - 1 for step in losses],  # the last step before it
                y=list(losses.values()),
                name=f"{name}: {of_set}",
                mode="lines+markers",
                line={"color": colour, "width": width, "dash": "dot"},
            )
    figure.update_layout(showlegend=True)
    return _titled(figure, "step", "loss, nats per token")


def step_times(history: History) -> go.Figure:
    """The time from commit to commit, the number of groups, and checkpoints, over the time of the run."""
    steps = history.steps
    taken_s = steps.taken_s
    num_members = np.array([len(members) for members in steps.members])
    drawn = extremes(taken_s, MOST_POINTS)
    unit = Unit.of(history)
    figure = go.Figure()
    figure.add_scatter(
        x=unit.values(steps.ended_s[drawn]),
        y=np.round(taken_s[drawn], 3),
        name="from commit to commit, s",
        line={"color": BLUE},
        customdata=steps.step[drawn],
        text=[", done again later" if is_undone else "" for is_undone in steps.is_undone[drawn]],
        hovertemplate="step %{customdata}: %{y} s%{text}",
        mode="lines",
    )
    drawn = extremes(num_members, MOST_POINTS)
    figure.add_scatter(
        x=unit.values(steps.ended_s[drawn]),
        y=num_members[drawn],
        name="groups",
        yaxis="y2",
        line={"color": ORANGE, "shape": "hv", "dash": "dot"},
    )
    figure.update_layout(yaxis2={"title": "groups", "overlaying": "y", "side": "right", "rangemode": "tozero"})
    _mark_checkpoints(figure, history, unit)
    return _titled(figure, f"{unit.name} since the start", "s")


def _mark_checkpoints(figure: go.Figure, history: History, unit: Unit) -> None:
    """Marks along the x axis where saves ended, by outcome."""
    for outcome, (colour, symbol) in _SAVES.items():
        ended = [(ended_s, record) for ended_s, record in history.checkpoints if record.outcome == outcome]
        marks = [(unit.values(ended_s), 0.04, f"after {record.step} steps") for ended_s, record in ended]
        marker = {"color": colour, "symbol": symbol, "size": 9}
        if marks:
            _add_marks(figure, f"checkpoint {outcome}", marks, marker, hover="%{text}", yaxis="y3")
    if history.checkpoints:
        figure.update_layout(yaxis3={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True})


def _add_marks(
    figure: go.Figure,
    name: str,
    marks: Sequence[tuple[Any, float, str]],
    marker: Mapping[str, Any],
    *,
    hover: str | None = None,
    yaxis: str | None = None,
) -> None:
    """Marks at places x and y with a text each; of very many some."""
    x, y, text = zip(*marks[:: -(-len(marks) // MOST_MARKS)], strict=True) if marks else ((), (), ())
    drawn = {"x": np.array(x), "y": np.array(y), "text": text, "hovertemplate": hover, "yaxis": yaxis}
    figure.add_scatter(**drawn, name=name, mode="markers", marker=marker)


def extremes(values: npt.NDArray[Any], most: int) -> npt.NDArray[np.intp]:
    """Indices to draw, ascending: all, or the minimum and the maximum of each of most / 2 runs of neighbours. Absent
    values are NaN, and drawn only where all values are.
    """
    if len(values) <= most:
        return np.arange(len(values))
    width = -(-len(values) // (most // 2))
    padded = np.full(-(-len(values) // width) * width, np.nan)
    padded[: len(values)] = values
    table = padded.reshape(-1, width)
    starts = np.arange(len(table)) * width
    lows = starts + np.where(np.isnan(table), np.inf, table).argmin(axis=1)
    highs = starts + np.where(np.isnan(table), -np.inf, table).argmax(axis=1)
    return np.unique(np.concatenate((lows, highs, [0, len(values) - 1])))


def waterfall(goodput: Goodput) -> go.Figure:
    """From the wall time down to the useful time, with a bar for each loss."""
    lost = {name: spent for name, spent in sorted(goodput.lost_s.items(), key=lambda item: -item[1]) if spent > 0}
    unit = Unit.for_up_to(goodput.wall_s)
    spent_s = np.array([goodput.wall_s, *lost.values(), goodput.useful_s])
    base_s = np.zeros(len(spent_s))
    base_s[1:-1] = goodput.wall_s - np.cumsum(spent_s[1:-1])
    figure = go.Figure(
        go.Bar(
            x=["wall time", *(name.replace("_", " ") for name in lost), "useful"],
            y=unit.values(spent_s),
            base=unit.values(base_s),
            text=[format_duration(value) for value in spent_s],
            textposition="outside",
            cliponaxis=False,
            marker={
                "color": [BLUE, *[VERMILION] * len(lost), BLUE],
                "pattern": {"shape": ["", *["/"] * len(lost), ""]},
            },
            hovertemplate="%{x}: %{text}<extra></extra>",
        )
    )
    return _titled(figure, "", unit.name)


def presence_map(history: History) -> go.Figure:
    """Groups over time: training, lost in the current step, or away."""
    intervals, unit = presence(history), Unit.of(history)
    figure = go.Figure()
    if len(intervals) > MOST_INTERVALS:
        figure.add_trace(_presence_heat(history, intervals, unit))
    for state, (colour, pattern) in _STATES.items() if len(intervals) <= MOST_INTERVALS else ():
        chosen = [item for item in intervals if item.presence == state]
        figure.add_bar(
            base=unit.values([item.from_s for item in chosen]),
            x=unit.values([item.to_s - item.from_s for item in chosen]),
            y=[item.group for item in chosen],
            orientation="h",
            width=_BAR,
            name=state,
            marker={"color": colour, "pattern": {"shape": pattern}},
            customdata=unit.values([(item.from_s, item.to_s) for item in chosen]).tolist(),
            hovertemplate=f"group %{{y}}, %{{customdata[0]:.2f}} to %{{customdata[1]:.2f}} {unit.name}",
        )
    marks = [(unit.values(found_s), record.group, record.cause) for found_s, record in history.losses]
    _add_marks(figure, "found lost", marks, {"color": "black", "symbol": "x-thin-open", "size": 9})
    figure.update_layout(barmode="overlay")
    _number_groups(figure, history)
    return _titled(figure, f"{unit.name} since the start", "group")


def _presence_heat(history: History, intervals: Sequence[Interval], unit: Unit) -> go.Heatmap:
    """Groups over time as a map. A cell shows the worst state in it."""
    end_s = float(history.steps.ended_s[-1])
    worst = np.zeros((history.run.most_groups, MOST_COLUMNS))
    codes: Mapping[Presence, int] = {"training": 0, "away": 1, "lost": 2}
    for item in intervals:
        first = int(item.from_s / end_s * MOST_COLUMNS)
        part = worst[item.group, min(first, MOST_COLUMNS - 1) : max(first + 1, int(item.to_s / end_s * MOST_COLUMNS))]
        np.maximum(part, codes[item.presence], out=part)
    table, by_group, _ = shrink(worst)
    colours = [_STATES[state][0] for state in codes]
    return go.Heatmap(
        z=table.astype(np.uint8),
        x=unit.values(np.arange(MOST_COLUMNS) * end_s / MOST_COLUMNS),
        y=np.arange(len(table)) * by_group,
        zmin=0,
        zmax=2,
        colorscale=[[place, colours[index // 2]] for index, place in enumerate((0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1))],
        colorbar={"tickvals": [1 / 3, 1, 5 / 3], "ticktext": list(codes)},
        hovertemplate=f"group %{{y}}, %{{x:.1f}} {unit.name}<extra></extra>",
        name="worst state",
    )


def group_map(history: History, values: Literal["step_s", "load"]) -> go.Figure:
    """Groups over commits, as colours. Commits are in the order of the log: without a restart the n-th is step n.
    `values` chooses between seconds from a step's start to its update ("step_s") and microbatches computed ("load").
    """
    is_time = values == "step_s"
    binned, by_group, by_step = shrink(history.steps.step_s.T if is_time else history.steps.load.T)
    known = binned[~np.isnan(binned)]
    is_counted = not is_time and (not known.size or np.ptp(known) <= _MOST_TICKS)
    figure = go.Figure(
        go.Heatmap(
            z=binned.astype(np.float32),
            x=np.arange(binned.shape[1]) * by_step,
            y=np.arange(binned.shape[0]) * by_group,
            colorscale="Cividis",
            colorbar={"title": "s" if is_time else "microbatches", "dtick": 1 if is_counted else None},
            hovertemplate="group %{y}, commit %{x}: %{z}<extra></extra>",
        )
    )
    _number_groups(figure, history)
    return _titled(figure, "commit", "group")


def rank_map(history: History) -> go.Figure:
    """Ranks over commits: a rank's time for a microbatch over the median of the same rank in the other groups."""
    steps, (_, num_groups, num_ranks) = history.paces.commit, history.paces.ratio.shape
    ratio = history.paces.ratio.reshape(len(steps), num_groups * num_ranks)
    by_step = -(-len(steps) // MOST_PACE_COLUMNS)
    padded = np.full((-(-len(steps) // by_step) * by_step, ratio.shape[1]), np.nan)
    padded[: len(steps)] = ratio
    columns = padded.reshape(-1, by_step, ratio.shape[1])
    has_values = ~np.isnan(columns).all(axis=1)
    usual = np.where(has_values, np.nanmedian(np.where(has_values[:, None], columns, 0.0), axis=1), np.nan)
    table, by_rank, _ = shrink(usual.T)
    figure = go.Figure(
        go.Heatmap(
            z=table.astype(np.float32).round(3),
            x=steps[::by_step],
            y=[f"{place // num_ranks}.{place % num_ranks}" for place in range(0, ratio.shape[1], by_rank)],
            zmin=LEAST_PACE,
            zmax=MOST_PACE,
            colorscale="Cividis",
            colorbar={"title": "x median"},
            hovertemplate="group.rank %{y}, commit %{x}: %{z:.2f} x the median<extra></extra>",
        )
    )
    figure.update_yaxes(type="category", autorange="reversed")
    return _titled(figure, "commit", "group.rank")


def dealt_paces(history: History) -> go.Figure:
    """The paces by which work is dealt, over commits: lines of groups that have deviated, marks where paces change."""
    changes = sorted(history.pace_changes, key=lambda change: change[0])
    most = {
        group: max(abs(np.log(paces[group])) for _, paces in changes if group in paces)
        for group in {group for _, paces in changes for group in paces}
    }
    drawn = sorted(sorted(most, key=lambda group: (-most[group], group))[:MOST_DEALT])
    commits = [0, *(commit for commit, _ in changes), max(len(history.steps), changes[-1][0])]
    figure = go.Figure()
    for group in drawn:
        paces = [1.0, *(paces.get(group, 1.0) for _, paces in changes)]
        figure.add_scatter(
            x=commits,
            y=[*paces, paces[-1]],
            name=f"group {group}",
            mode="lines",
            line={"shape": "hv"},
            hovertemplate="commit %{x}: %{y:.2f} x its like",
        )
    marks = [(commit, 1.0, f"from commit {commit} on") for commit, _ in changes]
    marker = {"color": "black", "symbol": "line-ns-open", "size": 9}
    _add_marks(figure, "dealt anew", marks, marker, hover="%{text}")
    figure.update_layout(showlegend=True)
    return _titled(figure, "commit", "x its like", LOW)


def shrink(table: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[np.float64], int, int]:
    """Merges neighbours into their maximum (NaN if all are absent), until rows and columns are within the limits.
    Returns the table, and how many rows and columns each cell stands for.
    """
    by_row, by_column = -(-table.shape[0] // MOST_ROWS), -(-table.shape[1] // MOST_COLUMNS)
    height, width = -(-table.shape[0] // by_row), -(-table.shape[1] // by_column)
    padded = np.full((height * by_row, width * by_column), -np.inf)
    padded[: table.shape[0], : table.shape[1]] = np.where(np.isnan(table), -np.inf, table)
    largest = padded.reshape(height, by_row, width, by_column).max(axis=(1, 3))
    return np.where(np.isneginf(largest), np.nan, largest), by_row, by_column


def load_around(history: History, hit: int) -> go.Figure:
    """Microbatches of each group in the step before a loss, in the step `hit` (an index), and in the one after it."""
    figure = go.Figure()
    shown = (("before", -1, GREY, ""), ("hit", 0, VERMILION, "x"), ("after", 1, BLUE, "/"))
    for name, offset, colour, pattern in shown:
        index = hit + offset
        if 0 <= index < len(history.steps):
            figure.add_bar(
                x=list(range(history.run.most_groups)),
                y=np.nan_to_num(history.steps.load[index]),
                name=f"{name}: step {history.steps.step[index]}",
                marker={"color": colour, "pattern": {"shape": pattern}},
            )
    return _titled(figure, "group", "microbatches")


def _number_groups(figure: go.Figure, history: History) -> None:
    """Makes a y axis of groups: the first on top, and no ticks between groups."""
    num_groups = history.run.most_groups
    figure.update_yaxes(range=[num_groups - 0.5, -0.5], dtick=1 if num_groups <= 30 else None)


def _titled(figure: go.Figure, x: str, y: str, height: int = HIGH) -> go.Figure:
    figure.update_layout(
        template="simple_white",
        height=height,
        margin={"l": 60, "r": 60, "t": 20, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        xaxis_title=x,
        yaxis_title=y,
        uirevision=x,  # keeps the reader's zoom while the run grows, if the unit stays
    )
    return figure
