"""Proof that wherever state was compared those who went on held the same, and that nothing else was left in the run.

Where the optimizer state is cut into slices, an owner with wrong state may have sent wrong parameters to all others.
Then the step is computed anew, and every group takes its digests once more, after it has gathered all parameters: those
are the ones that it goes on with.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.journal_view import JournalView, Steps, Stretch
from spare_megatron.journal.records import EndRecord, ParamsRecord, RunRecord, VoteRecord
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.state_partitions import Slicing, first_ownership

_Key = tuple[int, int]
"""Restarts, and committed steps before."""


def check_params(part: Steps, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """All groups told of the same parameters, and all hosts of a slice of the same state, but for who was put out."""
    changed: dict[_Key, set[int]] = defaultdict(set)
    told: dict[_Key, dict[int, ParamsRecord]] = defaultdict(dict)
    for record in part.params:
        key = record.num_restarts, record.step
        before = told[key].get(record.group)
        if before is not None and before.sha256 != record.sha256 and key not in fold.computed_anew:
            changed[key].add(record.group)
        told[key][record.group] = record
    for key, by_group in told.items():
        if not changed[key] and not any(_compare(key[1], by_group.values())):
            continue
        put_out = _put_out(fold, key, by_group, part.brought.get(key[1], set()))
        severity = fold.severity(is_known=key < fold.known.position)  # else a missing entry may have fenced a group
        for group in sorted(changed[key] - put_out):
            reason = f"after {key[1]} steps group {group} holds other parameters than it did"
            yield Finding(severity=severity, reason=reason, place=key)
        for reason in _compare(key[1], [record for group, record in by_group.items() if group not in put_out]):
            yield Finding(severity=severity, reason=reason, place=key)


def _put_out(fold: Fold, key: _Key, groups: Iterable[int], brought: Iterable[tuple[int, int]]) -> frozenset[int]:
    """The groups that may have had anything, for they had no part in what came of it.

    Args:
        fold: The log.
        key: When digests were compared.
        groups: Those that told of one.
        brought: Groups that contributed to the next step, each with the attempt.
    """
    step, put_out = key[1], fold.discarded.get(key, frozenset())
    lost = set(groups) & set(fold.last_fenced_at)
    if step < fold.next_step:  # whoever was lost before it entered the next reduction spoiled nothing with its own
        first = -1
        if key in fold.computed_anew:
            first = min(commit.attempts[0].attempt for commit in fold.commits if commit.step == step)
        contributed = {group for group, attempt in brought if attempt >= first}
        put_out |= lost - contributed
    elif key in fold.computed_anew:
        put_out |= lost - fold.members
    return put_out


def _compare(step: int, records: Collection[ParamsRecord]) -> Iterator[str]:
    if len({record.sha256 for record in records}) > 1:
        yield f"after {step} steps the groups hold different parameters"
    states: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for number, sha256 in record.slices.items():
            states[number].add(sha256)
    for number in sorted((number for number in states if len(states[number]) > 1), key=int):
        yield f"after {step} steps the hosts of slice {number} hold different state"


def check_last_params(part: Steps, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Whoever is left at the end has told of its parameters."""
    if fold.next_step not in part.stretch:
        return
    last = fold.num_restarts, fold.next_step
    silent = fold.members - {r.group for r in part.params if (r.num_restarts, r.step) == last}
    # Whoever lacks parameters when the last host of a slice is lost has no digest to give.
    for group in sorted(silent) if silent and not has_lost_state(run, fold) else ():
        yield Finding(severity="unknown", reason=f"no digest of the last parameters of group {group} in the journal")


def check_compared(part: Steps, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Whoever went on has told of its parameters wherever all were to."""
    compared = {(record.group, record.step) for record in part.params}
    for number, commit in part.commits:
        if not run.params_check_every_steps or (commit.step + 1) % run.params_check_every_steps:
            continue
        for group in sorted(commit.members):
            if (group, commit.step + 1) not in compared and (group, commit.attempt + 1) in part.went_on:
                reason = f"after {commit.step + 1} steps: no digest of the parameters of group {group} in the journal"
                yield Finding(severity="unknown", reason=reason, place=(number,))


def check_restored(part: Steps, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Where parameters were compared after as many steps before, those taken over at a restart are the same."""
    if not fold.num_restarts:
        return
    digests: dict[tuple[int, int], set[str]] = defaultdict(set)
    for record in part.params:
        key = record.num_restarts, record.step
        if record.group not in fold.discarded.get(key, ()):  # of those that were put out they were wrong
            digests[key].add(record.sha256)
    restarts = [fold.entries[index] for index in sorted(fold.entries) if fold.entries[index]["entry"] == "restart"]
    begun = [run.first_step]  # the steps with which training began, and began again
    for number, restart in enumerate(restarts, 1):
        step = restart["step"]
        # Of these steps none but the last training that came past them counts: later ones were undone.
        before = next((count for count in reversed(range(number)) if begun[count] <= step), None)
        begun.append(step)
        if step not in part.stretch:
            continue
        known = set() if before is None else digests.get((before, step), set())
        if known and not digests.get((number, step), set()) <= known:
            yield Finding(
                severity=fold.severity(is_known=(number, step) < fold.known.position),
                reason=f"restart {number} took over other parameters than the groups held after {step} steps before it",
                place=(number,),
            )


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


def check_slices(evidence: JournalView, run: RunRecord, fold: Fold) -> Iterator[Finding]:
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
