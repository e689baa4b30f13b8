"""What a real Slurm says of the jobs of our presets, which it only looks at."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from spare_megatron.config.loader import load_run_config
from tests.slurm.jobs import Cluster, slurm, spare

CONFIGS = Path(__file__).parents[2] / "configs"
H100 = CONFIGS / "cluster/h100.toml"
PRESETS = sorted(path for path in (CONFIGS / "run").glob("*.toml") if not path.stem.startswith("campaign"))
"""Campaigns are no jobs."""

pytestmark = pytest.mark.slurm


def test_slurm_takes_the_job_of_every_preset(
    start_cluster: Callable[..., Cluster], text_corpus: Path, tmp_path: Path
) -> None:
    """Those for GPUs on nodes that have eight, and not with more."""
    start_cluster(1)
    job = tmp_path / "job.sh"
    is_for_gpus = {path: load_run_config(path).config.cluster.device == "gpu" for path in PRESETS}
    assert {*is_for_gpus.values()} == {True, False}
    for path, needs_gpus in is_for_gpus.items():
        cluster = ["--cluster", str(H100)] if needs_gpus else []
        script = spare("submit", "--config", str(path), *cluster, "--set", f"data.corpus={text_corpus}", "--dry-run")
        job.write_text(script)
        slurm("sbatch", "--test-only", str(job))
        if needs_gpus:
            job.write_text(script.replace("--gpus-per-node=8", "--gpus-per-node=9"))
            with pytest.raises(subprocess.CalledProcessError):
                slurm("sbatch", "--test-only", str(job))
