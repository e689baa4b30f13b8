"""Rules on state: groups that continue hold equal parameters, and hosts of a state partition equal state.

An owner with wrong state may have sent wrong parameters to all groups. The step is then computed again, and the digests
that groups record after gathering all parameters again count.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spare_megatron.journal.files import records_of
from spare_megatron.journal.fold import Finding, Fold, Rule, invalid, unknown
from spare_megatron.journal.journal_view import JournalView, Steps, Stretch
from spare_megatron.journal.records import EndRecord, ParamsRecord, VoteRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.stacking.state_partitions import PartitionSetup, first_ownership

_Key = tuple[int, int]
"""(restarts, committed steps before)."""


def check_params(part: Steps, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """All groups record equal parameters, and partition hosts equal state, except `_excused_groups`."""
    changed: dict[_Key, set[int]] = defaultdict(set)
    recorded: dict[_Key, dict[int, ParamsRecord]] = defaultdict(dict)
    for record in part.params:
        key = record.num_restarts, record.step
        before = recorded[key].get(record.group)
        if before is not None and before.compared != record.compared and key not in fold.computed_anew:
            changed[key].add(record.group)
        recorded[key][record.group] = record
    for key, by_group in recorded.items():
        if not changed[key] and not any(_compare(key[1], by_group.values())):
            continue
        excused = _excused_groups(fold, key, by_group, part.contributed.get(key[1], set()))
        is_known = key < fold.known.position  # else a missing entry may have fenced a group
        for group in sorted(changed[key] - excused):
            reason = f"after {key[1]} steps group {group} has two digests of its parameters"
            yield fold.finding(reason, key, is_known=is_known)
        for reason in _compare(key[1], [record for group, record in by_group.items() if group not in excused]):
            yield fold.finding(reason, key, is_known=is_known)


def _excused_groups(
    fold: Fold, key: _Key, groups: Iterable[int], contributions: Iterable[tuple[int, int]]
) -> frozenset[int]:
    """Groups that may hold any state at position `key`, because they had no part in what followed.

    `contributions` has the (group, attempt) of each contribution to the next step.
    """
    step, excused = key[1], fold.discarded.get(key, frozenset())
    lost = set(groups) & set(fold.last_fenced_at)
    if step < fold.step:  # a group lost before it contributed spoiled nothing
        first = [0, *(attempt for attempt, _ in fold.restarts.values())][key[0]]  # of this pass over the step
        if key in fold.computed_anew | fold.resumed:
            committed = (commit.attempts[0].attempt for commit in fold.commits if commit.step == step)
            first = min((attempt for attempt in committed if attempt >= first), default=first)
        contributed = {group for group, attempt in contributions if attempt >= first}
        excused |= lost - contributed
    elif key in fold.computed_anew:
        excused |= lost - fold.groups
    return excused


def _compare(step: int, records: Collection[ParamsRecord]) -> Iterator[str]:
    if len({record.compared for record in records}) > 1 or len({record.sha256 for record in records} - {""}) > 1:
        yield f"after {step} steps the groups hold different parameters"
    states: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for number, digest in record.slices.items():
            states[number].add(digest)
    for number in sorted((number for number in states if len(states[number]) > 1), key=int):
        yield f"after {step} steps the hosts of state partition {number} hold different state"


def check_last_params(part: Steps, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every group that is left at the end has recorded its parameters."""
    if fold.step not in part.stretch:
        return
    steps = (fold.step, fold.step - 1) if fold.is_cut else (fold.step,)
    last = {(fold.num_restarts, step) for step in steps}
    silent = fold.groups - {r.group for r in part.params if (r.num_restarts, r.step) in last}
    # After the loss of a state partition, groups that still lack its parameters have no digest to record.
    for group in sorted(silent) if silent and not has_lost_state(fold) else ():
        yield unknown(f"no digest of the last parameters of group {group} in the journal")


