"""What benchmarks draw and make of recorded runs; nothing is trained here."""

import multiprocessing
import os
import re
from argparse import Namespace
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from multiprocessing.context import BaseContext, ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cadence import FIRST_KILL, best_interval_s, draw_kills, mean_rework
from benchmarks.peers.corruption import SUSPICION, Outcome
from benchmarks.shapes import SmallerScene, median_steps, optimum, stages_admitted
from benchmarks.telemetry import is_on, ratio_of
from benchmarks.wrong_numbers import NUM_CASES, SITES, SUMMED, _fault_of, configure, draw_cases, summarize
from spare_megatron.config.checks.validate_faults import fault_problems
from spare_megatron.config.schema import ClusterConfig, RunConfig
from spare_megatron.core.saves.survival import optimal_cadence_s
from spare_megatron.journal.files import Journal, Line
from spare_megatron.journal.records import CadenceRecord, EntryRecord
from spare_megatron.machine.gpus import Gpu
from spare_megatron.mcore.corruption import site_of
from spare_megatron.tools.bench import plain_megatron


def rework_of(kill: int, saved: list[int]) -> int:
    """Steps that are computed again after a loss in this step, by going back one by one."""
    step = kill
    while step > 0 and step not in saved:
        step -= 1
    return kill - step


@pytest.mark.parametrize("saved", [[], [21], [7, 25, 26, 40], [10, 58, 59, 60], list(range(1, 61))])
def test_the_rework_of_all_kills_is_that_of_one_after_the_other(saved: list[int]) -> None:
    assert mean_rework(saved, 60) == sum(rework_of(kill, saved) for kill in range(FIRST_KILL + 1, 59))


def test_its_share_is_the_mean_over_the_kills_that_are_drawn() -> None:
    steps, mean_steps, saved = 400, 12.0, [15, 40, 90, 92, 180, 300]
    options = Namespace(steps=steps, mean_steps=mean_steps)
    kills = [
        [int(kill) for kill in re.findall(r"step=(\d+)", " ".join(draw_kills(options, run)))] for run in range(3000)
    ]
    rework = [sum(kill - ([0, *saved])[bisect_right(saved, kill)] for kill in of_run) for of_run in kills]
    assert np.mean(rework) == pytest.approx(mean_rework(saved, steps) / (1 + mean_steps), rel=0.02)


@pytest.mark.parametrize(("save_s", "time_s"), [(0.22, 10.0), (1.0, 7.5), (5.0, 4.0)])
def test_the_interval_that_is_searched_for_is_the_one_that_is_computed(save_s: float, time_s: float) -> None:
    record = CadenceRecord(
        group=0,
        step=3,
        interval_s=0.0,
        save_s=save_s,
        group_interval_s=1.0,
        absence_s=None,
        time_to_wipe_out_s=time_s,
        num_losses=0,
        exposure_s=1.0,
        num_members=4,
    )
    assert best_interval_s(record) == pytest.approx(optimal_cadence_s(save_s, time_s), rel=1e-6)


def test_the_optimum_is_that_of_whole_microbatches_of_layers_and_fill() -> None:
    """(17 + 3) x 3 and (13 + 2) x 4 layers in place of (16 + 3) x 3; of 16 groups 15 take 16 or 17 each."""
    options = Namespace(layers=12, groups=4, microbatches=16, machines=4)
    assert optimum(options) == pytest.approx(20 / 19)
    assert optimum(Namespace(layers=12, groups=16, microbatches=16, machines=4)) == pytest.approx(20 / 19)


def test_a_group_that_lacks_a_machine_comes_back_without_another() -> None:
    scene = SmallerScene(groups=4, machines=4, losses=1, rejoins=0, steps_between=12)
    assert (scene.victims, scene.num_returns(1)) == ([(0, 0)], 1)


def test_steps_before_the_loss_and_with_the_smaller_group_leave_out_warm_ups_and_what_is_between() -> None:
    ended_s = [0, 9, 12, 13, 14, 15, 20, 25, 32, 35, 38, 40, 42, 44]
    commits = {step: {0: at_s + 100.0, 1: float(at_s)} for step, at_s in enumerate(ended_s)}
    assert median_steps(commits, 1, killed_at_s=15.5, joined=8) == [1.0, 2.0]


def test_stages_are_those_that_entries_name() -> None:
    entries = [{"entry": "commit", "step": 3}, {"entry": "commit", "step": 4, "admit": [[0, 1]], "stages": [3]}]
    records = [EntryRecord(group=1, index=index, entry=entry) for index, entry in enumerate(entries)]
    journal = Journal(lines=tuple(Line(source="test", at_s=0.0, record=record) for record in records))
    assert stages_admitted(journal) == {3}


def steps(num_steps: int, cost: float) -> dict[int, float]:
    """Steps of a machine whose speed wanders by a quarter; those with telemetry take so much more."""
    noise = np.random.default_rng(0).normal(scale=0.02, size=num_steps)
    return {
        step: 0.5 * (1 + 0.25 * np.sin(step / 40)) * (1 + noise[step]) * (1 + cost * is_on(step))
        for step in range(1, num_steps)
    }


@pytest.mark.parametrize("cost", [0.0, 0.01, 0.1])
def test_a_planted_cost_is_found_in_spite_of_a_drift(cost: float) -> None:
    found = ratio_of(steps(1600, cost))
    assert abs(found["ratio"] - (1 + cost)) < 1.5 * found["ratio_ci95"] < 0.005
    assert found["rounds"] == 196


def test_half_of_the_steps_are_with_it_and_both_halves_have_the_same_mean() -> None:
    on = [step for step in range(800) if is_on(step)]
    off = [step for step in range(800) if not is_on(step)]
    assert len(on) == len(off)
    assert sum(on) == sum(off)


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


class Refused(Exception):
    pass


@pytest.mark.parametrize(("device", "expected"), [("gpu", SpawnContext), ("cpu", ForkServerContext)])
def test_on_gpus_plain_ranks_are_no_forks_of_a_server_that_may_have_used_one(
    monkeypatch: pytest.MonkeyPatch, device: Any, expected: type[BaseContext]
) -> None:
    """With transformer-engine, which the server imports, they ended: CUDA cannot be used in a fork."""
    contexts: list[BaseContext] = []
    shown: list[str | None] = []

    def start_child(context: BaseContext, *_arguments: Any) -> None:
        contexts.append(context)
        shown.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if len(contexts) == 2:
            raise Refused

    gpus = tuple(Gpu(uuid=f"GPU-{letter}", name="H100", memory_bytes=1, free_bytes=1) for letter in "ba")
    monkeypatch.setattr(plain_megatron, "visible_gpus", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(plain_megatron, "preflight", lambda _config: None)
    monkeypatch.setattr(plain_megatron.processes, "fork_server", lambda: multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(plain_megatron.processes, "start_embedded_store", lambda *_arguments, **_options: (None, None))
    monkeypatch.setattr(plain_megatron.processes, "start_child", start_child)
    with pytest.raises(Refused):
        plain_megatron.run_plain(RunConfig(cluster=ClusterConfig(device=device)), len)
    assert [type(context) for context in contexts] == [expected] * 2
    assert shown == (["GPU-b", "GPU-a"] if device == "gpu" else ["1,0"] * 2), "each sees its own alone"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
