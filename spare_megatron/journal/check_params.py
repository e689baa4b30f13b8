"""Proof that wherever state was compared those who went on held the same, and that nothing else was left in the run.

Where the optimizer state is cut into slices, an owner with wrong state may have sent wrong parameters to all others.
Then the step is computed anew, and every group takes its digests once more, after it has gathered all parameters: those
are the ones that it goes on with.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from spare_megatron.journal.check_slices import has_lost_state
from spare_megatron.journal.evidence import Steps
from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.records import ParamsRecord, RunRecord

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
