"""What a real Slurm says of the jobs of our presets, which it only looks at."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.jobs import Cluster, slurm, spare

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = ("demo_cpu", "wipeout_cpu")
GPU = ("gpt_125m_node", "gpt_350m_node", "gpt_1p3b_node", "gpt_7b_node", "gpt_7b_h100")
NO_JOBS = ("campaign_cpu", "campaign_kills_cpu", "campaign_llama3_cpu", "campaign_nodes_cpu")
"""Presets of `spare campaign`, which is no job."""


def test_slurm_takes_the_job_of_every_preset(
    start_cluster: Callable[[int], Cluster], text_corpus: Path, tmp_path: Path
) -> None:
    """Those for GPUs on nodes that have them."""
    assert {path.stem for path in (CONFIGS / "run").glob("*.toml")} == {*CPU, *GPU, *NO_JOBS}
    start_cluster(1)
    script = tmp_path / "job.sh"
    for name in (*CPU, *GPU):
        words = ["--config", str(CONFIGS / f"run/{name}.toml"), "--set", f"data.corpus={text_corpus}"]
        if name in GPU:
            words += ["--cluster", str(CONFIGS / "cluster/h100.toml")]
        script.write_text(spare("submit", *words, "--dry-run"))
        slurm("sbatch", "--test-only", str(script))
    script.write_text(script.read_text().replace("--gpus-per-node=8", "--gpus-per-node=9"))
    with pytest.raises(subprocess.CalledProcessError):
        slurm("sbatch", "--test-only", str(script))
