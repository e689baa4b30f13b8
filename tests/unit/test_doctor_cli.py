"""`spare doctor` on this machine, and in a job of a Slurm whose commands are scripts."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.tools.doctor import node_survey as node_facts
from tests.unit.tiny_corpus import write_tiny_corpus

DEMO = str(Path(__file__).parents[2] / "configs/run/demo_cpu.toml")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(node_facts, "_PIECE_BYTES", 1 << 16)
    monkeypatch.chdir(tmp_path)
    write_tiny_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


def doctor(*words: str, expected: int) -> str:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code == expected, result.output
    return result.output


def on_this_machine(corpus: Path, *words: str, expected: int) -> str:
    return doctor("--config", DEMO, "--set", f"data.corpus={corpus}", *words, expected=expected)


def test_a_machine_that_is_fit_is_shown_and_left_as_it_was(corpus: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert "1 node, 0 problems, 0 warnings" in on_this_machine(corpus, expected=0)
    assert sorted(tmp_path.rglob("*")) == before


def test_problems_end_with_another_exit_code_and_name_the_node(corpus: Path) -> None:
    Path(f"{corpus}.idx").unlink()
    assert f"problem: node 0: corpus: data.corpus={corpus}: {corpus}.idx cannot be read" in on_this_machine(
        corpus, expected=1
    )
    answer = json.loads(on_this_machine(corpus, "--json", expected=1))
    assert [(found["node"], found["check"]) for found in answer["problems"]] == [("node 0", "corpus")]
    assert answer["warnings"] == []
    (node,) = answer["nodes"]
    assert node["facts"]["sees_folder"]
    assert node["write"]["bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the preset of the run is missing"),
        (["--node", "1"], "--node takes --folder"),
        (["--node", "1", "--folder", "f", "--config", DEMO], "and no preset"),
        (["--node", "1", "--folder", "f", "--wait-s", "0"], "node 1 is not awaited by a driver"),
        ([DEMO, "--set", "layout.num_groups=0"], "layout.num_groups=0 must be at least 1"),
    ],
)
def test_what_cannot_be_looked_at_is_explained(corpus: Path, words: list[str], expected: str) -> None:
    assert expected in doctor(*words, expected=2)


@pytest.fixture
def in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two nodes, where steps end at once."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    answers = 'case "$*" in *"show job"*) echo NodeList=n[1-2];; *hostnames*) printf "n1\\nn2\\n";; esac'
    for name, text in (("scontrol", answers), ("srun", 'echo "$@" >> $0.calls; echo srun: no such node; exit 1')):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    # A step is given this address to come to.
    monkeypatch.setattr("spare_megatron.driver.slurm.allocation.address_of", lambda name: "127.0.0.1")
    return folder


def test_in_a_job_each_node_is_a_step_and_those_that_fail_are_named(corpus: Path, in_a_job: Path) -> None:
    words = ("--set", "cluster.launcher=srun", "--set", "cluster.device=cpu")
    answer = json.loads(on_this_machine(corpus, *words, "--json", expected=1))
    assert [(found["node"], found["text"]) for found in answer["problems"]] == [
        ("n1", "its step has ended: srun: no such node"),
        ("n2", "its step has ended: srun: no such node"),
    ]
    calls = (in_a_job / "srun.calls").read_text()
    assert "--nodelist=n2 --job-name=doctor-1" in calls


def test_a_job_with_fewer_nodes_than_the_run_is_refused_before_anything_starts(corpus: Path, in_a_job: Path) -> None:
    words = ("cluster.launcher=srun", "cluster.device=cpu", "cluster.num_nodes=4", "control.store=etcd")
    many = [word for setting in words for word in ("--set", setting)]
    expected = "job 17 has 2 nodes (n1, n2), too few for cluster.num_nodes=4; ask for more"
    assert expected in on_this_machine(corpus, *many, expected=2)
    result = CliRunner().invoke(app, ["train", "--config", DEMO, "--set", f"data.corpus={corpus}", *many])
    assert (result.exit_code, expected in result.output) == (2, True), result.output
    assert not (in_a_job / "srun.calls").exists()
