"""The program of runs whose passes sleep, some groups' for longer at times (`slow_spells.py`).

A sleep stands for the passes of a microbatch on a device of its own, which two processors could not show for several
groups at once. Each run has a copy of this file, with its figures beside it in a file of JSON.
With `block`, a number of steps, no pace is measured in blocks of so many, votes have none and nothing is counted, by
turns with blocks as in every run, and each rank notes the processor time that it has used at the begin of each step.
"""

import contextlib
import json
import os
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from spare_megatron import Batch, RunConfig, StepContext, Terms, gpt_forward_step
from spare_megatron.process.heartbeats import RankProbe

step_under_way = 0

_OWN = Path(__file__)


class Noise:
    """Random tokens, made from the number of the sample."""

    def __init__(self, length: int, vocab_size: int) -> None:
        self._length, self._vocab_size = length, vocab_size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        line = torch.randint(self._vocab_size, (self._length + 1,), generator=generator)
        positions = torch.arange(self._length)
        return {"tokens": line[:-1], "labels": line[1:], "position_ids": positions}


def datasets_provider(config: RunConfig) -> Noise:
    return Noise(config.model.seq_length, config.model.vocab_size)


def forward_step(batch: Batch, model: torch.nn.Module, context: StepContext) -> tuple[torch.Tensor, Terms]:
    global step_under_way
    figures = _figures()
    if figures["block"] and context.step != step_under_way:
        with _OWN.with_suffix(f".used-{os.getpid()}").open("a") as file:
            file.write(f"{context.step} {time.process_time()}\n")
    step_under_way = context.step
    past_s = time.time() - _began_s()
    factors = [
        factor for group, from_s, to_s, factor in figures["spells"] if group == _group() and from_s <= past_s < to_s
    ]
    num_sleeps = _num_layers(model) if figures["is_per_layer"] else 1
    time.sleep(figures["sleep_s"] * num_sleeps * max(factors, default=1.0))
    return gpt_forward_step(batch, model, context)


@cache
def _num_layers(model: torch.nn.Module) -> int:
    """By name: tests import this file, and Megatron takes seconds to import."""
    return sum(type(module).__name__ == "TransformerLayer" for module in model.modules())


@cache
def _figures() -> dict[str, Any]:
    return dict(json.loads(_OWN.with_suffix(".json").read_text()))


@cache
def _began_s() -> float:
    """The wall clock at the first pass of the run, whichever rank's it is; that is in a file when this returns."""
    began = _OWN.with_suffix(".began")
    own = began.with_suffix(f".began-{os.getpid()}")
    own.write_text(str(time.time()))
    with contextlib.suppress(FileExistsError):
        os.link(own, began)
    own.unlink()
    return float(began.read_text())


@cache
def _group() -> int:
    """By the log that this process writes: a program cannot ask, since nothing that it computes may depend on it."""
    found = re.search(r"group-(\d+)", Path(os.readlink("/proc/self/fd/2")).name)
    assert found is not None, "the log of a rank is named after its group"
    return int(found[1])


def measure_by_turns(block: int) -> None:
    usual = RankProbe.pace_s

    def pace_s(probe: RankProbe, num_chunks: int) -> float:
        return usual(probe, num_chunks) if is_measured(step_under_way, block) else 0.0

    RankProbe.pace_s = pace_s  # type: ignore[assignment, method-assign]


def is_measured(step: int, block: int) -> bool:
    return step // block % 2 == 1


if _figures()["block"]:
    measure_by_turns(_figures()["block"])
