"""What the benchmark of wrong numbers draws and counts; nothing is trained here."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.corruption import SUSPICION, Outcome
from benchmarks.wrong_numbers import NUM_CASES, SITES, SUMMED, _fault_of, configure, draw_cases, summarize
from spare_megatron.config.checks.validate_faults import fault_problems
from spare_megatron.mcore.corruption import site_of

NOTHING = Outcome(params_sha256="calm", did=(), lost=())


def test_the_mix_is_as_stated_in_whatever_order_and_the_same_seed_draws_the_same() -> None:
    cases = draw_cases(NUM_CASES, 3)
    assert NUM_CASES == 200
    stated = {(site.name, kind, phase): number for site in SITES for kind, phase, number in site.faults}
    assert Counter((case.site, case.kind, case.phase) for case in cases) == stated
    assert cases == draw_cases(NUM_CASES, 3)
    assert cases[:5] == draw_cases(5, 3) != draw_cases(5, 4)
    assert len({case.number for case in cases}) == NUM_CASES


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_case_can_be_injected_where_its_site_says(precision: str) -> None:
    gradients = {site.name: site.gradient for site in SITES if site.gradient}
    for case in draw_cases(60, 1, precision):
        config = configure(Path("text"), "default", case, [f"model.precision={precision}"])
        assert list(fault_problems(config)) == []
        fault = _fault_of(case)
        assert (fault.kind, fault.step, fault.group, str(fault.phase)) == (case.kind, case.step, case.group, case.phase)
        if case.site in gradients:
            assert site_of(fault)[0] == (True, gradients[case.site])
        assert precision == "fp32" or not case.kind.endswith("drift")


def test_counts_are_of_cases_with_an_effect_by_site() -> None:
    cases = [replace(case, group=1) for case in draw_cases(NUM_CASES, 1)]
    summed = next(case for case in cases if case.site == SUMMED)
    tokens = [case for case in cases if case.site == "tokens"][:4]
    spoiled = Outcome(params_sha256="other", did=(), lost=())
    fenced = Outcome(params_sha256="calm", did=("fence",), lost=(1,))
    wrongly = Outcome(params_sha256="other", did=("fence",), lost=(2,))
    discarded = Outcome(params_sha256="calm", did=("retry",), lost=())
    reported = Outcome(params_sha256="other", did=(SUSPICION,), lost=())
    outcomes = {"some": [discarded, fenced, wrongly, reported, NOTHING], "none": [spoiled, *[spoiled] * 3, NOTHING]}
    result = summarize([summed, *tokens], outcomes, "calm")
    assert (result["cases"], result["without_effect"]) == (4, 1)
    some, none = result["ways"]["some"], result["ways"]["none"]
    keys = ("cases", "found", "reported_only", "right_group", "bitwise")
    assert [some[key] for key in keys] == [4, 4, 1, 2, 2]
    assert [none[key] for key in keys] == [4, 0, 0, 0, 0]
    assert [some["by_site"]["tokens"][key] for key in keys] == [3, 3, 1, 1, 1]
    assert [some["by_site"][SUMMED][key] for key in keys] == [1, 1, 0, 1, 1]
