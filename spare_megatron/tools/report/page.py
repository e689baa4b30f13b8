"""Renders one self-contained HTML page for a run, or for two side by side. It works from a file, without a network.
Plots and the library that draws them are compressed inside it; a plot is drawn when it comes into view.
"""

import base64
import gzip
import html
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import markupsafe
import numpy as np
import plotly.graph_objects as go

from spare_megatron.cli.run_view import describe_cost, describe_health, rows_of
from spare_megatron.formats.output import printable
from spare_megatron.formats.quantities import format_bytes, format_count, format_duration
from spare_megatron.journal.event_texts import groups_named
from spare_megatron.journal.state.rank_paces import Slowest, find_slowest
from spare_megatron.tools.report import figures as charts
from spare_megatron.tools.report.equality import compare
from spare_megatron.tools.report.history import Floats, History

MOST_LOADS = 12
"""Losses with a plot of loads. The map of loads has all of them."""
MOST_ROWS = 300
"""Limit of a table. The last rows are shown."""

_CURVES: Sequence[tuple[str, str, str, Callable[[History], Floats | None]]] = (
    ("Gradient norm", "", "norm", lambda history: history.steps.grad_norm),
    ("Learning rate", "", "learning rate", lambda history: history.steps.learning_rate),
    ("Tokens per second", "From commit to commit.", "tokens/s", History.tokens_per_s),
    (
        "Model FLOPs utilization",
        "Of the peak of the ranks that took part; operations done twice are not counted.",
        "MFU, %",
        lambda history: None if (share := history.utilization()) is None else 100 * share,
    ),
)
"""Title, note, label and values of the plots over steps."""

_NAMED_CURVES: Sequence[tuple[str, str, str, float]] = (
    ("Loss by corpus", "train/loss/", "loss, nats per token", 1.0),
    ("Epochs of each corpus", "data/epochs/", "epochs", 1.0),
    ("Tokens of each corpus", "data/tokens/", "tokens", 1.0),
    ("Gradient norm by layer", "train/grad_norm/", "norm", 1.0),
    ("Norm of the parameters", "train/params_norm", "norm", 1.0),
    ("Most tokens of an expert", "train/expert_load/", "over the mean", 1.0),
    ("Memory of the fullest rank", "perf/memory_", "GiB", 2.0**30),
)
"""Title, how the keys of the metrics begin, label and unit of further plots over steps."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its heading and a sentence on how to read it."""

    title: str
    note: str
    figure: go.Figure


def report(history: History, config: str) -> str:
    """The page of one run. `config` is its resolved configuration as text, or what replaces it."""
    return _render({history.run.name: history}, plots_of(history), config)


def comparison(histories: Mapping[str, History]) -> str:
    """The page of two runs, by names that distinguish them."""
    plots = list(curves_of(histories))
    for name, history in histories.items():
        if history.goodput is not None:
            plots.append(Plot(f"Where the time went: {name}", "", charts.waterfall(history.goodput)))
        plots.append(Plot(f"Groups over time: {name}", "", charts.presence_map(history)))
    return _render(histories, plots, "")


def live_page(name: str, config: str) -> str:
    """The page of a run that is served. It polls for `live_content`."""
    return _page(name, _content("", "", []), "", "", config, poll="data")


def live_content(history: History) -> str:
    """The present content of a served page, as JSON."""
    histories = {history.run.name: history}
    return _content(_head(histories), _tables(histories), plots_of(history))


def _render(histories: Mapping[str, History], plots: list[Plot], config: str) -> str:
    return _page(" and ".join(histories), _content("", "", plots), _head(histories), _tables(histories), config)


def _page(name: str, content: str, head: str, tables: str, config: str, poll: str = "") -> str:
    return _template("page").render(
        name=name,
        content=_pack(content),
        head=head,
        tables=tables,
        config=markupsafe.escape(printable(config, keep="\n\t")),
        library=_library(),
        poll=poll,
    )


