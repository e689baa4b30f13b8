"""Which steps of which site are in the parameters that sites have joined, for small histories."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from spare_megatron.core.log.entries import Entry, Restart, Synced, entry_fields
from spare_megatron.journal.proofs.joined_sites import JoinedSites, Revision, SiteHistory, join_sites
from spare_megatron.journal.records import RoundRecord

PER_STEP = 12


def synced(step: int, number: int = 0, *sites: int) -> Synced:
    digest = f"state {number}" if number else ""
    return Synced(step=step, attempt=step, round=number, sites=sites, digest=digest)


def record(number: int, **weights: int) -> RoundRecord:
    named = {site.removeprefix("site"): PER_STEP * steps for site, steps in weights.items()}
    return RoundRecord(group=0, step=0, attempt=0, round=number, weights=named, digest=f"state {number}")


def history(site: int, entries: Sequence[Entry], step: int, *records: RoundRecord, first_step: int = 0) -> SiteHistory:
    one = SiteHistory(site=site, first_step=first_step, microbatches_before=lambda step: PER_STEP * step)
    add(one, entries, step, *records, first_step=first_step)
    return one


def add(one: SiteHistory, entries: Sequence[Entry], step: int, *records: RoundRecord, first_step: int) -> None:
    fields = {index: entry_fields(entry) for index, entry in enumerate(entries)}
    fold: Any = SimpleNamespace(entries=fields, run=SimpleNamespace(first_step=first_step), step=step)
    one.add(fold, records)


def of_site(joined: JoinedSites, site: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]], Any]:
    one = next(one for one in joined.sites if one.site == site)
    return one.joined, one.left_out, one.since


def test_all_steps_up_to_the_last_round_are_joined() -> None:
    a = history(0, [synced(10, 1, 0, 1), synced(20, 2, 0, 1)], 25, record(1, site0=10, site1=8))
    b = history(1, [synced(8, 1, 0, 1), synced(17, 2, 0, 1)], 17)
    joined = join_sites([b, a])
    assert (joined.newest, joined.rounds, joined.findings) == (Revision(2, "state 2"), [1, 2], [])
    assert of_site(joined, 0) == ([(0, 10), (10, 20)], [], (20, 25))
    assert of_site(joined, 1) == ([(0, 8), (8, 17)], [], (17, 17))


def test_what_a_site_computes_before_it_takes_the_newest_state_is_left_out() -> None:
    a = history(0, [synced(10, 1, 0, 1), synced(20, 2, 0), synced(30, 3, 0, 1)], 30)
    b = history(1, [synced(10, 1, 0, 1), synced(20), synced(26, 2), synced(30, 3, 0, 1)], 30)
    joined = join_sites([a, b])
    assert joined.findings == []
    assert of_site(joined, 0) == ([(0, 10), (10, 20), (20, 30)], [], (30, 30))
    assert of_site(joined, 1) == ([(0, 10), (26, 30)], [(10, 26)], (30, 30))


def test_a_round_that_a_site_has_not_awaited_counts_what_it_had_voted_for() -> None:
    a = history(0, [synced(10, 1, 0, 1), synced(20, 2, 0)], 20, record(1, site0=10, site1=9))
    b = history(1, [synced(9), synced(14), synced(15, 1)], 18)
    joined = join_sites([a, b])
    assert joined.findings == []
    assert of_site(joined, 1) == ([(0, 9)], [(9, 18)], None)


def test_a_site_that_goes_back_to_a_checkpoint_computes_steps_again() -> None:
    back = Restart(step=4, members=())
    b = history(1, [synced(10, 1, 0, 1), back, synced(6, 1), synced(12, 2, 0, 1)], 12)
    a = history(0, [synced(10, 1, 0, 1), synced(20, 2, 0, 1)], 20)
    joined = join_sites([a, b])
    assert of_site(joined, 1) == ([(0, 10), (6, 12)], [], (12, 12))
    [finding] = joined.findings
    assert (finding.severity, finding.reason.partition(", from ")[2]) == ("remark", "6 to 9")


def test_a_run_that_continues_another_one_of_its_site_goes_on_with_its_rounds() -> None:
    a = history(0, [synced(10, 1, 0)], 14)
    add(a, [synced(20, 2, 0)], 22, first_step=12)
    assert of_site(join_sites([a]), 0) == ([(0, 10), (10, 20)], [], (20, 22))


def test_what_no_run_says_is_unknown() -> None:
    a = history(0, [synced(10, 1, 0, 1), synced(20, 2, 0, 1)], 20)
    assert [(one.severity, "site 1" in one.reason) for one in join_sites([a]).findings] == [("unknown", True)] * 2
    taken = history(1, [synced(4, 7)], 5)
    [finding] = join_sites([taken]).findings
    assert finding.reason == "round 7: no run that took part in it is given"


def test_sites_that_contradict_each_other_are_invalid() -> None:
    a = history(0, [synced(10, 1, 0, 1)], 20, record(1, site0=10, site1=7))
    b = history(1, [synced(8, 1, 1)], 20)
    found = join_sites([a, b]).findings
    assert {one.severity for one in found} == {"invalid"}
    assert [text for one in found for text in ("disagree", "another number") if text in one.reason] == ["disagree"]
    b = history(1, [synced(8, 1, 0, 1)], 20, record(1, site0=10, site1=7))
    [finding] = join_sites([a, b]).findings
    assert "counts another number of microbatches than the steps of site 1 have" in finding.reason


def test_sites_without_a_round_have_joined_nothing() -> None:
    joined = join_sites([history(0, [], 5), history(1, [synced(3)], 5)])
    assert (joined.rounds, joined.findings) == ([], [])
    assert of_site(joined, 0) == ([], [], (0, 5))
