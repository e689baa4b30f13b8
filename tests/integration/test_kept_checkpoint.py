"""A training goes on from checkpoints of an earlier version, and ends with the bits that it had then."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kept_runs.runs import CHECKPOINTS, unpack

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 150.0
TORCH = "2.13.0"
"""The version that computed the digests; others may round differently."""
PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Has every processor compute with the same instructions, and so the same bits."""


@pytest.mark.parametrize(
    ("settings", "checkpoint", "loss", "params_sha256"),
    [
        (
            "replicated.toml",
            "step-00000003",
            5.4309751987457275,
            "c9160400e0b4f9e43c5069c26b97adc48c87e33d2fedb1e545145ff42438b732",
        ),
        (
            "stacked.toml",
            "step-00000003.state",
            5.428216993808746,
            "48dcbe17525c1a06e273d9444bb71b6708870cf5cd80fcb01d11eb3229d51e1a",
        ),
    ],
    ids=["of a whole state", "of state partitions, in an emergency"],
)
def test_a_training_goes_on_from_a_kept_checkpoint_with_the_same_bits(
    tmp_path: Path, settings: str, checkpoint: str, loss: float, params_sha256: str
) -> None:
    folder = unpack(CHECKPOINTS, tmp_path)
    command = [sys.executable, "-m", "spare_megatron", "train", "--config", str(folder / settings), "--json"]
    command += ["--run-dir", str(tmp_path / "run")]
    for setting in (f"data.corpus={folder / 'text'}", f"checkpoint.load={folder / checkpoint}"):
        command += ["--set", setting]
    done = subprocess.run(
        command, env={**os.environ, **PORTABLE}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["outcome"], summary["verdict"], summary["steps_committed"]) == ("finished", "valid", 3)
    assert summary["final_loss"] == pytest.approx(loss, rel=1e-5)
    if torch.__version__.partition("+")[0] == TORCH:
        assert summary["params_sha256"] == params_sha256
