"""A training goes on from checkpoints of other versions of ours and of megatron-core, with the bits that it had."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kept_runs.runs import CHECKPOINTS, CHECKPOINTS_OF_VERSIONS, unpack

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 150.0
TORCHES = ("2.13.0", "2.14.1")
"""Versions that computed the digests; others may round differently."""
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
    summary = trained(unpack(CHECKPOINTS, tmp_path), settings, checkpoint)
    assert summary["final_loss"] == pytest.approx(loss, rel=1e-5)
    if torch.__version__.partition("+")[0] in TORCHES:
        assert summary["params_sha256"] == params_sha256


EXPERTS = "ec15f1089e3619a503f1df9af0c49df5b82f2f2997e0a24ecee92aaaa61fed42"


@pytest.mark.parametrize(
    ("settings", "checkpoint", "params_sha256"),
    [
        ("replicated.toml", "dense-0.19.2", "c9160400e0b4f9e43c5069c26b97adc48c87e33d2fedb1e545145ff42438b732"),
        ("experts.toml", "experts-0.16.1", EXPERTS),
        ("experts.toml", "experts-0.19.2", EXPERTS),
    ],
)
def test_a_checkpoint_of_one_version_of_megatron_core_loads_with_the_others(
    tmp_path: Path, settings: str, checkpoint: str, params_sha256: str
) -> None:
    """The dense model ends as the one of 0.16 above; the experts are in two stages, with a tied table."""
    summary = trained(unpack(CHECKPOINTS_OF_VERSIONS, tmp_path), settings, checkpoint)
    if torch.__version__.partition("+")[0] in TORCHES:
        assert summary["params_sha256"] == params_sha256


def trained(folder: Path, settings: str, checkpoint: str) -> dict[str, Any]:
    """The summary of a training that goes on from a kept checkpoint to its end."""
    command = [sys.executable, "-m", "spare_megatron", "train", "--config", str(folder / settings), "--json"]
    command += ["--run-dir", str(folder / "run")]
    for setting in (f"data.corpus={folder / 'text'}", f"checkpoint.load={folder / checkpoint}"):
        command += ["--set", setting]
    done = subprocess.run(
        command, env={**os.environ, **PORTABLE}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert (summary["outcome"], summary["verdict"], summary["steps_committed"]) == ("finished", "valid", 3)
    return summary
