"""Renders the state of a run as a terminal view or as lines; letters repeat what colours show."""

import datetime
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from spare_megatron.cli.console import LiveView, Pieces
from spare_megatron.formats.quantities import format_duration, format_large
from spare_megatron.journal import event_texts
from spare_megatron.journal.event_texts import EventLine
from spare_megatron.journal.fold import Committed, Fold
from spare_megatron.journal.records import UpdateRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.goodput import Goodput, flops_utilization, tokens_per_second
from spare_megatron.journal.state.overview import Overview
from spare_megatron.journal.state.run_state import GroupStatus, RunState, SavePlan

_LETTERS: dict[GroupStatus, tuple[str, str]] = {
    "alive": ("A", "green"),
    "slow": ("S", "bold yellow"),
    "rejoining": ("R", "bold cyan"),
    "drained": ("D", "bold blue"),
    "lost": ("L", "bold red"),
    "given up": ("X", "bold magenta"),
}
_IN_A_BLOCK, _IN_A_ROW = 10, 50
_NO_RUN = "the journal has no run yet"
_EVENTS_SHOWN = 6
_DAY_S = 86400.0
_RECENT_COMMITS = 8
"""Commits searched for that of the newest applied step."""
STEP_LINE_INTERVAL_S = 2.0
"""Seconds between lines about steps, without a terminal."""


def view_of(
    run_state: RunState, plan: SavePlan, overview: Overview, notes: Sequence[str] = (), *, has_events: bool = True
) -> LiveView:
    """The live view of a run as of the end of the overview's window, with notes that the journal does not have."""
    if run_state.run is None:
        return LiveView(lines=notes or [_NO_RUN])
    done = 0 if run_state.folding is None else run_state.folding.step
    lines: list[str | Pieces] = [describe_health(overview), *(f"  {alarm}" for alarm in overview.alarms)]
    lines += [*_headlines(run_state, plan, overview), *_grid(run_state.groups())]
    lines += [run_state.shapes] if run_state.shapes else []
    if has_events:
        form = "%H:%M:%S" if overview.until_s - overview.since_s <= _DAY_S else "%Y-%m-%d %H:%M:%S"

        def stamp(at_s: float) -> str:
            return f"{datetime.datetime.fromtimestamp(at_s):{form}}"

        rows = rows_of(overview, stamp)
        lines += [f"{when:<20}  {what:<21}  {cost:>8}  {text}" for when, what, cost, text in rows]
        lines += [f"{stamp(event.at_s)} {event.text}" for event in run_state.events(overview.since_s)[-_EVENTS_SHOWN:]]
    return LiveView(lines=[*lines, *notes], done=done, total=run_state.run.num_steps)


def lines_of(view: LiveView) -> Iterator[str]:
    """The view as lines of text, without bar and note."""
    for line in view.lines:
        yield line if isinstance(line, str) else "".join(text for text, _ in line)


def describe_health(overview: Overview) -> str:
    num_alarms = len(overview.alarms)
    alarms = f"{num_alarms} alarm{'s are' if num_alarms > 1 else ' is'} open" if num_alarms else "no alarm is open"
    return f"{overview.health}: {alarms}, {overview.proof}"


def rows_of(overview: Overview, stamp: Callable[[float], str]) -> Iterator[tuple[str, str, str, str]]:
    """What happened in the window, a row for each kind of event: first and last time, number, cost, and the last."""
    for one in overview.happened:
        masked = "" if one.num_masked is None else f", {one.num_masked} masked"
        times = dict.fromkeys(map(stamp, (one.first_at_s, one.last.at_s)))
        cost = "" if one.cost_s is None else format_duration(one.cost_s)
        plural = "" if one.count == 1 else "es" if one.kind.endswith("s") else "s"
        yield " to ".join(times), f"{one.count} {one.kind}{plural}{masked}", cost, one.last.text


class NewLines:
    """Lines about what is new in a run's journal, with timestamps; each event appears once. With `has_steps` there are
    also lines about the newest step, with events or every `STEP_LINE_INTERVAL_S`. `unrecorded`: events already shown
    before the journal had them.
    """

    def __init__(self, *, has_steps: bool) -> None:
        self.unrecorded: set[str] = set()
        self._has_steps = has_steps
        self._num_events = 0
        self._last_step = (-1, 0)  # newest attempt and number of restarts in the last step line
        self._next_at_s = 0.0

    def poll(self, run_state: RunState, now_s: float) -> list[str]:
        """The new lines, ordered by time."""
        if run_state.num_events > self._num_events or run_state.end is not None:
            self._next_at_s = now_s  # show an earlier step before the event
        # At equal times the step comes first: the last commit ends the run.
        found = [*self._step(run_state, now_s), *run_state.events(num_before=self._num_events)]
        self._num_events = run_state.num_events
        new = [event for event in sorted(found, key=lambda event: event.at_s) if event.text not in self.unrecorded]
        self.unrecorded -= {event.text for event in found}
        return [self.stamped(event.text, event.at_s) for event in new]

    def stamped(self, text: str, at_s: float) -> str:
        """The line after the local time, and the date if lines are kept."""
        form = "%Y-%m-%d %H:%M:%S" if self._has_steps else "%H:%M:%S"
        return f"{datetime.datetime.fromtimestamp(at_s):{form}} {text}"

    def _step(self, run_state: RunState, now_s: float) -> Iterator[EventLine]:
        folding, update = run_state.folding, run_state.newest
        if not self._has_steps or folding is None or update is None:
            return
        newest = update.attempt, folding.num_restarts
        if newest != self._last_step and now_s >= self._next_at_s:
            self._last_step, self._next_at_s = newest, now_s + STEP_LINE_INTERVAL_S
            yield EventLine(at_s=run_state.committed_at_s, text=step_line(run_state, now_s), kind="step")


