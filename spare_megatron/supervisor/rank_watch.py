"""Finds the ranks of a node that have stopped, by their heartbeats and by the state that the kernel reports."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from spare_megatron.core.machines.failure_detector import (
    HOLDING_UP,
    FailureDetector,
    ProcessState,
    Pulse,
    StopDetector,
    first_to_stop,
)
from spare_megatron.process.processes import describe_exit
from spare_megatron.process.reports import RankKey
from spare_megatron.stacking.layout import GroupId
from spare_megatron.supervisor.rank_processes import RankProcesses

_QUIET_INTERVALS = 10.0
"""A group that is not up yet and has made no progress for so many heartbeat intervals is stuck."""


_TRACER = re.compile(rb"^TracerPid:\t(\d+)", re.MULTILINE)
_SWITCHES = re.compile(rb"^(?:non)?voluntary_ctxt_switches:\t(\d+)", re.MULTILINE)
_FILE_BYTES = 4096
_FLAGS, _EXIT_CODE = 9 - 3, 52 - 3
"""Places of these fields of `stat` behind the name of the program."""
_IS_EXITING = 0x4
"""PF_EXITING of the kernel, of a thread that no longer runs a program."""
_SIGNAL_OF_CODE = 0x7F


def read_state(pid: int) -> ProcessState:
    """State of the process (proc(5)): `T` in `stat` is stopped by a signal, `t` by a debugger. `status`, which takes
    several times as long to read, is read of a stopped process alone.
    """
    try:
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if int(fields[_FLAGS]) & _IS_EXITING and (number := int(fields[_EXIT_CODE]) & _SIGNAL_OF_CODE):
            return ProcessState(killed_by=describe_exit(-number))
        if fields[0] != b"T":
            return ProcessState()
        status = _read(pid, "status")
    except OSError:  # it has ended
        return ProcessState()
    is_traced = _TRACER.findall(status) != [b"0"]
    return ProcessState(is_stopped=not is_traced, num_switches=sum(map(int, _SWITCHES.findall(status))))


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.read(_FILE_BYTES)


@dataclass
class RankWatch:
    """A failure detector for each watched rank. `group_timeout_s`: longest wait of a rank for others of its group.
    `load_timeout_s`: longest time for a rank to read a checkpoint. `read_state`: what the kernel reports of a process.
    """

    ranks: RankProcesses
    interval_s: float
    group_timeout_s: float
    load_timeout_s: float
    read_state: Callable[[int], ProcessState] = read_state

    def __post_init__(self) -> None:
        self._detectors: dict[RankKey, FailureDetector] = {}
        self._stop_detectors: dict[RankKey, StopDetector] = {}  # of the same ranks
        self._starved_s: dict[RankKey, float] = {}  # at the last poll
        self._waits: dict[RankKey, int] = {}  # likewise
        self._group_starved_s: defaultdict[GroupId, float] = defaultdict(float)  # never falls, though ranks end

    def start_watching(self, group: GroupId) -> None:
        """Watches the group's ranks on this node. Until then `control.startup_timeout_s` limits them."""
        for key in self.ranks.of(group):
            self._detectors[key] = self._new_detector()
            self._stop_detectors[key] = StopDetector()

    def stop_watching(self, *keys: RankKey) -> None:
        for key in keys:
            self._detectors.pop(key, None)
            self._stop_detectors.pop(key, None)
            self._starved_s.pop(key, None)
            self._waits.pop(key, None)

    def is_watched(self, group: GroupId) -> bool:
        return any(key in self._detectors for key in self.ranks.of(group))

    def is_getting_on(self, group: GroupId, now_s: float) -> bool:
        """Whether the group is not watched because it is not up yet, but one of its ranks has made progress lately."""
        progress_at_s = max(self.ranks.pulse(key).progress_at_s for key in self.ranks.of(group))
        return not self.is_watched(group) and now_s - progress_at_s < _QUIET_INTERVALS * self.interval_s

    def forgive(self) -> None:
        """Restarts all detectors, so that what happened up to now does not count."""
        self._detectors = {key: self._new_detector() for key in self._detectors}
        self._stop_detectors = {key: StopDetector() for key in self._detectors}

    def find_lost(self, now_s: float, known: Collection[GroupId]) -> Iterator[tuple[GroupId, int, str]]:
        """Yields groups with a rank that has stopped: group, the rank that stopped first, and the cause. `known` has
        the groups that are lost already; the caller adds each group that it receives. `now_s` is monotonic.
        """
        pulses = {key: self.ranks.pulse(key) for key in self._detectors}
        self._add_starvation(pulses)
        holding = {
            key
            for key, pulse in pulses.items()
            if pulse.operation in HOLDING_UP or pulse.waits != self._waits.get(key, pulse.waits)
        }
        self._waits = {key: pulse.waits for key, pulse in pulses.items()}
        causes = {key: cause for key, pulse in pulses.items() if (cause := self._judge(key, pulse, holding, now_s))}
        for (group, rank), cause in causes.items():
            if group not in known:
                peers = {key[1]: pulse for key, pulse in pulses.items() if key[0] == group}
                stopped = rank if "heartbeat" in cause else first_to_stop(peers)
                pulse = peers[stopped]
                yield group, stopped, f"{cause} in {pulse.operation} of step {pulse.step}"

    def find_stopped(self, now_s: float, known: Collection[GroupId]) -> Iterator[tuple[GroupId, int, str]]:
        """Yields likewise the groups with a process that a signal stops or ends; for every `STOP_POLL_S`."""
        pids = self.ranks.pids
        states = {key: self.read_state(pids[key]) for key in self._stop_detectors}
        causes = {key: detector.poll(states[key], now_s) for key, detector in self._stop_detectors.items()}
        for (group, rank), cause in causes.items():
            if cause and group not in known:
                pulse = self.ranks.pulse((group, rank))
                is_killed = bool(states[group, rank].killed_by)
                yield group, rank, cause if is_killed else f"{cause} in {pulse.operation} of step {pulse.step}"

    def _judge(self, key: RankKey, pulse: Pulse, holding: Collection[RankKey], now_s: float) -> str:
        group = key[0]
        is_held_up = any(peer in holding for peer in self.ranks.of(group) if peer != key)
        return self._detectors[key].poll(
            pulse, now_s, group_starved_s=self._group_starved_s[group], is_held_up=is_held_up
        )

    def _add_starvation(self, pulses: Mapping[RankKey, Pulse]) -> None:
        for key, pulse in pulses.items():
            self._group_starved_s[key[0]] += pulse.starved_s - self._starved_s.get(key, pulse.starved_s)
            self._starved_s[key] = pulse.starved_s

    def _new_detector(self) -> FailureDetector:
        return FailureDetector(self.interval_s, self.group_timeout_s, self.load_timeout_s)
