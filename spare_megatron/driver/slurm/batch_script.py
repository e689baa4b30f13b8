"""Renders the batch script of a run from its configuration; pure."""

import re
from importlib.resources import files
from pathlib import Path

import jinja2

from spare_megatron.config.schema import RunConfig

SCRIPT, CONFIG, LOG, CHECKPOINTS = "job.sh", "config.toml", "slurm.log", "checkpoints"
"""Names in a job's folder, beside a directory `attempt-NNN` for each run. An array's folder holds the script and, for
each task, a job's folder `task-N`."""

_SHELL_SAFE = re.compile(r"[A-Za-z0-9_./@:+,=-]+")


def task_folders(num_tasks: int) -> list[str]:
    """Names of the task folders of an array; sbatch and the script use the same."""
    return [f"task-{index}" for index in range(num_tasks)]


def job_script(config: RunConfig, *, folder: Path, working_folder: Path, python: Path, num_tasks: int = 0) -> str:
    """The script for sbatch. Requires `cluster.launcher` to be srun, and `folder` and `python` on all nodes; relative
    paths of the configuration start from `working_folder`. Both folders are absolute. `num_tasks`: size of an array, 0
    for a single job. ValueError: a path has characters that sbatch or a shell does not take literally.
    """
    for what, path in (("the run's directory", folder), ("the working directory", working_folder), ("Python", python)):
        if not _SHELL_SAFE.fullmatch(str(path)):
            raise ValueError(
                f"{what} {str(path)!r} has characters that a batch script does not take literally; letters, digits and "
                f"_./@:+,=- are fine: choose another path"
            )
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    template = environment.from_string(files(__package__).joinpath("job.sh.j2").read_text())
    return template.render(
        config=config,
        slurm=config.slurm,
        layout=config.parallel,
        folder=folder,
        working_folder=working_folder,
        python=python,
        num_tasks=num_tasks,
    )
