"""Requests to a run: a file per group in its directory, polled by supervisors, says whether it is to take part."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from spare_megatron.config.schema import RunConfig
from spare_megatron.core.machines.places import Assignment, Holding, Places
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, PlaceId

Request = Literal["drain", "grow"]
_FOLDER = "requests"
Holdings = Iterable[Sequence[Sequence[int]]]
"""Of each assignment in turn: machine, place and incarnation, as the journal has them."""
_NODE, _MACHINE = "node:", "machine:"


def request(run_dir: Path, groups: Iterable[GroupId], what: Request) -> None:
    """Asks groups to leave the run (drain) or to take part (grow). OSError: the run directory cannot be written."""
    folder = run_dir / _FOLDER
    folder.mkdir(exist_ok=True)
    for group in groups:
        written = folder / f".{os.getpid()}"
        written.write_text(f"{what}\n")
        written.replace(folder / f"group-{group:04d}")


def read_requests(run_dir: Path) -> dict[GroupId, Request]:
    """The last request for each group that any was made for. OSError: the run directory cannot be read."""
    folder = run_dir / _FOLDER
    found: dict[GroupId, Request] = {}
    for file in sorted(folder.glob("group-*")) if folder.is_dir() else ():
        text, number = file.read_text().strip(), file.name.removeprefix("group-")
        if text in ("drain", "grow") and number.isdecimal():
            found[GroupId(int(number))] = text  # type: ignore[assignment]
    return found


def asked_to_leave(run_dir: Path, further: Iterable[GroupId] = ()) -> frozenset[GroupId]:
    """The groups that are not to take part: asked to leave, or, of these `further` ones, not asked for."""
    requests = read_requests(run_dir)
    drained = frozenset(group for group, what in requests.items() if what == "drain")
    return drained | {group for group in further if requests.get(group) != "grow"}


def groups_of(which: Sequence[str], config: RunConfig, holdings: Holdings = ()) -> list[GroupId]:
    """The groups that texts name, ascending: by number, as `node:N`, which is a place, or as `machine:N`, wherever
    the `holdings` of the run's assignments have moved it. ValueError: the run has no such group, node or machine.

    >>> groups_of(["2", "node:0"], RunConfig())
    [0, 1, 2, 3]
    """
    layout = config.parallel
    found: set[GroupId] = set()
    for text in which:
        prefix = next((prefix for prefix in (_NODE, _MACHINE) if text.startswith(prefix)), "")
        kind, setting = (prefix.removesuffix(":"), "cluster.num_nodes") if prefix else ("group", "layout.num_groups")
        setting = "layout.max_groups" if layout.num_further and not prefix else setting
        limit, number = layout.num_nodes if prefix else layout.num_groups, text.removeprefix(prefix)
        if not number.isdecimal() or int(number) >= limit:
            raise ValueError(
                f"{text!r} names no {kind} of the run, which has {setting}={limit}: name groups as 0 to "
                f"{layout.num_groups - 1}, nodes as node:0 to node:{layout.num_nodes - 1}, or machines likewise, as "
                f"machine:0"
            )
        node = _place_of(int(number), layout, holdings) if prefix == _MACHINE else int(number)
        found.update(layout.groups_on(node) if prefix else [GroupId(int(number))])
    return sorted(found)


def _place_of(machine: int, layout: Layout, holdings: Holdings) -> int:
    """The place of the machine, or of the one that has replaced it."""
    places = Places(layout)
    for begun in holdings:
        places.apply(
            Assignment(holdings=tuple(Holding(MachineId(m), PlaceId(place), life) for m, place, life in begun))
        )
    if (held := places.held_by(MachineId(machine))) is None:
        raise ValueError(f"machine {machine} has no place in the run now: nothing is lost if it is switched off")
    return held.place


def groups_to_grow(
    config: RunConfig, taking_part: Iterable[int], away: Iterable[int], *, to: int | None, by: int | None
) -> list[GroupId]:
    """The groups to ask so that the run has `to` groups, or `by` more: the lowest that are `away`. `taking_part`: those
    that take part, or are about to. ValueError: the run has more groups already, or no room for so many.

    >>> groups_to_grow(RunConfig(), [0, 2], [1, 3], to=3, by=None)
    [1]
    """
    present, absent = set(taking_part), sorted(map(GroupId, away))
    number = to - len(present) if to is not None else by or 0
    option = f"--to {to}" if to is not None else f"--by {by}"
    if number < 0:
        raise ValueError(f"{option}: the run has {len(present)} groups; `spare drain` has groups leave")
    if number > len(absent):
        raise ValueError(
            f"{option}: the run has {len(present)} groups, and {len(absent)} more may be asked to take part "
            f"(layout.max_groups={config.layout.most_groups}); the others are lost, and come with their machines"
        )
    return absent[:number]


def why_not_drained(
    groups: Sequence[GroupId], config: RunConfig, members: Iterable[int], leaving: Iterable[int]
) -> str:
    """Why these groups cannot leave after those that are `leaving`; empty if they can. The run decides for itself at
    the end of each step (`core.controller.departures`).
    """
    left = frozenset(map(GroupId, members)).difference(map(GroupId, leaving), groups)
    lost = [] if config.data.access == "shared" else [int(shard) for shard in config.placement.uncovered(left)]
    if left and not lost:
        return ""
    what = f"no host for shards {lost} (spare.redundancy={config.spare.redundancy})" if lost else "no group"
    return (
        f"without groups {[int(group) for group in groups]} the run would have {what}: drain fewer groups, or wait "
        f"until others have come back; `spare status` shows which take part"
    )
