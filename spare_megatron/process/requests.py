"""Requests to a run: a file per group in its directory says whether the group is to take part.

The last request for a group stands, whichever of the run's processes are replaced meanwhile. Supervisors poll them.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from spare_megatron.config.schema import RunConfig
from spare_megatron.stacking.layout import GroupId
from spare_megatron.stacking.placement import make_placement

Request = Literal["drain", "grow"]
_FOLDER = "requests"
_NODE = "node:"


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


def groups_of(which: Sequence[str], config: RunConfig) -> list[GroupId]:
    """The groups that texts name, by number or as `node:N`, ascending. ValueError: the run has no such group or node.

    >>> groups_of(["2", "node:0"], RunConfig())
    [0, 1, 2, 3]
    """
    layout = config.parallel
    found: set[GroupId] = set()
    for text in which:
        is_node = text.startswith(_NODE)
        kind, setting = ("node", "cluster.num_nodes") if is_node else ("group", "layout.num_groups")
        setting = "layout.max_groups" if layout.num_further and not is_node else setting
        limit, number = layout.num_nodes if is_node else layout.num_groups, text.removeprefix(_NODE)
        if not number.isdecimal() or int(number) >= limit:
            raise ValueError(
                f"{text!r} names no {kind} of the run, which has {setting}={limit}: name groups as 0 to "
                f"{layout.num_groups - 1}, or nodes as node:0 to node:{layout.num_nodes - 1}"
            )
        found.update(layout.groups_on(int(number)) if is_node else [GroupId(int(number))])
    return sorted(found)


def why_not_drained(
    groups: Sequence[GroupId], config: RunConfig, members: Iterable[int], leaving: Iterable[int]
) -> str:
    """Why these groups cannot leave, after the members that are asked to; empty if they can.

    The run decides for itself at the end of each step (`core.departures`): what it cannot grant by then waits.
    """
    left = frozenset(map(GroupId, members)).difference(map(GroupId, leaving), groups)
    spare = config.spare
    placement = make_placement(spare.placement, config.layout.num_groups, spare.redundancy, spare.groups_per_domain)
    lost = [] if config.data.access == "shared" else [int(shard) for shard in placement.uncovered(left)]
    if left and not lost:
        return ""
    what = f"no host for shards {lost} (spare.redundancy={spare.redundancy})" if lost else "no group"
    return (
        f"without groups {[int(group) for group in groups]} the run would have {what}: drain fewer groups, or wait "
        f"until others have come back; `spare status` shows which take part"
    )
