"""A training goes on from checkpoints of other versions of ours and of megatron-core, with the bits that it had."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kept_runs.runs import CHECKPOINTS, CHECKPOINTS_OF_VERSIONS, unpack

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 150.0
TORCHES = ("2.13.0", "2.14.1")
"""Versions that computed the digests; others may round differently."""
MAKER = "AuthenticAMD"
"""Of the processors that did: those of another maker have other bits, also with the same instructions."""
PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Has all processors of a maker compute with the same instructions, and so the same bits."""
DENSE = "c9160400e0b4f9e43c5069c26b97adc48c87e33d2fedb1e545145ff42438b732"
EXPERTS = "ec15f1089e3619a503f1df9af0c49df5b82f2f2997e0a24ecee92aaaa61fed42"


def has_bits_of(params_sha256: str, expected: str) -> bool:
    """Whether the digest is the one expected, where that can be known."""
    is_known = torch.__version__.partition("+")[0] in TORCHES and MAKER in Path("/proc/cpuinfo").read_text()
    return not is_known or params_sha256 == expected


@pytest.mark.parametrize(
    ("settings", "checkpoint", "loss", "params_sha256"),
    [
        ("replicated.toml", "step-00000003", 5.4309751987457275, DENSE),
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
    # Its own run is not kept, and the commit of its last step has to be proven.
    run_dir = unpack("partitioned", tmp_path)
    for file in folder.glob("step-00000003.state/*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "run_dir": str(run_dir)}))
    summary = trained(folder, settings, checkpoint)
    assert summary["final_loss"] == pytest.approx(loss, rel=1e-5)
    assert has_bits_of(summary["params_sha256"], params_sha256)


@pytest.mark.parametrize(
    ("settings", "checkpoints", "params_sha256"),
    [
        ("replicated.toml", [(CHECKPOINTS, "step-00000003"), (CHECKPOINTS_OF_VERSIONS, "dense-0.19.2")], DENSE),
        ("experts.toml", [(CHECKPOINTS_OF_VERSIONS, f"experts-{one}") for one in ("0.16.1", "0.19.2")], EXPERTS),
    ],
    ids=["dense", "experts in two stages, with a tied table"],
)
def test_a_checkpoint_of_one_version_of_megatron_core_loads_with_the_others(
    tmp_path: Path, settings: str, checkpoints: Sequence[tuple[str, str]], params_sha256: str
) -> None:
    """Of one training that two versions have begun: it ends with the same bits from the checkpoint of either."""
    ends = [trained(unpack(archive, tmp_path / name), settings, name)["params_sha256"] for archive, name in checkpoints]
    assert ends[0] == ends[1]
    assert has_bits_of(ends[0], params_sha256)


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
