"""Faults of machines as others record them: InfiniteHBD's trace, Slurm's accounting, events of Kubernetes."""

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spare_megatron.formats.codec import parsed_json
from spare_megatron.tools.simulate.failures import Loss
from spare_megatron.tools.simulate.traces import Row, number_in, rows_of, text_of

_NONE = ("", "Unknown", "None")
"""What Slurm prints for the end of an event that goes on, and for no reason or node."""
_STOP, _END = "NodeNotReady", "NodeReady"
"""Reasons of events of Kubernetes."""


def faults_in(path: Path) -> list[Loss]:
    """The faults in a file, whose head says who wrote it. Times begin with the trace, absolute ones with the first
    fault. ValueError, with file and line.
    """
    text = text_of(path)
    head = text.lstrip().partition("\n")[0].strip()
    delimiter = "|" if "|" in head else ","
    columns = {*next(csv.reader([head], delimiter=delimiter))} if head else set()
    read = next((read for needed, read in _TABLES.items() if {*needed.split(",")} <= columns), None)
    if head.startswith("{"):
        faults = list(_of_kubernetes(path, text, head))
    elif read is not None:
        faults = list(read(rows_of(path, text, delimiter)))
    else:
        raise ValueError(f"{path}:1: {head!r} has the columns of no known table: {'; '.join(_TABLES)}; nor is it JSON")
    first_s = 0.0 if read is _of_infinitehbd else min((fault.at_s for fault in faults), default=0.0)
    return [replace(fault, at_s=fault.at_s - first_s) for fault in faults]


def _of_infinitehbd(rows: Iterable[Row]) -> Iterator[Loss]:
    for where, row in rows:
        begin_s, end_s = (86_400 * number_in(where, row, column) for column in ("start_day", "end_day"))
        yield _fault(where, row["node"], begin_s, end_s, f"{row['level']}: {row['class']}")


def _of_sacctmgr(rows: Iterable[Row]) -> Iterator[Loss]:
    """A node that drains still works; events of the whole cluster have no node."""
    for where, row in rows:
        if row["NodeName"] and not row["State"].startswith(("DRNG", "DRAINING")):
            begin_s, end_s = (_time_s(where, row, column) for column in ("TimeStart", "TimeEnd"))
            reason = "" if row.get("Reason", "") in _NONE else f": {row['Reason']}"
            yield _fault(where, row["NodeName"], begin_s, end_s, row["State"].rstrip("*") + reason)


def _of_sacct(rows: Iterable[Row]) -> Iterator[Loss]:
    """Jobs that a failed node has ended; nothing says when it was back."""
    for where, row in rows:
        if row["State"].startswith("NODE_FAIL") and row["FailedNode"] not in _NONE:
            yield _fault(where, row["FailedNode"], _time_s(where, row, "End"), None, "NODE_FAIL")


_TABLES: dict[str, Callable[[Iterable[Row]], Iterator[Loss]]] = {
    "node,start_day,end_day,level,class": _of_infinitehbd,
    "NodeName,TimeStart,TimeEnd,State": _of_sacctmgr,
    "End,State,FailedNode": _of_sacct,
}
"""Columns that a table has at least -> what reads it."""


def _of_kubernetes(path: Path, text: str, head: str) -> Iterator[Loss]:
    """One document over several lines, or one in each line: lists of events, or events. Of an event that repeats, the
    first and the last time count.
    """
    events: set[tuple[float, str, str]] = set()
    for number, document in enumerate([text] if head == "{" else text.splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            found = parsed_json(document or "{}")
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{where}: no JSON object")
        listed = found.get("items", [found])
        if not isinstance(listed, list) or not all(isinstance(event, dict) for event in listed):
            raise ValueError(f"{where}: items={listed} has to be a list of JSON objects")
        for event in listed:
            node = event.get("involvedObject") or event.get("regarding") or {}
            if not isinstance(node, dict):
                raise ValueError(f"{where}: the object of an event is {node}, no JSON object")
            if node.get("kind") == "Node" and event.get("reason") in (_STOP, _END):
                times_s = {_time_s(where, event, column) for column in ("firstTimestamp", "lastTimestamp", "eventTime")}
                events |= {(at_s, event["reason"], node.get("name", "")) for at_s in times_s if at_s is not None}
    began_s: dict[str, float] = {}
    for at_s, reason, machine in sorted(events):
        if reason == _STOP:
            began_s.setdefault(machine, at_s)
        elif machine in began_s:
            yield _fault(str(path), machine, began_s.pop(machine), at_s, _STOP)
    yield from (_fault(str(path), machine, at_s, None, _STOP) for machine, at_s in began_s.items())


def _fault(where: str, machine: str, begin_s: float | None, end_s: float | None, cause: str) -> Loss:
    if not machine or "[" in machine:
        raise ValueError(f"{where}: {machine!r} has to name one machine")
    if begin_s is None or (end_s is not None and end_s < begin_s):
        raise ValueError(f"{where}: the fault of {machine} has no beginning, or one after its end")
    repair_s = None if end_s is None else end_s - begin_s
    return Loss(at_s=begin_s, groups=(), machine=machine, repair_s=repair_s, cause=cause)


def _time_s(where: str, row: dict[str, Any], column: str) -> float | None:
    """Seconds of a time, in UTC if it names no zone; None if it is not known."""
    if (text := row.get(column) or "") in _NONE:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{where}: {column}={text!r} is no time as 2026-11-29T12:00:00") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