def _content(head: str, tables: str, plots: list[Plot]) -> str:
    drawn = []
    for plot in plots:
        figure = json.loads(plot.figure.to_json(validate=False))
        figure["data"] = [{key: _escaped(key, value) for key, value in trace.items()} for trace in figure["data"]]
        drawn.append({"title": plot.title, "note": plot.note, "figure": figure})
    return json.dumps({"head": head, "tables": tables, "plots": drawn}, separators=(",", ":"))


_LABELS = ("name", "text", "x", "y")
"""Parts of a trace that may hold names, causes and other text from elsewhere, in which plotly.js would see tags."""


def _escaped(key: str, value: Any) -> Any:
    """The value of a trace, with markup of plotly.js escaped."""
    if key not in _LABELS:
        return value
    if isinstance(value, list):
        return [_escaped(key, one) for one in value]
    return html.escape(printable(value), quote=False) if isinstance(value, str) else value


def _head(histories: Mapping[str, History]) -> str:
    figures = {name: dict(_figures_of(history)) for name, history in histories.items()}
    rows = list(dict.fromkeys(row for of_run in figures.values() for row in of_run))
    equality = compare(*histories.values()) if len(histories) == 2 else None
    overviews = {name: history.overview for name, history in histories.items()}
    return _template("head").render(
        figures=figures,
        rows=rows,
        equality=equality,
        overviews=overviews,
        health=describe_health,
        cost=describe_cost,
        rows_of=lambda overview: rows_of(overview, _utc),
        utc=_utc,
    )


