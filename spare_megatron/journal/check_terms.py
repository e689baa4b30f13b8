"""Proof that the run record says what all groups ran under: every rule reads the terms of the run there."""

from collections.abc import Iterator
from dataclasses import asdict

from spare_megatron.journal.evidence import Evidence
from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.records import RunRecord, TermsRecord
from spare_megatron.journal.terms import digest_of_terms


def check_terms(evidence: Evidence, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """The run record, the settings beside the journal and the record of each group's life have the same terms."""
    records = [line.record for line in evidence.rare if isinstance(line.record, TermsRecord)]
    terms = asdict(run)
    for name, value in sorted(evidence.settings.items()):
        if terms[name] != value and run.terms:
            reason = f"the run record has {name}={terms[name]!r}, and config.toml {value!r}"
            yield Finding(severity="invalid", reason=reason)
    digest = digest_of_terms(terms)
    if run.terms not in ("", digest):
        yield Finding(severity="invalid", reason="the run record has other terms than those its digest was taken of")
    for group in sorted({record.group for record in records if record.sha256 != digest}):
        reason = f"group {group} ran under other terms than the run record has"
        yield Finding(severity="invalid", reason=reason)
    if run.terms or records:
        for group, life in sorted(_lives(fold) - {(record.group, record.incarnation) for record in records}):
            reason = f"the terms that group {group} ran under in its life {life} are not in the journal"
            yield Finding(severity="unknown", reason=reason)


def _lives(fold: Fold) -> set[tuple[int, int]]:
    """The groups that had a part in a committed step, each with its incarnation."""
    lives: set[tuple[int, int]] = set()
    known: tuple[object, object] = (None, None)
    for commit in fold.commits:
        opened = fold.opened.get(commit.attempt, {})
        if known[0] is not commit.members or known[1] is not opened:  # mostly the same objects
            lives |= {(group, opened[group]) for group in commit.members if group in opened}
            known = commit.members, opened
    return lives
