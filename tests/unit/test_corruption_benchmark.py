"""What the comparison of injected wrong numbers draws and counts; nothing is trained here."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.corruption import (
    FIRST,
    LAST,
    NUM_GROUPS,
    PHASES,
    SUMMED,
    Outcome,
    configure,
    draw_cases,
    read_peer,
    summarize,
)
from benchmarks.peers.peer_group import END_SUFFIX
from spare_megatron.config.checks.validate_faults import fault_problems
from spare_megatron.driver.planned_faults import resolve_trace

NOTHING = Outcome(params_sha256="calm", did=(), lost=())
WAYS = ("ours", "ours_each_step", "torchft", "nvrx")


def test_every_kind_is_drawn_as_often_and_the_same_seed_draws_the_same() -> None:
    cases = draw_cases(96, 3)
    assert Counter(case.kind for case in cases) == dict.fromkeys(PHASES, 12)
    assert {case.phase for case in cases if case.kind == "sum_flip"} == {"staged", "summed"}
    assert {case.group for case in cases} == set(range(NUM_GROUPS))
    assert {case.step for case in cases} == set(range(FIRST, LAST + 1))
    assert cases == draw_cases(96, 3) != draw_cases(96, 4)


def test_every_way_is_hit_alike_and_by_nothing_that_is_refused() -> None:
    for case in draw_cases(16, 1):
        configs = [configure(Path("text"), way, case) for way in WAYS]
        traces = [resolve_trace(config) for config in configs]
        [fault] = traces[-1]
        expected = replace(fault, bit=2 * case.bit + 1) if case.kind in SUMMED else fault
        assert traces == [(expected,), (expected,), (fault,), (fault,)]
        assert (fault.kind, fault.step, fault.group, str(fault.phase)) == (case.kind, case.step, case.group, case.phase)
        assert [problem for config in configs for problem in fault_problems(config)] == []


def test_cases_without_effect_count_for_no_system() -> None:
    cases = draw_cases(4, 1)
    found = Outcome(params_sha256="calm", did=("retry", "fence"), lost=(cases[1].group,))
    late = Outcome(params_sha256="other", did=("fence",), lost=(cases[2].group + 1,))
    spoiled = Outcome(params_sha256="other", did=(), lost=(), was_finite=False)
    reported = Outcome(params_sha256="other", did=("suspicion", "verdict invalid"), lost=())
    outcomes = {"ours": [NOTHING, found, late, reported], "torchft": [NOTHING, spoiled, spoiled, spoiled]}
    result = summarize(cases, outcomes, {"ours": NOTHING, "torchft": NOTHING})
    assert (result["cases"], result["without_effect"], result["not_finite"]) == (3, 1, 3)
    ours, theirs = result["ways"]["ours"], result["ways"]["torchft"]
    assert [ours[key] for key in ("found", "right_group", "bitwise", "reported_only")] == [3, 1, 1, 1]
    assert [theirs[key] for key in ("found", "right_group", "bitwise", "reported_only")] == [0, 0, 0, 0]
    assert ours["by_kind"][cases[1].kind]["bitwise"] == 1


@pytest.mark.parametrize("is_reacted_to", [False, True])
def test_what_a_peer_did_is_read_from_its_events_and_ends(tmp_path: Path, is_reacted_to: bool) -> None:
    [case] = draw_cases(1, 1)
    for group in range(NUM_GROUPS):
        kinds = ["fault"] if group == case.group else []
        kinds += ["discarded"] if is_reacted_to else []
        lines = [
            {"kind": kind, "group": group, "step": case.step, "at_s": 1.0, "num_microbatches": 0} for kind in kinds
        ]
        (tmp_path / f"group-{group}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if not is_reacted_to or group != case.group:
            end = {"params_sha256": "same", "was_finite": True}
            (tmp_path / f"group-{group}{END_SUFFIX}").write_text(json.dumps(end))
    outcome = read_peer(configure(Path("text"), "torchft", case), tmp_path)
    assert (outcome.params_sha256, outcome.was_finite) == ("same", True)
    assert outcome.did == (("discarded", "lost") if is_reacted_to else ())
    assert outcome.lost == ((case.group,) if is_reacted_to else ())


def test_a_peer_whose_groups_end_apart_is_not_bitwise_and_a_fault_that_did_not_strike_proves_nothing(
    tmp_path: Path,
) -> None:
    for group in range(NUM_GROUPS):
        end = {"params_sha256": str(group % 2), "was_finite": True}
        (tmp_path / f"group-{group}{END_SUFFIX}").write_text(json.dumps(end))
        (tmp_path / f"group-{group}.jsonl").write_text("")
    assert read_peer(configure(Path("text"), "nvrx", None), tmp_path).params_sha256 == ""
    with pytest.raises(RuntimeError, match="0 of 1 faults struck"):
        read_peer(configure(Path("text"), "nvrx", draw_cases(1, 1)[0]), tmp_path)
