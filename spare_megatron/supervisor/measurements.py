"""Measures what the ranks of a node did in some steps, and what their machine showed meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from spare_megatron.core.machines.failure_detector import OPERATIONS, Operation
from spare_megatron.core.slow_machines.culprit import MachineSigns, RankTimes
from spare_megatron.machine.machine_signs import MachineCounters, read_machine, starved_s, throttled_s
from spare_megatron.process.heartbeats import HeartbeatPage
from spare_megatron.process.reports import NodeMeasured, RankKey
from spare_megatron.stacking.layout import MachineId
from spare_megatron.supervisor.rank_processes import RankProcesses

_LEAST_STEPS = 4
_LEAST_S = 2.0
"""A window has so many steps of every rank, and takes so long, at least."""
_TOTALS = [one.name for one in fields(RankTimes) if one.name not in ("machine", "group", "rank", "device")]
_WAITS = (Operation.SETTLE, Operation.VOTE, Operation.AWAIT_ENTRY)


@dataclass(frozen=True, slots=True)
class _Begin:
    """When a window began, and the totals at that time: of ranks, of the machine, and of answers of the store."""

    at_s: float
    ranks: dict[RankKey, tuple[int, RankTimes]]
    """Each with the id of its process, which began its totals with its first step."""
    machine: MachineCounters
    answers: tuple[int, float]


@dataclass
class Measurements:
    """The windows of one node. `answers` returns how often the control store has answered, and the seconds in all;
    `clocks` of each GPU why its clock is reduced.
    """

    ranks: RankProcesses
    machine: MachineId
    answers: Callable[[], tuple[int, float]]
    clocks: Callable[[], Sequence[str]]
    _begin: _Begin | None = None

    def poll(self, now_s: float) -> NodeMeasured | None:
        """The window that has ended by this monotonic time, if one has; another begins then."""
        begin = self._begin
        if begin is None:
            self._begin = self._read(now_s)
            return None
        if now_s - begin.at_s < _LEAST_S or not self._has_steps(begin):
            return None
        end = self._begin = self._read(now_s)
        times = []
        for key, (pid, ended) in end.ranks.items():
            began_pid, began = begin.ranks.get(key, (None, ended))
            if began_pid == pid and ended.num_steps > began.num_steps:
                passed = {name: getattr(ended, name) - getattr(began, name) for name in _TOTALS}
                times.append(replace(ended, **passed))
        if not times:
            return None
        window_s = end.at_s - begin.at_s
        clocks = self.clocks() if any(self.ranks.device_index(key) is not None for key in end.ranks) else ()
        times = [replace(one, device=self._clock_of((one.group, one.rank), clocks)) for one in times]
        return NodeMeasured(
            machine=self.machine,
            step_s=window_s / max(one.num_steps for one in times),
            ranks=tuple(times),
            signs=_signs(begin, end, window_s),
        )

    def _clock_of(self, key: RankKey, clocks: Sequence[str]) -> str:
        index = self.ranks.device_index(key)
        return "" if index is None or index >= len(clocks) else clocks[index]

    def _has_steps(self, begin: _Begin) -> bool:
        """Whether some rank has done enough steps since, or since its process began; whole groups may be gone."""
        began = {(key, pid): times.num_steps for key, (pid, times) in begin.ranks.items()}
        return any(page.num_steps - began.get((key, pid), 0) >= _LEAST_STEPS for key, pid, page in self._pages())

    def _pages(self) -> Iterator[tuple[RankKey, int, HeartbeatPage]]:
        for key, pid in self.ranks.pids.items():
            # The ranks of a group with fewer stages compute more than those at their position elsewhere.
            if self.ranks.stages[key[0]] is None and (page := self.ranks.page(key)) is not None:
                yield key, pid, page

    def _read(self, now_s: float) -> _Begin:
        ranks = {key: (pid, self._totals(key, pid, page)) for key, pid, page in self._pages()}
        return _Begin(now_s, ranks, read_machine(), self.answers())

    def _totals(self, key: RankKey, pid: int, page: HeartbeatPage) -> RankTimes:
        spent_s = dict(zip(OPERATIONS, page.spent_s, strict=True))
        return RankTimes(
            machine=self.machine,
            group=key[0],
            rank=key[1],
            num_steps=page.num_steps,
            num_passes=page.num_passes,
            pass_s=page.pass_s,
            data_s=page.reading_s,
            transfer_s=spent_s[Operation.TRANSFER],
            reduce_s=spent_s[Operation.REDUCE],
            wait_s=sum(spent_s[operation] for operation in _WAITS),
            starved_s=starved_s(pid),
            throttled_s=throttled_s(pid),
        )


def _signs(begin: _Begin, end: _Begin, window_s: float) -> MachineSigns:
    before, after = begin.machine, end.machine
    num_answers = end.answers[0] - begin.answers[0]
    return MachineSigns(
        answer_s=(end.answers[1] - begin.answers[1]) / max(1, num_answers),
        retransmitted_per_s=(after.retransmitted - before.retransmitted) / window_s,
        swapped_per_s=(after.swapped - before.swapped) / window_s,
        busy=(after.busy_ticks - before.busy_ticks) / max(1, after.ticks - before.ticks),
    )
