"""A short campaign as a user starts it: random faults of many kinds, groups that come back, an end by time."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.loader import dump_run_config
from spare_megatron.config.schema import ClusterConfig, FaultsConfig, LayoutConfig, OptimizerConfig, RunConfig
from spare_megatron.driver.run import start_run
from spare_megatron.faults.points import FaultKind
from spare_megatron.journal.files import read_journal
from tests.integration.whole_run import alert_config, entries_of, kill, tiny_config

pytestmark = [pytest.mark.timeout(450), pytest.mark.slow]

STEPS = 300


def campaign(config: RunConfig, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and figures of `spare campaign`."""
    preset = tmp_path / "campaign.toml"
    preset.write_text(dump_run_config(config))
    command = [sys.executable, "-m", "spare_megatron", "campaign", str(preset), "--json", *options]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_random_faults_of_all_kinds_are_masked_and_nothing_is_left_behind(text_corpus: Path, tmp_path: Path) -> None:
    """With a further group, which joins, and groups that leave and come back."""
    config = alert_config(text_corpus, LayoutConfig(num_groups=4), steps=STEPS, rejoins=100)
    config = dataclasses.replace(
        config,
        layout=dataclasses.replace(config.layout, max_groups=5),
        data=dataclasses.replace(config.data, access="shared"),
    )
    faults = FaultsConfig(seed=45, mean_steps=10.0, recovery_steps=40, max_seconds=0.2)
    code, figures = campaign(dataclasses.replace(config, faults=faults), tmp_path)
    assert figures["problems"] == []
    assert (code, figures["is_passed"]) == (0, True)
    assert (figures["verdict"], figures["outcome"], figures["steps_committed"]) == ("valid", "finished", STEPS)
    fired = {kind: count["fired"] for kind, count in figures["faults"].items() if count["fired"]}
    assert sum(fired.values()) >= 10
    assert len(fired) >= 5
    assert fired.keys() >= {"drain", "resize"}
    entries = entries_of(read_journal(tmp_path / "run"))
    assert any(entry["entry"] == "commit" and entry["drain"] for entry in entries)
    assert any(entry["entry"] == "commit" and [4, 1] in entry["admit"] for entry in entries)
    assert figures["losses"] >= 2
    assert figures["admissions"] >= 1
    assert figures["processes"]["orphans"] == []
    assert figures["processes"]["num_processes"] >= 8
    goodput = figures["goodput"]
    assert goodput["useful_s"] + sum(goodput["lost_s"].values()) == pytest.approx(goodput["wall_s"])
    assert 0.0 < goodput["goodput"] < 1.0


def test_random_faults_with_stacked_state_are_masked(text_corpus: Path, tmp_path: Path) -> None:
    """Wrong state of a host, then losses that every state partition survives, with lost copies made anew or not."""
    optimizer = OptimizerConfig(sharding="stacked", redundancy=3)
    config = tiny_config(text_corpus, LayoutConfig(num_groups=5), steps=60, optimizer=optimizer)
    kinds: tuple[FaultKind, ...] = ("kill", "raise", "param_flip", "slow")
    faults = FaultsConfig(seed=1, mean_steps=4.0, recovery_steps=12, max_seconds=0.2, kinds=kinds)
    code, figures = campaign(dataclasses.replace(config, faults=faults), tmp_path)
    assert figures["problems"] == []
    assert (code, figures["is_passed"], figures["verdict"]) == (0, True, "valid")
    fired = {kind: count["fired"] for kind, count in figures["faults"].items() if count["fired"]}
    assert fired == {"slow": 1, "param_flip": 1, "kill": 2}
    assert figures["losses"] == 3


def test_nodes_that_are_away_as_in_a_trace_change_no_bit(text_corpus: Path, tmp_path: Path) -> None:
    """Three machines of a trace on three nodes; a fourth has no place."""
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "seconds,machine,repair_s,cause\n0,early,900,\n90000,a,14400,\n93600,b,1,\n108000,a,7200,\n"
        "108000,b,14400,\n110000,c,14400,\n110000,c,21600,\n120000,d,1,\n900000,b,1,late\n"
    )
    config = alert_config(
        text_corpus, LayoutConfig(num_groups=3), steps=120, rejoins=100, max_restarts=10, mode="reproducible",
        cluster=ClusterConfig(device="cpu", num_nodes=3),
    )  # fmt: skip
    replayed = ("--trace", str(trace), "--days", "1", "2", "--day", "25s", "--minutes", "10")
    code, figures = campaign(config, tmp_path, *replayed)
    assert figures["problems"] == []
    assert (code, figures["verdict"], figures["steps_committed"]) == (0, "valid", 120)
    absences = figures["faults"]["absence"]
    assert absences["planned"] == 5
    assert absences["masked"] == absences["fired"] >= absences["due"] >= 1
    assert figures["trace"]["machines"] == ["a", "b", "c"]
    assert figures["trace"]["left_out"] == 1
    assert figures["losses"] >= 1
    plain = start_run(config, tmp_path / "plain", lambda _: None)
    assert figures["params_sha256"] == plain.params_sha256


def test_a_campaign_ends_in_time_and_fails_if_no_fault_struck(text_corpus: Path, tmp_path: Path) -> None:
    faults = [kill("forward", 99_990, 0)]
    config = tiny_config(text_corpus, LayoutConfig(num_groups=2), steps=100_000, faults=faults)
    code, figures = campaign(config, tmp_path, "--minutes", "0.05")
    assert (code, figures["is_passed"]) == (1, False)
    assert figures["problems"] == ["no fault struck; set faults.mean_steps lower, or train longer"]
    assert (figures["verdict"], figures["outcome"]) == ("valid", "finished")
    assert 0 < figures["steps_committed"] < 100_000
    assert 3.0 <= figures["goodput"]["wall_s"] < 90.0
