"""What all ranks did around an event, as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

Format: Google, "Trace Event Format": complete events (X), metadata (M), flows (s, f) and instants (i), times in
microseconds.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import EntryRecord, LossRecord
from spare_megatron.journal.spans import RankSpans, Span

Event = dict[str, Any]

_MICRO = 1e6


def trace_of(ranks: Sequence[RankSpans], journal: Journal, steps: range | None = None) -> dict[str, Any]:
    """The trace: a process for each group, a thread for each of its ranks.

    Args:
        ranks: What the ranks did.
        journal: Of the same run: losses are marked, and clocks aligned by it.
        steps: Only what belongs to these steps, or to none; everything when absent.

    Raises:
        ValueError: Nothing belongs to these steps.
    """
    offsets_s = clock_offsets(ranks, journal)
    chosen = [(part, span) for part in ranks for span in part.spans if steps is None or span.step in steps]
    if not chosen:
        which = "" if steps is None else f" of steps {steps.start} to {steps.stop - 1}"
        raise ValueError(f"nothing was kept{which}; what was: steps {_ranges(ranks) or 'none'}")
    placed = [(part, span, span.began_s + offsets_s[part.machine]) for part, span in chosen]
    origin_s = min(began_s for _, _, began_s in placed)
    events = [_complete(part, span, began_s - origin_s) for part, span, began_s in placed]
    events += _names(part for part, _ in chosen)
    events += _flows(placed, origin_s)
    end_s = max(began_s + span.ended_s - span.began_s for _, span, began_s in placed)
    events += _losses(journal, origin_s, end_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def clock_offsets(ranks: Iterable[RankSpans], journal: Journal) -> dict[str, float]:
    """Seconds to add to the monotonic clock of each machine to get one time for all, which is about wall time.

    Ranks on one machine share a clock. All groups read each entry of the decision log as soon as it is written: by how
    much later one machine has read them, in the median over entries, is taken for the difference of the wall clocks.
    """
    wall_s: dict[str, float] = {}
    machine_of: dict[int, str] = {}
    for part in ranks:
        wall_s.setdefault(part.machine, part.wall_s)
        machine_of.setdefault(part.group, part.machine)
    read_s: dict[int, dict[str, float]] = defaultdict(dict)
    for line in journal.lines:
        if isinstance(line.record, EntryRecord) and line.record.group in machine_of:
            read_s[line.record.index].setdefault(machine_of[line.record.group], line.at_s)
    first = next(iter(wall_s), "")
    offsets_s = {}
    for machine, offset_s in wall_s.items():
        late_s = [times[machine] - times[first] for times in read_s.values() if machine in times and first in times]
        offsets_s[machine] = offset_s - (median(late_s) if late_s and machine != first else 0.0)
    return offsets_s


def _complete(part: RankSpans, span: Span, began_s: float) -> Event:
    arguments: dict[str, Any] = {"step": span.step}
    if span.microbatch is not None:
        arguments |= {"shard": span.microbatch[0], "microbatch": span.microbatch[1]}
    if part.incarnation:
        arguments["life"] = part.incarnation
    return {
        "name": span.name,
        "ph": "X",
        "pid": part.group,
        "tid": part.rank,
        "ts": began_s * _MICRO,
        "dur": (span.ended_s - span.began_s) * _MICRO,
        "args": arguments,
    }


def _names(parts: Iterable[RankSpans]) -> Iterator[Event]:
    for group, rank, stage in sorted({(part.group, part.rank, part.stage) for part in parts}):
        if rank == 0:
            yield {"name": "process_name", "ph": "M", "pid": group, "args": {"name": f"group {group}"}}
        name = {"name": f"rank {rank}, stage {stage}"}
        yield {"name": "thread_name", "ph": "M", "pid": group, "tid": rank, "args": name}


def _flows(placed: Sequence[tuple[RankSpans, Span, float]], origin_s: float) -> Iterator[Event]:
    """Arrows from the pass of a microbatch through a stage to the one that needs what it gave."""
    passes: dict[tuple[Any, ...], list[tuple[int, RankSpans, float, float]]] = defaultdict(list)
    for part, span, began_s in placed:
        if span.microbatch is not None:
            key = (part.group, part.incarnation, span.step, span.name, span.microbatch)
            ended_s = began_s + span.ended_s - span.began_s
            passes[key].append((part.stage, part, began_s - origin_s, ended_s - origin_s))
    number = 0
    for found in passes.values():
        ordered = sorted(found, key=lambda item: item[2])
        for (stage, part, _, ended_s), (other, next_part, next_s, _) in itertools.pairwise(ordered):
            if stage == other:
                continue
            number += 1
            flow = {"name": "stage to stage", "cat": "flow", "id": number}
            # Inside the spans, or the arrows bind to nothing.
            yield flow | {"ph": "s", "pid": part.group, "tid": part.rank, "ts": min(ended_s, next_s) * _MICRO - 1}
            place = {"pid": next_part.group, "tid": next_part.rank}
            yield flow | place | {"ph": "f", "bp": "e", "ts": next_s * _MICRO + 1}


def _losses(journal: Journal, origin_s: float, end_s: float) -> Iterator[Event]:
    """A mark across all ranks where the loss of a group was written, with what its ranks were about."""
    for line in journal.lines:
        record = line.record
        if isinstance(record, LossRecord) and origin_s <= line.at_s <= end_s:
            yield {
                "name": f"group {record.group} lost: rank {record.rank}: {record.cause}",
                "ph": "i",
                "s": "g",
                "pid": record.group,
                "tid": max(record.rank, 0),
                "ts": (line.at_s - origin_s) * _MICRO,
                "args": {"pending": record.pending},
            }


def _ranges(ranks: Sequence[RankSpans]) -> str:
    """The steps that are there, in words."""
    steps = sorted({span.step for part in ranks for span in part.spans})
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(f"{first} to {last}" if first < last else str(first) for first, last in parts)
