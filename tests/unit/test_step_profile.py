"""A rank's traces beside a full run: NVTX ranges of a GPU that is not there, and storage that takes nothing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.schema import ProfileConfig, RunConfig
from spare_megatron.core.log.actions import ComputeStep
from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.devices import gpu
from spare_megatron.process.span_ring import Ranges
from spare_megatron.rank.step_profile import StepProfile, wants_profile
from spare_megatron.rank.train_step import compute_step
from spare_megatron.stacking.layout import GroupId, ShardId
from spare_megatron.stacking.plans import Microbatch, make_plan, work_of
from spare_megatron.state.rank_context import RankProgress
from tests.rank_context import rank_context


class FakeProbe:
    """Notes what is pending when, and has the ranges."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.ranges: Ranges | None = None
        self.heartbeat = SimpleNamespace(spans=self)

    @contextmanager
    def during(self, operation: Operation) -> Iterator[None]:
        assert self.ranges is None, "it would be in the trace that it writes"
        self.operations.append(operation)
        yield


def profile_in(run_dir: Path, device: str, *steps: int) -> tuple[StepProfile, FakeProbe]:
    probe = FakeProbe()
    ctx = rank_context(config=RunConfig(profile=ProfileConfig(steps=steps)), run_dir=run_dir, probe=probe)
    ctx.spec.device = device
    return StepProfile(ctx), probe


def test_ranges_of_a_rank_on_a_gpu_are_those_of_nvtx_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(gpu.nvtx, "range_push", shown.append)
    monkeypatch.setattr(gpu.nvtx, "range_pop", lambda: shown.append("."))
    profile, probe = profile_in(tmp_path, "cuda:0", 3)
    profile.begin_step(2)
    profile.end_step()
    assert (probe.ranges, probe.operations) == (None, [])
    with warnings.catch_warnings(action="ignore"):  # torch's: there is no GPU
        profile.begin_step(3)
        assert probe.ranges is profile
        profile.push("reduce")
        profile.pop()
        profile.end_step()
        profile.begin_step(4)
    assert shown == ["ProfilerStep#3", "reduce", ".", "."]
    assert probe.operations == [Operation.PROFILE] * 2, "to start, and to write"
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["step-00000003-group-0.json"]


def test_storage_that_takes_no_trace_costs_the_trace_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").touch()
    profile, probe = profile_in(tmp_path, "cpu", 3)
    profile.begin_step(3)
    profile.end_step()
    profile.end_step()
    assert probe.ranges is None
    assert "step 3 has no profile: " in capsys.readouterr().out


def test_only_ranks_that_are_named_are_traced() -> None:
    profile = ProfileConfig(steps=(1,), groups=(0, 2), ranks=(1,))
    assert [(group, rank) for group in range(3) for rank in range(2) if wants_profile(profile, group, rank)] == [
        (0, 1),
        (2, 1),
    ]
    assert not wants_profile(ProfileConfig(), 0, 0)


def test_an_evaluation_ends_the_trace_of_the_step_before_and_begins_none() -> None:
    """It has the number of the step that follows, whose trace replaced the one that it had begun."""
    calls: list[object] = []
    profile = SimpleNamespace(begin_step=calls.append, end_step=lambda: calls.append("end"))
    controller: Any = SimpleNamespace(members=[0], num_missing_stages=0)
    probe: Any = SimpleNamespace(begin_step=lambda _: None)
    progress = RankProgress(lacks_params=True)  # it computes nothing
    ctx, parts = rank_context(controller=controller, probe=probe, progress=progress), SimpleNamespace(profile=profile)
    work = work_of({GroupId(0): [Microbatch(ShardId(0), 0)]}, (1, 1))
    for step, is_evaluation in ((1, False), (2, True), (2, False)):
        plan = make_plan(step, 0, work, is_evaluation=is_evaluation)
        compute_step(ctx, parts, ComputeStep(plan=plan, into=None))  # type: ignore[arg-type]
    assert calls == ["end", 1, "end", "end", 2]
