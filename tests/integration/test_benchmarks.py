"""Benchmarks that train, in a mode so short that their figures mean nothing: their commands work.

They run in this process, which has what they import and the server that they fork their ranks from. The peers'
environment is not made here: only our ways run.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.integration.test_planning_benchmarks import NOT_TRAINING, ROOT, checked

pytestmark = pytest.mark.timeout(300)

TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.seq_length=32",
    "train.micro_batch_size=1",
    "optimizer.warmup_steps=0",
    "spare.microbatches_per_shard=2",
    "control.heartbeat_interval_s=2",
)
THREE_GROUPS = ("layout.num_groups=3", "layout.pipeline_parallel=1", "spare.redundancy=3")
TWO_GROUPS = ("layout.num_groups=2", "layout.pipeline_parallel=1", "spare.redundancy=2")
_DELAY = '{{phase="forward", kind="delay", step={step}, group=2, rank=0, seconds=0.1}}'
UNHURRIED = f"faults.trace=[{', '.join(_DELAY.format(step=step) for step in range(2, 300))}]"
"""Steps of a tenth of a second, where a benchmark trains on until something has happened."""

TRAINING: dict[str, tuple[str, set[str], tuple[str, ...]]] = {
    "cadence": ("--intervals 0.2 --steps 24 --mean-steps 2", {"ratio", "outcomes"}, TWO_GROUPS),
    "calibration": ("--runs 1", {"own", "replays"}, ("train.steps=14", *THREE_GROUPS)),
    "checkpoint_stall": ("--pairs 1 --steps 5", {"ratio", "asynchronous"}, TWO_GROUPS),
    "culprits": ("--cases 0 --minutes 0.1", {"num_right", "num_cases"}, ()),
    "evaluation": ("--steps 3", {"ratio", "ratio_to_training", "evaluation_s"}, TWO_GROUPS),
    "fault_free_overhead": (
        "--pairs 1 --steps 8",
        {"ratio", "ours_step_s", "ratio_of_means", "plain_mean_step_s"},
        TWO_GROUPS,
    ),
    "gradient_guard": (
        "--steps 5",
        {"norm_share", "checksum_share", "hash_share", "rest_share", "sha256_s"},
        TWO_GROUPS,
    ),
    "goodput": (
        "--ways ours --runs 1 --steps 24 --quiet-steps 10 --kills 1 --mean-steps 0.1",
        {"ways", "failed", "quiet_step_s"},
        (),
    ),
    "growth": ("--groups 2 3 --runs 1 --steps 8", {"curves"}, ()),
    "memory": ("--steps 1 --lanes 2", {"rows", "ratio"}, TWO_GROUPS),
    "peers.compare": ("--runs 1 --faults kill --peers", {"faults", "ratio"}, TWO_GROUPS),
    "peers.fault_free": ("--runs 1 --steps 13 --peers", {"ratio", "step_s", "processor_over_plain"}, TWO_GROUPS),
    "recovery": ("--kills 1", {"phases"}, TWO_GROUPS),
    "reform": (
        "--runs 1 --rejoins 1 --steps-between 8",
        {"groups_before", "groups_after", "seconds", "longest_pause_s", "bitwise"},
        ("control.heartbeat_interval_s=1", UNHURRIED),
    ),
    "rejoin": ("--kills 1 --pairs 1", {"ratio", "with", "without"}, TWO_GROUPS),
    "repair": ("--runs 1", {"ratio", "losses"}, ()),
    "snapshots": ("--pairs 1 --steps 5", {"ratio", "restarts"}, TWO_GROUPS),
    "telemetry": (
        "--steps 56 --reported-steps 100 --hanging",
        {"ratio", "sinks", "reported_processor_s", "memory_growth_bytes"},
        TWO_GROUPS,
    ),
    "wide_groups": ("--pairs 1 --steps 7 --lanes 2", {"ratio", "bytes_over_groups", "ours_host_bytes"}, TWO_GROUPS),
}
"""Arguments, keys that the result has beside where it comes from, and settings beside those of all."""


ALONE = {
    "audit": (
        "--cases 2 --calm-steps 1 --pairs 2 --tokens 32",
        {"cases", "found", "right_rank", "bitwise", "false_alarms", "ratio"},
    ),
    "peers.corruption": ("--cases 1 --batch 1 --ways ours_each_step", {"cases", "ways", "without_effect"}),
    "reconfigure": ("--kills 1 --others 1", {"kills", "others", "cases"}),
    "shapes": (
        "--groups 3 --machines 3 --layers 6 --microbatches 4 --sleep 0.02 --steps 7 --heartbeat 2",
        {"ratio", "optimum", "seconds", "longest_pause_s", "bitwise", "valid"},
    ),
    "sites": (
        "--rounds 1 --alone 1 --hidden 32 --wait 2",
        {"ratio_to_model", "ratio_to_sums", "longest_wait_s", "steps_lost", "verdicts"},
    ),
    "sites_loss": (
        "--seeds 1 --steps 4 --every 2 --sequences 8",
        {"losses", "mean", "spread", "above_sums", "hours"},
    ),
    "slow_group": (
        "--groups 3 --microbatches 4 --redundancy 2 --sleep 0.02 --slow-steps 12",
        {"ratio", "optimum", "steps_to_deal"},
    ),
    "wrong_numbers": (
        "--cases 1 --ways products_1 --bounds 1 --sound 1",
        {"cases", "ways", "without_effect", "seconds_per_case", "bounds", "sound"},
    ),
}
"""Likewise, of those with models of their own."""


def settings(corpus: Path, more: tuple[str, ...]) -> list[str]:
    return [word for text in (*TINY, *more, f"data.corpus={corpus}") for word in ("--set", text)]


def scripts() -> dict[str, str]:
    """The text of each command, by its name."""
    found = {file: file.read_text() for file in (ROOT / "benchmarks").rglob("*.py")}
    return {
        ".".join(file.relative_to(ROOT / "benchmarks").with_suffix("").parts): text
        for file, text in found.items()
        if '__name__ == "__main__"' in text
    }


def test_every_command_is_tried_here() -> None:
    in_the_peers_environment = {"peers.nvrx_world", "peers.torchft_world", "peers.torchft_diloco"}
    with_megatrons_loop = {"convert_reduced"}  # in test_megatron_training
    elsewhere = in_the_peers_environment | with_megatrons_loop
    assert set(scripts()) - elsewhere == {*NOT_TRAINING, *TRAINING, *ALONE}


@pytest.mark.parametrize("name", [*NOT_TRAINING, *TRAINING, *ALONE, "convert_reduced"])
def test_a_command_finds_what_it_imports(name: str) -> None:
    text = scripts()[name]
    assert 0 < text.find("\nsys.path.insert(0, ") < text.find("\nfrom benchmarks")


def test_too_few_steps_to_measure_are_refused_with_the_limit(
    text_corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trained all of them, and ended in a StatisticsError."""
    words = ["--steps", "6", *settings(text_corpus, TWO_GROUPS)]
    monkeypatch.setattr(sys, "argv", ["fault_free_overhead", *words])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("benchmarks.fault_free_overhead").main()
    assert "train.steps=6" in (message := capsys.readouterr().err)
    assert "set --steps to more than 6" in message


