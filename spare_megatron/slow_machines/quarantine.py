"""One machine's part in examinations, through the control store: of itself while it is in quarantine, and of others.

For the thread that calls the store. Examinations run in processes of their own (`slow_machines.examination`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from spare_megatron.core.machines.failure_detector import ENDED
from spare_megatron.core.machines.places import Places, Quarantine
from spare_megatron.core.slow_machines import examination_rules as examination
from spare_megatron.core.slow_machines.examination_rules import Figures, judge_examination
from spare_megatron.journal.records import ExaminationRecord
from spare_megatron.slow_machines.examination import ExaminationWanted
from spare_megatron.stacking.layout import MachineId
from spare_megatron.store import keys
from spare_megatron.store.interface import ControlStore, read_values, write_value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """An examination under way; `examined` is the machine whose quarantine it may end, which this one may replace."""

    examined: MachineId
    number: int
    helpers: tuple[MachineId, ...]
    begun_at_s: float


class Examinations:
    """The examinations that concern one machine. `start` has it do what an examination asks for."""

    def __init__(self, machine: MachineId, interval_s: float, start: Callable[[ExaminationWanted], None]) -> None:
        self._machine = machine
        self._interval_s = interval_s
        self._start = start
        self._last: dict[MachineId, int] = {}  # number of the last examination of each other machine that was seen
        self._open: _Open | None = None
        self._begins_at_s: float | None = None
        self._num_failed = 0

    def poll(self, store: ControlStore, places: Places) -> ExaminationRecord | None:
        """Does what is due. Returns the record of this machine's examination once it has ended; it has passed if
        `reason` is empty.
        """
        others = [one.machine for one in places.quarantines]
        own = places.quarantine_of(self._machine)
        if own is not None:
            others.remove(own.machine)
        self._help(store, others)
        if own is None:
            self._open, self._begins_at_s, self._num_failed = None, None, 0
            return None
        now_s = time.monotonic()
        if self._open is not None:
            return self._judge(store, self._open, now_s)
        if self._begins_at_s is None or now_s >= self._begins_at_s:
            self._begin(store, places, own, now_s)
        return None

    def _help(self, store: ControlStore, others: Sequence[MachineId]) -> None:
        """Does the same as other machines that are examined, if they ask for it."""
        wanted = read_values(store, [keys.examination(one) for one in others], tuple[int, list[MachineId]])
        for machine, (number, asked) in ((one, found) for one, found in zip(others, wanted, strict=True) if found):
            if self._last.get(machine) != number:
                self._last[machine] = number
                if self._machine in asked:
                    self._start(ExaminationWanted(examined=machine, number=number, helpers=tuple(asked)))

    def _begin(self, store: ControlStore, places: Places, own: Quarantine, now_s: float) -> None:
        held = [holding for holding in places.holders if holding.machine != own.machine]
        beats = store.get([keys.beat(holding.place) for holding in held]) if held else []
        others = [one.machine for one, beat in zip(held, beats, strict=True) if beat not in (None, ENDED)]
        (last,) = read_values(store, [keys.examination(own.machine)], tuple[int, list[MachineId]])
        number = 0 if last is None else last[0] + 1
        helpers = examination.helpers_of(own.machine, number, others)
        self._open = _Open(examined=own.machine, number=number, helpers=helpers, begun_at_s=now_s)
        write_value(store, keys.examination(own.machine), (number, helpers))
        self._start(ExaminationWanted(examined=own.machine, number=number, helpers=helpers, is_own=True))

    def _judge(self, store: ControlStore, of: _Open, now_s: float) -> ExaminationRecord | None:
        by = [self._machine, *of.helpers]
        figures = read_values(store, [keys.examined(of.examined, of.number, one) for one in by], Figures)
        limit_s = examination.LIMIT_INTERVALS * self._interval_s
        if figures[0] is None:
            limit_s = max(limit_s, examination.LEAST_LIMIT_S)
        if None in figures and now_s < of.begun_at_s + limit_s:
            return None
        found = {one: of_one for one, of_one in zip(by, figures, strict=True) if of_one is not None}
        own = found.pop(self._machine, None)
        reason = judge_examination(own, found)
        self._open, wait_s = None, 0.0
        if reason:
            self._num_failed += 1
            wait_s = examination.wait_s(self._num_failed, self._interval_s)
            self._begins_at_s = now_s + wait_s
        store.delete([keys.examined(of.examined, of.number, one) for one in by])
        return ExaminationRecord(
            machine=self._machine,
            number=of.number,
            reason=reason,
            wait_s=wait_s,
            own=None if own is None else asdict(own),
            likes={str(machine): asdict(figures) for machine, figures in found.items()},
        )
