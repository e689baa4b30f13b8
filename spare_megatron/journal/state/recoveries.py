"""How long each loss kept training waiting, by stage, from the records of the survivors."""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import EntryRecord, FaultRecord, LossRecord, RecoveryRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One recovery, timed on the survivor that finished its own compute last: it waits least for others."""

    step: int
    lost: tuple[int, ...]
    """Groups lost before the commit of the step, in one or several losses."""
    detect_s: float
    """To folding the fence: from the loss, or from the end of the survivor's own compute if later."""
    agree_s: float
    """To the decision whether the sum was complete."""
    patch_s: float
    rebuild_s: float
    """Waiting for the new communicator, which is built while the patch is computed."""
    reduce_s: float
    """From the new communicator to the commit."""
    total_s: float
    num_patched: int
    """Microbatches that all survivors have computed for it: what the lost groups still owed, or the whole step if its
    sums were discarded."""
    phase: str | None
    """Fault point of the injected fault; None if the loss was not injected."""


class Recoveries:
    """Collects lines in any order; returns the recoveries in the order of their steps.

    `num_recomputed` is `Recovery.num_patched`, summed over all of them. Steps that are begun anew without a loss (wrong
    sums) or after a pause or a restart are not in it.
    """

    def __init__(self) -> None:
        self.num_recomputed = 0
        self._by_step: dict[tuple[int, int], list[RecoveryRecord]] = defaultdict(list)
        self._struck: dict[int, list[tuple[float, FaultRecord | LossRecord]]] = defaultdict(list)
        self._admitted: dict[int, list[tuple[int, int, float]]] = defaultdict(list)  # step, incarnation, minus its time
        self._last_admitted: dict[int, list[tuple[int, int, float]]] = {}  # the same, the latest up to each step

    def add_line(self, line: Line) -> None:
        match line.record:
            case RecoveryRecord() as record:
                self._by_step[record.num_restarts, record.step].append(record)
                self.num_recomputed += record.num_patched
            case FaultRecord() | LossRecord() as record:
                self._struck[record.group].append((line.at_s, record))
            case EntryRecord(entry={"admit": [_, *_] as members, "step": step, "entry": kind}):
                after = step - 1 if kind == "resume" else step  # the end of a pause admits to the step itself
                for group, incarnation in members:
                    self._admitted[group].append((after, incarnation, -line.at_s))

    def __len__(self) -> int:
        return len(self._by_step)

    def found(self) -> tuple[Recovery, ...]:
        for struck in self._struck.values():
            struck.sort(key=lambda item: item[0])
        self._last_admitted = {
            group: list(accumulate(sorted(admitted), lambda last, item: (item[0], *max(last[1:], item[1:]))))
            for group, admitted in self._admitted.items()
        }
        return tuple(self._recovery(self._by_step[key]) for key in sorted(self._by_step))

    def _recovery(self, records: list[RecoveryRecord]) -> Recovery:
        """Ignores the step of a fault: a group that dies right after its vote is missed only in the next."""
        last = max(records, key=lambda record: record.computed_at_s)
        lost = tuple(sorted({group for record in records for group in record.lost}))
        faults: list[tuple[float, FaultRecord]] = []
        lost_at_s: list[float] = []
        for group in lost:
            struck = self._struck.get(group, [])
            first = bisect_right(struck, self._taken_in_at_s(group, last.step), key=lambda item: item[0])
            for at_s, record in struck[first:]:
                if isinstance(record, LossRecord):
                    lost_at_s.append(at_s)
                elif at_s <= last.noticed_at_s:
                    faults.append((at_s, record))
                    lost_at_s.append(at_s)
                if lost_at_s and at_s > last.noticed_at_s:
                    break  # the rest is later
        detect_s = max(0.0, last.noticed_at_s - max(last.computed_at_s, min(lost_at_s, default=last.computed_at_s)))
        return Recovery(
            step=last.step,
            lost=lost,
            detect_s=detect_s,
            agree_s=last.agree_s,
            patch_s=last.patch_s,
            rebuild_s=last.rebuild_s,
            reduce_s=last.reduce_s,
            total_s=detect_s + last.agree_s + last.patch_s + last.rebuild_s + last.reduce_s,
            num_patched=sum(record.num_patched for record in records),
            phase=min(faults, key=lambda item: item[0])[1].phase if faults else None,
        )

    def _taken_in_at_s(self, group: int, step: int) -> float:
        """When the group was last admitted before this step; what hit it earlier was another loss."""
        admitted = self._last_admitted.get(group, [])
        before = bisect_left(admitted, (step,))
        return -admitted[before - 1][2] if before else -math.inf


def read_recoveries(journal: Journal) -> Recoveries:
    recoveries = Recoveries()
    for line in journal.lines:
        recoveries.add_line(line)
    return recoveries


def find_recoveries(journal: Journal) -> tuple[Recovery, ...]:
    return read_recoveries(journal).found()
