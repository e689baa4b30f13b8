"""A job that no partition can hold is reported before Slurm queues it for ever."""

from pathlib import Path

import pytest

from tests.unit.submit.job_configs import spare


def partition(name: str, total: str, **fields: str) -> str:
    more = "".join(f" {key}={value}" for key, value in fields.items())
    return f"PartitionName={name} Nodes=n[1-{total}] TotalNodes={total}{more}\n"


@pytest.mark.parametrize(
    ("answer", "words", "expected"),
    [
        (partition("h100", "16"), [], "h100 has 16 nodes, and cluster.num_nodes + slurm.num_spare_nodes = 17"),
        (partition("a", "99") + partition("h100", "16"), [], "the job would wait forever"),
        (partition("a", "2", Default="YES") + partition("h100", "99"), ["--set", "slurm.partition="], "a has 2 nodes"),
        (
            partition("a", "2") + partition("h100", "3"),
            ["--set", "slurm.partition=a,h100"],
            "a has 2 nodes, h100 has 3 nodes",
        ),
    ],
)
def test_a_partition_that_cannot_hold_the_job_is_reported_before_it_is_queued(
    arguments: list[str], fake_slurm: Path, tmp_path: Path, answer: str, words: list[str], expected: str
) -> None:
    """Slurm would queue it, and not say so."""
    (fake_slurm / "scontrol.out").write_text(answer)
    assert expected in spare("submit", *arguments, *words, expected=2)
    assert not (tmp_path / "job").exists()
    assert "sbatch" not in (fake_slurm / "calls").read_text()


@pytest.mark.parametrize(
    ("answer", "words", "variable"),
    [
        (partition("h100", "17", MaxNodes="UNLIMITED", MaxTime="1-00:00:00"), [], ""),
        (partition("a", "2", Default="YES"), [], ""),  # sbatch says that there is no h100
        (partition("h100", "2"), ["--set", 'slurm.options=["--partition=b"]'], ""),
        (partition("h100", "2"), [], "SBATCH_PARTITION"),
        (partition("h100", "2") + partition("a", "17"), ["--set", "slurm.partition=a,h100"], ""),
    ],
)
def test_a_job_that_may_fit_is_left_to_slurm(
    arguments: list[str],
    fake_slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    words: list[str],
    variable: str,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "b")
    (fake_slurm / "scontrol.out").write_text(answer)
    assert "waits for ever" not in spare("submit", *arguments, *words)


def test_limits_that_a_qos_may_lift_are_warned_of(arguments: list[str], fake_slurm: Path) -> None:
    (fake_slurm / "scontrol.out").write_text(partition("h100", "99", MaxNodes="16", MaxTime="12:00:00"))
    output = spare("submit", *arguments)
    assert "warning: cluster.num_nodes + slurm.num_spare_nodes = 17 exceeds MaxNodes=16 of partition h100" in output
    assert "warning: slurm.time_limit_minutes=1440 exceeds MaxTime=12:00:00 of partition h100" in output
