"""Did every rank run the code that the run record and `origin.json` name?"""

from collections import defaultdict
from collections.abc import Iterator

from spare_megatron.journal.evidence import Evidence
from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.records import RankRecord, RunRecord

_NUM_DIGITS = 12


def check_code(evidence: Evidence, run: RunRecord, fold: Fold) -> Iterator[Finding]:
    """All ranks ran the code of the run record, and each rank of a group that was in a committed sum names its code."""
    if evidence.origin_code not in (None, run.code):
        reason = f"origin.json names {_code(evidence.origin_code)}, the run record {_code(run.code)}"
        yield Finding(severity="invalid", reason=reason)
    ranks = [line.record for line in evidence.rare if isinstance(line.record, RankRecord)]
    others: dict[str, list[RankRecord]] = defaultdict(list)
    for record in ranks:
        if record.code != run.code:
            others[record.code].append(record)
    for code, records in others.items():
        names = f"rank {records[0].rank} of group {records[0].group} in life {records[0].incarnation}"
        more = f" and {len(records) - 1} more" if len(records) > 1 else ""
        reason = f"{names}{more} ran {_code(code)}, the run record names {_code(run.code)}"
        yield Finding(severity="invalid", reason=reason)
    if run.code:
        named = {(record.group, record.incarnation, record.rank) for record in ranks}
        for group, life in sorted(_lives(fold)):
            missing = [rank for rank in range(run.ranks_per_group) if (group, life, rank) not in named]
            if missing:
                reason = f"the code of ranks {missing} of group {group} in life {life} is not in the journal"
                yield Finding(severity="unknown", reason=reason)


def _lives(fold: Fold) -> set[tuple[int, int]]:
    """The groups that were in a committed sum, each with its life."""
    memberships = {}  # by identity: the log repeats few
    for commit in fold.commits:
        opened = fold.opened.get(commit.attempt, {})
        memberships[id(opened), id(commit.members)] = opened, commit.members
    return {(group, opened[group]) for opened, members in memberships.values() for group in members if group in opened}


def _code(digest: str | None) -> str:
    return f"code {digest[:_NUM_DIGITS]}" if digest else "no code"