@pytest.mark.parametrize("name", TRAINING)
def test_a_command_that_trains(
    name: str, text_corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, keys, more = TRAINING[name]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", [name, *words.split(), *settings(text_corpus, more), "--json"])
    importlib.import_module(f"benchmarks.{name}").main()
    result = checked(capsys.readouterr().out, keys)
    if name == "cadence":
        assert {outcome["kills"] for [outcome] in result["outcomes"].values()} == {1}
    if name == "wide_groups":  # fp32 numbers, and what is counted beside them
        tables = 256 * 32 + 32 * 32
        gradients = tables + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
        for lanes, sent in result["bytes_over_groups"].items():
            assert 0 < sent - 4 * gradients // int(lanes) < 200


@pytest.mark.parametrize("name", ALONE)
def test_a_command_with_a_model_of_its_own(name: str, text_corpus: Path) -> None:
    if name == "reconfigure" and not hasattr(dist.ProcessGroup, "reconfigure"):
        pytest.skip("torch has reconfigure from 2.14 on")
    words, keys = ALONE[name]
    script = ROOT / "benchmarks" / f"{name.replace('.', '/')}.py"
    command = [sys.executable, script, *words.split(), "--json"]
    if name in ("shapes", "sites", "sites_loss"):
        command += ["--set", f"data.corpus={text_corpus}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    result = checked(done.stdout, keys)
    if name == "audit":
        assert (result["found"], result["bitwise"], result["false_alarms"]) == (result["cases"], result["cases"], 0)
    elif name == "peers.corruption":  # a layer that drifts
        assert (result["cases"], result["ways"]["ours_each_step"]["right_group"]) == (1, 1)
    elif name == "shapes":
        assert (result["bitwise"], result["valid"]) == (True, True)
    elif name == "slow_group":  # what it measures is a matter of times, which other tests disturb
        assert result["optimum"] == 1.25
