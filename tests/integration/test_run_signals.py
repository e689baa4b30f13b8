"""However a run is ended from outside, it leaves no process behind; a signal in a start is one line."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import LayoutConfig
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import EndRecord
from spare_megatron.state.checkpoint.checkpoint_folder import checkpoint_path
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.whole_run import tiny_config
from tests.interrupts.trial import interrupt, write_preset
from tests.unit.journal_in_memory import check_journal

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 60.0
_POLL_S = 0.05
ECHO_S = 0.25
"""A signal this soon after another one repeats it."""
LAYOUT = LayoutConfig(num_groups=2, pipeline_parallel=2)
NUM_STEPS = 5000
"""More than are committed by the time of the signal."""

# Fork server, its resource tracker, control store, supervisor, four ranks, two that wait for a loss.
NUM_PROCESSES = 10


def test_ctrl_c_ends_all_processes_of_a_run_and_says_so(text_corpus: Path, tmp_path: Path) -> None:
    """It reaches every process of the terminal's group at once, and impatient people press it more than once."""
    with training(text_corpus, tmp_path) as (process, descendants):
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.01)
        assert_interrupted(process, descendants, tmp_path / "run")


@pytest.mark.parametrize("whom", ["driver", "supervisor", "all"])
def test_sigterm_ends_a_run_with_a_checkpoint_and_says_so(text_corpus: Path, tmp_path: Path, whom: str) -> None:
    """Slurm sends it to every process of a step: ranks, store and fork server died of it."""
    run_dir = tmp_path / "run"
    with training(text_corpus, tmp_path) as (process, descendants):
        driver = psutil.Process(process.pid)
        for one in {"driver": [driver], "supervisor": [supervisor_of(driver)], "all": [driver, *descendants]}[whom]:
            one.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=END_TIMEOUT_S)
        assert process.returncode == 5, output
        assert left_of(descendants) == []
    assert "SIGTERM: the run ends after the step under way, with a checkpoint" in " ".join(output.split())
    assert "Traceback" not in output
    summary = json.loads((run_dir / "summary.json").read_text())
    committed = summary["steps_committed"]
    assert (summary["outcome"], summary["verdict"], summary["groups_lost"]) == ("stopped", "valid", 0)
    assert summary["outcome_reason"] == f"asked to end by SIGTERM after {committed} of {NUM_STEPS} steps"
    assert verify(checkpoint_path(run_dir / "checkpoints", committed)).manifest.step == committed


def test_a_second_sigterm_ends_a_run_at_once(text_corpus: Path, tmp_path: Path) -> None:
    """While nothing comes of the first, as the supervisor is stopped that is to pass it on."""
    with training(text_corpus, tmp_path) as (process, descendants):
        supervisor_of(psutil.Process(process.pid)).suspend()
        process.terminate()
        assert process.stdout is not None
        assert any("SIGTERM: the run ends" in line for line in iter(process.stdout.readline, ""))
        time.sleep(2 * ECHO_S)
        process.terminate()
        assert_interrupted(process, descendants, tmp_path / "run")


def supervisor_of(driver: psutil.Process) -> psutil.Process:
    """The child of the fork server that has ranks below it."""
    [server] = [child for child in driver.children() if child.children()]
    [supervisor] = [child for child in server.children() if child.children()]
    return supervisor


def assert_interrupted(process: subprocess.Popen[str], descendants: Sequence[psutil.Process], run_dir: Path) -> None:
    output, _ = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 130, output
    assert left_of(descendants) == []
    assert "interrupted" in output
    assert "Traceback" not in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["groups_lost"]) == ("interrupted", 0)
    assert 0 < summary["steps_committed"] < NUM_STEPS
    (end,) = read_journal(run_dir).of(EndRecord)
    assert end.outcome == "interrupted"
    # Ranks that found the control store gone began to save their state by themselves, and were killed in it.
    assert list((run_dir / "checkpoints").glob("*.state")) == []
    assert check_journal(read_journal(run_dir)).verdict != "invalid"


@pytest.mark.parametrize("stopped", ["nothing", "some", "all"])
def test_nothing_outlives_a_driver_that_is_killed(text_corpus: Path, tmp_path: Path, stopped: str) -> None:
    """A process that is stopped for good cannot see that the driver is gone."""
    with training(text_corpus, tmp_path) as (process, descendants):
        for victim in chosen(process.pid, stopped):
            victim.suspend()
        process.kill()
        process.wait(END_TIMEOUT_S)
        assert left_of(descendants) == []
    verdict = check_journal(read_journal(tmp_path / "run"))
    assert verdict.verdict == "unknown"
    assert any("no end" in reason for reason in verdict.reasons)


def chosen(driver_pid: int, whom: str) -> list[psutil.Process]:
    """Processes of a run below its fork server. Ranks, snapshot server and spares are children of the supervisor."""
    supervisor = supervisor_of(psutil.Process(driver_pid))
    server = supervisor.parent()
    assert server is not None
    return {
        "nothing": [],
        "some": [supervisor, *supervisor.children()[::2]],
        "all": server.children(recursive=True),
    }[whom]


@contextlib.contextmanager
def training(corpus: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], Sequence[psutil.Process]]]:
    """A `spare train` that has committed a step and has its spares, and all processes below it."""
    with spare_train(corpus, folder) as process:
        wait_for_a_step(process, folder / "run" / "metrics.jsonl")
        end_s = time.monotonic() + START_TIMEOUT_S
        while len(descendants := psutil.Process(process.pid).children(recursive=True)) < NUM_PROCESSES:
            assert time.monotonic() < end_s, descendants
            time.sleep(_POLL_S)
        # A process that is stopped before it has asked the kernel to end with its parent would stay.
        for child in supervisor_of(psutil.Process(process.pid)).children():
            while not ignores_interrupts(child):
                assert time.monotonic() < end_s, child
                time.sleep(_POLL_S)
        yield process, descendants


def ignores_interrupts(process: psutil.Process) -> bool:
    """What a child of a supervisor does right after it has asked to end with it."""
    [mask] = re.findall(r"SigIgn:\s+([0-9a-f]+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(mask, 16) >> signal.SIGINT - 1 & 1)


@contextlib.contextmanager
def spare_train(corpus: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A `spare train` in a process group of its own, as a terminal gives it. It is ended with the block."""
    preset = folder / "preset.toml"
    preset.write_text(dump_run_config(tiny_config(corpus, LAYOUT, steps=NUM_STEPS, rejoins=1, spares=1)))
    command = [sys.executable, "-m", "spare_megatron", "train", "--config", str(preset)]
    process = subprocess.Popen(
        [*command, "--run-dir", str(folder / "run")],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=END_TIMEOUT_S)


def wait_for_a_step(process: subprocess.Popen[str], metrics: Path) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end_s, "no step was committed in time"
        time.sleep(_POLL_S)


def left_of(processes: Sequence[psutil.Process]) -> list[str]:
    """Those of the processes that have not ended in time. A zombie has; not every container reaps orphans."""
    _, alive = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    left = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(str(process))
    return left


@pytest.mark.parametrize(
    ("line", "after_s"),
    [
        ("begun", 0.2),
        ("starting: Megatron", 0.4),
        ("starting: control store", 0.0),
        ("starting: 2 ranks", 0.1),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_start_is_one_line(
    text_corpus: Path, tmp_path: Path, line: str, after_s: float, number: signal.Signals
) -> None:
    """As `python -m tests.interrupts` does at 200 moments."""
    write_preset(text_corpus, tmp_path / "preset.toml")
    assert interrupt(tmp_path / "preset.toml", tmp_path / "trial", after_s, line, number).problem == ""
