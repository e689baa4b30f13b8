"""Throughput and model FLOPs utilization, from the run record and step times.

Step times and numbers of ranks may be arrays with one element per step.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from spare_megatron.journal.records import RunRecord

T = TypeVar("T", float, npt.NDArray[np.float64])


def tokens_per_second(run: RunRecord, step_s: T) -> T | None:
    """Tokens of the global batch per second; None if their number is unknown."""
    return run.tokens_per_step / step_s if run.tokens_per_step else None


def tflops_per_rank(run: RunRecord, step_s: T, num_ranks: T) -> T | None:
    """Model TFLOPS of each rank that took part, redundant computation excluded; None if unknown."""
    return run.flops_per_step / step_s / num_ranks / 1e12 if run.flops_per_step else None


def flops_utilization(run: RunRecord, step_s: T, num_ranks: T) -> T | None:
    """Model FLOPs utilization (MFU) of the ranks that took part; None if FLOPs or peak are unknown."""
    tflops = tflops_per_rank(run, step_s, num_ranks)
    return None if tflops is None or run.peak_tflops is None else tflops / run.peak_tflops
