"""What torch's profiler has written of a run, as Chrome's trace format has it."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from spare_megatron.core.machines.failure_detector import Operation
from spare_megatron.journal.records import ContributionRecord
from tests.integration.whole_run import Run

TraceKey = tuple[int, int, int, int]
"""Step, group, rank and incarnation of a trace."""

_OF_TORCH = ("gloo:", "nccl:", "Optimizer.")
"""Ranges that torch adds by itself."""


def traces_of(run_dir: Path) -> dict[TraceKey, list[dict[str, Any]]]:
    """The complete events of each file, by what its name says."""
    found = {}
    for file in sorted((run_dir / "profile").iterdir()):
        match = re.fullmatch(r"step-(\d{8})-group-(\d{4})-rank-(\d+)(?:-life-(\d+))?\.json", file.name)
        assert match is not None, file.name
        step, group, rank, incarnation = (int(number or 0) for number in match.groups())
        events = json.loads(file.read_text())["traceEvents"]
        found[step, group, rank, incarnation] = [event for event in events if event["ph"] == "X"]
    return found


def assert_traced(run: Run, key: TraceKey, events: list[dict[str, Any]]) -> None:
    """The trace of a step that the group has completed: its passes as its journal has them, and nothing of other
    steps; what torch computed is inside them.
    """
    step, group, _, _ = key
    annotations = [event for event in events if event["cat"] == "user_annotation"]
    ranges = [event for event in annotations if not event["name"].startswith(_OF_TORCH)]
    names = Counter(event["name"] for event in ranges)
    assert names.pop(f"ProfilerStep#{step}") == 1
    passes = Counter({name: number for name, number in names.items() if " of shard " in name})
    counted = {
        (int(shard), index)
        for record in run.journal.of(ContributionRecord)
        if (record.step, record.group) == (step, group)
        for shard, indices in record.microbatches.items()
        for index in indices
    }
    assert passes == Counter(
        f"{kind} of shard {shard}, microbatch {index}" for kind in ("forward", "backward") for shard, index in counted
    )
    others = set(names) - set(passes)
    assert {Operation.REDUCE, Operation.SETTLE, Operation.UPDATE} <= others <= set(Operation)
    assert all(is_inside(event, whole) for whole in ranges if whole["name"].startswith("Prof") for event in ranges)
    products = [event for event in events if event["name"] in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")]
    for name in passes:
        (of_pass,) = [event for event in ranges if event["name"] == name]
        is_forward = name.startswith("forward")
        assert not is_forward or any(is_inside(event, of_pass) for event in products), name


def is_inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
