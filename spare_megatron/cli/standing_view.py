"""How a run stands, for people: a view on a terminal, lines elsewhere. Letters say what colours say."""

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spare_megatron.journal.events import describe_storage
from spare_megatron.journal.goodput import Goodput
from spare_megatron.journal.quantities import format_duration
from spare_megatron.journal.standing import GroupState, SavePlan, Standing

_LETTERS: dict[GroupState, tuple[str, str]] = {
    "alive": ("A", "green"),
    "slow": ("S", "bold yellow"),
    "rejoining": ("R", "bold cyan"),
    "lost": ("L", "bold red"),
    "given up": ("X", "bold magenta"),
}
_IN_A_BLOCK, _IN_A_ROW = 10, 50
_BAR_WIDTH = 50
_EVENTS_SHOWN = 6


def view_of(standing: Standing, plan: SavePlan, now_s: float, note: str = "") -> RenderableType:
    """The view of a run.

    Args:
        standing: How it stands.
        plan: When it saves.
        now_s: Seconds since the epoch.
        note: What is to be said that no journal tells.
    """
    run = standing.run
    if run is None:
        return Text(note or "the journal has no run yet")
    done = 0 if standing.folding is None else standing.folding.step
    bar = ProgressBar(total=run.num_steps, completed=done, width=_BAR_WIDTH)
    rows: list[RenderableType] = [bar]
    rows += [Text(line) for line in _headlines(standing, plan, now_s)]
    rows += [_grid(standing.groups())]
    rows += [Text(line) for line in _events(standing, _EVENTS_SHOWN)]
    view = Table.grid()
    for row in (*rows, *([Text(note)] if note else [])):
        view.add_row(row)
    return view


def lines_of(standing: Standing, plan: SavePlan, now_s: float) -> Iterator[str]:
    """The same as text."""
    if standing.run is None:
        yield "the journal has no run yet"
        return
    yield from _headlines(standing, plan, now_s)
    yield from _grid(standing.groups()).plain.split("\n")
    yield from _events(standing, _EVENTS_SHOWN)


def step_line(standing: Standing) -> str:
    """The step that the run has come to, in a line."""
    run, folding = standing.run, standing.folding
    assert run is not None, "nothing is told of a run that is not there"
    assert folding is not None, "a run has a log"
    if not folding.commits:
        return f"no step of {run.num_steps} committed yet"
    loss = f"  loss {standing.loss:.4f}" if standing.loss else ""  # a simulated run has none
    return f"step {folding.step}/{run.num_steps}{loss}  groups {len(folding.members)}/{run.num_groups}"


def _headlines(standing: Standing, plan: SavePlan, now_s: float) -> Iterator[str]:
    reason = "" if standing.end is None else standing.end.reason
    outcome = f"{standing.outcome}: {reason}" if reason else standing.outcome
    goodput = standing.goodput(now_s)
    pace = "" if goodput is None else f"  {format_duration(goodput.step_s)}"
    yield f"{step_line(standing)}{pace}  ({outcome})"
    if goodput is not None:
        yield _describe_goodput(goodput)
    next_s = standing.next_save_s(plan, now_s)
    if next_s is not None:
        yield f"next save in {format_duration(round(next_s))}"
    if standing.storage is not None:
        stale = "lines stay in memory until there is room, and the figures here are as old as the last one written"
        yield f"incomplete: {describe_storage(standing.storage)}" + ("" if standing.end else f"; {stale}")
    for text in standing.damage[:1]:
        yield f"damaged: {text}"


def _describe_goodput(goodput: Goodput) -> str:
    lost = sorted(((spent, name) for name, spent in goodput.lost_s.items() if spent >= 0.05), reverse=True)
    told = ", ".join(f"{name.replace('_', ' ')} {format_duration(spent)}" for spent, name in lost)
    return f"goodput {goodput.goodput:.1%} of {format_duration(goodput.wall_s)}" + (f"; lost: {told}" if told else "")


def _grid(states: Sequence[GroupState]) -> Text:
    """A letter for each group, by tens, and what the letters mean."""
    grid = Text("groups ")
    for group, state in enumerate(states):
        if group and group % _IN_A_ROW == 0:
            grid.append(f"\n{group:>6} ")
        elif group and group % _IN_A_BLOCK == 0:
            grid.append(" ")
        letter, style = _LETTERS[state]
        grid.append(letter, style=style)
    counts = Counter(states)
    grid.append(
        "\n       " + ", ".join(f"{_LETTERS[state][0]} {state} {counts[state]}" for state in _LETTERS if counts[state])
    )
    return grid


def _events(standing: Standing, most: int) -> Iterator[str]:
    for event in standing.events(most):
        yield f"{datetime.datetime.fromtimestamp(event.at_s):%H:%M:%S} {event.text}"
