"""Proof that every committed step could be applied to all of the optimizer state, where groups hold slices of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.core.slices import Slicing, first_ownership
from spare_megatron.core.topology import GroupId, Member
from spare_megatron.journal.evidence import Evidence, Stretch
from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.records import EndRecord, RunRecord, VoteRecord


@dataclass(slots=True)
class _Slices:
    """Who holds what, between two entries of the log.

    Attributes:
        hosts: For each slice, its hosts.
        attempt: The attempt under way.
        finished_at: The attempt on which the log says that the run can end.
        errors: What contradicts the invariant.
    """

    hosts: list[set[Member]]
    attempt: int = 0
    finished_at: int | None = None
    errors: list[str] = field(default_factory=list)

    def wiped_out(self) -> list[int]:
        return [index for index, row in enumerate(self.hosts) if not row]


def check_slices(evidence: Evidence, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """No step is committed while a slice has no host, copies are those of members, who lets go of one leaves enough,
    and the run ends with all of it.
    """
    if not run.slice_redundancy:
        return
    slices = _fold_slices(run, fold)
    for error in slices.errors:
        yield Finding(severity=fold.severity(is_known=fold.is_whole), reason=error)
    ends = [line.record for line in evidence.rare if isinstance(line.record, EndRecord)]
    if len(ends) == 1 and ends[0].outcome == "finished" and slices.finished_at is None:
        reason = "the run finished, and no entry says that all parameters were whole"
        yield Finding(severity=fold.severity(is_known=fold.known.is_over), reason=reason)
    if slices.finished_at is None:
        return
    stretch = Stretch(key="attempt", first=slices.finished_at, end=slices.finished_at + 1)
    for _, record in evidence.select((VoteRecord,), stretch)[VoteRecord]:
        if not record.is_complete:
            reason = f"the run finished though group {record.group} lacked parameters"
            yield Finding(severity="invalid", reason=reason)


def has_lost_state(run: RunRecord, fold: Fold) -> bool:
    """Whether some slice has no host after the last entry."""
    return bool(run.slice_redundancy and _fold_slices(run, fold).wiped_out())


def _fold_slices(run: RunRecord, fold: Fold) -> _Slices:
    slicing = Slicing(
        num_groups=run.num_groups, redundancy=run.slice_redundancy, groups_per_domain=run.groups_per_domain
    )
    slices = _Slices(_first_hosts(slicing, dict.fromkeys(range(run.num_groups), 0)))
    gone: set[Member] = set()
    for index in sorted(fold.entries):
        entry = fold.entries[index]
        if index in fold.fenced:
            lost = Member(GroupId(fold.fenced[index][0]), fold.fenced[index][1])
            gone.add(lost)
            for row in slices.hosts:
                row.discard(lost)
        if entry["entry"] in ("commit", "retry"):
            slices.attempt = entry["attempt"] + 1
        if entry["entry"] == "commit":
            present = {Member(GroupId(g), life) for g, life in fold.opened.get(entry["attempt"], {}).items()} - gone
            _let_go(slices, entry["step"], entry.get("released", ()), min(slicing.redundancy, len(present)))
            _commit(slices, entry["step"], entry.get("restored", ()), present)
        elif entry["entry"] == "finish":
            slices.finished_at = entry["attempt"]
        elif entry["entry"] == "restart":
            slices.attempt += 1
            slices.hosts, slices.finished_at = _first_hosts(slicing, fold.opened[slices.attempt]), None
    return slices


def _first_hosts(slicing: Slicing, members: Mapping[int, int]) -> list[set[Member]]:
    ownership = first_ownership(slicing, [Member(GroupId(group), life) for group, life in members.items()])
    return [set(row) for row in ownership.hosts]


def _let_go(slices: _Slices, step: int, released: Sequence[Any], num_wanted: int) -> None:
    """Before any copy becomes a host's: those that take its place have been compared since they did."""
    for index, (group, life) in released:
        member, row = Member(GroupId(group), life), slices.hosts[index]
        if member not in row:
            slices.errors.append(f"step {step}: group {group} lets go of slice {index}, of which it is no host")
        elif len(row) <= num_wanted:
            slices.errors.append(f"step {step}: group {group} lets go of slice {index}, which has {len(row)} hosts")
        row.discard(member)


def _commit(slices: _Slices, step: int, restored: Sequence[Any], present: set[Member]) -> None:
    for index in slices.wiped_out():
        slices.errors.append(f"step {step}: committed though slice {index} had no host")
    for index, (group, life) in restored:
        member = Member(GroupId(group), life)
        if member not in present:
            slices.errors.append(f"step {step}: group {group} has copied slice {index}, and takes no part")
        elif member in slices.hosts[index]:
            slices.errors.append(f"step {step}: group {group} has copied slice {index}, of which it is a host")
        slices.hosts[index].add(member)
