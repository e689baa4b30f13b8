"""What the audits of a run have compared and found, and what groups have stated about disputed microbatches, from its
journal.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spare_megatron.core.audits.clean_prefix import AuditedSteps, Computed
from spare_megatron.core.log.votes import WRONG_NUMBERS
from spare_megatron.journal.event_texts import groups_named, text_of_audited
from spare_megatron.journal.files import records_of
from spare_megatron.journal.fold import Committed, Fold
from spare_megatron.journal.journal_view import JournalView, Stretch, attempts_of, by_attempt
from spare_megatron.journal.records import AuditRecord, DisputeRecord, ParamsRecord, SuspicionRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.plans import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A microbatch that groups have computed to different digests."""

    step: int
    attempt: int
    shard: int
    index: int
    """Of the microbatch in its shard."""
    digests: Mapping[int, list[str]]
    """Group -> all digests that it has voted with, 16 hex digits each."""
    asked: list[int]
    """The groups that were asked to compute it then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectAudit:
    """A microbatch with a suspect loss that other hosts were asked about before the commit."""

    step: int
    attempt: int
    shard: int
    index: int
    counted_by: list[int]
    """The groups that have counted it and reported it."""
    asked: list[int]
    """The groups that were asked to compute it, those included."""
    is_data: bool
    """They have, to equal values, and the step was committed with it."""
    samples: list[str]
    """Where its sequences lie, as the journal's `suspicion` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedGroup:
    """A group that was fenced for what it has computed, and why; `reason` names the stage, and the rank or ranks."""

    group: int
    incarnation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoiled:
    """Committed steps that groups which were found wrong may have spoiled."""

    audited_steps: int
    """As `AuditedSteps.num_steps`: the steps before these are not spoiled."""
    num_steps: int
    """Committed steps."""
    groups: list[int]
    """As `AuditedSteps.spoiled_by`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoneSteps:
    """Committed steps that were computed again, as groups that were found wrong had spoiled them."""

    first: int
    end: int
    groups: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHistory:
    """Audits of a run."""

    every_steps: int
    """Steps between audits; 0 if the run has none."""
    steps: int
    """Committed steps with audits, those that a restart undid included."""
    compared: int
    """Microbatches in them that two or more groups have computed to equal digests."""
    audited_steps: int
    """As `AuditedSteps.num_steps` at the end of the journal."""
    spoiled: Spoiled | None
    """What groups that were found wrong have left in the parameters; None if nothing, or without audits."""
    undone: list[UndoneSteps]
    suspects: list[SuspectAudit]
    mismatches: list[Mismatch]
    culprits: list[FencedGroup]
    saved: dict[int, str]
    """Step with a mismatch -> why its parameters are not saved, empty if they are."""
    halted: str
    """Why the run halted over an audit, or over what own checks have found; empty if it did not."""


def find_spoiled(view: JournalView, run: RunRecord, fold: Fold) -> Spoiled | None:
    """What groups that were outvoted or fenced for wrong state have left in the parameters; None without such a group.

    Reads the audits of the journal only if a group was found wrong.
    """
    if not run.audit_every_steps or not any(entry.get("discard", False) for entry in fold.entries.values()):
        return None
    audited = AuditedSteps(run.first_step)
    for _ in _audited_commits(view, fold, audited):
        pass
    return _spoiled(audited, fold.step)


def _spoiled(audited: AuditedSteps, num_steps: int) -> Spoiled | None:
    groups = list(map(int, audited.spoiled_by))
    return Spoiled(audited_steps=audited.num_steps, num_steps=num_steps, groups=groups) if groups else None


def text_of_spoiled(spoiled: Spoiled) -> str:
    """Which steps are clean, and what else is in the parameters.

    >>> text_of_spoiled(Spoiled(audited_steps=6, num_steps=12, groups=[2]))
    'the first 6 of 12 steps are audited; what group 2 computed since is in the parameters'
    """
    audited = text_of_audited(spoiled.audited_steps, spoiled.num_steps)
    return f"{audited}; what {groups_named(spoiled.groups)} computed since is in the parameters"


def find_undone(fold: Fold) -> list[UndoneSteps]:
    undone: list[UndoneSteps] = []
    step, wrong = fold.run.first_step, set[int]()
    for index in sorted(fold.entries):
        match fold.entries[index]:
            case {"entry": "commit", "step": committed}:
                step, wrong = committed + 1, set()
            case {"entry": "fence", "group": group, "discard": True}:
                wrong.add(group)
            case {"entry": "restart", "step": first}:
                step = first
            case {"entry": "undo", "step": first}:
                undone.append(UndoneSteps(first=first, end=step, groups=sorted(wrong)))
                step, wrong = first, set()
    return undone


def text_of_undone(undone: UndoneSteps) -> str:
    """What was computed again, and without which groups.

    >>> text_of_undone(UndoneSteps(first=6, end=9, groups=[2]))
    'steps 6 to 8 were undone and computed again without group 2'
    """
    steps = f"steps {undone.first} to {undone.end - 1}"
    return f"{steps} were undone and computed again without {groups_named(undone.groups)}"


class SpoiledSteps:
    """What `find_spoiled` returns, of a journal that is read as it grows."""

    def __init__(self, first_step: int) -> None:
        self._audited = AuditedSteps(first_step)
        self._records: dict[int, list[AuditRecord]] = defaultdict(list)  # by attempt
        self._entries: deque[tuple[Mapping[str, Any], Collection[int]]] = deque()

    def add_audit(self, record: AuditRecord) -> None:
        self._records[record.attempt].append(record)

    def add_entry(self, entry: Mapping[str, Any], members: Collection[int]) -> None:
        """Adds an entry of the log, in its order, and the groups that took part before it."""
        self._entries.append((entry, members))

    def settle(self) -> None:
        """Folds the entries, once all lines that were written have been added: audits are written before votes."""
        while self._entries:
            entry, members = self._entries.popleft()
            attempt = entry["attempt"] if entry["entry"] == "commit" else -1
            _fold_entry(self._audited, entry, members, self._records.get(attempt, ()))
            for old in [other for other in self._records if other <= attempt]:
                del self._records[old]

    def found(self, num_steps: int) -> Spoiled | None:
        """What is spoiled of so many committed steps; None if nothing is."""
        return _spoiled(self._audited, num_steps)


def _audited_commits(
    view: JournalView, fold: Fold, audited: AuditedSteps
) -> Iterator[tuple[Committed, list[AuditRecord]]]:
    """Yields all commits with the audits of their attempts, and folds them and what lies between into `audited`."""
    left = deque(sorted(fold.entries))
    for part in attempts_of(view, fold):
        audits = by_attempt(part.audits)
        for _, commit in part.commits:
            records = audits[commit.attempt]
            while left and left[0] <= commit.index:
                _fold_entry(audited, fold.entries[left.popleft()], commit.members, records)
            yield commit, records
    for index in left:
        _fold_entry(audited, fold.entries[index], (), ())


def _fold_entry(
    audited: AuditedSteps, entry: Mapping[str, Any], members: Collection[int], records: Collection[AuditRecord]
) -> None:
    match entry:
        case {"entry": "commit", "step": step}:
            audited.on_commit(step, planned_audits(records), frozenset(map(GroupId, members)))
        case {"entry": "fence", "group": group, "discard": True}:
            audited.on_wrong(GroupId(group))
        case {"entry": "restart" | "undo", "step": step}:
            audited.on_restart(step)


def planned_audits(records: Collection[AuditRecord]) -> list[Computed]:
    return [
        (GroupId(record.group), Microbatch(ShardId(shard), index))
        for record in records
        for shard, index, _ in record.digests[: record.num_planned]
    ]


def audit_history(view: JournalView, run: RunRecord, fold: Fold) -> AuditHistory:
    num_compared, steps, audited = 0, 0, AuditedSteps(run.first_step)
    agreed: set[tuple[int, int, int]] = set()  # step and microbatch
    samples: dict[tuple[int, int, int], list[str]] = {}
    for commit, records in _audited_commits(view, fold, audited):
        times = Counter((shard, index) for record in records for shard, index, _ in record.digests)
        equal = {microbatch for microbatch, count in times.items() if count > 1}
        num_compared += len(equal)
        agreed |= {(commit.step, *microbatch) for microbatch in equal}
        steps += bool(records)
    mismatches, culprits, halted = _found(fold)
    for record in records_of(view.rare, SuspicionRecord):
        samples.setdefault((record.step, record.shard, record.index), record.samples)
    return AuditHistory(
        every_steps=run.audit_every_steps,
        steps=steps,
        compared=num_compared,
        audited_steps=audited.num_steps,
        spoiled=_spoiled(audited, fold.step) if run.audit_every_steps else None,
        undone=find_undone(fold),
        suspects=_suspects(fold, agreed, samples),
        mismatches=mismatches,
        culprits=culprits,
        saved={step: record.reason for step, record in sorted(saved_disputes(view).items())},
        halted=halted,
    )


def _suspects(
    fold: Fold, agreed: Collection[tuple[int, int, int]], samples: Mapping[tuple[int, int, int], list[str]]
) -> list[SuspectAudit]:
    """The questions about suspects, each microbatch of a step once."""
    found: dict[tuple[int, int, int], SuspectAudit] = {}
    wrong: set[tuple[int, int, int]] = set()
    for index in sorted(fold.entries):
        entry = fold.entries[index]
        for dispute in entry.get("disputes", ()):
            place = (entry["step"], *dispute["microbatch"])
            if differs(dispute):
                wrong.add(place)
            if dispute.get("is_suspicion") and place not in found:
                found[place] = SuspectAudit(
                    step=entry["step"],
                    attempt=entry["attempt"],
                    shard=place[1],
                    index=place[2],
                    counted_by=[group for group, *_ in dispute["statements"]],
                    asked=list(dispute["asked"]),
                    is_data=False,
                    samples=samples.get(place, []),
                )
    return [replace(one, is_data=place in agreed and place not in wrong) for place, one in found.items()]


def _found(fold: Fold) -> tuple[list[Mismatch], list[FencedGroup], str]:
    step, mismatches, culprits, halted = 0, [], [], ""
    for index in sorted(fold.entries):
        entry = fold.entries[index]
        match entry["entry"]:
            case "commit":
                step = entry["step"] + 1
            case "restart" | "undo":
                step = entry["step"]
            case "retry":
                for dispute in filter(differs, entry.get("disputes", ())):
                    digests: dict[int, list[str]] = defaultdict(list)
                    for group, digest, _ in dispute["statements"]:
                        digests[group].append(f"{digest:016x}")
                    shard, number = dispute["microbatch"]
                    mismatches.append(
                        Mismatch(
                            step=entry["step"],
                            attempt=entry["attempt"],
                            shard=shard,
                            index=number,
                            digests=dict(digests),
                            asked=list(dispute["asked"]),
                        )
                    )
            case "fence" if entry.get("is_outvoted"):
                incarnation = entry.get("incarnation", 0)
                culprits.append(
                    FencedGroup(
                        group=entry["group"], incarnation=incarnation, step=step, reason=entry.get("reason", "")
                    )
                )
            case "halt" if entry["reason"].startswith(("audit of", WRONG_NUMBERS)):
                halted = entry["reason"]
    return mismatches, culprits, halted


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
