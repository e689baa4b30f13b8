"""Goodput, which divides the wall time into useful steps and losses by cause, and throughput of the steps."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from spare_megatron.journal.files import Journal
from spare_megatron.journal.fold import Members
from spare_megatron.journal.records import FaultRecord, RedundancyRecord
from spare_megatron.journal.run_record import RunRecord

Times = npt.NDArray[np.float64]
T = TypeVar("T", float, npt.NDArray[np.float64])
"""One step, or an array with one element per step."""


_MOST_READERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Useful time and losses, which add up to the wall time."""

    wall_s: float
    """From the run record, or a later commit, to the end."""
    step_s: float
    """A quiet step: median time between commits with all ranks and without fault, loss or admission."""
    useful_s: float
    """Time of all committed steps, at most `step_s` for each."""
    goodput: float
    longest_pause_s: float
    lost_s: Mapping[str, float]
    """The rest, by cause. `rework`: up to the last step that a restart or an undo made void. `end`: after the last
    commit. The others count time beyond `step_s`. `start`: up to the first commit. `restart`: from the end of the
    rework to the next commit. `pause`: steps with a pause. `recovery`: others with a loss. `admission`: first steps
    with admitted groups. `evaluation`: steps after one. `fault`: with a fault that cost no group. `fewer_groups`: other
    steps without all ranks. `scatter`: quiet steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A commit that no restart has undone."""

    index: int
    step: int
    num_ranks: int
    """Of the groups that took part."""
    cause: str
    """Why the time since the previous commit exceeds a quiet step, empty if nothing."""
    undone: tuple[int, ...]
    """Log indices of undone commits in between."""


def cause_of(met: Collection[str], *, is_first: bool, has_newcomers: bool) -> str:
    """Cause of the time between two commits beyond a quiet step, by the kinds of entries `met`; empty if none."""
    if "restart" in met:
        return "restart"
    if is_first:
        return "start"
    if "resume" in met:
        return "pause"
    if "fence" in met:
        return "recovery"
    if has_newcomers:
        return "admission"
    return "evaluation" if "evaluated" in met else ""


