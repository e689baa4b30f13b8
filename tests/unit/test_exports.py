"""Keys that lines of `slurm.setup` export stay with their author."""

import dataclasses
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import dump_run_config, load_run_config, without_exports, write_with_exports
from spare_megatron.config.schema import MetricsConfig, RunConfig, SlurmConfig
from spare_megatron.driver import telemetry
from spare_megatron.tools.report.report_commands import config_of
from tests.unit.tiny_corpus import write_tiny_corpus

ROOT = Path(__file__).parents[2]
SETUP = (
    "module load cuda",
    "export WANDB_API_KEY=k3y-1",
    "cd /x && export A='k3y-2 k3y-3'  B=k3y-4",
    '  export C="k3y-5"',
    "ulimit -n 65536",
)
SECRET = RunConfig(slurm=SlurmConfig(setup=SETUP), metrics=MetricsConfig(wandb_project="p"))
OPEN = RunConfig(slurm=SlurmConfig(setup=("module load cuda", "PATH=$PATH:/opt")))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _usual_umask() -> Any:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_page_shows_which_variables_are_exported_and_not_their_values(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump_run_config(SECRET))
    shown = config_of(tmp_path)
    assert "k3y" not in shown
    (preset := tmp_path / "shown.toml").write_text(shown)
    found = load_run_config(preset).config
    assert found.slurm.setup == (
        "module load cuda",
        "export WANDB_API_KEY=...",
        "cd /x && export A=...",
        "  export C=...",
        "ulimit -n 65536",
    )
    assert dataclasses.replace(found, slurm=SECRET.slurm) == SECRET


def test_a_configuration_that_exports_nothing_is_shown_as_it_is() -> None:
    text = "# by hand\n" + dump_run_config(OPEN)
    assert without_exports(text) == text


def test_a_page_of_another_users_run_omits_private_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> str:
        raise PermissionError(path)

    assert config_of(tmp_path) == ""
    monkeypatch.setattr(Path, "read_text", denied)  # root may read anything
    assert config_of(tmp_path) == ""


@pytest.mark.parametrize(("config", "mode"), [(SECRET, 0o600), (OPEN, 0o644)])
def test_only_its_owner_reads_a_file_with_exports(tmp_path: Path, config: RunConfig, mode: int) -> None:
    """Others of a project may read the rest."""
    file = tmp_path / "config.toml"
    for text in ("first and longer", "second"):
        write_with_exports(file, text, config)
        assert (file.read_text(), mode_of(file)) == (text, mode)
    readable = tmp_path / "there"
    readable.touch(0o644)
    write_with_exports(readable, "text", config)
    assert mode_of(readable) == mode


def test_a_job_with_exports_is_readable_to_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_corpus(tmp_path / "corpus")
    commands = tmp_path / "slurm"
    commands.mkdir()
    for name, answer in (("sbatch", "echo 17"), ("scontrol", "exit 1")):
        (commands / name).write_text(f"#!/bin/sh\n{answer}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    preset, corpus = str(ROOT / "configs/run/gpt_7b_h100.toml"), f"data.corpus={tmp_path / 'corpus'}"
    words = ["submit", "--config", preset, "--set", corpus, "--set", 'slurm.setup=["export KEY=k3y"]']
    result = CliRunner().invoke(app, [*words, "--run-dir", str(tmp_path / "job")])
    assert result.exit_code == 0, result.output
    files = [tmp_path / "job" / name for name in ("config.toml", "job.sh")]
    assert all("export KEY=k3y" in file.read_text() for file in files)
    assert [mode_of(file) for file in files] == [0o600, 0o600]
    assert load_run_config(files[0]).config.slurm.setup == ("export KEY=k3y",)


def test_a_metrics_service_receives_no_cluster_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[dict[str, Any]] = []
    opened: list[Any] = []
    monkeypatch.setattr(telemetry, "WandbSink", lambda run_dir, project, run_id, name, config: configs.append(config))
    monkeypatch.setattr(telemetry, "DetachedSink", lambda name, open_sink, failed, rest_s: opened.append(open_sink()))
    telemetry.open_sinks(SECRET, tmp_path, lambda event: None)
    assert len(opened) == len(configs) == 1
    assert "k3y" not in str(configs)
    expected = {field.name for field in dataclasses.fields(RunConfig)} - {"slurm", "control", "watch"}
    assert set(configs[0]) == expected
    assert configs[0]["train"] == dataclasses.asdict(SECRET.train)
