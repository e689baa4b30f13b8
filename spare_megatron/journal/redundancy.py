"""For how long slices of the optimizer's state had fewer hosts than they are to have."""

from collections import defaultdict

from spare_megatron.journal.files import Journal
from spare_megatron.journal.records import RedundancyRecord


def full_redundancy_s(journal: Journal) -> tuple[float, ...]:
    """Seconds from each loss of a copy, or the first of several, until all slices had all of their hosts again.

    As one group saw it: the one that has seen the most of it. What never ended is not in it.
    """
    seen: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for line in journal.lines:
        if isinstance(line.record, RedundancyRecord):
            seen[line.source].append((line.at_s, line.record.num_missing))
    spans: list[float] = []
    since_s: float | None = None
    for at_s, num_missing in max(seen.values(), key=len, default=[]):
        if num_missing and since_s is None:
            since_s = at_s
        elif not num_missing and since_s is not None:
            spans.append(at_s - since_s)
            since_s = None
    return tuple(spans)