class Stretches:
    """The time between commits, by cause; entries are added in log order."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._undone: list[int] = []
        self._met: set[str] = set()  # kinds of entries since the last commit
        self._before: Members = frozenset()

    def add_entry(self, index: int, entry: Mapping[str, Any], members: Members, num_ranks: int) -> None:
        """Adds an entry, before which the members took part, with so many ranks."""
        kind = entry["entry"]
        if kind in ("restart", "undo"):
            while self._kept and self._kept[-1].step >= entry["step"]:
                self._undone.append(self._kept.pop().index)
        if kind != "commit":
            self._met.add(kind)
            return
        kept = _Kept(
            index=index,
            step=entry["step"],
            num_ranks=num_ranks,
            cause=self._cause(members),
            undone=tuple(self._undone),
        )
        self._kept.append(kept)
        self._undone.clear()
        self._met.clear()
        self._before = members

    def _cause(self, members: Members) -> str:
        return cause_of(self._met, is_first=not self._kept, has_newcomers=bool(members - self._before))

    def goodput(
        self,
        at_s: Callable[[npt.NDArray[np.intp]], Times],
        span_s: tuple[float, float],
        hit_after: Collection[int],
        since_s: float = 0.0,
    ) -> Goodput | None:
        """Goodput so far; None without a commit whose time is known.

        `at_s` gives the times in seconds at which log entries were read, NaN if unknown; `span_s` is start and end of
        the run; `hit_after` are steps whose commits were followed by a fault. Counts from the last commit before the
        first one at `since_s` or later; a quiet step is that of the whole run.
        """
        times = at_s(np.array([kept.index for kept in self._kept], np.intp))
        chosen = [kept for kept, is_known in zip(self._kept, ~np.isnan(times), strict=True) if is_known]
        if not chosen:
            return None
        began_s, ended_s = span_s
        times_s = np.concatenate(([began_s], times[~np.isnan(times)]))
        rework_s = np.zeros(len(chosen))
        for position, kept in enumerate(chosen):
            if kept.undone:
                undone_s = at_s(np.array(kept.undone, np.intp))
                rework_s[position] = max(undone_s[~np.isnan(undone_s)] - times_s[position], default=0.0)
        first = int(np.append(times_s[1:] >= since_s, True).argmax())
        return _sum_up(np.diff(times_s) - rework_s, rework_s, _causes(chosen, hit_after), times_s, ended_s, first)


def _causes(chosen: list[_Kept], hit_after: Collection[int]) -> list[str]:
    """Cause of each interval that ends with a commit; `scatter` for a quiet step."""
    most_ranks = max(kept.num_ranks for kept in chosen)
    causes = ["restart" if chosen[0].cause == "restart" else "start"]
    for before, kept in itertools.pairwise(chosen):
        cause = kept.cause or ("fault" if before.step in hit_after else "")
        causes.append(cause or ("fewer_groups" if kept.num_ranks < most_ranks else "scatter"))
    return causes


def _sum_up(
    intervals_s: Times, rework_s: Times, causes: list[str], times_s: Times, ended_s: float, first: int
) -> Goodput:
    """Sums up the intervals from the one of number `first` on."""
    is_quiet = np.array([name == "scatter" for name in causes])
    step_s = median((intervals_s[is_quiet] if is_quiet.any() else intervals_s).tolist())
    intervals_s, rework_s, times_s = intervals_s[first:], rework_s[first:], times_s[first:]
    names, of_commit = np.unique(np.array(causes[first:]), return_inverse=True)
    lost_s: dict[str, float] = {"rework": float(rework_s.sum())} if rework_s.any() else {}
    spent_s = np.bincount(of_commit, weights=np.maximum(0.0, intervals_s - step_s))
    lost_s |= {str(name): float(spent) for name, spent in zip(names, spent_s, strict=True)}
    lost_s["end"] = float(ended_s - times_s[-1])
    wall_s = float(ended_s - times_s[0])
    useful_s = float(np.minimum(intervals_s, step_s).sum())
    return Goodput(
        wall_s=wall_s,
        step_s=step_s,
        useful_s=useful_s,
        goodput=useful_s / wall_s if wall_s > 0 else 0.0,
        longest_pause_s=float(intervals_s[first == 0 :].max(initial=0.0)),
        lost_s=lost_s,
    )


class EntryTimes:
    """When each log entry was read: the median over the groups (by id modulo `_MOST_READERS`), as clocks may jump."""

    def __init__(self) -> None:
        self._read_s = np.full((256, 1), np.nan)
        self._median_s = np.full(256, np.nan)
        self._changed_from = 0
        self._end = 0

    def add_read(self, index: int, group: int, at_s: float) -> None:
        """The earliest time counts: a group that returns reads old entries again."""
        column = group % _MOST_READERS
        height, width = self._read_s.shape
        if index >= height or column >= width:
            grown = np.full((max(height, 2 * index if index >= height else 0), max(width, column + 1)), np.nan)
            grown[:height, :width] = self._read_s
            self._read_s = grown
            self._median_s = np.concatenate((self._median_s, np.full(len(grown) - height, np.nan)))
        if not self._read_s[index, column] <= at_s:
            self._read_s[index, column] = at_s
            self._changed_from = min(self._changed_from, index)
            self._end = max(self._end, index + 1)

    def __call__(self, indices: npt.NDArray[np.intp]) -> Times:
        """Read times of these entries; NaN for unread ones."""
        if self._changed_from < self._end:
            changed = slice(self._changed_from, self._end)
            ordered = np.sort(self._read_s[changed], axis=1)  # NaN come last
            count = (~np.isnan(ordered)).sum(axis=1)
            rows = np.arange(len(ordered))
            self._median_s[changed] = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2 - (count == 0)]) / 2
            self._changed_from = self._end
        is_there = indices < len(self._median_s)
        return np.where(is_there, self._median_s[np.where(is_there, indices, 0)], np.nan)


def step_before(fault: FaultRecord) -> int:
    """The step whose commit the fault followed."""
    return fault.step if fault.phase == "after_commit" else fault.step - 1


def full_redundancy_s(journal: Journal) -> tuple[float, ...]:
    """Seconds from each loss of copies of state partitions until every partition had all of its hosts again.

    By the group with the most redundancy records, without losses that were never made good.
    """
    seen: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for line in journal.lines:
        if isinstance(line.record, RedundancyRecord):
            seen[line.source].append((line.at_s, line.record.num_missing))
    spans: list[float] = []
    since_s: float | None = None
    for at_s, num_missing in max(seen.values(), key=len, default=[]):
        if num_missing and since_s is None:
            since_s = at_s
        elif not num_missing and since_s is not None:
            spans.append(at_s - since_s)
            since_s = None
    return tuple(spans)


def tokens_per_second(run: RunRecord, step_s: T) -> T | None:
    """Tokens of the global batch per second; None if their number is unknown."""
    return run.tokens_per_step / step_s if run.tokens_per_step else None


def tflops_per_rank(run: RunRecord, step_s: T, num_ranks: T) -> T | None:
    """Model TFLOPS of each rank that took part, redundant computation excluded; None if unknown."""
    return run.flops_per_step / step_s / num_ranks / 1e12 if run.flops_per_step else None


def flops_utilization(run: RunRecord, step_s: T, num_ranks: T) -> T | None:
    """Model FLOPs utilization (MFU) of the ranks that took part; None if FLOPs or peak are unknown."""
    tflops = tflops_per_rank(run, step_s, num_ranks)
    return None if tflops is None or run.peak_tflops is None else tflops / run.peak_tflops
