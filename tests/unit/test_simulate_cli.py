"""`spare simulate`: its figures, its files, and what it says about bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.journal.files import JournalWriter, read_journal
from spare_megatron.journal.records import EntryRecord
from spare_megatron.tools.simulate.simulate_calibrate import costs_elsewhere, measured_by
from spare_megatron.tools.simulate.simulate_table import percent_with_bounds
from spare_megatron.tools.simulate.sweep import Estimate, SweepFigures
from tests.unit.journal_in_memory import check_journal

SMALL = """
num_groups = 12
redundancy = 3
microbatches_per_shard = 4
num_steps = 30

[costs]
compute_s = 60.0
reduce_s = 5.0
jitter = 0.05
save_s = 20.0
restart_s = 600.0
agree_s = 0.1

[failures]
mean_s = 400.0
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def spare_simulate(*options: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "--jobs", "1", *options])


def figures(*options: str) -> dict[str, Any]:
    result = spare_simulate("--json", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_json_has_the_keys_of_the_contract(small: str) -> None:
    found = figures("--preset", small, "--seeds", "3")
    assert (found["policy"], found["granularity"]) == ("spare", "microbatch")
    assert (found["num_groups"], found["redundancy"], found["seeds"]) == (12, 3, 3)
    for name in ("time_to_train_ratio", "availability"):
        assert set(found[name]) == {"mean", "ci95"}
        assert found[name]["ci95"] > 0
    assert found["time_to_train_ratio"]["mean"] > 1
    assert 0 < found["availability"]["mean"] <= 1
    assert {"restarts", "losses", "wall_s"} <= set(found)
    assert 1 + sum(found["terms"].values()) == pytest.approx(found["time_to_train_ratio"]["mean"])


def test_options_reach_the_scenario(small: str) -> None:
    options = ["--preset", small, "--seeds", "1"]
    assert figures(*options, "--redundancy", "4")["redundancy"] == 4
    assert figures(*options, "--granularity", "stack")["granularity"] == "stack"
    assert figures(*options, "--policy", "checkpoint-only")["redundancy"] == 1
    assert figures(*options, "--set", "failures.mean_s=inf", "--save", "0s")["losses"] == 0
    back = figures(*options, "--repair", "1m", "--join", "30s", "--set", "failures.mean_s=150")
    assert back["terms"]["join"] > 0
    assert figures("--preset", "paper_n200", "--seeds", "1", "--steps", "5")["num_groups"] == 200


def test_the_table_names_what_keeps_the_ratio_from_1(small: str) -> None:
    result = spare_simulate("--preset", small, "--seeds", "2")
    assert result.exit_code == 0, result.output
    for text in ("time to train", "+-", "availability", "terms of the ratio", "extra compute", "restarts"):
        assert text in result.stdout
    assert "case 2/2" in result.stderr


def test_the_interval_of_a_share_stays_within_all_of_it() -> None:
    """The table had `94.33 +- 51.26 %`."""
    assert percent_with_bounds(Estimate(mean=0.9433, ci95=0.5126), 2) == "94.33 (43.07 to 100.00)"
    assert percent_with_bounds(Estimate(mean=0.25, ci95=0.5), 1) == "25.0 (0.0 to 75.0)"
    assert percent_with_bounds(Estimate(mean=0.25, ci95=None), 1) == "25.0"


def test_losses_are_listed_by_cause_where_causes_have_names(small: str) -> None:
    options = ["--preset", small, "--seeds", "2"]
    assert figures(*options)["losses_by_cause"].keys() == {"simulated"}
    assert "losses by cause" not in spare_simulate(*options).stdout
    options += ["--set", "failures.mix.io_board.weight=3", "--set", "failures.mix.software.weight=1"]
    found = figures(*options)
    assert found["losses_by_cause"].keys() == {"io_board", "software"}
    assert sum(found["losses_by_cause"].values()) == pytest.approx(found["losses"])
    assert "io board" in spare_simulate(*options).stdout.split("losses by cause")[1]


def test_the_papers_figures_stand_beside_ours() -> None:
    result = spare_simulate("--preset", "paper_n200", "--seeds", "1", "--steps", "3")
    assert "2.92 x, 87.00% at r = 9" in result.stdout


def test_all_policies_are_compared(small: str) -> None:
    found = figures("--preset", small, "--seeds", "2", "--policy", "all", "--sweep-redundancy", "2,3")
    assert len(found["cases"]) == 7
    assert found["time_to_train_ratio"] == min(
        (c["time_to_train_ratio"] for c in found["cases"]), key=lambda t: t["mean"]
    )
    table = spare_simulate("--preset", small, "--seeds", "1", "--policy", "all").stdout
    for name in ("checkpoint-only", "replication", "spare, stack", "spare, microbatch"):
        assert name in table
    slow = spare_simulate("--preset", small, "--seeds", "1", "--policy", "all", "--set", "slow.group_interval_s=1e5")
    assert "left out: replication, not simulated with slow.group_interval_s" in slow.stderr
    assert "replication" not in slow.stdout


def test_a_sweep_that_was_cut_off_simulates_only_the_rest(small: str, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    options = ["--preset", small, "--seeds", "2", "--sweep-redundancy", "2..4", "--out", str(out)]
    whole = figures(*options)
    lines = out.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    out.write_text("".join(lines[:4]) + lines[4][:20])
    result = spare_simulate("--json", *options)
    assert "4 of 6 cases were done before" in result.stderr
    again = json.loads(result.stdout)
    assert again["time_to_train_ratio"] == whole["time_to_train_ratio"]
    assert [line[:40] for line in out.read_text().splitlines()] == [line[:40] for line in lines]
    assert "case" not in spare_simulate("--json", *options).stderr.replace("6 of 6 cases", "")


@pytest.mark.slow
def test_several_processes_simulate_the_same(small: str) -> None:
    options = ["--preset", small, "--seeds", "3"]
    assert figures(*options, "--jobs", "2")["time_to_train_ratio"] == figures(*options)["time_to_train_ratio"]


def test_the_journal_is_valid(small: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = spare_simulate("--preset", small, "--seeds", "1", "--journal", str(run_dir))
    assert result.exit_code == 0, result.output
    journal = read_journal(run_dir)
    verdict = check_journal(journal)
    assert (verdict.verdict, verdict.steps_committed) == ("valid", 30), verdict.reasons
    assert any(record.entry["entry"] == "fence" for record in journal.of(EntryRecord))


def test_the_size_of_a_journal_is_known_before_it_is_written(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that restarts throw away are journaled, too: here they are about half."""
    run_dir = tmp_path / "run"
    options = ["--preset", small, "--seeds", "1", "--policy", "checkpoint_only", "--steps", "100"]
    assert spare_simulate(*options, "--journal", str(run_dir)).exit_code == 0
    size = (run_dir / "journal" / "simulator.jsonl").stat().st_size
    monkeypatch.setattr("spare_megatron.tools.simulate.simulate_command.MOST_JOURNAL_BYTES", size)
    result = spare_simulate(*options, "--journal", str(tmp_path / "other"))
    assert result.exit_code == 2
    assert "a journal of 100 steps, " in result.stderr
    assert "times each, of 12 groups has about" in result.stderr
    assert "lower --steps" in result.stderr
    assert "time to train" in result.stdout
    assert not (tmp_path / "other").exists()
    monkeypatch.setattr("spare_megatron.tools.simulate.simulate_command.MOST_JOURNAL_BYTES", 2 * size)
    assert spare_simulate(*options, "--journal", str(tmp_path / "other")).exit_code == 0


def test_costs_come_from_the_journal_of_a_run(small: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ["--preset", small, "--seeds", "1"]
    spare_simulate(*options, "--set", "costs.jitter=0.0", "--set", "costs.compute_s=48.0", "--journal", str(run_dir))
    found = figures(*options, "--calibrate", str(run_dir))
    assert found["calibration"]["compute_s"] == pytest.approx(48.0)
    assert found["calibration"]["full_speed_groups"] is None  # JSON has no infinity
    replayed = found["replay"]
    assert replayed["steps"]
    for step in replayed["steps"]:
        assert step["time"]["predicted_s"] == pytest.approx(step["time"]["measured_s"])
        assert step["time"]["error"] == pytest.approx(0.0, abs=1e-6)
    table = spare_simulate(*options, "--calibrate", str(run_dir)).stdout
    assert "measured in the run small" in table
    assert "the losses of the run small again" in table


def test_the_costs_of_one_run_predict_the_times_of_another(small: str, tmp_path: Path) -> None:
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    options = ["--preset", small, "--seeds", "1"]
    for run_dir, compute_s in ((slow, 96.0), (fast, 48.0)):
        compute = f"costs.compute_s={compute_s}"
        spare_simulate(*options, "--set", "costs.jitter=0.0", "--set", compute, "--journal", str(run_dir))
    found = figures(*options, "--calibrate", str(slow), "--replay", str(fast))
    first = found["replay"]["steps"][0]["time"]
    assert first["predicted_s"] == pytest.approx(first["measured_s"] + 48.0)


def test_processors_that_a_run_shared_are_not_shared_elsewhere(small: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ["--preset", small, "--seeds", "1"]
    shared = ["--set", "costs.jitter=0.0", "--set", "costs.full_speed_groups=2.0"]
    spare_simulate(*options, *shared, "--journal", str(run_dir))
    measured = measured_by(run_dir, None)
    assert measured.calibration.full_speed_groups == 2.0
    assert measured.replay.steps[0].time.error == pytest.approx(0.0, abs=1e-6)
    assert set(measured.calibration.costs) - set(costs_elsewhere(measured.calibration)) == {"full_speed_groups"}
    assert "2 at a time" in spare_simulate(*options, "--calibrate", str(run_dir)).stdout


@pytest.mark.parametrize("policy", ["spare", "replication"])
def test_the_plot_is_a_picture(small: str, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "simulated.png"
    result = spare_simulate(
        "--preset", small, "--seeds", "2", "--policy", policy, "--sweep-redundancy", "2,3", "--plot", str(path)
    )
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--preset nothing", "there is no preset nothing; known: llama3_16k"),
        ("--preset missing.toml", "missing.toml"),
        ("--policy other", "policy='other' must be one of checkpoint_only, replication, spare"),
        ("--granularity shard", "granularity='shard' must be one of"),
        ("--redundancy 601", "redundancy=601 exceeds num_groups=600"),
        ("--seeds 0", "--seeds 0 is below 1"),
        ("--jobs 0", "--jobs 0 is below 1"),
        ("--save -1s", "--save -1s: a duration here has to be 0 or more"),
        ("--repair 10", "--repair 10: no unit"),
        ("--set costs.compute=1", "unknown setting costs.compute; the nearest valid one is costs.compute_s"),
        ("--sweep-redundancy many", "--sweep-redundancy many: not redundancies, as in 2..20"),
        ("--sweep-redundancy 5..3", "--sweep-redundancy 5..3: redundancies have to be 1 or more"),
        ("--sweep-redundancy 0..3", "--sweep-redundancy 0..3: redundancies have to be 1 or more"),
        ("--sweep-redundancy 2..1000000000", "1000000000 exceeds num_groups=600; lower it or take more"),
        ("--sweep-redundancy 2,700", "--sweep-redundancy 2,700: 700 exceeds num_groups=600"),
        ("--seeds 1000000000", "1 scenarios with so many seeds makes 1000000000 simulations, more than 1000000; lower"),
        ("--plot picture.pdf", "--plot picture.pdf: the name has to end with .png"),
        ("--plot missing/picture.png", "missing; make it"),
        ("--calibrate missing", "missing holds no journal"),
        ("--replay missing", "--replay missing needs the costs of a run: add --calibrate RUN_DIR"),
        ("--journal somewhere", "--journal somewhere: a journal of 10000 steps of 600 groups has about"),
        ("--journal somewhere --policy replication", "keeps no decision log"),
    ],
)
def test_bad_input_gets_one_line(options: str, message: str) -> None:
    result = spare_simulate(*options.split())
    assert result.exit_code == 2
    complaints = [line for line in result.stderr.splitlines() if line.startswith("spare simulate: ")]
    assert len(complaints) == 1
    assert message in complaints[0]
    assert not result.stdout


def test_a_run_that_is_given_up_is_reported_in_one_line(small: str) -> None:
    options = ["--preset", small, "--seeds", "1", "--steps", "2", "--policy", "checkpoint_only"]
    result = spare_simulate(*options, "--set", "failures.mean_s=1")
    assert result.exit_code == 2
    assert "spare simulate: checkpoint-only, r = 1: small: after" in result.stderr
    assert not result.stdout


def test_what_another_sweep_gave_up_is_not_reported_of_this_one(small: str, tmp_path: Path) -> None:
    out = str(tmp_path / "results.jsonl")
    options = ["--preset", small, "--seeds", "1", "--steps", "2", "--out", out]
    hopeless = spare_simulate(*options, "--policy", "checkpoint_only", "--set", "failures.mean_s=1")
    assert "checkpoint-only, r = 1: small: after" in hopeless.stderr
    result = spare_simulate(*options)
    assert result.exit_code == 0
    assert "given up" not in result.stderr


def test_a_journal_that_cannot_be_made_is_refused_before_anything_is_simulated(small: str, tmp_path: Path) -> None:
    result = spare_simulate("--preset", small, "--journal", f"{small}/run")
    assert result.exit_code == 2
    assert f"--journal {small}/run cannot be made: {small} is a file" in result.stderr
    assert "case" not in result.stderr


def test_more_steps_than_memory_has_room_for_get_one_line(small: str) -> None:
    result = spare_simulate("--preset", small, "--seeds", "1", "--steps", "1000000000000000")
    assert result.exit_code == 2
    assert "this machine has too little memory for it: Unable to allocate" in result.stderr
    assert "1000000000000000" in result.stderr


def test_foreign_files_are_not_overwritten(small: str, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine\n")
    result = spare_simulate("--preset", small, "--out", str(other))
    assert result.exit_code == 2
    assert "line 1 is no result of a simulation" in result.stderr
    assert other.read_text() == "mine\n"
    JournalWriter(tmp_path, "writer").close()
    result = spare_simulate("--preset", small, "--journal", str(tmp_path))
    assert result.exit_code == 2
    assert "holds a journal already" in result.stderr


def test_figures_and_journal_are_there_though_the_plot_cannot_be_written(small: str, tmp_path: Path) -> None:
    """The simulations may have taken hours."""
    picture, run_dir = tmp_path / "full.png", tmp_path / "run"
    picture.symlink_to("/dev/full")
    files = ["--journal", str(run_dir), "--plot", str(picture)]
    result = spare_simulate("--preset", small, "--seeds", "1", "--sweep-redundancy", "2,3", *files)
    assert result.exit_code == 2
    assert "time to train" in result.stdout
    assert f"journal in {run_dir}" in result.stdout
    assert "curves in" not in result.stdout
    assert "spare simulate: [Errno 28] No space left on device" in result.stderr
    assert check_journal(read_journal(run_dir)).verdict == "valid"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_plot_is_there_though_the_figures_cannot_be_shown(small: str, tmp_path: Path, options: list[str]) -> None:
    picture = tmp_path / "simulated.png"
    words = ["--preset", small, "--seeds", "1", "--sweep-redundancy", "2", "--jobs", "1", "--plot", str(picture)]
    command = [sys.executable, "-m", "spare_megatron", "simulate", *words, *options]
    reader, pipe = os.pipe()
    os.close(reader)
    with os.fdopen(pipe, "w") as unread:
        done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def is_running(process: psutil.Process) -> bool:
    """Whether it still runs. It may be a zombie without a parent that reaps it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stop_a_sweep(out: Path, number: signal.Signals) -> tuple[int, str, list[psutil.Process]]:
    """Exit code and stderr of a sweep that gets a signal when it has results, and the processes it had by then."""
    options = ["--preset", "paper_n200", "--steps", "20", "--seeds", "1000", "--jobs", "2", "--out", str(out)]
    command = [sys.executable, "-m", "spare_megatron", "simulate", *options]
    # Not a pipe: a process that is left over would hold it open.
    with (out.parent / "stderr").open("w+") as stderr:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            deadline_s = time.monotonic() + 60
            while not (out.exists() and out.read_text().count("\n") >= 2):
                assert child.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            processes = psutil.Process(child.pid).children(recursive=True)
            os.kill(child.pid, number)
            code = child.wait(timeout=30)
        finally:
            child.kill()
            child.wait(timeout=30)
        stderr.seek(0)
        return code, stderr.read(), processes


def left_over(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after some seconds; they are killed."""
    deadline_s = time.monotonic() + 20
    while (left := [process for process in processes if is_running(process)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for process in left:
        process.kill()
    return left


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_ends_its_processes_and_keeps_what_is_done(tmp_path: Path, number: signal.Signals) -> None:
    code, message, processes = stop_a_sweep(tmp_path / "results.jsonl", number)
    assert len(processes) >= 2
    assert not left_over(processes)
    assert code == 130
    assert "interrupted; finished cases are in" in message
    assert "Traceback" not in message


@pytest.mark.slow
def test_a_sweep_that_is_killed_leaves_no_processes(tmp_path: Path) -> None:
    """As is one in a benchmark, which has no handler, by SIGTERM."""
    code, _, processes = stop_a_sweep(tmp_path / "results.jsonl", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert len(processes) >= 2
    assert not left_over(processes)


def test_re_forming_has_options_and_the_figures_of_any_run() -> None:
    shown = figures(
        *("--preset", "paper_n200", "--policy", "spare", "--granularity", "microbatch", "--shared-data"),
        *("--reform", "60s", "--machines-per-group", "375", "--microbatches", "64", "--join", "1s", "--save", "1.5s"),
        *("--steps", "200", "--seeds", "1"),
    )
    assert set(shown) == {field.name for field in fields(SweepFigures)}
    assert shown["losses"] > 20
    assert 1 < shown["time_to_train_ratio"]["mean"] < 1.06
    assert sum(shown["terms"].values()) == pytest.approx(shown["time_to_train_ratio"]["mean"] - 1)
    assert shown["terms"]["rebuild"] > 0, "the survivors' own compute hides the detection of most losses"


def test_machines_without_re_forming_are_refused() -> None:
    result = spare_simulate("--machines-per-group", "125")
    assert result.exit_code == 2
    assert "machines_per_group=125 is never used: set reform_s" in result.output
