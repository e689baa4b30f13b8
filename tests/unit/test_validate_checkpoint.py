"""Settings of checkpoints, and of faults that strike a save, that are refused."""

from dataclasses import replace
from typing import Any

import pytest

from spare_megatron.config.checks.validate import problems
from spare_megatron.config.schema import FaultConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.faults.points import FaultPoint
from tests.unit.configured import CPU, configured


def only_problem(fault: FaultConfig | None = None, **settings: Any) -> str:
    (problem,) = problems(struck(*filter(None, [fault]), **settings), CPU)
    return problem


def struck(*trace: FaultConfig, **settings: Any) -> RunConfig:
    base = configured("layout.pipeline_parallel=2")
    return replace(base, checkpoint=CheckpointConfig(**settings), faults=replace(base.faults, trace=trace))


def fault(**fields: Any) -> FaultConfig:
    return FaultConfig(**{"phase": FaultPoint.SAVE_RENAME, "group": 1, "rank": 0, **fields})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"interval_steps": 0}, "checkpoint.interval_steps=0 must be at least 1"),
        ({"keep_last": 0}, "checkpoint.keep_last=0 must be at least 1"),
        ({"interval_s": 0.0}, "checkpoint.interval_s=0.0 must be above 0"),
        ({"timeout_s": -1.0}, "checkpoint.timeout_s=-1.0 must be above 0"),
        ({"interval_steps": 1, "keep_every_steps": 0}, "checkpoint.keep_every_steps=0 must be at least 1"),
        ({"keep_every_steps": 9}, "has no effect without checkpoints"),
    ],
)
def test_what_says_nothing_or_the_impossible_is_refused(settings: dict[str, Any], text: str) -> None:
    assert text in only_problem(**settings)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": "raise"}, "faults.trace[0].kind=raise cannot strike a save; choose one of kill, stop"),
        ({"rank": 1}, "faults.trace[0].phase=save_rename is reached by rank 0 alone"),
        ({"group": None}, "set faults.trace[0].group"),
    ],
)
def test_faults_that_no_save_can_meet_are_refused(fields: dict[str, Any], text: str) -> None:
    assert text in only_problem(fault(**fields), interval_steps=2)


@pytest.mark.parametrize("phase", [FaultPoint.LOAD, FaultPoint.LOAD_SEARCH])
def test_a_fault_needs_a_load_to_strike(phase: FaultPoint) -> None:
    assert "is reached only when a checkpoint is loaded" in only_problem(fault(phase=phase))
    found = problems(struck(fault(phase=phase), load="runs/a/checkpoints"), CPU)
    assert len(found) == (phase is FaultPoint.LOAD_SEARCH), "at the start no group searches"
    wiped_out = struck(fault(), fault(phase=phase), load="runs/a/checkpoints")
    assert not [text for text in problems(wiped_out, CPU) if "is loaded" in text]


def test_a_fault_needs_a_save_to_strike() -> None:
    assert "is reached only when a checkpoint is taken" in only_problem(fault())


def test_a_save_may_be_struck_where_there_is_one() -> None:
    assert problems(struck(fault(), fault(phase=FaultPoint.SAVE, rank=1), interval_s=60.0), CPU) == []
