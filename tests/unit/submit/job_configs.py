"""Configurations of jobs, and what submitting them prints."""

from pathlib import Path

from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig

CONFIGS = Path(__file__).parents[3] / "configs"
SRUN = ("data.corpus=c", "cluster.launcher=srun", "cluster.device=cpu", "checkpoint.cadence=optimal")


def configured(*overrides: str) -> RunConfig:
    return load_run_config(None, [*SRUN, *overrides]).config


def spare(*words: str, expected: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == expected, result.output
    return result.output
