"""Processes that simulate, and their end when their results are no longer wanted."""

import multiprocessing
import os
import signal
import threading

import pytest

from spare_megatron.tools.simulate import simulate_jobs
from spare_megatron.tools.simulate.failures import FailureSpec
from spare_megatron.tools.simulate.scenario import CostModel, Scenario
from spare_megatron.tools.simulate.sweep import cases_of

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
