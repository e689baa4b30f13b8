"""What the check says of digests of the state: of groups that gather all parameters anew, and of hosts that differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.fold import fold_log
from spare_megatron.journal.journal_view import steps_of
from spare_megatron.journal.proofs.check_state import check_compared, check_last_params, check_params
from spare_megatron.journal.records import ContributionRecord, ParamsRecord, Record
from spare_megatron.journal.run_record import RunRecord
from tests.unit.journal_in_memory import JournalInMemory, run_record

RUN = run_record(4, name="by hand", redundancy=3, num_steps=2, params_check_every_steps=1, slice_redundancy=3)
COMMITS = [{"entry": "commit", "step": 0, "attempt": 0}, {"entry": "commit", "step": 1, "attempt": 2}]
FENCE = {"entry": "fence", "group": 0, "discard": True}
ANEW = {"entry": "retry", "step": 1, "attempt": 1, "recompute": True, "gather": True}
FENCED = [COMMITS[0], FENCE, ANEW, COMMITS[1]]


def digests(step: int, params: str, partitions: str = "") -> list[Record]:
    """Records of groups 0, 1, ...: a letter for the digest of each, of parameters and partition 0; - for none."""
    return [
        ParamsRecord(
            group=group,
            step=step,
            digest=digest,
            slices={"0": partitions[group]} if partitions[group : group + 1] not in ("", "-") else {},
        )
        for group, digest in enumerate(params)
        if digest != "-"
    ]


def brought(step: int, attempt: int, groups: Sequence[int]) -> list[Record]:
    return [
        ContributionRecord(group=group, step=step, attempt=attempt, epoch=0, members=list(groups), microbatches={})
        for group in groups
    ]


def found(entries: Sequence[Mapping[str, Any]], *records: Record, run: RunRecord = RUN) -> list[str]:
    """The findings, and the errors of the log itself."""
    journal = Journal(lines=tuple(Line(source="test", at_s=0.0, record=record) for record in (run, *records)))
    fold = fold_log({index: dict(entry) for index, entry in enumerate(entries)}, run)
    [part] = steps_of(JournalInMemory(journal), fold)
    rules = (check_params, check_last_params, check_compared)
    return [*fold.errors, *(finding.reason for rule in rules for finding in rule(part, run, fold))]


WRONG = [*digests(1, "xyyx", "xyy-"), *brought(1, 1, range(4))]
RIGHT = [*digests(1, "-yyy", "-yy-"), *brought(1, 2, range(1, 4)), *digests(2, "-zzz", "-zz-")]


def as_earlier_versions_had_it(record: Record) -> Record:
    return replace(record, digest="", sha256=record.digest) if isinstance(record, ParamsRecord) else record


@pytest.mark.parametrize("version", [lambda record: record, as_earlier_versions_had_it], ids=["this", "earlier"])
def test_the_digests_that_are_known_are_compared(version: Callable[[Record], Record]) -> None:
    assert found(FENCED, *map(version, [*WRONG, *RIGHT])) == []
    other = map(version, [*WRONG, *RIGHT, *digests(2, "---x")])
    assert found(FENCED, *other) == [
        "after 2 steps group 3 has two digests of its parameters",
        "after 2 steps the groups hold different parameters",
    ]


@pytest.mark.parametrize(("last", "is_right"), [("-sss", True), ("-s-s", True), ("-sst", False)])
def test_sha256_at_the_end_is_compared_where_it_is_known(last: str, *, is_right: bool) -> None:
    ends = [
        ParamsRecord(group=group, step=2, digest="z", sha256=sha256, slices={"0": "z"} if group < 3 else {})
        for group, sha256 in enumerate(last)
        if sha256 != "-"
    ]
    reasons = found(FENCED, *WRONG, *RIGHT, *ends)
    assert reasons == ([] if is_right else ["after 2 steps the groups hold different parameters"])


def test_who_had_taken_wrong_parameters_over_goes_on_with_those_that_it_gathered_anew() -> None:
    assert found(FENCED, *WRONG, *RIGHT) == []


def test_parameters_change_between_two_steps_only_where_the_step_is_computed_anew() -> None:
    entries = [COMMITS[0], FENCE, {**ANEW, "recompute": False}, COMMITS[1]]
    assert "after 1 steps group 3 has two digests of its parameters" in found(entries, *WRONG, *RIGHT)


def test_a_group_lost_before_it_contributes_may_have_had_any_parameters() -> None:
    """A donor whose parameters change when it is about to give them, found by its next gradient."""
    entries = [COMMITS[0], {"entry": "fence", "group": 0}, {**COMMITS[1], "attempt": 1}]
    records = [*digests(1, "yyyy"), *digests(1, "x---"), *brought(1, 1, range(1, 4)), *digests(2, "-zzz")]
    assert found(entries, *records) == []
    assert "after 1 steps group 0 has two digests of its parameters" in found(entries, *records, *brought(1, 1, [0]))


def test_what_a_group_contributed_before_a_restart_does_not_count_after_it() -> None:
    """Its memory changes after the restart, and it is lost before it contributes again."""
    fences = [{"entry": "fence", "group": group} for group in range(4)]
    restart = {"entry": "restart", "step": 1, "members": [[group, 1] for group in range(4)]}
    last = [{"entry": "fence", "group": 3, "incarnation": 1}, {"entry": "commit", "step": 1, "attempt": 3}]
    commits = [{**COMMITS[0], "save": True}, {**COMMITS[1], "attempt": 1}]
    entries = [*commits, *fences, restart, *last]
    first = [*digests(1, "yyyy"), *brought(1, 1, range(4)), *digests(2, "zzzz")]
    again = [replace(record, num_restarts=1) for record in (*digests(1, "yyyx"), *digests(2, "zzz-"))]  # type: ignore[call-arg]
    records = [*first, *again, *brought(1, 3, range(3))]
    assert found(entries, *records, run=replace(RUN, num_steps=3)) == []
    wrong = "after 1 steps the groups hold different parameters"
    assert found(entries, *records, *brought(1, 3, [3]), run=replace(RUN, num_steps=3)) == [wrong]


def test_who_has_not_gathered_anew_must_not_go_on() -> None:
    later = [record for record in RIGHT if not (isinstance(record, ParamsRecord) and record.group == 3)]
    reasons = found(FENCED, *WRONG, *later, *digests(2, "---z"))
    assert reasons == ["after 1 steps the groups hold different parameters"]


def test_who_is_lost_before_it_has_gathered_anew_has_no_part_in_it() -> None:
    entries = [COMMITS[0], FENCE, ANEW, {"entry": "fence", "group": 3}, {**COMMITS[1], "attempt": 2}]
    right = [*digests(1, "-yy-", "-yy-"), *brought(1, 2, [1, 2]), *digests(2, "-zz-", "-zz-")]
    assert found(entries, *WRONG, *right) == []


def test_hosts_that_stay_must_hold_the_same_state() -> None:
    assert found(FENCED, *WRONG, *RIGHT[:-3], *digests(2, "-zzz", "-ab-")) == [
        "after 2 steps the hosts of state partition 0 hold different state"
    ]


def test_a_void_attempt_must_be_followed_by_another_gather() -> None:
    entries = [COMMITS[0], FENCE, {**ANEW, "gather": False}, COMMITS[1]]
    assert found(entries, *WRONG, *RIGHT) == ["step 1: attempt 1 was void, and its parameters are not gathered anew"]
