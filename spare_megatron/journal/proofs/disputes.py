"""What groups have stated about the disputed microbatches of a step, from the journal of the run."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spare_megatron.journal.fold import Fold
from spare_megatron.journal.journal_view import JournalView, Stretch
from spare_megatron.journal.lines import records_of
from spare_megatron.journal.records import AuditRecord, DisputeRecord, ParamsRecord

Address = tuple[int, int]
"""Shard of a microbatch, and its index in the shard."""


class Place(NamedTuple):
    """Kind, stage and position of a digest along the way of a microbatch through a group."""

    kind: str
    stage: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A digest of a microbatch that a group has voted with, and what it is made of, if the group has stated that."""

    digest: str
    boundaries: Mapping[Place, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisputedStep:
    """A step in which groups have computed microbatches to different values."""

    saved: DisputeRecord | None
    """How the save of its parameters has ended; None if the journal does not say."""
    stated: Mapping[Address, Mapping[int, Sequence[Stated]]]
    """Microbatch -> group -> its different statements, in the order of its votes."""
    params: Mapping[int, str]
    """Group -> digest of the state of its parameters before the step, where that was compared."""


def differs(dispute: Mapping[str, Any]) -> bool:
    """Whether groups have stated different digests of the microbatch; of a suspect one they may all agree."""
    return len({digest for _, digest, _ in dispute["statements"]}) > 1


def saved_disputes(view: JournalView) -> dict[int, DisputeRecord]:
    """Step -> the last save of its parameters; one that succeeded if there is any."""
    found: dict[int, DisputeRecord] = {}
    for record in records_of(view.rare, DisputeRecord):
        before = found.get(record.step)
        if before is None or before.outcome != "saved" or record.outcome == "saved":
            found[record.step] = record
    return found


def disputed_step(view: JournalView, fold: Fold, step: int) -> DisputedStep | None:
    """The disputes of a step, when its saved parameters were computed with, else the last ones; None without any."""
    saved = saved_disputes(view).get(step)
    attempts = [
        entry["attempt"]
        for entry in fold.entries.values()
        if entry["entry"] == "retry" and entry["step"] == step and any(map(differs, entry.get("disputes", ())))
    ]
    if saved is not None and saved.outcome == "saved":
        attempts = [saved.attempt]
    if not attempts:
        return None
    attempt = max(attempts)
    commits = [commit.attempt for commit in fold.commits]
    first = max((one for one in commits if one < attempt), default=-1) + 1
    end = min((one for one in commits if one >= attempt), default=math.inf) + 1
    num_restarts = sum(first <= attempt for first, _ in fold.restarts.values())
    audits = view.select((AuditRecord,), Stretch(key="attempt", first=first, end=end))[AuditRecord]
    params = view.select((ParamsRecord,), Stretch(key="step", first=step, end=step + 1))[ParamsRecord]
    return DisputedStep(
        saved=saved,
        stated=_disputed([record for _, record in audits if record.step == step]),
        params={
            record.group: record.digest for _, record in params if record.digest and record.num_restarts == num_restarts
        },
    )


def _disputed(records: Sequence[AuditRecord]) -> dict[Address, dict[int, list[Stated]]]:
    found: dict[Address, dict[int, list[Stated]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        boundaries: dict[Address, dict[Place, str]] = defaultdict(dict)
        for shard, index, kind, stage, position, digest in record.boundaries:
            boundaries[shard, index][Place(kind, stage, position)] = digest
        for shard, index, digest in record.digests:
            address, reported = (shard, index), found[shard, index][record.group]
            stated = Stated(digest=digest, boundaries=boundaries[address])
            known = next((number for number, one in enumerate(reported) if one.digest == digest), None)
            if known is None:
                reported.append(stated)
            elif not reported[known].boundaries:
                reported[known] = stated
    return {
        address: dict(by_group)
        for address, by_group in sorted(found.items())
        if len({one.digest for reported in by_group.values() for one in reported}) > 1
    }
