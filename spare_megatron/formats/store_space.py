"""The size of etcd's database against its quota."""

from dataclasses import dataclass

from spare_megatron.formats.quantities import format_binary_bytes

STEP_BYTES = 400
"""Bytes that a step's log entry leaves in etcd's database for good; measured in docs/control_store.md."""

_WELL_FILLED = 0.8
"""Share of the quota beyond which an operator is warned early enough to act."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpace:
    used_bytes: int
    """Keys with all versions not yet compacted, without free pages."""
    limit_bytes: int | None
    """The quota, at which etcd refuses writes; None if unknown."""
    is_full: bool


def shortage(space: StoreSpace, num_steps: int) -> str:
    """Why etcd may refuse writes before `num_steps` more steps are committed, and the remedy; empty if it will not."""
    if space.is_full:
        return f"{FULL}, at {usage(space.used_bytes, space.limit_bytes)}; {REMEDY}"
    needed_bytes = num_steps * STEP_BYTES
    if space.limit_bytes is None or space.used_bytes + needed_bytes <= _WELL_FILLED * space.limit_bytes:
        return ""
    return (
        f"etcd holds {usage(space.used_bytes, space.limit_bytes)}, {num_steps} steps take "
        f"{format_binary_bytes(needed_bytes)} more, and it refuses all writes when it is full; {REMEDY}"
    )


def usage(used_bytes: int, limit_bytes: int | None) -> str:
    """The size of a database, with its quota if known.

    >>> usage(3 * 2**29, 2**33)
    '1.5 GiB of the 8 GiB of its --quota-backend-bytes'
    """
    used = format_binary_bytes(used_bytes)
    if limit_bytes is None:
        return used
    return f"{used} of the {format_binary_bytes(limit_bytes)} of its --quota-backend-bytes"


FULL = "etcd is full and refuses all writes"

REMEDY = (
    "remove the keys of runs that were killed (etcdctl del --prefix /spare/NAME-RANDOM/), have it compacted "
    "(--auto-compaction-retention) and defragmented, raise --quota-backend-bytes, to 8 GiB at most, then run `etcdctl "
    "alarm disarm`"
)
"""The steps of docs/control_store.md, in order."""
