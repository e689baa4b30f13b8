"""What a person asks first in the morning: is the run healthy, what happened, and what did it cost."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spare_megatron.formats.quantities import format_duration
from spare_megatron.journal import event_texts
from spare_megatron.journal.event_texts import EventKind, EventLine
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.proofs.audit_history import text_of_spoiled
from spare_megatron.journal.state.goodput import Goodput
from spare_megatron.journal.state.run_state import RunState
from spare_megatron.journal.state.summary import NOT_RUN

Proof = tuple[str, tuple[str, ...]]
"""Verdict of `spare check` and its reasons."""
UNPROVEN: Proof = (NOT_RUN, ())
NO_STEP_S, RESTART_S, NOT_SAVED_S = 600.0, 900.0, 3600.0
"""As in the alarms of Prometheus: age of the last commit from which on it is one, of a restart and of a failed save up
to which they are."""
_CAUSES: Mapping[EventKind, Sequence[str]] = {
    "loss": ("recovery", "fewer_groups"),
    "injected fault": ("fault",),
    "return": ("admission",),
    "pause": ("pause",),
    "restart": ("rework", "restart"),
    "evaluation": ("evaluation",),
}
"""Causes in `Goodput.lost_s` whose time events of a kind have cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """All events of one kind. `num_masked`: losses whose step was committed without a pause or restart. `cost_s`: time
    beyond quiet steps, or of saves without training; None: not counted apart.
    """

    kind: EventKind
    count: int
    num_masked: int | None
    cost_s: float | None
    first_at_s: float
    last: EventLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Health of a run, its events from `since_s` on by kind, and `goodput` from the last commit before that on, None
    without a commit. `device_hours` are of all ranks, which have a GPU each or share processors.
    """

    health: Literal["healthy", "unproven", "not healthy"]
    alarms: tuple[str, ...]
    proof: str
    since_s: float
    until_s: float
    happened: tuple[Happened, ...]
    goodput: Goodput | None
    device: Literal["GPU", "CPU"]
    device_hours: float


def overview_of(
    run_state: RunState, now_s: float, proof: Proof, *, window_s: float, further: Sequence[str] = ()
) -> Overview:
    """The answers for the last `window_s` seconds before now or the end; `further` alarms are not of the journal.

    The journal of a run that goes on has no end, so that the verdict `unknown` is no alarm then.
    """
    until_s = run_state.until_s(now_s)
    since_s = max(run_state.began_s, until_s - window_s)
    alarms = [*_alarms(run_state, until_s), *further]
    text = "; ".join((f"spare check: {proof[0]}", *proof[1][:1]))
    if proof[0] == "unknown" and run_state.end is None:
        text = "spare check finds nothing wrong so far"
    elif proof[0] not in ("valid", NOT_RUN):
        alarms.append(text)
    goodput, run = run_state.goodput(now_s, since_s), run_state.run
    num_devices = 0 if run is None else run.num_processors or run.most_groups * run.ranks_per_group
    return Overview(
        health="not healthy" if alarms else "unproven" if proof[0] == NOT_RUN else "healthy",
        alarms=tuple(alarms),
        proof=text,
        since_s=since_s,
        until_s=until_s,
        happened=tuple(_happened(run_state, since_s, {} if goodput is None else goodput.lost_s)),
        goodput=goodput,
        device="CPU" if run is not None and run.num_processors else "GPU",
        device_hours=0.0 if goodput is None else num_devices * goodput.wall_s / 3600,
    )


def _alarms(run_state: RunState, until_s: float) -> Iterator[str]:
    end = run_state.end
    if end is not None and end.outcome not in ("finished", "stopped"):
        yield event_texts.text_of_end(end, "")
    if end is None and run_state.folding is not None:
        yield from _passing_alarms(run_state, run_state.folding, until_s)
    for machine, one in sorted(run_state.quarantined.items()):  # also at the end: it is still to be mended
        failed = f"; last examination: {one.failed}" if one.failed else ""
        yield f"in quarantine: machine {machine}, {one.cause}: {one.reason}{failed}"
    if run_state.spoiled is not None:
        yield text_of_spoiled(run_state.spoiled)
    if run_state.storage is not None:
        stale = "lines stay in memory until there is room, and the figures here are as old as the last one written"
        yield f"incomplete: {event_texts.describe_storage(run_state.storage)}" + ("" if end else f"; {stale}")
    for text in run_state.damage[:1]:
        yield f"damaged: {text}"


def _passing_alarms(run_state: RunState, fold: Fold, until_s: float) -> Iterator[str]:
    """Alarms that the end of a run ends."""
    placement, members = fold.terms.placement, frozenset(fold.members)
    if run_state.awaited:
        yield f"paused: no group left hosts {event_texts.shards_named(run_state.awaited)}"
    elif not fold.terms.last_resort and placement.alive_mask(members)[placement.host_array].sum(1).min() <= 1:
        yield "a shard has one host left, whose loss pauses the run or costs a restart"
    if until_s - run_state.committed_at_s > NO_STEP_S:
        yield f"no step has been committed for more than {format_duration(NO_STEP_S)}"
    if run_state.culprit is not None:
        yield f"held back: {event_texts.text_of_culprit(run_state.culprit)}"
    if given_up := [group for group, status in enumerate(run_state.groups()) if status == "given up"]:
        yield f"{event_texts.groups_named(given_up)} given up: spare.rejoins is used up"
    for kind, age_s in (("restart", RESTART_S), ("failed save", NOT_SAVED_S)):
        yield from [event.text for event in run_state.events(until_s - age_s) if event.kind == kind][-1:]


def _happened(run_state: RunState, since_s: float, lost_s: Mapping[str, float]) -> Iterator[Happened]:
    by_kind: dict[EventKind, list[EventLine]] = {}
    for event in run_state.events(since_s):
        by_kind.setdefault(event.kind, []).append(event)
    stalls_s = {record.step: record.stall_s for at_s, record in run_state.checkpoints if at_s >= since_s}
    for kind, events in by_kind.items():
        known = [lost_s[cause] for cause in _CAUSES.get(kind, ()) if cause in lost_s]
        yield Happened(
            kind=kind,
            count=len(events),
            num_masked=_num_masked(run_state, since_s) if kind == "loss" else None,
            cost_s=sum(stalls_s.values()) if kind == "checkpoint" else sum(known) if known else None,
            first_at_s=events[0].at_s,
            last=events[-1],
        )


def _num_masked(run_state: RunState, since_s: float) -> int:
    fold, num_masked = run_state.folding, 0
    if fold is None:
        return 0
    restarts = sorted(fold.restarts)
    for loss in [record for at_s, record in run_state.losses if at_s >= since_s]:
        place = bisect_right(fold.commits, loss.entry_index, key=lambda commit: commit.index)
        for commit in fold.commits[place : place + 1]:
            before, after = (bisect_right(restarts, index) for index in (loss.entry_index, commit.index))
            num_masked += before == after and (after, commit.step) not in fold.resumed
    return num_masked
