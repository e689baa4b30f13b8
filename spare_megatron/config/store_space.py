"""Sizes of what machines have, as their tools tell them."""

from dataclasses import dataclass


def gib(num_bytes: float) -> str:
    """A size with three digits.

    >>> [gib(size) for size in (100, 5e5, 3 * 2**30)]
    ['100 B', '488 KiB', '3 GiB']
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


STEP_BYTES = 400
"""What a step leaves in etcd's database for good, its entry of the log: docs/control_store.md has the measurement."""

_WELL_FILLED = 0.8
"""Of the quota. Beyond it whoever looks after etcd is told: what is left has to last until somebody does something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpace:
    """How large the database of an etcd is.

    Attributes:
        used_bytes: What its keys take with all versions that are not compacted; free pages, which are taken again, do
            not count.
        limit_bytes: Its quota: a database of this size takes no more writes. None where it does not tell.
        is_full: It takes no more.
    """

    used_bytes: int
    limit_bytes: int | None
    is_full: bool


def shortage(space: StoreSpace, num_steps: int) -> str:
    """Why etcd may refuse writes before so many further steps are committed, and what to do; empty if it will not."""
    if space.is_full:
        return f"{FULL}, at {held(space.used_bytes, space.limit_bytes)}; {REMEDY}"
    needed_bytes = num_steps * STEP_BYTES
    if space.limit_bytes is None or space.used_bytes + needed_bytes <= _WELL_FILLED * space.limit_bytes:
        return ""
    return (
        f"etcd holds {held(space.used_bytes, space.limit_bytes)}, {num_steps} steps take {gib(needed_bytes)} more, and "
        f"it refuses all writes when it is full; {REMEDY}"
    )


def held(used_bytes: int, limit_bytes: int | None) -> str:
    """The size of a database beside its quota, where that is known.

    >>> held(3 * 2**29, 2**33)
    '1.5 GiB of the 8 GiB of its --quota-backend-bytes'
    """
    return gib(used_bytes) + ("" if limit_bytes is None else f" of the {gib(limit_bytes)} of its --quota-backend-bytes")


FULL = "etcd is full and refuses all writes"

REMEDY = (
    "remove the keys of runs that were killed (etcdctl del --prefix /spare/NAME-RANDOM/), have it compacted "
    "(--auto-compaction-retention) and defragmented, raise --quota-backend-bytes, to 8 GiB at most, then run `etcdctl "
    "alarm disarm`"
)
"""As docs/control_store.md has it in order."""
