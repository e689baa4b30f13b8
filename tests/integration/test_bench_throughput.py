"""`spare bench throughput`: ours beside plain Megatron in turn, and what it refuses."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.model.model_tensors import flops_per_token
from spare_megatron.config.schema import FaultConfig, FaultsConfig, RunConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.state.summary import Summary
from spare_megatron.tools.bench import bench_throughput
from spare_megatron.tools.bench.bench_throughput import NUM_WARMUP, problems_of, training_alone

pytestmark = pytest.mark.timeout(180)

STEPS = NUM_WARMUP + 3
PRESETS = Path(__file__).parents[2] / "configs/run"
DEMO = PRESETS / "demo_cpu.toml"
FOR_GPUS = PRESETS / "gpt_1p3b_node.toml"
SMALL = [
    "cluster.device=cpu",
    "layout.num_groups=2",
    "spare.redundancy=2",
    "spare.microbatches_per_shard=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.num_layers=2",
    "model.seq_length=16",
    "model.vocab_size=256",
    "metrics.peak_tflops=0.01",
    "control.heartbeat_interval_s=3",
]


WITH_RANKS = 5
"""Processes of the command when plain Megatron trains: two that start others, the store, two ranks."""


def words_of(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def run(preset: Path, *words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "throughput", "--config", str(preset), *words])
    return result.exit_code, result.stdout, result.stderr


def test_both_train_the_same_and_the_figures_follow_from_the_steps(text_corpus: Path, tmp_path: Path) -> None:
    settings = [*SMALL, f"data.corpus={text_corpus}"]
    out = tmp_path / "figures.json"
    words = words_of(settings)
    code, shown, errors = run(FOR_GPUS, *words, "--steps", str(STEPS), "--pairs", "1", "--json", "--out", str(out))
    assert code == 0, errors
    found = json.loads(shown)
    assert found == json.loads(out.read_text())
    config = load_run_config(FOR_GPUS, settings).config
    tokens = 2 * config.spare.microbatches_per_shard * config.train.micro_batch_size * 16
    for way in ("ours", "plain"):
        speed = found["speeds"][way]
        assert speed["num_steps"] == STEPS - NUM_WARMUP - 1
        assert speed["tokens_per_s"] == pytest.approx(tokens / speed["step_s"])
        assert speed["mfu"] == pytest.approx(flops_per_token(config) * tokens / speed["step_s"] / 2 / 0.01e12)
        assert speed["memory"]["host_bytes"] > 2**20
    assert found["ratio"] == found["speeds"]["ours"]["step_s"] / found["speeds"]["plain"]["step_s"]
    assert found["ratios"] == [found["ratio"]]
    means = {way: found["speeds"][way]["mean_step_s"] for way in ("ours", "plain")}
    assert all(mean > 0 for mean in means.values())
    assert found["ratio_of_means"] == means["ours"] / means["plain"]
    split_s = found["speeds"]["ours"]["split_s"]
    # A median of times that the rank took; those of steps are of the driver, and differ on a busy machine.
    assert 0 < split_s["compute"] < 2 * found["speeds"]["ours"]["step_s"]
    assert [found[name] for name in ("layers", "adam", "adam_of_plain")] == ["megatron-core", "torch", "torch"]


def test_only_steps_of_one_batch_are_compared_and_no_program_with_plain_megatron() -> None:
    ramp = ["spare.ramp_start=2", "spare.ramp_increment=2", "spare.ramp_steps=9"]
    changed = ["eval.every_steps=2", "data.split=9,1", "profile.steps=[9]", *ramp]
    config = training_alone(load_run_config(DEMO, [*changed, "program.file=mine.py"]).config)
    assert (config.eval.every_steps, config.profile.steps, config.spare.ramp.steps) == (0, (), 0)
    assert config.spare.ramp_increment == 1, "refused without a ramp"
    assert "program.file=mine.py" in "".join(problems_of(config, has_plain=True))
    assert not list(problems_of(config, has_plain=False))


def test_a_preset_that_ends_by_time_is_measured_to_the_last_step() -> None:
    config = load_run_config(DEMO, ["train.max_minutes=0.5"]).config
    assert training_alone(config).train.max_minutes is None


def test_what_is_left_out_keeps_nothing_from_being_measured(text_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset's faults were refused for steps that `--steps` leaves out, or a folder that no process writes to."""
    measured: list[RunConfig] = []

    def stop(config: RunConfig, *_: object, **__: object) -> None:
        measured.append(config)
        raise RuntimeError("far enough")

    monkeypatch.setattr(bench_throughput, "measure", stop)
    absent = ["checkpoint.interval_steps=0", "snapshot.every_steps=1", "train.max_minutes=-1"]
    for preset in ("wipeout_cpu", "campaign_cpu"):
        words = words_of([f"data.corpus={text_corpus}", *absent])
        code, _, errors = run(PRESETS / f"{preset}.toml", *words, "--steps", "12")
        assert (code, "far enough" in errors) == (1, True), errors
    run(DEMO, *words_of([f"data.corpus={text_corpus}", "train.steps=13", "optimizer.warmup_steps=3"]))
    assert [config.train.steps for config in measured] == [12, 12, 13]
    assert [config.optimizer.warmup_steps for config in measured] == [0, 0, 3]


