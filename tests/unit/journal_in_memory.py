"""A journal in memory as one part: what a `JournalIndex` of its files must prove, too; and the first record of one."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from spare_megatron.journal.files import Journal
from spare_megatron.journal.journal_view import Placed, Stretch, is_rare
from spare_megatron.journal.proofs.proof import Verdict, check
from spare_megatron.journal.records import EntryRecord, Record
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.summary import Summary, sum_up


def check_journal(journal: Journal) -> Verdict:
    return check(JournalInMemory(journal))


def summarize(journal: Journal) -> Summary:
    return sum_up(JournalInMemory(journal))


def run_record(num_groups: int, **terms: Any) -> RunRecord:
    """The record of a small run in which every group hosts every shard, unless `terms` say otherwise."""
    common: dict[str, Any] = {
        "name": "test",
        "ranks_per_group": 1,
        "redundancy": num_groups,
        "microbatches_per_shard": 1,
        "num_steps": 9,
        "placement": "golomb",
        "granularity": "microbatch",
        "reduce_mode": "fast",
        "faults": [],
    }
    return RunRecord(num_groups=num_groups, **{**common, **terms})


class JournalInMemory:
    """A `JournalView` of a journal in memory, as a single part."""

    num_stretches = 1
    origin_code: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.damage = journal.damage
        self.rare = [line for line in journal.lines if is_rare(line.record)]
        self.entries: dict[int, dict[str, Any]] = {}
        for record in journal.of(EntryRecord):
            self.entries.setdefault(record.index, record.entry)

    def disputed(self) -> list[Placed]:
        return [
            ((line.at_s, 0, number), line.record)
            for number, line in enumerate(self._journal.lines)
            if isinstance(line.record, EntryRecord) and line.record.entry != self.entries[line.record.index]
        ]

    def select(self, kinds: Collection[type[Record]], stretch: Stretch) -> dict[type[Record], list[Placed]]:
        found: dict[type[Record], list[Placed]] = {kind: [] for kind in kinds}
        for number, line in enumerate(self._journal.lines):
            kind = type(line.record)
            if kind in found and getattr(line.record, stretch.key) in stretch:
                found[kind].append(((line.at_s, 0, number), line.record))
        return found
