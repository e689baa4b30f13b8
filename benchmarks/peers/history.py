"""What happened in one run with faults, ours or a peer's, in the same few events; and what a fault cost in it."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import ContributionRecord, EntryRecord, FaultRecord, UpdateRecord

EventKind = Literal["fault", "computed", "discarded", "committed", "joined"]
NUM_WARMUP = 2
"""Steps at the start of a run, and committed steps after a fault, that are in no median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened to one group.

    Attributes:
        kind: `fault`: about to be hit. `computed`: microbatches back-propagated. `discarded`: what it had computed of
            the step was thrown away. `committed`: it knows that the step is committed. `joined`: the step is the first
            that it takes part in since it has come back.
        group: The group.
        step: The step, from 0.
        at_s: Wall-clock time, seconds since the epoch.
        num_microbatches: Those that were computed now, or that the committed sum counts; else 0.
    """

    kind: EventKind
    group: int
    step: int
    at_s: float
    num_microbatches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the faults of one step cost the groups that survive them.

    Attributes:
        to_commit_s: From the first fault until the last survivor knows of a commit of the step that was hit.
        steps_discarded: How often survivors threw away what they had computed of that step.
        microbatches_recomputed: Computed by survivors in that step beyond what they were first assigned.
        microbatches_counted: In the sum that was committed for that step.
        step_before_s: Median time between commits before the faults.
        step_after_s: The same after the step that was hit.
        counted_after: Median of the microbatches in the sums committed after that step.
    """

    to_commit_s: float
    steps_discarded: int
    microbatches_recomputed: int
    microbatches_counted: int
    step_before_s: float
    step_after_s: float
    counted_after: float


def read_events(files: Iterable[Path]) -> list[Event]:
    """The events that peers wrote, a JSON object a line, by their times. A line that a kill tore is left out."""
    lines = [line for file in files for line in file.read_text().split("\n")[:-1]]
    return sorted((Event(**json.loads(line)) for line in lines), key=lambda event: event.at_s)


def events_of_journal(journal: Journal) -> list[Event]:
    """Our journal in the same events."""
    events: list[Event] = []
    brought: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
    counted = {(record.group, record.step): record.num_microbatches for record in journal.of(UpdateRecord)}
    for line in journal.lines:
        match line.record:
            case FaultRecord(group=group, step=step):
                events.append(Event(kind="fault", group=group, step=step, at_s=line.at_s))
            case ContributionRecord(group=group, step=step, microbatches=microbatches):
                work = {(shard, index) for shard, indices in microbatches.items() for index in indices}
                before = brought[group, step]
                if not before <= work:
                    events.append(Event(kind="discarded", group=group, step=step, at_s=line.at_s))
                    before = set()
                events.append(_computed(group, step, line.at_s, len(work - before)))
                brought[group, step] = work
            case EntryRecord(group=group, entry={"entry": "commit", "step": int(step), **rest}):
                brought.pop((group, step), None)  # after a restart the step is computed again
                if (group, step) in counted:
                    events.append(_committed(group, step, line.at_s, counted[group, step]))
                for newcomer, _ in rest.get("admit", ()):
                    events.append(Event(kind="joined", group=newcomer, step=step + 1, at_s=line.at_s))
    return events


def cost_of(events: Sequence[Event], num_faults: int) -> Cost:
    """What the faults of the run cost.

    Raises:
        ValueError: Not all of that many faults fired in one step, survivors differ in what they committed, or the run
            is too short to tell.
    """
    faults = [event for event in events if event.kind == "fault"]
    hit, steps = {fault.group for fault in faults}, {fault.step for fault in faults}
    if len(faults) != num_faults or len(hit) != num_faults or len(steps) != 1:
        raise ValueError(f"{num_faults} faults in one step were to fire, these did: {faults}")
    step, struck_at_s = steps.pop(), min(fault.at_s for fault in faults)
    survived = [event for event in events if event.group not in hit]
    commits = [event for event in survived if event.kind == "committed"]
    hit_commits = {event.group: event for event in commits if event.step == step}
    if not hit_commits or hit_commits.keys() != {event.group for event in survived}:
        raise ValueError(f"step {step} was committed by groups {sorted(hit_commits)}, not by all survivors")
    counts = {event.num_microbatches for event in hit_commits.values()}
    if len(counts) != 1:
        raise ValueError(f"step {step}: survivors counted {sorted(counts)} microbatches")
    in_step = [event for event in survived if event.step == step]
    first = min(hit_commits)
    after = [event for event in commits if event.group == first and event.step > step]
    return Cost(
        to_commit_s=max(event.at_s for event in hit_commits.values()) - struck_at_s,
        steps_discarded=max(_number(in_step, group, "discarded") for group in hit_commits),
        microbatches_recomputed=sum(_recomputed(in_step, group) for group in hit_commits),
        microbatches_counted=counts.pop(),
        step_before_s=_median_step(commits, first, range(NUM_WARMUP, step)),
        step_after_s=_median_step(commits, first, range(step + NUM_WARMUP, step + 1_000_000)),
        counted_after=statistics.median(event.num_microbatches for event in after),
    )


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _computed(group: int, step: int, at_s: float, number: int) -> Event:
    return Event(kind="computed", group=group, step=step, at_s=at_s, num_microbatches=number)


def _committed(group: int, step: int, at_s: float, number: int) -> Event:
    return Event(kind="committed", group=group, step=step, at_s=at_s, num_microbatches=number)


def _number(events: Sequence[Event], group: int, kind: EventKind) -> int:
    return sum(event.group == group and event.kind == kind for event in events)


def _recomputed(events: Sequence[Event], group: int) -> int:
    computed = [event.num_microbatches for event in events if event.group == group and event.kind == "computed"]
    return sum(computed[1:])


def _median_step(commits: Sequence[Event], group: int, steps: range) -> float:
    times = [event.at_s for event in commits if event.group == group and event.step in steps]
    if len(times) < 2:
        raise ValueError(f"group {group} committed {len(times)} steps of {steps}; let the run be longer")
    return statistics.median(later - earlier for earlier, later in pairwise(times))