def check_compared(part: Steps, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Every group that continued has recorded its parameters at each periodic comparison."""
    compared = {(record.group, record.step) for record in part.params}
    for number, commit in part.commits:
        if not run.params_check_every_steps or (commit.step + 1) % run.params_check_every_steps:
            continue
        for group in sorted(commit.members):
            if (group, commit.step + 1) not in compared and (group, commit.attempt + 1) in part.went_on:
                reason = f"after {commit.step + 1} steps: no digest of the parameters of group {group} in the journal"
                yield unknown(reason, (number,))


def check_restored(part: Steps, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Parameters loaded at a restart equal those recorded before it after as many steps."""
    if not fold.num_restarts:
        return
    digests: dict[tuple[int, int], set[str]] = defaultdict(set)
    for record in part.params:
        key = record.num_restarts, record.step
        if record.group not in fold.discarded.get(key, ()):  # those of discarded groups were wrong
            digests[key].add(record.compared)
    # First steps of the training before and after each restart.
    begun = [run.first_step, *(restart.step for _, restart in fold.restarts.values())]
    for number, step in enumerate(begun[1:], 1):
        # The state after these steps comes from the last training that began at or before them.
        before = next((count for count in reversed(range(number)) if begun[count] <= step), None)
        if step not in part.stretch:
            continue
        known = set() if before is None else digests.get((before, step), set())
        if known and not digests.get((number, step), set()) <= known:
            reason = f"restart {number} loaded parameters that differ from those the groups held after {step} steps"
            yield fold.finding(reason, (number,), is_known=(number, step) < fold.known.position)


RULES: Sequence[Rule] = (check_restored, check_params, check_last_params, check_compared)


@dataclass(slots=True)
class _PartitionHosts:
    """Hosts of each state partition between two log entries; `finished_at` is the attempt of the finish entry."""

    hosts: list[set[Member]]
    finished_at: int | None = None
    errors: list[str] = field(default_factory=list)

    def wiped_out(self) -> list[int]:
        return [index for index, row in enumerate(self.hosts) if not row]


def check_partitions(view: JournalView, fold: Fold) -> Iterator[Finding]:
    """A committed step has a host for every partition, copies go to members, and in the end all have all parameters."""
    if fold.terms.partitions is None:
        return
    partitions = _fold_partitions(fold.terms.partitions, fold)
    for error in partitions.errors:
        yield fold.finding(error, is_known=fold.is_whole)
    ends = records_of(view.rare, EndRecord)
    if len(ends) == 1 and ends[0].outcome in ("finished", "stopped") and partitions.finished_at is None:
        reason = "the run has ended, and no log entry states that all parameters are complete"
        yield fold.finding(reason, is_known=fold.known.is_over)
    if partitions.finished_at is None:
        return
    stretch = Stretch(key="attempt", first=partitions.finished_at, end=partitions.finished_at + 1)
    for _, record in view.select((VoteRecord,), stretch)[VoteRecord]:
        if not record.is_complete:
            yield invalid(f"the run finished although group {record.group} lacked parameters")


def has_lost_state(fold: Fold) -> bool:
    """Whether some state partition has no host after the last entry."""
    return fold.terms.partitions is not None and bool(_fold_partitions(fold.terms.partitions, fold).wiped_out())


def _fold_partitions(setup: PartitionSetup, fold: Fold) -> _PartitionHosts:
    partitions = _PartitionHosts(_first_hosts(setup, fold.opened[0]))
    fenced: set[Member] = set()
    for index in sorted(fold.entries):
        entry = fold.entries[index]
        if index in fold.fenced:
            lost = Member(GroupId(fold.fenced[index][0]), fold.fenced[index][1])
            fenced.add(lost)
            for row in partitions.hosts:
                row.discard(lost)
        if entry["entry"] == "commit":
            present = {
                Member(GroupId(g), number) for g, number in fold.opened.get(entry["attempt"], {}).items()
            } - fenced
            _release(partitions, entry["step"], entry.get("released", ()), min(setup.redundancy, len(present)))
            _commit(partitions, entry["step"], entry.get("restored", ()), present)
            drained = {Member(GroupId(group), number) for group, number in entry.get("drain", ())}
            fenced |= drained
            for row in partitions.hosts:
                row -= drained
        elif entry["entry"] == "finish":
            partitions.finished_at = entry["attempt"]
        elif index in fold.restarts:
            attempt, _ = fold.restarts[index]
            partitions.hosts, partitions.finished_at = _first_hosts(setup, fold.opened[attempt]), None
    return partitions


def _first_hosts(setup: PartitionSetup, members: Mapping[int, int]) -> list[set[Member]]:
    ownership = first_ownership(setup, [Member(GroupId(group), incarnation) for group, incarnation in members.items()])
    return [set(row) for row in ownership.hosts]


def _release(partitions: _PartitionHosts, step: int, released: Sequence[Any], num_wanted: int) -> None:
    """Runs before `_commit`: the copies that replace released ones joined, and were compared, earlier."""
    for index, (group, incarnation) in released:
        member, row = Member(GroupId(group), incarnation), partitions.hosts[index]
        what = f"step {step}: group {group} releases state partition {index}"
        if member not in row:
            partitions.errors.append(f"{what}, which it does not host")
        elif len(row) <= num_wanted:
            partitions.errors.append(f"{what}, which has {len(row)} hosts")
        row.discard(member)


def _commit(partitions: _PartitionHosts, step: int, restored: Sequence[Any], present: set[Member]) -> None:
    for index in partitions.wiped_out():
        partitions.errors.append(f"step {step}: committed although state partition {index} had no host")
    for index, (group, incarnation) in restored:
        member = Member(GroupId(group), incarnation)
        what = f"step {step}: group {group} copied state partition {index}"
        if member not in present:
            partitions.errors.append(f"{what}, but takes no part")
        elif member in partitions.hosts[index]:
            partitions.errors.append(f"{what}, which it hosts already")
        partitions.hosts[index].add(member)
