"""After a restart the groups hold what they held before it."""

from collections import defaultdict
from collections.abc import Iterator

from spare_megatron.journal.evidence import Steps
from spare_megatron.journal.finding import Finding
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.records import RunRecord


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
