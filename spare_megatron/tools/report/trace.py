"""Converts the spans of ranks to a trace for Perfetto (ui.perfetto.dev) and chrome://tracing. Format: Google, "Trace
Event Format": complete events (X), metadata (M), flows (s, f) and instants (i). Times are whole microseconds: Perfetto
drops a span that exceeds the one around it by a rounding error.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from spare_megatron.journal.event_texts import text_of_places
from spare_megatron.journal.files import Journal, source_of_rank
from spare_megatron.journal.records import EntryRecord, LossRecord, PlacesRecord
from spare_megatron.journal.spans import RECOVERY_NAMES, RankSpans, Span
from spare_megatron.journal.state.run_state import Losses

TraceEvent = dict[str, Any]
_MICRO = 1e6
_FIRST_THREAD, _MOST_RANKS = 10_000_000, 10_000
_RECOVERY = _MOST_RANKS - 1
"""Rank number of a group's recoveries, whose stages would overlap with the spans of a rank."""


class _Placed(NamedTuple):
    """A span in the time of the trace, in microseconds."""

    part: RankSpans
    span: Span
    began_us: int
    ended_us: int


def trace_of(ranks: Sequence[RankSpans], journal: Journal, steps: range | None = None) -> dict[str, Any]:
    """Builds the trace: a process for each group, a thread for each of its ranks, and one for its recoveries. Keeps the
    spans of `steps`; None keeps all. The journal, of the same run, marks losses and aligns clocks. ValueError: there
    are no such spans.
    """
    offsets_s = clock_offsets(ranks, journal)
    chosen = [(part, span) for part in ranks for span in part.spans if steps is None or span.step in steps]
    if not chosen:
        which = "" if steps is None else f" of steps {steps.start} to {steps.stop - 1}"
        raise ValueError(f"nothing was kept{which}; what was: steps {_ranges(ranks) or 'none'}")
    origin_s = min(span.began_s + offsets_s[part.machine] for part, span in chosen)
    shift_us = {machine: _micro(offset_s - origin_s) for machine, offset_s in offsets_s.items()}
    placed = [
        _Placed(part, span, *(_micro(at_s) + shift_us[part.machine] for at_s in (span.began_s, span.ended_s)))
        for part, span in chosen
    ]
    placed.sort(key=lambda one: (one.began_us, -one.ended_us))  # enclosing spans come first
    events = [_complete(one) for one in placed]
    events += _names(chosen)
    events += _flows(placed)
    end_us = max(one.ended_us for one in placed)
    events += _marks(journal, origin_s, end_us)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def clock_offsets(ranks: Iterable[RankSpans], journal: Journal) -> dict[str, float]:
    """Seconds to add to each machine's monotonic clock to get one time for all, close to wall time. All groups read a
    log entry as soon as it is written: the median delay between two machines' reads is taken for the difference of
    their wall clocks. Machines whose ranks journal no entries they share with the others keep their wall clocks.
    """
    wall_s: dict[str, float] = {}
    machine_of: dict[str, str] = {}
    for part in ranks:
        wall_s.setdefault(part.machine, part.wall_s)
        machine_of[source_of_rank(part.group, part.rank, part.incarnation)] = part.machine
    read_s: dict[int, dict[str, float]] = defaultdict(dict)
    for line in journal.lines:
        if isinstance(line.record, EntryRecord) and line.source in machine_of:
            read_s[line.record.index].setdefault(machine_of[line.source], line.at_s)
    num_read = Counter(itertools.chain.from_iterable(read_s.values()))
    first = max(num_read, key=num_read.__getitem__, default="")
    offsets_s = {}
    for machine, offset_s in wall_s.items():
        late_s = [times[machine] - times[first] for times in read_s.values() if machine in times and first in times]
        offsets_s[machine] = offset_s - (median(late_s) if late_s and machine != first else 0.0)
    return offsets_s


def _place(group: int, rank: int) -> dict[str, int]:
    """Process and thread ids. Perfetto identifies threads by number across processes, and ignores 0."""
    return {"pid": group + 1, "tid": _FIRST_THREAD + group * _MOST_RANKS + rank}


