"""Tokens a second and model FLOPs utilization."""

import numpy as np
import pytest

from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.goodput import flops_utilization, tflops_per_rank, tokens_per_second


def _run(**known: object) -> RunRecord:
    terms = {
        "name": "r",
        "num_groups": 2,
        "ranks_per_group": 2,
        "redundancy": 2,
        "microbatches_per_shard": 2,
        "num_steps": 9,
        "placement": "golomb",
        "granularity": "microbatch",
        "reduce_mode": "fast",
        "faults": [],
    }
    return RunRecord(**{**terms, **known})  # type: ignore[arg-type]


def test_speed_follows_from_the_terms_of_the_run_and_the_time_of_a_step() -> None:
    run = _run(tokens_per_step=1000, flops_per_step=8e12, peak_tflops=4.0)
    assert tokens_per_second(run, 0.5) == 2000
    assert tflops_per_rank(run, 0.5, 4) == 4.0
    assert flops_utilization(run, 0.5, 4) == 1.0
    assert flops_utilization(run, 0.5, 8) == 0.5


def test_speed_of_many_steps_is_an_array() -> None:
    run = _run(tokens_per_step=1000, flops_per_step=8e12, peak_tflops=4.0)
    assert tokens_per_second(run, np.array([0.5, 1.0])) == pytest.approx([2000, 1000])
    assert flops_utilization(run, np.array([0.5, 1.0]), np.array([4.0, 2.0])) == pytest.approx([1.0, 1.0])


def test_without_tokens_operations_or_a_peak_there_is_no_figure() -> None:
    unknown = _run()
    assert tokens_per_second(unknown, 0.5) is None
    assert tflops_per_rank(unknown, 0.5, 4) is None
    assert flops_utilization(_run(flops_per_step=8e12), 0.5, 4) is None
    assert flops_utilization(_run(peak_tflops=4.0), 0.5, 4) is None
