"""What people are told of a run, a line each: losses, returns, restarts, saves, and its end."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from spare_megatron.journal.quantities import format_bytes, format_duration
from spare_megatron.journal.records import CheckpointRecord, EndRecord, FaultRecord, LossRecord, Record, StorageRecord


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
        case StorageRecord():
            text = describe_storage(record)
    return Event(at_s=at_s, text=text) if text else None


def describe_storage(record: StorageRecord) -> str:
    """What has become of files that the storage did not take."""
    match record.outcome:
        case "held":
            return f"the storage takes no more of {record.path}: {record.reason}"
        case "written":
            return "the storage takes the files of the run again; nothing that was written down is lost"
        case "lost":
            files = and_others(record.path, record.num_files - 1)
            return f"the storage has not taken the last {format_bytes(record.num_bytes)} of {files}: {record.reason}"


def and_others(path: str, num_others: int) -> str:
    """A file, and how many more.

    >>> and_others("a", 0), and_others("a", 1), and_others("a", 2)
    ('a', 'a and 1 other file', 'a and 2 other files')
    """
    plural = "s" if num_others > 1 else ""
    return f"{path} and {num_others} other file{plural}" if num_others else path


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
