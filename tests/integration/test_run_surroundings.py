"""What happens around a run changes nothing in it: its output, its directory, and how much time it is given to end."""

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import FaultConfig, LayoutConfig, RunConfig
from spare_megatron.config.schema_sections import CheckpointConfig
from spare_megatron.faults.points import FaultPoint
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import LossRecord
from spare_megatron.state.checkpoint.verification import verify
from tests.integration.whole_run import complete_run, tiny_config
from tests.unit.journal_in_memory import check_journal

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

LAYOUT = LayoutConfig(num_groups=2)
TIMEOUT_S = 120.0
_POLL_S = 0.05


@contextlib.contextmanager
def train(
    config: RunConfig, folder: Path, streams: Callable[[], None] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`spare train` with these standard streams, or with its output in a file. It is ended with the block."""
    (folder / "preset.toml").write_text(dump_run_config(config))
    command = [sys.executable, "-m", "spare_megatron", "train", "--config", str(folder / "preset.toml")]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--run-dir", str(folder / "run")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=streams,
            env={**os.environ, "PYTHONIOENCODING": "ascii"} if streams else None,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def output_of(folder: Path) -> str:
    """Without line breaks, as a terminal's width may be set."""
    return " ".join((folder / "output").read_text().split())


def summary_of(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < end_s, "not in time"
        time.sleep(_POLL_S)


def num_committed(run_dir: Path) -> int:
    return sum(
        Path(file).read_text().count('"record":"update"') for file in glob.glob(f"{run_dir}/journal/group-0000*")
    )


# ---------------------------------------------------------------------------------------------------------- output


def close_all() -> None:
    os.closerange(0, 3)


def close_output() -> None:
    os.closerange(1, 3)


def fill() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def leave_unread() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


@pytest.fixture(scope="module")
def expected(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run without anything unusual computes."""
    run = complete_run(tiny_config(text_corpus, LAYOUT), tmp_path_factory.mktemp("usual") / "run")
    assert run.summary.params_sha256 is not None
    return run.summary.params_sha256


@pytest.mark.parametrize("streams", [close_all, close_output, fill, leave_unread])
def test_output_that_nothing_takes_changes_nothing(
    text_corpus: Path, tmp_path: Path, expected: str, streams: Callable[[], None]
) -> None:
    """With closed streams its sockets and files had the numbers 1 and 2, and no step was made."""
    with train(tiny_config(text_corpus, LAYOUT), tmp_path, streams) as process:
        assert process.wait(TIMEOUT_S) == 0
    summary = summary_of(tmp_path / "run")
    assert (summary["outcome"], summary["verdict"], summary["params_sha256"]) == ("finished", "valid", expected)


# ------------------------------------------------------------------------------------------------------- directory


def test_a_run_goes_on_where_its_directory_is_moved(text_corpus: Path, tmp_path: Path) -> None:
    """A rank that starts later, checkpoints and the summary are there, and nothing is at the old place."""
    config = tiny_config(text_corpus, LAYOUT, steps=60, rejoins=1)
    config = replace(config, checkpoint=CheckpointConfig(interval_steps=20))
    run_dir, moved = tmp_path / "run", tmp_path / "there" / "moved"
    with train(config, tmp_path) as process:
        wait_until(lambda: num_committed(run_dir) > 2, process)
        moved.parent.mkdir()
        run_dir.rename(moved)
        [rank] = [
            one
            for one in psutil.Process(process.pid).children(recursive=True)
            if any("group-0001-rank-0.jsonl" in file.path for file in one.open_files())
        ]
        rank.kill()
        assert process.wait(TIMEOUT_S) == 0, output_of(tmp_path)
    assert not run_dir.exists()
    assert f"{run_dir}, the directory of the run, is now {moved}" in output_of(tmp_path)
    journal = read_journal(moved)
    assert [(loss.group, loss.incarnation) for loss in journal.of(LossRecord)] == [(1, 0)]
    assert check_journal(journal).verdict == "valid"
    assert (summary_of(moved)["outcome"], summary_of(moved)["groups_lost"]) == ("finished", 1)
    assert verify(moved / "checkpoints" / "step-00000060").manifest.step == 60


def test_a_run_whose_directory_is_removed_ends_with_a_checkpoint(text_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(text_corpus, LAYOUT, steps=5000)
    config = replace(config, checkpoint=CheckpointConfig(folder=str(tmp_path / "saved")))
    with train(config, tmp_path) as process:
        wait_until(lambda: num_committed(tmp_path / "run") > 2, process)
        (tmp_path / "run").rename(tmp_path / "gone")
        subprocess.run(["rm", "-r", str(tmp_path / "gone")], check=False)
        assert process.wait(TIMEOUT_S) == 5, output_of(tmp_path)
    assert f"the removal of its directory {tmp_path / 'gone'}" in output_of(tmp_path)
    (saved,) = (tmp_path / "saved").glob("step-*")
    assert verify(saved).manifest.step > 2


# ------------------------------------------------------------------------------------------------------------ time


HANG = FaultConfig(phase=FaultPoint.FORWARD, step=3, group=0, rank=0, kind="hang", seconds=100.0)
WAITED_FOR = {
    "sums of a group that computes too long": HANG,
    "vote of a group that hangs": replace(HANG, phase=FaultPoint.AFTER_REDUCE),
    "control store": replace(HANG, kind="stop_store"),
}


@pytest.mark.parametrize("awaited", WAITED_FOR)
def test_a_run_whose_step_takes_too_long_to_end_saves_what_was_committed(
    text_corpus: Path, tmp_path: Path, awaited: str
) -> None:
    """Ranks that wait save alone; the next run goes on from there."""
    config = tiny_config(text_corpus, LAYOUT, steps=5, faults=[WAITED_FOR[awaited]], heartbeat_s=7.0)
    config = replace(config, control=replace(config.control, end_grace_s=6.0))
    run_dir = tmp_path / "run"
    with train(config, tmp_path) as process:
        wait_until(lambda: num_committed(run_dir) == 3, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 5, output_of(tmp_path)
    summary = summary_of(run_dir)
    assert (summary["outcome"], summary["steps_committed"], summary["verdict"]) == ("stopped", 3, "unknown")
    assert "could not end in order within control.end_grace_s=6" in summary["outcome_reason"]
    further = replace(config, checkpoint=replace(config.checkpoint, load=str(run_dir)))
    rest = complete_run(replace(further, faults=replace(config.faults, trace=())), tmp_path / "rest")
    whole = complete_run(replace(config, faults=replace(config.faults, trace=())), tmp_path / "whole")
    assert rest.summary.steps_committed == 2
    assert rest.summary.params_sha256 == whole.summary.params_sha256
