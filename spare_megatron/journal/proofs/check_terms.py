"""Rules on terms and code: the run record, which every rule relies on, states what all groups ran under."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict

from spare_megatron.journal import records
from spare_megatron.journal.event_texts import fault_named
from spare_megatron.journal.files import records_of
from spare_megatron.journal.fold import Finding, Fold, invalid, unknown
from spare_megatron.journal.journal_view import JournalView
from spare_megatron.journal.run_record import RunRecord, digest_of_terms


def check_terms(view: JournalView, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """The run record, the settings beside the journal and each incarnation's terms record agree."""
    found = records_of(view.rare, records.TermsRecord)
    terms = asdict(run)
    for name, value in sorted(view.settings.items()):
        if terms[name] != value and run.terms:
            yield invalid(f"the run record has {name}={terms[name]!r}, and config.toml {value!r}")
    digest = digest_of_terms(terms)
    if run.terms not in ("", digest):
        yield invalid("the terms in the run record do not match their digest")
    for group in sorted({record.group for record in found if record.sha256 != digest}):
        yield invalid(f"group {group} ran under terms other than those of the run record")
    if run.terms or found:
        named = {(record.group, record.incarnation) for record in found}
        for group, incarnation in _incarnations_in_sums(fold):
            if (group, incarnation) not in named:
                yield unknown(f"the terms of group {group} in incarnation {incarnation} are not in the journal")


def _incarnations_in_sums(fold: Fold) -> list[tuple[int, int]]:
    """Sorted (group, incarnation) of every group in a committed sum."""
    memberships = {}  # by identity: few are distinct
    for commit in fold.commits:
        opened = fold.opened.get(commit.attempt, {})
        memberships[id(opened), id(commit.members)] = opened, commit.members
    return sorted(
        {(group, opened[group]) for opened, members in memberships.values() for group in members if group in opened}
    )


def check_reports(view: JournalView, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """Losses, recoveries, restarts and injected faults agree with the log and the run record."""
    wanted = {(f["step"], f["group"], f["rank"], f["phase"], f["kind"]) for f in run.faults}
    ordered = {(entry.step, member) for first, entry in fold.restarts.values() for member in fold.opened[first].items()}
    for line in view.rare:
        match line.record:
            case records.LossRecord() as loss:
                yield from _check_loss(loss, fold)
            case records.RecoveryRecord() as recovery:
                yield from _check_recovery(recovery, fold)
            case records.RestartRecord() as restart:
                if (restart.step, (restart.group, restart.incarnation)) not in ordered:
                    who = f"group {restart.group}, incarnation {restart.incarnation}"
                    reason = f"{who}, restarted after {restart.step} steps, and no log entry orders it"
                    yield fold.finding(reason, is_known=fold.known.is_over)
            case records.FaultRecord() as fault:
                if (fault.step, fault.group, fault.rank, fault.phase, fault.kind) not in wanted:
                    yield invalid(f"the run record lacks an injected fault: {fault_named(fault)}")


def _check_loss(loss: records.LossRecord, fold: Fold) -> Iterator[Finding]:
    entry = fold.entries.get(loss.entry_index)
    if entry is None:
        return
    is_fence = entry["entry"] == "fence" and entry["group"] == loss.group
    if not is_fence or entry.get("incarnation", 0) < loss.incarnation:
        what = f"log entry {loss.entry_index} does not fence incarnation {loss.incarnation} of group {loss.group}"
        yield invalid(f"{what}, although a supervisor reports it")


def _check_recovery(recovery: records.RecoveryRecord, fold: Fold) -> Iterator[Finding]:
    strangers = sorted({group for group in recovery.lost if group not in fold.last_fenced_at})
    if strangers:
        what = f"group {recovery.group} recovered from the loss of groups {strangers} in step {recovery.step}"
        yield fold.finding(f"{what}, and no log entry fences them", is_known=fold.known.is_over)


_NUM_DIGITS = 12


def check_code(view: JournalView, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """All ranks ran the code of the run record; each rank of a group in a committed sum recorded its code."""
    if view.origin_code not in (None, run.code):
        yield invalid(f"origin.json names {_code(view.origin_code)}, the run record {_code(run.code)}")
    ranks = records_of(view.rare, records.RankRecord)
    others: dict[str, list[records.RankRecord]] = defaultdict(list)
    for record in ranks:
        if record.code != run.code:
            others[record.code].append(record)
    for code, found in others.items():
        names = f"rank {found[0].rank} of group {found[0].group} in incarnation {found[0].incarnation}"
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield invalid(f"{names}{more} ran {_code(code)}, the run record names {_code(run.code)}")
    if run.code:
        named = {(record.group, record.incarnation, record.rank) for record in ranks}
        starts = records_of(view.rare, records.StartRecord)
        shorter = {(one.group, one.incarnation): one.stages * run.ranks_per_stage for one in starts if one.stages}
        for group, incarnation in _incarnations_in_sums(fold):
            num_ranks = shorter.get((group, incarnation), run.ranks_per_group)
            missing = [rank for rank in range(num_ranks) if (group, incarnation, rank) not in named]
            if missing:
                who = f"ranks {missing} of group {group} in incarnation {incarnation}"
                yield unknown(f"the code of {who} is not in the journal")


def _code(digest: str | None) -> str:
    return f"code {digest[:_NUM_DIGITS]}" if digest else "no code"