def _utc(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"


def _tables(histories: Mapping[str, History]) -> str:
    return _template("tables").render(
        histories=histories, most_rows=MOST_ROWS, duration=format_duration, size=format_bytes
    )


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return environment.from_string(files(__package__).joinpath(f"{name}.html.j2").read_text())


@cache
def _library() -> str:
    """The part of plotly.js that `figures` needs: a third of what the Python package brings."""
    return _pack(files(__package__).joinpath("plotly/plotly-cartesian.min.js").read_text())


def _pack(text: str) -> str:
    """Compresses the text to a third; the page unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _figures_of(history: History) -> Iterator[tuple[str, str]]:
    figures, goodput = history.figures, history.goodput
    loss = figures["final_loss"]
    yield "outcome", f"{figures['outcome']} {figures['outcome_reason']}".strip()
    if history.began_s is not None:
        yield "began", f"{_utc(history.began_s)} UTC"
    yield "wall time", format_duration(history.lasted_s)
    run = history.run
    if run.host:
        yield "host", run.host
    if run.version:
        yield "version, commit", f"{run.version}, {run.commit or 'unknown'}"
    yield "steps committed", f"{figures['steps_committed']} of {history.run.num_steps}"
    yield "steps done again after a restart", str(figures["steps_lost"])
    num_ranks = history.run.ranks_per_group
    lanes = f" in {run.lanes} lanes" if run.lanes > 1 else ""
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}{lanes}"
    yield "groups", f"{history.run.num_groups} of {ranks}, r = {history.run.redundancy}"
    yield "losses, and groups admitted again", f"{len(history.losses)}, {figures['groups_rejoined']}"
    whole = [run.num_ranks(len(members)) for members in history.steps.members]
    if num_short := int((history.steps.num_ranks < whole).sum()):
        yield "steps with groups of fewer stages", str(num_short)
    if history.num_places_taken:
        yield "places that other machines took", str(history.num_places_taken)
    yield "microbatches computed again", str(figures["microbatches_recomputed"])
    yield "last loss", f"{loss:.4f}" if loss else "none"
    for name, losses in history.evaluations.items():
        step, found = list(losses.items())[-1]
        yield f"last evaluation, {name}", f"{found:.4f} after {step} steps"
    yield from _speed_of(history)
    if history.checkpoints:
        counts = Counter(record.outcome for _, record in history.checkpoints)
        yield "checkpoints", ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    if goodput is not None:
        yield "goodput", f"{goodput.goodput:.1%} of the wall time was useful"
        yield (
            "quiet step, longest pause",
            f"{format_duration(goodput.step_s)}, {format_duration(goodput.longest_pause_s)}",
        )


def _speed_of(history: History) -> Iterator[tuple[str, str]]:
    tokens, utilization = history.tokens_per_s(), history.utilization()
    if tokens is not None and not np.isnan(tokens).all():
        yield "tokens/s of the median step", format_count(float(np.nanmedian(tokens)))
        if utilization is not None:
            yield "MFU of the median step", f"{np.nanmedian(utilization):.1%}"


def plots_of(history: History) -> list[Plot]:
    plots = list(curves_of({history.run.name: history}))
    if len(history.steps):
        plots.append(Plot("Step time", "From commit to commit.", charts.step_times(history)))
    if history.goodput is not None:
        note = "A quiet step is the median one with all groups and no fault; what a step took beyond it is lost."
        plots.append(Plot("Where the time went", note, charts.waterfall(history.goodput)))
    if len(history.steps):
        plots += [
            Plot("Groups over time", "", charts.presence_map(history)),
            Plot("Step time of each group", "Slow groups stand out as rows.", charts.group_map(history, "step_s")),
            Plot("Microbatches of each group", "What each group computed.", charts.group_map(history, "load")),
        ]
    return [*plots, *_paces_of(history), *_loads_of(history)]


def curves_of(histories: Mapping[str, History]) -> Iterator[Plot]:
    """The curves over steps that the runs have: a simulated run has none."""
    losses = _known(histories, lambda history: history.steps.loss)
    if losses:
        yield Plot("Loss", "Crosses mark steps in which groups were lost.", charts.loss_curves(losses))
    for title, note, label, values in _CURVES:
        curves = _known(histories, values)
        if curves:
            yield Plot(title, note, charts.step_curves(curves, label))
    for title, begin, label, unit in _NAMED_CURVES:
        named = {
            f"{run}: {key.removeprefix(begin)}" if len(histories) > 1 else key.removeprefix(begin): (
                steps,
                values / unit,
            )
            for run, history in histories.items()
            for key, (steps, values) in history.further.items()
            if key.startswith(begin)
        }
        if named:
            yield Plot(title, "", charts.named_curves(named, label))


def _known(
    histories: Mapping[str, History], values: Callable[[History], Floats | None]
) -> dict[str, tuple[History, Floats]]:
    """The runs that have these values, with them. A run whose values are all 0 or absent is left out."""
    found = {name: (history, values(history)) for name, history in histories.items()}
    return {name: (history, data) for name, (history, data) in found.items() if data is not None and np.nansum(data**2)}


def _paces_of(history: History) -> Iterator[Plot]:
    slowest = find_slowest(history.paces.ratio)
    if slowest is not None:
        note = (
            "Time of a microbatch's passes, waiting apart, beside the same rank of the other groups. "
            + _slowest_ranks(slowest, history.run.ranks_per_stage)
        )
        yield Plot("Compute of each rank", note, charts.rank_map(history))
    if any(paces for _, paces in history.pace_changes):
        note = "Time of a microbatch by which work is dealt. Groups without a line are as fast as most."
        yield Plot("Pace of each group", note, charts.dealt_paces(history))


def _slowest_ranks(slowest: Slowest, ranks_per_stage: int) -> str:
    """The slowest rank, and the next one, whose ratio shows how far scatter goes."""
    first = f"group {slowest.group} rank {slowest.rank} (stage {slowest.rank // ranks_per_stage})"
    second = f"group {slowest.next_group} rank {slowest.next_rank} (stage {slowest.next_rank // ranks_per_stage})"
    return f"Slowest: {first}: {slowest.ratio:.2f} x the median; next: {second}: {slowest.next_ratio:.2f} x."


def _loads_of(history: History) -> Iterator[Plot]:
    hit = [index for index, lost in enumerate(history.steps.lost) if lost and index > 0]
    for index in hit[:MOST_LOADS]:
        title = f"Step {history.steps.step[index]}: {groups_named(history.steps.lost[index])} lost"
        yield Plot(title, "What each group computed, patches included.", charts.load_around(history, index))
