"""What people are told of a run, a line each: losses, returns, restarts, saves, and its end."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from spare_megatron.journal.quantities import format_bytes, format_duration
from spare_megatron.journal.records import CheckpointRecord, EndRecord, FaultRecord, LossRecord, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, and when, in seconds since the epoch."""

    at_s: float
    text: str


def groups_named(groups: Collection[int]) -> str:
    """Groups in words.

    >>> groups_named([3]), groups_named({6, 3})
    ('group 3', 'groups 3, 6')
    """
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, sorted(groups)))}"


def event_of_record(record: Record, at_s: float) -> Event | None:
    """What a record tells people, if anything."""
    text = ""
    match record:
        case LossRecord():
            end = "; given up" if record.is_given_up else ""
            text = f"group {record.group} lost: rank {record.rank}: {record.cause}{end}"
        case FaultRecord():
            text = f"fault injected: {record.kind} of group {record.group} rank {record.rank}, {record.phase}"
        case CheckpointRecord(outcome="saved"):
            figures = f"{format_bytes(record.num_bytes)} in {format_duration(record.write_s)}"
            text = f"checkpoint after {record.step} steps saved: {figures}"
        case CheckpointRecord():
            text = f"checkpoint after {record.step} steps {record.outcome}: {record.reason}"
        case EndRecord():
            text = "the run " + (f"ended: {record.outcome}: {record.reason}" if record.reason else record.outcome)
    return Event(at_s=at_s, text=text) if text else None


def event_of_entry(entry: Mapping[str, Any], taken_in: Collection[int], at_s: float) -> Event | None:
    """What an entry of the decision log tells people, if anything.

    Args:
        entry: The entry.
        taken_in: The groups that take part from it on and did not before.
        at_s: When it was read.
    """
    text = ""
    match entry:
        case {"entry": "commit", "step": step} if taken_in:
            take = "take" if len(taken_in) > 1 else "takes"
            text = f"{groups_named(taken_in)} rejoined, and {take} part from step {step + 1} on"
        case {"entry": "restart", "step": step}:
            source = "the snapshot" if entry.get("snapshot") is not None else "the checkpoint"
            where = f"{source} after {step} steps" if step else "the beginning"
            text = f"training starts again from {where}"
        case {"entry": "halt", "reason": reason}:
            text = f"halted: {reason}"
    return Event(at_s=at_s, text=text) if text else None
