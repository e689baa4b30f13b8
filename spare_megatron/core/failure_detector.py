"""Is a rank, or a node, still there? Judged by counters that it moves, on the watcher's own clock.

A beat says that a process is scheduled at all; progress says that its main thread gets on with its work. Only
differences of the watcher's monotonic clock count, so that clocks that jump or differ between machines mean nothing.
Time that a rank spends ready to run, waiting for a processor, is not its own and does not count. Of its progress that
of the other ranks of its group does not count, either: it may wait for them in the middle of any operation. But a part
of the time always counts: on a busy machine threads that wake up every few milliseconds to find nothing to do wait for
a processor most of the time, and several of them together longer than time passes, also in a rank that hangs.

Times, in heartbeat intervals: counters move every 1/4, are looked at every 1/4, and stand for lost after 1.5 without
a change, so that whoever stops is found within 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

BEATS_PER_INTERVAL = 4
"""How often counters move, and are looked at, in one heartbeat interval."""

ENDED = "ended"
"""The last beat of a node that ends by itself."""

_LIMIT_INTERVALS = 1.5
_LEAST_SHARE = 0.2
"""Of the time that passes, what counts at least, whoever lacks a processor."""
_STALL_FACTOR = 10.0
"""An operation may take this many times as long as the slowest of its kind lately: slow is not lost."""


class Operation(StrEnum):
    """What a rank's main thread is about."""

    START = "start"
    COMPUTE = "compute"
    """The forward and backward pass of microbatches, layer by layer, and all that has no name of its own."""
    TRANSFER = "transfer"
    """A transfer between pipeline stages, waiting included."""
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
    """Giving the state to a group that comes back, or taking it."""
    LOAD = "load"
    """Reading a checkpoint."""
    STORAGE = "storage"
    """Reading samples, or handing a line of the journal to the system: both may lie on storage that pauses for all."""
    CHECK = "check"
    """Hashing the parameters, or packing the whole state: alone, and the longer the larger the model."""
    SAVE = "save"
    """Waiting for a checkpoint: for its copy of the state, or for storage, which may take its time."""
    END = "end"
    """Leaving the process, which beats no more and may have much to give back."""


OPERATIONS = tuple(Operation)

_PATIENT = frozenset(
    {
        Operation.START,
        Operation.TRANSFER,
        Operation.SETTLE,
        Operation.VOTE,
        Operation.AWAIT_ENTRY,
        Operation.SAVE,
    }
)
"""Operations in which a rank waits for others, for the store or for storage: who is at fault shows elsewhere, or by a
timeout."""

_POLLING = frozenset({Operation.JOIN})
"""Operations that make progress all the time, whoever they wait for."""

_ALONE = frozenset({Operation.COMPUTE, Operation.STORAGE, Operation.CHECK})
"""Operations that need nobody else, tensor parallelism apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a rank shows of itself.

    Attributes:
        beats: Moves while the process is scheduled.
        progress: Moves with every operation, and inside long ones.
        operation: The pending operation.
        step: The step it belongs to; -1 before the first.
        progress_at_s: When `progress` last moved, by the monotonic clock that the processes of a node share.
        slowest_s: Longest time between two moves of `progress` in operations of this kind lately; 0 if unknown.
        starved_s: For how long its threads have been ready to run and had no processor, since they began, added up.
    """

    beats: int
    progress: int
    operation: Operation
    step: int
    progress_at_s: float
    slowest_s: float
    starved_s: float = 0.0


class FailureDetector:
    """Watches one rank.

    Args:
        interval_s: The heartbeat interval.
        first_limit_s: How long an operation may take that has not been done before, if it does not poll, and one of
            storage whenever it is done: a pause of storage that all groups share must not end all of them.
        load_limit_s: How long reading a checkpoint may take.
    """

    def __init__(self, interval_s: float, first_limit_s: float, load_limit_s: float) -> None:
        self._interval_s = interval_s
        self._first_limit_s = first_limit_s
        self._load_limit_s = max(first_limit_s, load_limit_s)
        self._beats = _Counter()
        self._progress = _Counter()
        self._looked_at_s: float | None = None

    def look(self, pulse: Pulse, now_s: float, *, group_starved_s: float, is_held_up: bool = False) -> str:
        """Why the rank has to be given up, for people; empty while it need not be.

        Args:
            pulse: What it shows now.
            now_s: The watcher's monotonic clock.
            group_starved_s: That of all ranks of its group that the watcher sees, added up since some time.
            is_held_up: Another rank of its group is at storage. It may wait for that one in any operation.
        """
        if self._looked_at_s is not None and now_s - self._looked_at_s > self._interval_s:
            # The watcher itself was away. What it missed is no evidence.
            self._beats, self._progress = _Counter(), _Counter()
        if is_held_up and pulse.operation is not Operation.STORAGE:
            self._progress = _Counter()  # anew: it goes on a little later than the one that it waits for
        self._looked_at_s = now_s
        silent_s = self._beats.see(pulse.beats, now_s, pulse.starved_s)
        stuck_s = self._progress.see(pulse.progress, now_s, group_starved_s)
        if pulse.operation is Operation.END:
            return f"not ended for {silent_s:.1f} s" if silent_s >= self._first_limit_s else ""
        is_stuck = pulse.operation not in _PATIENT and stuck_s >= self._stall_limit_s(pulse)
        # Who beats no more makes no progress either, and that may show first.
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


def first_to_stop(pulses: Mapping[int, Pulse]) -> int:
    """Which of a group's ranks the others wait for, as far as their operations tell.

    Rather one that needs nobody for what it does than one that may, and that rather than one that waits; then the one
    that made progress longest ago.

    Args:
        pulses: By rank.
    """

    def order(rank: int) -> tuple[bool, bool, float, int]:
        operation = pulses[rank].operation
        return operation in _PATIENT, operation not in _ALONE, pulses[rank].progress_at_s, rank

    return min(pulses, key=order)


class Absence:
    """Watches the beats of one node.

    Args:
        interval_s: The heartbeat interval.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._beats = _Counter()
        self._looked_at_s: float | None = None

    def look(self, beats: int, now_s: float) -> str:
        """Why the node has to be given up, for people; empty while it need not be."""
        if self._looked_at_s is not None and now_s - self._looked_at_s > self._interval_s:
            self._beats = _Counter()
        self._looked_at_s = now_s
        silent_s = self._beats.see(beats, now_s)
        return f"no heartbeat for {silent_s:.1f} s" if silent_s >= _LIMIT_INTERVALS * self._interval_s else ""


class _Counter:
    """A counter and since when it stands where it does."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._since_s = self._starved_since_s = 0.0

    def see(self, value: int, now_s: float, starved_s: float = 0.0) -> float:
        """Seconds without a change, less those without a processor, but a part of them in any case."""
        if value != self._value:
            self._value, self._since_s, self._starved_since_s = value, now_s, starved_s
        passed_s = now_s - self._since_s
        return max(passed_s - (starved_s - self._starved_since_s), _LEAST_SHARE * passed_s)
