"""Detects lost ranks and nodes by counters that they move, on the watcher's monotonic clock.

Heartbeats show that a process is scheduled, progress that its main thread advances. Time that threads wait for a
processor does not count as silence, nor for progress that of the group's other ranks, but a share of it always does.
Counters move and are read every 1/4 heartbeat interval; 1.5 intervals without a change mean lost, so a silent process
is found within 2. That a signal has stopped a process is known from the kernel, and counts sooner.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

BEATS_PER_INTERVAL = 4
"""How often counters move, and are read, per heartbeat interval."""

STOP_POLL_S = 0.1
"""How often a supervisor reads whether the processes of its ranks are stopped."""

SHORT_STOP_S = 0.4
"""A process that is stopped for no longer costs no group, even if it is continued a little late."""

ENDED = "ended"
"""The last heartbeat of a node that ends by itself."""

_STOP_LIMIT_S = 0.5
_MOST_BETWEEN_POLLS_S = 2 * STOP_POLL_S
"""How much of the time between two polls counts at most: a watcher that was delayed or suspended has seen no more."""
_LIMIT_INTERVALS = 1.5
_LEAST_SHARE = 0.2
"""Share of the elapsed time that counts at least, however long threads lack a processor."""
_STALL_FACTOR = 10.0
"""An operation may take this many times as long as the slowest recent one of its kind: slow is not lost."""


class Operation(StrEnum):
    """What a rank's main thread is doing."""

    START = "start"
    COMPUTE = "compute"
    """The forward and backward pass of microbatches, layer by layer, and everything without a name of its own."""
    TRANSFER = "transfer"
    """A transfer between pipeline stages or a sum over lanes, waiting included."""
    REDUCE = "reduce"
    """The cross-group reduction, waiting for its communicator included."""
    SETTLE = "settle"
    """Agreement between the ranks of the group."""
    VOTE = "vote"
    """Casting the group's vote."""
    AWAIT_ENTRY = "await_entry"
    """Waiting for the next entry of the decision log."""
    UPDATE = "update"
    """The optimizer."""
    JOIN = "join"
    """Giving the state to a returning group, or taking it."""
    LOAD = "load"
    """Reading a checkpoint."""
    STORAGE = "storage"
    """Reading samples, or writing a journal line: both may be on storage that pauses for all groups. Or waiting between
    two steps for an examination of another machine.
    """
    CHECK = "check"
    """Hashing the parameters, or packing the whole state: local, and longer for larger models."""
    SAVE = "save"
    """Waiting for a checkpoint: for its copy of the state, or for storage."""
    PROFILE = "profile"
    """Starting torch's profiler, or writing its trace: it holds the interpreter's lock, so no heartbeat is sent."""
    END = "end"
    """Leaving the process, which no longer sends heartbeats and may have much memory to free."""


OPERATIONS = tuple(Operation)

_PATIENT = frozenset(
    {Operation.START, Operation.TRANSFER, Operation.SETTLE, Operation.VOTE, Operation.AWAIT_ENTRY, Operation.SAVE}
)
"""Operations that wait for others, the store or storage: the fault shows elsewhere, or by a timeout."""

_POLLING = frozenset({Operation.JOIN})
"""Operations that make progress all the time, whatever they wait for."""

_ALONE = frozenset({Operation.COMPUTE, Operation.STORAGE, Operation.CHECK, Operation.PROFILE})
"""Operations that need no other rank, tensor parallelism apart."""

HOLDING_UP = frozenset({Operation.STORAGE, Operation.PROFILE})
"""Operations during which the other ranks of the group, which may wait for this one, are not found lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a rank reports about itself."""

    beats: int
    """Moves while the process is scheduled."""
    progress: int
    operation: Operation
    step: int
    """The step of the pending operation; -1 before the first."""
    progress_at_s: float
    """When `progress` last moved, on the monotonic clock that the processes of a node share."""
    slowest_s: float
    """Longest recent time between two moves of `progress` in operations of this kind; 0 if unknown."""
    starved_s: float = 0.0
    """Total time that its threads have been ready to run without a processor."""
    waits: int = 0
    """Moves while its device waits for other groups, which may block its main thread."""