def test_restarts_stay_as_they_fit_the_waits_of_the_run() -> None:
    settings = ["control.decision_timeout_s=250", "checkpoint.restart_wait_s=20", "checkpoint.interval_steps=5"]
    checkpoint = training_alone(load_run_config(DEMO, settings).config).checkpoint
    assert (checkpoint.is_wanted, checkpoint.restart_wait_s) == (False, 20.0)


def test_a_run_that_has_lost_a_group_is_no_figure(text_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is valid, and its steps are not those of a run in which nothing fails."""
    start_run, summaries = bench_throughput.start_run, []

    def with_a_loss(config: RunConfig, *arguments: Any) -> Summary:
        faults = FaultsConfig(trace=(FaultConfig(phase=FaultPoint.FORWARD, step=NUM_WARMUP, group=1),))
        summaries.append(start_run(dataclasses.replace(config, faults=faults), *arguments))
        return summaries[-1]

    monkeypatch.setattr(bench_throughput, "start_run", with_a_loss)
    words = words_of([*SMALL, f"data.corpus={text_corpus}"])
    code, shown, errors = run(FOR_GPUS, *words, "--steps", str(STEPS), "--pairs", "1", "--alone")
    assert [(summary.verdict, summary.groups_lost) for summary in summaries] == [("valid", 1)]
    assert code == 1
    assert "groups were lost 1 times" in errors
    assert "group 1: rank 0: SIGKILL" in errors
    assert "tokens/s" not in shown


def test_sigterm_leaves_no_process_of_plain_megatron(text_corpus: Path, tmp_path: Path) -> None:
    """They trained to their end, for no reader, when the command was killed while it waited for them."""
    words = words_of([*SMALL, f"data.corpus={text_corpus}"])
    command = [sys.executable, "-m", "spare_megatron", "bench", "throughput", "--config", str(FOR_GPUS)]
    with (tmp_path / "output").open("w+") as output:
        child = subprocess.Popen([*command, *words, "--steps", "20000"], stdout=output, stderr=output)
        started: list[psutil.Process] = []
        try:
            deadline_s = time.monotonic() + 120
            while len(started) < WITH_RANKS:
                assert child.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
                started = psutil.Process(child.pid).children(recursive=True)
            child.terminate()
            code = child.wait(timeout=60)
            _, left = psutil.wait_procs(started, timeout=20)
        finally:
            child.kill()
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            child.wait(timeout=30)
        output.seek(0)
        assert (code, left) == (130, []), output.read()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "6"], "train.steps=6: the first 5 steps are not measured; set --steps to more"),
        (["--set", "cluster.num_nodes=2"], "cluster.num_nodes=2"),
        (["--set", "layout.pipeline_parallel=2", "--set", "layout.virtual_pipeline=2"], "layout.virtual_pipeline=2"),
        (["--out", "/nowhere/figures.json"], "--out /nowhere/figures.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    text_corpus: Path, words: list[str], message: str
) -> None:
    code, _, errors = run(DEMO, "--set", f"data.corpus={text_corpus}", *words)
    assert code == 2
    assert message in errors