def _micro(seconds: float) -> int:
    return round(seconds * _MICRO)


def _complete(placed: _Placed) -> TraceEvent:
    part, span = placed.part, placed.span
    arguments: dict[str, Any] = {"step": span.step}
    if span.shard >= 0:
        arguments |= {"shard": span.shard, "microbatch": span.microbatch}
    if part.incarnation:
        arguments["life"] = part.incarnation
    return {
        "name": span.name,
        "ph": "X",
        **_place(part.group, _RECOVERY if _is_recovery(span) else part.rank),
        "ts": placed.began_us,
        "dur": placed.ended_us - placed.began_us,
        "args": arguments,
    }


def _is_recovery(span: Span) -> bool:
    return span.name in RECOVERY_NAMES.values()


def _names(chosen: Sequence[tuple[RankSpans, Span]]) -> Iterator[TraceEvent]:
    for group in sorted({part.group for part, span in chosen if _is_recovery(span)}):
        yield {"name": "thread_name", "ph": "M", **_place(group, _RECOVERY), "args": {"name": "recovery"}}
    for group, rank, stage in sorted({(part.group, part.rank, part.stage) for part, _ in chosen}):
        if rank == 0:
            yield {"name": "process_name", "ph": "M", **_place(group, rank), "args": {"name": f"group {group}"}}
        name = {"name": f"rank {rank}, stage {stage}"}
        yield {"name": "thread_name", "ph": "M", **_place(group, rank), "args": name}


def _flows(placed: Sequence[_Placed]) -> Iterator[TraceEvent]:
    """Arrows from a microbatch's pass through a stage to the pass through the next stage that needs its result."""
    passes: dict[tuple[Any, ...], list[_Placed]] = defaultdict(list)
    for one in placed:
        part, (name, step, _, _, *microbatch) = one.part, one.span
        if one.span.shard >= 0:
            passes[part.group, part.incarnation, part.lane, step, name, *microbatch].append(one)
    number = 0
    for found in passes.values():
        for before, after in itertools.pairwise(sorted(found, key=lambda one: one.began_us)):
            if before.part.stage == after.part.stage:
                continue
            number += 1
            flow = {"name": "stage to stage", "cat": "flow", "id": number}
            # Inside the spans, otherwise the arrows bind to nothing.
            left_us = min(before.ended_us, after.began_us) - 1
            yield flow | _place(before.part.group, before.part.rank) | {"ph": "s", "ts": left_us}
            yield flow | _place(after.part.group, after.part.rank) | {"ph": "f", "bp": "e", "ts": after.began_us + 1}


def _marks(journal: Journal, origin_s: float, end_us: int) -> Iterator[TraceEvent]:
    """Marks across all ranks: losses, with the pending operations, and where machines took places."""
    losses, places = Losses(), dict[int, tuple[float, PlacesRecord]]()
    for line in journal.lines:
        if isinstance(line.record, LossRecord):
            losses.add(line.record, line.at_s)
        elif isinstance(line.record, PlacesRecord):
            places.setdefault(line.record.index, (line.at_s, line.record))
    marks: list[tuple[float, TraceEvent]] = []
    for at_s, one in losses.found:
        name = f"group {one.group} lost: rank {one.rank}: {one.cause}"
        place = _place(one.group, max(one.rank, 0))
        marks.append((at_s, {"name": name, **place, "args": {"pending": one.pending}}))
    marks += [(at_s, {"name": text_of_places(moved), **_place(0, 0)}) for at_s, moved in places.values()]
    for at_s, mark in marks:
        at_us = _micro(at_s - origin_s)
        if 0 <= at_us <= end_us:
            yield {**mark, "ph": "i", "s": "g", "ts": at_us}


def _ranges(ranks: Sequence[RankSpans]) -> str:
    steps = sorted({span.step for part in ranks for span in part.spans})
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(f"{first} to {last}" if first < last else str(first) for first, last in parts)
