"""Cases of a sweep, their results, and the processes that simulate them."""

import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from scipy import stats

from spare_megatron.tools.plan.slow_group_costs import SlowRate
from spare_megatron.tools.simulate import simulate_jobs
from spare_megatron.tools.simulate.engine import timeline_of
from spare_megatron.tools.simulate.failures import FailureSpec, MachineDomain
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.sweep import (
    VARIANTS,
    Case,
    CaseResult,
    cases_of,
    decode_results,
    encode_result,
    estimate,
    figures_of,
    given_up,
    grid,
    run_case,
    summarize,
)

BASE = Scenario(
    name="small",
    num_groups=12,
    redundancy=3,
    microbatches_per_shard=4,
    num_steps=30,
    costs=CostModel(compute_s=60.0, reduce_s=5.0, jitter=0.05, save_s=20.0, restart_s=600.0, agree_s=0.1),
    failures=FailureSpec(mean_s=400.0),
)


def simulated(case: Case) -> CaseResult:
    ticks = count()
    return run_case(case, lambda: float(next(ticks)))


def test_the_grid_has_every_policy_and_redundancy_and_one_checkpoint_only() -> None:
    found = grid(BASE, VARIANTS, (2, 3))
    assert [(one.policy, one.granularity, one.redundancy) for one in found] == [
        ("checkpoint_only", "stack", 1),
        ("replication", "stack", 2),
        ("replication", "stack", 3),
        ("spare", "stack", 2),
        ("spare", "stack", 3),
        ("spare", "microbatch", 2),
        ("spare", "microbatch", 3),
    ]
    assert {one.failures for one in found} == {BASE.failures}


def test_policies_without_some_of_the_losses_are_left_out() -> None:
    slow = replace(BASE, slow=SlowRate(group_interval_s=1e5))
    assert [one.policy for one in grid(slow, VARIANTS, (2,))] == ["checkpoint_only", "spare", "spare"]
    racks = FailureSpec(mean_s=400.0, domains=(MachineDomain(name="rack", machines=2, mean_s=1e4),))
    found = grid(replace(BASE, failures=racks, reform_s=10.0), VARIANTS, (2,))
    assert [(one.policy, one.failures) for one in found] == [("spare", racks), ("spare", racks)]


def test_a_digest_names_scenario_and_seed() -> None:
    other = replace(BASE, costs=replace(BASE.costs, save_s=21.0))
    cases = [*cases_of((BASE, other), 2), Case(scenario=replace(BASE), seed=0)]
    assert len({case.digest for case in cases}) == 4
    assert cases[0].digest == cases[-1].digest


def test_a_result_of_other_code_is_not_taken_for_one_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(scenario=BASE, seed=0)
    before = case.digest
    monkeypatch.setattr("spare_megatron.tools.simulate.sweep.code_digest", lambda *_: "other")
    assert case.digest != before


def test_a_sweep_goes_on_where_its_file_ends() -> None:
    cases = cases_of(grid(BASE, VARIANTS, (2,)), 1)
    done = [simulated(case) for case in cases[:2]]
    cut_off = encode_result(simulated(cases[2]))[:-5]
    text = "".join(encode_result(result) + "\n" for result in done) + cut_off
    found = decode_results(text)
    assert list(found.values()) == done
    assert [case for case in cases if case.digest not in found] == list(cases[2:])


def test_a_file_with_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2 is no result"):
        decode_results(encode_result(simulated(Case(scenario=BASE, seed=0))) + '\n{"a": 1}\n')


def test_what_causes_add_explains_the_ratio() -> None:
    for case in cases_of(grid(BASE, VARIANTS, (2, 3)), 2):
        result = simulated(case)
        assert 1 + sum(result.terms.values()) == pytest.approx(result.time_to_train_ratio), case


def test_the_interval_is_that_of_students_t() -> None:
    samples = np.random.default_rng(5).normal(size=7).tolist()
    low, high = stats.t.interval(0.95, df=6, loc=np.mean(samples), scale=stats.sem(samples))
    found = estimate(samples)
    assert found.ci95 is not None
    assert (found.mean - found.ci95, found.mean + found.ci95) == pytest.approx((low, high))
    assert estimate([2.0]).ci95 is None


def test_figures_are_means_over_seeds() -> None:
    results = [simulated(case) for case in cases_of((BASE,), 3)]
    found = figures_of(results)
    assert found.seeds == 3
    assert found.losses == pytest.approx(np.mean([result.losses for result in results]))
    assert found.time_to_train_ratio.mean == pytest.approx(np.mean([r.time_to_train_ratio for r in results]))
    assert found.losses > 0


def test_a_run_that_is_given_up_has_no_figures_and_a_reason() -> None:
    hopeless = replace(BASE, policy="checkpoint_only", num_steps=2, failures=FailureSpec(mean_s=1.0))
    scenarios = (BASE, hopeless)
    results = {case.digest: simulated(case) for case in cases_of(scenarios, 1)}
    assert [figures.policy for figures in summarize(scenarios, 1, results)] == ["spare"]
    (reason,) = given_up(results.values())
    assert reason.startswith("checkpoint-only, r = 1: small: after")


def test_the_timeline_is_that_of_the_simulated_run() -> None:
    scenario = replace(BASE, redundancy=2, failures=FailureSpec(mean_s=200.0))
    result = simulated(Case(scenario=scenario, seed=1))
    moments = timeline_of(scenario, 1)
    happened = [moment.what for moment in moments]
    assert result.restarts > 0
    assert happened.count("restart") == result.restarts
    assert happened.count("loss") == result.losses
    assert moments[-1].num_steps == scenario.num_steps
    assert moments[-1].at_s <= result.end_s <= moments[-1].at_s + scenario.costs.save_s + 1e-6
    assert list(moments) == sorted(moments, key=lambda moment: moment.at_s)


SMALL = Scenario(
    name="small",
    num_groups=4,
    redundancy=2,
    num_steps=2,
    costs=CostModel(compute_s=1.0),
    failures=FailureSpec(mean_s=1000.0),
)


@pytest.mark.timeout(120)
def test_a_caller_that_wants_no_more_leaves_no_process_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the pool closed its pipe while the end of the program wrote to it: a traceback was the last output.

    It ends with its processes, one of which is stopped here.
    """
    monkeypatch.setattr(simulate_jobs, "_ENDING_S", 0.01)
    before = {*threading.enumerate(), *multiprocessing.active_children()}
    finished = simulate_jobs._simulated(cases_of([SMALL], 100), 2)
    next(finished)
    child, *_ = set(multiprocessing.active_children()) - before
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    finished.close()
    assert {*threading.enumerate(), *multiprocessing.active_children()} <= before
