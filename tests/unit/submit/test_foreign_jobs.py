"""A node that is started by hand inside an allocation of its own, which is not the run's to end."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.driver.slurm.allocation import end_orphaned_job
from spare_megatron.journal.state.summary import Summary


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an `salloc`."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SPARE_REQUEUES", raising=False)


@pytest.mark.parametrize("wants_more", [True, False])
def test_an_allocation_that_no_script_of_ours_runs_in_is_left_alone(
    fake_slurm: Path, allocation: None, wants_more: bool
) -> None:
    end_orphaned_job(wants_more=wants_more)
    assert not (fake_slurm / "calls").exists()


@pytest.mark.parametrize(("launcher", "calls"), [("hand", None), ("srun", "scancel 17\n")])
def test_a_node_ends_the_job_only_if_the_job_has_started_it(
    fake_slurm: Path,
    allocation: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    calls: str | None,
) -> None:
    """The driver was lost, and nodes started by hand in a batch script of the user's own ended that."""
    monkeypatch.setenv("SPARE_REQUEUES", "0")  # as in a job of ours, and a run by hand within it
    config = load_run_config(None, [f"cluster.launcher={launcher}"]).config
    ended = Summary(verdict="valid", reasons=(), outcome="finished", outcome_reason="", steps_committed=1)
    monkeypatch.setattr(
        "spare_megatron.supervisor.node_process.look_after_node", lambda run_dir, node, wait_s: (ended, config)
    )

    class Ended(BaseException):
        """Instead of the end of this process."""

    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # this process goes on
    with pytest.raises(Ended):
        CliRunner().invoke(app, ["supervise", str(tmp_path), "--node", "1"], catch_exceptions=False)
    written = fake_slurm / "calls"
    assert (written.read_text() if written.exists() else None) == calls
