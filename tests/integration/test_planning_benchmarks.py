"""Benchmarks that do not train, in a mode so short that their figures mean nothing: their commands work.

They run in this process, which has what they import, as the scripts that they are.
"""

import json
import resource
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]

NOT_TRAINING: dict[str, tuple[str, set[str]]] = {
    "control_plane": (
        "--stores embedded --groups 6 --fan-in 2 --steps 2 --processes 2 --log 600 --kept 20",
        {"rows", "logs", "kept"},
    ),
    "convert_megatron": (
        str(ROOT / "tests/megatron_launches"),
        {"configurations", "converted", "ratio", "arguments", "refusals"},
    ),
    "growth_simulated": (
        "--groups 60 120 --samples 3 --curves groups losses --at 60 --steps 12 --seeds 1",
        {"decisions", "curves"},
    ),
    "paper_assumptions": ("--steps 3", {"ratio", "rows"}),
    "paper_table": ("--seeds 1 --steps 3 --jobs 1", {"ratio", "rows"}),
    "planner_formulas": ("--samples 20 --most-groups 200", {"endurance", "overhead"}),
    "preprocess": ("--megabytes 1 --vocab-size 300 --pairs 1", {"ratio", "processor_ratio", "tokens_per_s"}),
    "reorder": ("--states 3 --sequences 1 --most-groups 200", {"coverage", "times"}),
    "report": ("--steps 50 --chromium=", {"processor_s", "page_bytes"}),
    "scatter": ("--groups 2 --elements 1000 --parts 2 --rounds 2", {"ratio", "median_s"}),
    "state_alternatives": ("--mib 1 --rounds 1 --files 2 --groups 1 2", {"ratio", "snapshots", "parity", "restart"}),
    "state_wipe_outs": ("--groups 200 --hosts 2 --steps 3", {"ratio", "rows"}),
}
"""Arguments, and keys that the result has beside where it comes from. None of these trains."""


def checked(text: str, keys: set[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text)
    assert {"machine", "commit", "date"} | keys <= set(result)
    return result


@pytest.fixture
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes back what scripts change in their process."""
    for what in ("argv", "path"):
        monkeypatch.setattr(sys, what, list(getattr(sys, what)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def run(name: str, words: list[str]) -> None:
    """As a script, which may end by an exit without a fault."""
    sys.argv = [f"benchmarks/{name}.py", *words, "--json"]
    code: Any = 0
    try:
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert not code


@pytest.mark.parametrize("name", NOT_TRAINING)
def test_a_command_that_does_not_train(name: str, process_as_before: None, capsys: pytest.CaptureFixture[str]) -> None:
    words, keys = NOT_TRAINING[name]
    run(name, words.split())
    result = checked(capsys.readouterr().out, keys)
    if name == "control_plane":
        loops, threads = result["rows"]
        assert (loops["clients"], threads["clients"]) == ("loops", "threads")
        assert 0 < loops["commit_ms"]["p50"] <= loops["commit_ms"]["p99"]
        assert [log["entries"] for log in result["logs"]] == [600]
        assert [kept["steps"] for kept in result["kept"]] == [20]
        assert 0 < threads["fence_ms"]["p50"] < threads["epoch_change_ms"]["p99"]
    if name == "convert_megatron":
        assert (result["configurations"], result["converted"]) == (3, 2)
        assert result["arguments"].keys() == {"taken", "implied"}
    if name == "growth_simulated":
        assert result["decisions"]["x"] == result["curves"]["groups"]["x"] == [60, 120]
        losses = result["curves"]["losses"]["figures"]["losses"]["medians"]
        assert losses[0] < losses[-1]
        assert all(spent_s > 0 for spent_s in result["curves"]["groups"]["figures"]["run_s"]["medians"])
