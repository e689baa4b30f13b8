"""Traces of losses: CSV files with a head, a line for each loss of a machine or group, times in seconds."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from pathlib import Path

from spare_megatron.stacking.layout import GroupId
from spare_megatron.tools.simulate.failures import UNNAMED, Loss

HEAD = "seconds,machine[,repair_s][,cause] or seconds,group[,repair_s][,cause]"
Row = tuple[str, dict[str, str]]
"""Where it stands, as FILE:LINE, and its values by column."""


def read_trace(path: Path) -> tuple[Loss, ...]:
    """The losses in a file with this head, `merged`; raises ValueError."""
    losses = [_loss(where, row) for where, row in rows_of(path, text_of(path), ",")]
    if not losses:
        raise ValueError(f"the trace {path} holds no losses; it needs a head {HEAD} and lines")
    return merged(losses)


def _loss(where: str, row: dict[str, str]) -> Loss:
    machine, group = row.get("machine") or None, row.get("group", "")
    if "seconds" not in row or (machine is None) != group.isdecimal():
        raise ValueError(f"{where}: {row} is no loss with {HEAD}")
    return Loss(
        at_s=number_in(where, row, "seconds"),
        groups=(GroupId(int(group)),) if machine is None else (),
        machine=machine,
        repair_s=number_in(where, row, "repair_s") if row.get("repair_s") else None,
        cause=row.get("cause") or UNNAMED,
    )


def merged(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    """In the order of time. A loss of a machine that is away extends its absence, which keeps its cause; the end is not
    known if that of the loss that ends last is not.
    """
    found: list[Loss] = []
    latest: dict[str, int] = {}
    for loss in sorted(losses, key=lambda loss: loss.at_s):
        index = latest.get(loss.machine or "")
        if index is not None and end_of(before := found[index]) >= loss.at_s:
            last = max(before, loss, key=lambda one: (end_of(one), one.repair_s is None))
            found[index] = replace(before, repair_s=None if last.repair_s is None else end_of(last) - before.at_s)
        else:
            latest |= {loss.machine: len(found)} if loss.machine else {}
            found.append(loss)
    return tuple(found)


def end_of(loss: Loss) -> float:
    """When it is repaired; at once if that is not known."""
    return loss.at_s + (loss.repair_s or 0.0)


def machines_away(losses: Sequence[Loss]) -> tuple[float, int]:
    """Of merged losses: the mean number of machines away up to the last end, and the most at a time."""
    changes = sorted([*((end_of(loss), -1) for loss in losses), *((loss.at_s, 1) for loss in losses)])
    most = max(accumulate(change for _, change in changes))
    return sum(loss.repair_s or 0.0 for loss in losses) / max(changes[-1][0], 1.0), most


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from error


def rows_of(path: Path, text: str, delimiter: str) -> Iterator[Row]:
    """The lines below the head; values that are missing are empty."""
    rows = csv.DictReader(text.splitlines(), delimiter=delimiter, restval="")
    for row in rows:
        if None in row:
            raise ValueError(f"{path}:{rows.line_num}: {row[None]} is more than the head has columns")
        yield f"{path}:{rows.line_num}", row


def number_in(where: str, row: dict[str, str], column: str) -> float:
    """A number from 0 on."""
    try:
        value = float(row[column])
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise ValueError(f"{where}: {column}={row[column]!r} has to be a number of 0 or more")
    return value
