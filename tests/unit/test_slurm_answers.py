"""What is made of commands of Slurm that fail, say something else, or forget."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.driver.slurm.slurm_commands import Unanswered, call, submit, wait_for
from tests.unit.tiny_corpus import write_tiny_corpus

ROOT = Path(__file__).parents[2]

Command = Callable[[str, str], None]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Makes a command of Slurm that is these lines of Python; `words` are its arguments."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, lines: str) -> None:
        begin = f"#!{sys.executable} -S\nimport pathlib, sys\nwords = ' '.join(sys.argv[1:])\n"
        (folder / name).write_text(begin + lines + "\n")
        (folder / name).chmod(0o755)

    return make


def submitted(tmp_path: Path, *words: str) -> tuple[int, str]:
    write_tiny_corpus(tmp_path / "corpus")
    preset, corpus = str(ROOT / "configs/run/gpt_7b_h100.toml"), f"data.corpus={tmp_path / 'corpus'}"
    given = ["submit", "--config", preset, "--set", corpus, "--run-dir", str(tmp_path / "job"), *words]
    result = CliRunner().invoke(app, given)
    return result.exit_code, result.output


# ------------------------------------------------------------------------------------------------------ submission


@pytest.mark.parametrize(
    "printed", ["17", "17;cluster", "Welcome to the cluster!\n17", "17;c\n", "Account 4 has 17 hours left\n17;c"]
)
def test_the_number_of_a_job_is_found_below_a_greeting(command: Command, printed: str) -> None:
    command("sbatch", f"print({printed!r})")
    assert submit(Path("job.sh")) == 17


@pytest.mark.parametrize(
    "lines",
    [
        "sys.exit('sbatch: error: Batch job submission failed: Socket timed out on send/recv operation')",
        "sys.exit('sbatch: error: Unable to contact slurm controller (connect failure)')",
        "sys.exit(1)",
        "print('Submitted.')",
        "pass",
    ],
    ids=["timed out", "no contact", "no reason", "no number", "silent"],
)
def test_a_job_that_slurm_may_have_taken_keeps_its_folder(command: Command, tmp_path: Path, lines: str) -> None:
    """The job came out of the queue, and its folder was gone."""
    command("scontrol", "sys.exit('no partitions')")
    command("sbatch", lines)
    code, output = submitted(tmp_path)
    assert code == 2
    assert f"may be in the queue all the same, see `squeue --me`; its folder {tmp_path / 'job'} is left" in output
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"job.sh", "config.toml"}


def test_a_job_that_slurm_refuses_with_a_reason_leaves_nothing(command: Command, tmp_path: Path) -> None:
    command("scontrol", "sys.exit('no partitions')")
    command("sbatch", "sys.exit('sbatch: error: Batch job submission failed: Invalid account')")
    code, output = submitted(tmp_path)
    assert (code, (tmp_path / "job").exists()) == (2, False)
    assert "correct slurm.account" in output


def test_a_command_whose_answer_got_lost_is_distinguished_from_one_that_was_refused(command: Command) -> None:
    command("scontrol", "sys.exit('slurm_load_jobs error: ' + words)")
    with pytest.raises(ValueError, match="Access denied") as refusal:
        call("scontrol", "Access denied")
    assert not isinstance(refusal.value, Unanswered)
    with pytest.raises(Unanswered, match="Connection timed out"):
        call("scontrol", "Connection timed out")


# ------------------------------------------------------------------------------------------------------ waiting


COUNTED = """
file = pathlib.Path(__file__).with_name('count-' + words.split()[-1])
count = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(count))
def show_job(state, code=0):
    print(f'JobId=17 JobState={state} Reason=None ExitCode={code}:0 NodeList=(null)')
"""
"""Of a command that knows how often it has been asked of a job."""


def test_a_job_is_waited_for_through_failures_of_slurm(command: Command, tmp_path: Path) -> None:
    """The first that failed ended the command with 2, as if the job had."""
    command(
        "scontrol",
        COUNTED
        + "if 'partition' in words or count in (2, 3):\n    sys.exit('Socket timed out on send/recv operation')\n"
        + "show_job('RUNNING') if count < 5 else show_job('FAILED', 4)",
    )
    command("sbatch", "print(17)")
    code, output = submitted(tmp_path, "--wait")
    assert code == 4, output
    assert json.loads((tmp_path / "job/job.json").read_text()) == {"job_id": 17}
    assert (tmp_path / "slurm/count-17").read_text() == "5"


def test_the_end_of_a_job_is_kept_when_slurm_has_forgotten_it(command: Command) -> None:
    """Others of the array go on for longer than Slurm remembers."""
    command(
        "scontrol",
        COUNTED
        + "if not words.endswith('_0') and count > 1:\n    sys.exit('Invalid job id specified')\n"
        + "if words.endswith('_0'):\n    show_job('RUNNING') if count < 4 else show_job('COMPLETED')\n"
        + "else:\n    show_job('FAILED', 3) if words.endswith('_1') else show_job('COMPLETED')",
    )
    assert wait_for(["17_0", "17_1", "17_2"], poll_s=0.0) == 3
    assert wait_for(["17_0"]) == 0


def test_slurm_that_does_not_answer_for_minutes_ends_the_wait(command: Command) -> None:
    command("scontrol", "sys.exit('Unable to contact slurm controller (connect failure)')")
    with pytest.raises(Unanswered, match="Unable to contact slurm controller"):
        wait_for([17], silence_s=0.0)


def test_a_job_whose_end_was_not_seen_is_reported(command: Command) -> None:
    command("scontrol", "sys.exit('slurm_load_jobs error: Invalid job id specified')")
    with pytest.raises(ValueError, match="Slurm no longer knows job 17_1"):
        wait_for(["17_1"])
