"""The rules of `spare check` about machines: none holds two places, no place has two, and those of broken groups move
as `core.machines.places` decides. One in quarantine gets no place and starts no group, and an examination that has
passed ends its quarantine. A slow machine is drained only where its record says why.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import isclose
from typing import Any

from spare_megatron.core.machines.places import Assignment, Holding, Places
from spare_megatron.core.slow_machines.slow_machine_policy import Situation, decide
from spare_megatron.journal.files import records_of
from spare_megatron.journal.fold import Finding, invalid, placement_of, unknown
from spare_megatron.journal.journal_view import JournalView
from spare_megatron.journal.records import ExaminationRecord, LadderRecord, PlacesRecord, StartRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.stacking.layout import GroupId, Layout, MachineId, PlaceId, ShardId
from spare_megatron.stacking.paces import PipelineTimes


def check_places(view: JournalView, run: RunRecord) -> Iterator[Finding]:
    """Assignments follow each other, and those that re-form groups are what their inputs ask for. The record of an
    assignment may be missing, if all who read it were lost at once.
    """
    by_index: dict[int, PlacesRecord] = {}
    for record in records_of(view.rare, PlacesRecord):
        if by_index.setdefault(record.index, record) != record:
            yield _invalid(record, "is journaled in two ways")
    holders: dict[int, int] = {}  # machine by place, both where known
    incarnations: Counter[int] = Counter()
    newest: dict[int, int] = {}  # machine by its first place
    places = Places(_layout_of(run, by_index[min(by_index)].num_places)) if by_index else None
    for number, record in enumerate(by_index[index] for index in sorted(by_index)):
        yield from (_invalid(record, reason) for reason in _why_impossible(record, holders, incarnations, newest))
        assert places is not None
        if record.index == number:  # else it is not known what came before
            yield from (_invalid(record, reason) for reason in _why_not_chosen(record, run, places))
        holdings = tuple(
            Holding(MachineId(machine), PlaceId(place), number) for machine, place, number in record.holdings
        )
        places.apply(Assignment(holdings=holdings, stages=tuple((GroupId(group), one) for group, one in record.stages)))
        for machine, place, incarnation in record.holdings:
            holders = {other: holder for other, holder in holders.items() if holder != machine} | {place: machine}
            incarnations[place], newest[machine % record.num_places] = incarnation, machine


def _invalid(record: PlacesRecord, reason: str) -> Finding:
    return invalid(f"assignment {record.index} of places {reason}")


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


def _why_not_chosen(record: PlacesRecord, run: RunRecord, places: Places) -> Iterator[str]:
    """Reasons why the choice is not the one that its inputs lead to, or no group grows by it that should."""
    if not record.places:
        for group, stages in record.stages:
            if stages <= places.stages_of(GroupId(group)):
                yield f"gives group {group} {stages} stages, which has {places.stages_of(GroupId(group))}"
        return
    hosts = placement_of(run).hosts
    chosen = places.reform(
        [PlaceId(int(place or 0)) for place, machine in record.places if machine is None],
        run.groups_per_domain,
        {ShardId(shard): hosts[ShardId(shard)] for shard in record.shards},
        tuple(map(MachineId, record.idle)),
        PipelineTimes(
            num_layers=run.num_layers,
            num_shards=run.num_groups,
            num_microbatches=run.microbatches_per_shard,
            lanes=run.lanes // run.row_size,
            moves_shards=run.granularity == "stack",
            is_dealt=run.deal_by_pace,
        ),
    )
    for what, found, right in (("moves", record.holdings, chosen.holdings), ("stages", record.stages, chosen.stages)):
        if found != [[*one] for one in right]:
            yield f"has the {what} {found}, and its inputs lead to {[[*one] for one in right]}"


def _layout_of(run: RunRecord, num_places: int) -> Layout:
    return Layout(
        num_groups=run.most_groups,
        data_parallel=run.ranks_per_stage,
        pipeline_parallel=run.ranks_per_group // run.ranks_per_stage,
        num_nodes=num_places,
        num_further=run.most_groups - run.num_groups,
        least_pipeline_parallel=run.least_stages or None,
    )


def check_quarantines(view: JournalView) -> Iterator[Finding]:
    """Follows the list of assignments, and what each supervisor has written from one entry to the next."""
    by_index: dict[int, PlacesRecord] = {}
    passed: set[int] = set()  # machines, of which some examination has
    ladder: list[LadderRecord] = []
    by_source: defaultdict[str, list[Any]] = defaultdict(list)
    for line in view.rare:
        record = line.record
        if isinstance(record, PlacesRecord):
            by_index.setdefault(record.index, record)
        if isinstance(record, LadderRecord):
            ladder.append(record)
        if isinstance(record, ExaminationRecord):
            yield from _why_misjudged(record)
            passed |= set() if record.reason else {record.machine}
        if isinstance(record, PlacesRecord | StartRecord) and line.source.startswith("supervisor"):
            by_source[line.source].append(record)
    drained = {record.machine for record in ladder if record.rule == "drain"}
    for record in ladder:
        yield from _why_not_decided(record)
    for places in by_index.values():
        for machine, cause, _ in places.quarantined:
            if cause == "slow" and machine not in drained:
                yield _invalid(places, f"puts machine {machine} into quarantine as slow, which no decision asks for")
    yield from _of_list([by_index[index] for index in sorted(by_index)], passed)
    for source in sorted(by_source):
        yield from _of_supervisor(source, by_source[source])


def _why_not_decided(record: LadderRecord) -> Iterator[Finding]:
    """Rules and figures to which the inputs of a decision do not lead."""
    right = decide(Situation(**{one.name: getattr(record, one.name) for one in fields(Situation)}))
    wrong = []
    if record.rule != right.rule:
        wrong.append(f"its inputs lead to `{right.rule}`")
    figures = (("a step gains", record.gain_s, right.gain_s), ("it costs", record.cost_s, right.cost_s))
    for what, written_s, found_s in figures:
        if not isclose(written_s, found_s, rel_tol=1e-6, abs_tol=1e-9):
            wrong.append(f"{what} {written_s:g} s, by its inputs {found_s:g} s")
    for reason in wrong:
        yield invalid(f"the decision about machine {record.machine} ({record.rule}): {reason}")


def _of_list(records: list[PlacesRecord], passed: set[int]) -> Iterator[Finding]:
    """The record of an entry may be missing, if all who read it were lost at once, and what one machine has found."""
    quarantined: dict[int, int] = {}  # machine by its first place
    for number, record in enumerate(records):
        for machine, _, _ in record.quarantined:
            quarantined.setdefault(int(machine) % record.num_places, int(machine))
        for machine in record.released:
            if quarantined.pop(machine % record.num_places, None) is None and record.index == number:
                yield _invalid(record, f"ends the quarantine of machine {machine}, which is in none")
            elif machine not in passed:
                reason = f"the journal lacks an examination that machine {machine} has passed, whose quarantine ends"
                yield unknown(reason)
        for machine, place, _ in record.holdings:
            if machine % record.num_places in quarantined:
                yield _invalid(record, f"gives place {place} to machine {machine}, which is in quarantine")


def _of_supervisor(source: str, records: list[PlacesRecord | StartRecord]) -> Iterator[Finding]:
    """A supervisor journals the quarantines of its own machine alone, in the order in which it learns of things."""
    quarantined: set[int] = set()
    for record in records:
        if isinstance(record, PlacesRecord):
            quarantined |= {int(machine) for machine, _, _ in record.quarantined}
            quarantined -= set(record.released)
        elif quarantined:
            text = f"machine {min(quarantined)} starts group {record.group} (life {record.incarnation}) in quarantine"
            yield invalid(f"{source}: {text}")


def _why_misjudged(record: ExaminationRecord) -> Iterator[Finding]:
    """Reasons why an examination has not passed that is recorded as passed: results that differ or are wrong."""
    if record.reason:
        return
    if record.own and record.own.get("wrong"):
        yield invalid(f"examination {record.number} of machine {record.machine} has passed with wrong values")
    own = set(_digests(record.own))
    model = (record.own or {}).get("model")
    others = [set(_digests(like)) for like in record.likes.values() if like.get("model") == model]
    if len(own) != 1 or not record.likes or (others and own not in others):
        what = f"examination {record.number} of machine {record.machine}"
        yield invalid(f"{what} has passed, and no other machine has computed the same")


def _digests(figures: Mapping[str, Any] | None) -> list[str]:
    return [] if figures is None else list(figures["digests"])