class FailureDetector:
    """Watches one rank.

    `first_limit_s` limits an operation's first run, unless it polls; every storage operation, because storage that
    pauses for all groups must not end them; and the silence of a rank that writes a profile.
    """

    def __init__(self, interval_s: float, first_limit_s: float, load_limit_s: float) -> None:
        self._interval_s = interval_s
        self._first_limit_s = first_limit_s
        self._load_limit_s = max(first_limit_s, load_limit_s)
        self._beats = _Counter()
        self._progress = _Counter()
        self._polled_at_s: float | None = None

    def poll(self, pulse: Pulse, now_s: float, *, group_starved_s: float, is_held_up: bool = False) -> str:
        """Why the rank is considered lost, for people; empty while it is not.

        `group_starved_s`: total time without a processor of all ranks of its group, from any origin. `is_held_up`:
        another rank of its group is in an operation of `HOLDING_UP` or waits for other groups, and this one may wait
        for it.
        """
        if self._polled_at_s is not None and now_s - self._polled_at_s > self._interval_s:
            # The watcher itself was suspended. What it missed is no evidence.
            self._beats, self._progress = _Counter(), _Counter()
        if is_held_up and pulse.operation not in HOLDING_UP:
            self._progress = _Counter()  # start anew: it continues a little later than the rank that it waits for
        self._polled_at_s = now_s
        silent_s = self._beats.unchanged_s(pulse.beats, now_s, pulse.starved_s)
        stuck_s = self._progress.unchanged_s(pulse.progress + pulse.waits, now_s, group_starved_s)
        if pulse.operation is Operation.END:
            return f"not ended for {silent_s:.1f} s" if silent_s >= self._first_limit_s else ""
        if pulse.operation is Operation.PROFILE:
            return f"no heartbeat for {silent_s:.1f} s" if silent_s >= self._first_limit_s else ""
        is_stuck = pulse.operation not in _PATIENT and stuck_s >= self._stall_limit_s(pulse)
        # A rank without heartbeats makes no progress either, and that may show first.
        if silent_s >= (0.5 if is_stuck else _LIMIT_INTERVALS) * self._interval_s:
            return f"no heartbeat for {silent_s:.1f} s"
        return f"no progress for {stuck_s:.1f} s" if is_stuck else ""

    def _stall_limit_s(self, pulse: Pulse) -> float:
        if pulse.operation is Operation.LOAD:
            return self._load_limit_s
        if pulse.operation is Operation.STORAGE:
            return self._first_limit_s
        if pulse.slowest_s == 0.0:
            is_quick = pulse.operation in _POLLING
            return min(_STALL_FACTOR * self._interval_s, self._first_limit_s) if is_quick else self._first_limit_s
        return max(_LIMIT_INTERVALS * self._interval_s, _STALL_FACTOR * pulse.slowest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What the kernel reports of a process."""

    is_stopped: bool = False
    """A signal has stopped it, and no debugger traces it."""
    num_switches: int = 0
    """Context switches of its main thread, which stand still while it is stopped."""
    killed_by: str = ""
    """Name of the signal that is ending it. Its exit may come much later: first its memory is freed."""


class StopDetector:
    """Finds out that a process stays stopped, or is being killed. Poll it every `STOP_POLL_S`."""

    def __init__(self) -> None:
        self._state = ProcessState()
        self._polled_at_s = 0.0
        self._stopped_s = 0.0

    def poll(self, state: ProcessState, now_s: float) -> str:
        """Why the process is considered lost, for people; empty while it is not."""
        if state.killed_by:
            return state.killed_by
        is_still_stopped = state.is_stopped and state == self._state
        passed_s = min(now_s - self._polled_at_s, _MOST_BETWEEN_POLLS_S)
        self._stopped_s = self._stopped_s + passed_s if is_still_stopped else 0.0
        self._state, self._polled_at_s = state, now_s
        return f"stopped for {self._stopped_s:.1f} s" if self._stopped_s >= _STOP_LIMIT_S else ""


def first_to_stop(pulses: Mapping[int, Pulse]) -> int:
    """The rank that the others of its group probably wait for: least dependent first, then longest without progress."""

    def order(rank: int) -> tuple[bool, bool, float, int]:
        operation = pulses[rank].operation
        return operation in _PATIENT, operation not in _ALONE, pulses[rank].progress_at_s, rank

    return min(pulses, key=order)


class Absence:
    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._beats = _Counter()
        self._polled_at_s: float | None = None

    def poll(self, beats: int, now_s: float) -> str:
        """Why the node is considered lost, for people; empty while it is not."""
        if self._polled_at_s is not None and now_s - self._polled_at_s > self._interval_s:
            self._beats = _Counter()
        self._polled_at_s = now_s
        silent_s = self._beats.unchanged_s(beats, now_s)
        return f"no heartbeat for {silent_s:.1f} s" if silent_s >= _LIMIT_INTERVALS * self._interval_s else ""


class _Counter:
    """A counter, and since when it has its value."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._since_s = self._starved_since_s = 0.0

    def unchanged_s(self, value: int, now_s: float, starved_s: float = 0.0) -> float:
        """Seconds without a change, less those without a processor, but at least a share of the elapsed time."""
        if value != self._value:
            self._value, self._since_s, self._starved_since_s = value, now_s, starved_s
        passed_s = now_s - self._since_s
        return max(passed_s - (starved_s - self._starved_since_s), _LEAST_SHARE * passed_s)