def step_line(run_state: RunState, now_s: float) -> str:
    """One line about the newest step of the run."""
    run, folding, update = run_state.run, run_state.folding, run_state.newest
    assert run is not None, "callers check that the journal has a run"
    assert folding is not None, "a run has a log"
    if not folding.commits or not folding.step:
        return f"no step of {run.num_steps} committed yet"
    if update is None or update.step >= folding.step:  # undone by a restart
        parts = [_step_named(run, folding.step - 1), f"groups {len(folding.members)}/{run.most_groups}"]
    else:
        recent = [commit for commit in folding.commits[-_RECENT_COMMITS:] if commit.attempt == update.attempt]
        part: Committed | Fold = recent[0] if recent else folding
        parts = [*figures_of(run, update, len(part.members), part.num_missing_stages)]
    left_s = run_state.left_s(now_s)
    if left_s:
        parts.append(f"left {format_duration(max(1, round(left_s)))}")
    return "  ".join(parts)


def _step_named(run: RunRecord, step: int) -> str:
    """A step by its number, which counts from 0, and how many of all steps are committed with it."""
    return f"step {step} ({step + 1}/{run.num_steps})"


def figures_of(run: RunRecord, update: UpdateRecord, num_groups: int, num_missing_stages: int) -> Iterator[str]:
    yield _step_named(run, update.step)
    if update.loss:  # a simulated run has none
        yield f"loss {update.loss:.4f}"
        yield f"lr {update.learning_rate:.2e}"
        yield f"grad norm {update.grad_norm:.3f}"
    whole_s = update.step_s / run.size_of_step(update.step)
    tokens = tokens_per_second(run, whole_s)
    if tokens is not None:
        yield f"{format_large(tokens)} tokens/s"
    utilization = flops_utilization(run, whole_s, run.num_ranks(num_groups, num_missing_stages))
    if utilization is not None:
        yield f"MFU {utilization:.1%}"
    yield f"groups {num_groups}/{run.most_groups}"
    yield f"load {update.makespan}"
    yield format_duration(update.step_s)


def _headlines(run_state: RunState, plan: SavePlan, overview: Overview) -> Iterator[str]:
    now_s = overview.until_s
    reason = "" if run_state.end is None else run_state.end.reason
    outcome = f"{run_state.outcome}: {reason}" if reason else run_state.outcome
    yield f"{step_line(run_state, now_s)}  ({outcome})"
    if run_state.paces:
        shown = ", ".join(f"group {group} {pace / 1000:.2f}" for group, pace in run_state.paces.items())
        yield f"work is dealt by pace; time per microbatch over that of most groups: {shown}"
    for name, last in run_state.evaluated.items():
        yield f"loss of {name}: {event_texts.text_of_evaluation(last)}"
    if overview.goodput is not None:
        yield describe_cost(overview, overview.goodput)
    next_s = run_state.next_save_s(plan, now_s)
    if next_s is not None:
        yield f"next save in {format_duration(round(next_s))}"


def describe_cost(overview: Overview, goodput: Goodput) -> str:
    """Goodput, what was lost by cause, and device hours."""
    lost = sorted(((spent, name) for name, spent in goodput.lost_s.items() if spent >= 0.05), reverse=True)
    causes = ", ".join(f"{name.replace('_', ' ')} {format_duration(spent)}" for spent, name in lost)
    text = f"goodput {goodput.goodput:.1%} of {format_duration(goodput.wall_s)}"
    hours, lost_hours = overview.device_hours, overview.device_hours * (1 - goodput.goodput)
    of_hours = f"{format_large(lost_hours)} of {format_large(hours)}"
    return f"{text}; lost: {causes or 'nothing'}; lost {overview.device} hours: {of_hours}"


def _grid(states: Sequence[GroupStatus]) -> Iterator[Pieces]:
    """One letter per group in blocks of ten, and the legend."""
    for first in range(0, max(len(states), 1), _IN_A_ROW):
        row: list[tuple[str, str]] = [(f"{first:>6} " if first else "groups ", "")]
        for index, state in enumerate(states[first : first + _IN_A_ROW]):
            row += [(" ", "")] if index and index % _IN_A_BLOCK == 0 else []
            row.append(_LETTERS[state])
        yield row
    counts = Counter(states)
    legend = [f"{_LETTERS[state][0]} {state} {counts[state]}" for state in _LETTERS if counts[state]]
    yield [(f"       {', '.join(legend)}", "")]
