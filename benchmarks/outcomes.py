"""What a run with kills came to, of any way to train, from the events that all of them leave."""

import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.peers.history import NUM_WARMUP, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """When the first group knew that a step is committed, for the first time where it is computed again later.

    Attributes:
        step: The step.
        at_s: Wall-clock time, seconds since the epoch.
        share: Microbatches in the committed sum over those that a whole step has.
    """

    step: int
    at_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run came to.

    Attributes:
        wall_s: From the first commit to the last.
        counted: Microbatches in the committed sums of that time, over those that a whole step has.
        quiet_s: Median time between the commits before the first kill, or before a group is slow for the first time.
        to_commit_s: Of each kill that struck, until the step that it hit, or a later one, is committed.
        longest_gap_s: The longer of the time between commits that it fell into and the next: some losses are noticed in
            the step after.
        pause_s: Of each return, by how much the first step of all took longer than a quiet one.
        thrown_away: Microbatches that groups computed to their end and that are in no sum that was kept, or are there
            because they were computed again after a restart, without those of the groups that were killed.
    """

    wall_s: float
    counted: float
    quiet_s: float
    to_commit_s: list[float]
    longest_gap_s: list[float]
    pause_s: list[float]
    thrown_away: int

    @property
    def goodput_by_own_steps(self) -> float:
        """Useful time over wall time, useful being what the counted microbatches take by this run's quiet steps."""
        return self.counted * self.quiet_s / self.wall_s


def commits_of(events: Sequence[Event], per_step: int) -> list[Commit]:
    """The commits in the order of their steps; `per_step` microbatches make a whole one."""
    first: dict[int, Event] = {}
    for event in events:
        if event.kind == "committed":
            first.setdefault(event.step, event)
    return [
        Commit(step=step, at_s=event.at_s, share=event.num_microbatches / per_step)
        for step, event in sorted(first.items())
    ]


def outcome_of(events: Sequence[Event], per_step: int, quiet_until_s: float = math.inf) -> Outcome:
    """What a run came to that went on for some steps after its last kill.

    Args:
        events: All of it, by their times.
        per_step: Microbatches of a whole step.
        quiet_until_s: Wall-clock time at which something else than a kill disturbs it first.
    """
    commits = commits_of(events, per_step)
    faults = [event for event in events if event.kind == "fault"]
    end_s = min([quiet_until_s, *(fault.at_s for fault in faults)])
    quiet = [commit for commit in commits[NUM_WARMUP:] if commit.at_s < end_s]
    quiet_s = statistics.median(later.at_s - earlier.at_s for earlier, later in pairwise(quiet))
    ended = {(event.group, event.step) for event in events if event.kind == "committed"}
    joined = {event.step for event in events if event.kind == "joined" and (event.group, event.step) in ended}
    took_s = {later.step: later.at_s - earlier.at_s for earlier, later in pairwise(commits)}
    at_s = [commit.at_s for commit in commits]
    to_commit_s, longest_gap_s = [], []
    for fault in faults:
        behind = max(bisect_left(at_s, fault.at_s), bisect_left(commits, fault.step, key=lambda commit: commit.step))
        to_commit_s.append(at_s[behind] - fault.at_s)
        longest_gap_s.append(max(took_s[commit.step] for commit in commits[behind : behind + 2]))
    return Outcome(
        wall_s=at_s[-1] - at_s[0],
        counted=sum(commit.share for commit in commits[1:]),
        quiet_s=quiet_s,
        to_commit_s=to_commit_s,
        longest_gap_s=longest_gap_s,
        pause_s=[took_s[step] - quiet_s for step in sorted(joined)],
        thrown_away=_thrown_away(events),
    )


def _thrown_away(events: Sequence[Event]) -> int:
    pending: dict[int, tuple[int, int]] = {}
    """Group -> the step that it is in and what it has computed of it."""
    done: Counter[tuple[int, int]] = Counter()
    lost = 0
    for event in events:
        step, number = pending.get(event.group, (event.step, 0))
        match event.kind:
            case "computed":
                lost += number if step != event.step else 0
                kept = number if step == event.step else 0
                pending[event.group] = event.step, kept + event.num_microbatches
            case "discarded":
                lost += number
                pending.pop(event.group, None)
            case "fault":
                pending.pop(event.group, None)
            case "committed":
                is_its_own = step == event.step
                lost += done[event.group, event.step] + (0 if is_its_own else number)
                done[event.group, event.step] = number if is_its_own else 0
                pending.pop(event.group, None)
    return lost
