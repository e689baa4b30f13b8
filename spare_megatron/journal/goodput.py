"""Where the wall time of a run went: useful steps, and every loss by its name."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from spare_megatron.journal.files import Journal
from spare_megatron.journal.fold import Committed, Fold
from spare_megatron.journal.records import EndRecord, EntryRecord, FaultRecord, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Useful time and losses add up to the wall time.

    Attributes:
        wall_s: From the run's record to its end.
        step_s: A quiet step: the median time between commits with all groups, no fault, no loss and nobody taken in.
        useful_s: The time of all committed steps, each counted with a quiet step's at most.
        goodput: Useful time over wall time.
        longest_pause_s: The longest time between two commits.
        lost_s: What the rest went to. `start`: before the first step. `rework`: up to the last of the steps that a
            restart from a checkpoint threw away. `restart`: from there to the first commit after the restart.
            `recovery`: steps in which a group was lost. `admission`: steps that begin with groups taken in.
            `fault`: steps with a fault that cost no group. `fewer_groups`: other steps without all groups. `scatter`:
            steps that took longer for none of these reasons. `end`: after the last commit.
    """

    wall_s: float
    step_s: float
    useful_s: float
    goodput: float
    longest_pause_s: float
    lost_s: Mapping[str, float]


def find_goodput(journal: Journal, fold: Fold) -> Goodput | None:
    """The goodput of a run that has ended; None if the journal lacks its beginning, its end or every step."""
    began = [line.at_s for line in journal.lines if isinstance(line.record, RunRecord)]
    ended = [line.at_s for line in journal.lines if isinstance(line.record, EndRecord)]
    at_s = entry_times(journal)
    commits = [commit for commit in fold.kept if commit.index in at_s]
    if not began or not ended or not commits:
        return None
    times_s = [began[0], *(at_s[commit.index] for commit in commits)]
    undone_s = _undone_s(commits, times_s, fold, at_s)
    intervals_s = [
        later - earlier - spent_s
        for (earlier, later), spent_s in zip(itertools.pairwise(times_s), undone_s, strict=True)
    ]
    causes = _causes(journal, fold, commits)
    quiet_s = [spent_s for spent_s, cause in zip(intervals_s, causes, strict=True) if cause == "scatter"]
    step_s = median(quiet_s or intervals_s)
    lost_s: dict[str, float] = defaultdict(float)
    if any(undone_s):
        lost_s["rework"] = sum(undone_s)
    for spent_s, cause in zip(intervals_s, causes, strict=True):
        lost_s[cause] += max(0.0, spent_s - step_s)
    lost_s["end"] = ended[0] - times_s[-1]
    wall_s = ended[0] - began[0]
    useful_s = sum(min(spent_s, step_s) for spent_s in intervals_s)
    return Goodput(
        wall_s=wall_s,
        step_s=step_s,
        useful_s=useful_s,
        goodput=useful_s / wall_s if wall_s > 0 else 0.0,
        longest_pause_s=max(intervals_s[1:], default=0.0),
        lost_s=dict(lost_s),
    )


def _undone_s(commits: list[Committed], times_s: list[float], fold: Fold, at_s: Mapping[int, float]) -> list[float]:
    """For each commit, the time that went into commits since the one before that a restart threw away."""
    undone = {commit.index: at_s[commit.index] for commit in fold.commits if commit.is_undone and commit.index in at_s}
    first_of = [-1, *(commit.index for commit in commits)]
    return [
        max((read_s - began_s for index, read_s in undone.items() if before < index < commit.index), default=0.0)
        for before, commit, began_s in zip(first_of, commits, times_s, strict=False)
    ]


def entry_times(journal: Journal) -> dict[int, float]:
    """Log index -> when the entry was read: the median over the groups, one of whose clocks may have jumped."""
    read_s: dict[int, list[float]] = defaultdict(list)
    for line in journal.lines:
        if isinstance(line.record, EntryRecord):
            read_s[line.record.index].append(line.at_s)
    return {index: median(times_s) for index, times_s in read_s.items()}


def _causes(journal: Journal, fold: Fold, commits: list[Committed]) -> list[str]:
    """For each commit, what made the time since the commit before longer than that of a quiet step."""
    hit_after = {
        record.step if record.phase == "after_commit" else record.step - 1 for record in journal.of(FaultRecord)
    }
    everybody = max(len(commit.members) for commit in commits)
    causes = ["restart" if "restart" in _between(fold, -1, commits[0].index) else "start"]
    for before, commit in itertools.pairwise(commits):
        between = _between(fold, before.index, commit.index)
        if "restart" in between:
            causes.append("restart")
        elif "fence" in between:
            causes.append("recovery")
        elif commit.members - before.members:
            causes.append("admission")
        elif before.step in hit_after:
            causes.append("fault")
        else:
            causes.append("fewer_groups" if len(commit.members) < everybody else "scatter")
    return causes


def _between(fold: Fold, first: int, last: int) -> list[str | None]:
    """The kinds of the entries between two."""
    return [fold.entries.get(index, {}).get("entry") for index in range(first + 1, last)]
