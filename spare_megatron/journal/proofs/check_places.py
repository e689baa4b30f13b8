"""The rules of `spare check` about machines that take places: none holds two, no place has two, moves are optimal."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from spare_megatron.journal.fold import Finding, placement_of
from spare_megatron.journal.journal_view import JournalView
from spare_megatron.journal.records import PlacesRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import ShardId


def check_places(view: JournalView, run: RunRecord) -> Iterator[Finding]:
    """Assignments follow each other, and those that re-form groups are what their inputs ask for. The record of an
    assignment may be missing, if all who read it were lost at once.
    """
    by_index: dict[int, PlacesRecord] = {}
    for line in view.rare:
        if isinstance(record := line.record, PlacesRecord) and by_index.setdefault(record.index, record) != record:
            yield _invalid(record, "is journaled in two ways")
    holders: dict[int, int] = {}  # machine by place, both where known
    incarnations: Counter[int] = Counter()
    newest: dict[int, int] = {}  # machine by its first place
    for record in (by_index[index] for index in sorted(by_index)):
        yield from (_invalid(record, reason) for reason in _why_impossible(record, holders, incarnations, newest))
        yield from (_invalid(record, reason) for reason in _why_not_chosen(record, run))
        for machine, place, incarnation in record.holdings:
            holders = {other: holder for other, holder in holders.items() if holder != machine} | {place: machine}
            incarnations[place], newest[machine % record.num_places] = incarnation, machine


def _invalid(record: PlacesRecord, reason: str) -> Finding:
    return Finding(severity="invalid", reason=f"assignment {record.index} of places {reason}")


def _why_impossible(
    record: PlacesRecord, holders: Mapping[int, int], incarnations: Mapping[int, int], newest: Mapping[int, int]
) -> Iterator[str]:
    """Reasons why an assignment does not fit those before it, as far as they are known."""
    machines, places = ([holding[field] for holding in record.holdings] for field in (0, 1))
    for what, numbers in (("machine", machines), ("place", places)):
        twice = [number for number, times in Counter(numbers).items() if times > 1]
        if twice:
            yield f"names {what} {twice[0]} twice"
    for machine, place, incarnation in record.holdings:
        if incarnation <= incarnations[place]:
            yield f"begins incarnation {incarnation} of place {place}, which has had {incarnations[place]}"
        if machine < newest.get(machine % record.num_places, machine):
            yield f"names machine {machine}, which another one has replaced"
    for where, holder in record.places:
        if holder is not None and holder != holders.get(int(where or 0), holder):
            yield f"takes machine {holder} for that of place {where}, which has another"


def _why_not_chosen(record: PlacesRecord, run: RunRecord) -> Iterator[str]:
    """Reasons why the moves do not make as many groups whole as there are machines for, or others would be better: they
    leave fewer shards without a host, or as many and are fewer.
    """
    if not record.places:
        return
    machine_of = {int(place or 0): machine for place, machine in record.places}
    movable = {machine for machine in machine_of.values() if machine is not None} | set(record.idle)
    for machine, place, _ in record.holdings:
        if machine not in movable:
            yield f"moves machine {machine}, whose group may train"
        if machine_of.get(place, place) is not None:
            yield f"gives place {place} away, which is not empty"
    size = record.num_places // run.most_groups
    missing: defaultdict[int, int] = defaultdict(int)
    for place, holder in machine_of.items():
        missing[place // size] += holder is None
    num_whole = min(len(missing), len(movable) // size)
    filled = Counter(place // size for _, place, _ in record.holdings)
    if any(number != missing.get(group) for group, number in filled.items()) or len(filled) != num_whole:
        yield f"makes groups {sorted(filled)} whole, and its machines suffice for {num_whole} of {sorted(missing)}"
        return
    hosts = [{*placement_of(run).hosts[ShardId(shard)]} for shard in record.shards]
    fewest = sorted(missing, key=lambda group: (missing[group], group))[:num_whole]
    found, others = (
        (sum(of_shard.isdisjoint(groups) for of_shard in hosts), sum(map(missing.__getitem__, groups)))
        for groups in (filled, fewest)
    )
    if found > others:
        yield f"moves {found[1]} machines, and fewer would make as many groups whole and host as many shards"
