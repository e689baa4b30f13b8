"""`spare submit`: a run as a job of Slurm."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.running import choose_run_dir

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig


def submit(
    config: Annotated[Path, typer.Option(help="The run preset, a TOML file.")],
    cluster: Annotated[
        Path | None, typer.Option(help="Preset of the cluster; its values win over those of the run preset.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides one setting; repeatable.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the job, which all nodes share; runs/NAME-TIME when absent.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script; write and submit nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended, with its exit code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print job and folder as JSON.")] = False,
) -> None:
    """Train as a job of Slurm, which goes back into the queue after a wipe-out and at its time limit.

    Every time that it comes out of the queue is a run of its own in the job's folder, and goes on from the newest
    checkpoint. Exit codes: 0 submitted, 2 not; with --wait that of `spare train`.
    """
    from spare_megatron.slurm.commands import wait_for
    from spare_megatron.slurm.job import job_script

    with explained_errors("submit"):
        loaded = _load(config, cluster, overrides or ())
        folder = choose_run_dir(loaded, run_dir).absolute()
        script = job_script(loaded, folder=folder, working_folder=Path.cwd(), python=Path(sys.executable))
        if dry_run:
            typer.echo(script, nl=False)
            return
        job_id = _hand_over(loaded, folder, script)
    if as_json:
        typer.echo(json.dumps({"job_id": job_id, "folder": str(folder)}))
    else:
        typer.echo(f"job {job_id} is submitted; its folder is {folder}\n  spare status {folder}\n  spare logs {folder}")
    if wait:
        with explained_errors("submit"):
            raise typer.Exit(wait_for(job_id))


def _load(path: Path, cluster: Path | None, overrides: Sequence[str]) -> "RunConfig":
    """The configuration as the job will have it, after telling what may not be meant.

    Raises:
        ValueError: It cannot run on the cluster; the text has every reason that can be seen from here.
    """
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.config.validate import Machine, problems, warnings

    config = load_run_config(path, overrides, cluster).config
    config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, launcher="srun"))
    corpus = Path(config.data.corpus)
    has_corpus = all(corpus.with_name(corpus.name + suffix).is_file() for suffix in (".bin", ".idx"))
    num_ranks = max(0, config.parallel.num_ranks)
    machine = Machine(num_gpus=num_ranks, num_cores=num_ranks * config.cluster.threads_per_rank, has_corpus=has_corpus)
    found = problems(config, machine)
    if found:
        raise ValueError("this configuration cannot run as a job:\n" + "\n".join(f"  - {text}" for text in found))
    for text in warnings(config, machine):
        typer.echo(f"spare submit: warning: {text}", err=True)
    return config


def _check_folders(config: "RunConfig", folder: Path) -> None:
    """Refuses what the job would only find when it runs, and tells what may keep it waiting.

    Raises:
        ValueError: A folder cannot be written, or is that of a job.
        FileExistsError: The job's folder holds something.
    """
    from spare_megatron.runtime.lock import LOCK, Locked, locked
    from spare_megatron.slurm.commands import JOB_FILE, job_fields, job_of

    if (folder / JOB_FILE).exists():
        job_id = job_of(folder)
        state = job_fields(job_id).get("JobState", "forgotten by Slurm")
        raise ValueError(
            f"--run-dir {folder} is that of job {job_id}, which is {state}: see `spare status {folder}`; choose another "
            f"--run-dir, and checkpoint.folder={folder}/checkpoints to go on from there"
        )
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; a job never writes over another: choose another --run-dir")
    _check_writable("--run-dir", folder)
    if not config.checkpoint.folder:
        return
    checkpoints = Path(config.checkpoint.folder).absolute()
    _check_writable("checkpoint.folder", checkpoints)
    if (checkpoints / LOCK).exists():
        try:
            with locked(checkpoints):
                pass
        except Locked as error:
            typer.echo(f"spare submit: warning: checkpoint.folder: {error}; the job would end at once before", err=True)


def _check_writable(setting: str, folder: Path) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{setting} {folder} cannot be made: {there} is a file; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{setting} {folder} cannot be written: {there} is not yours to write; choose another")


def _hand_over(config: "RunConfig", folder: Path, script: str) -> int:
    """Writes the job's folder and submits it; returns the job's number. What Slurm refuses leaves nothing."""
    from spare_megatron.config.resolved import dump_run_config
    from spare_megatron.slurm.commands import require, submit
    from spare_megatron.slurm.job import CHECKPOINTS, CONFIG, SCRIPT

    require("sbatch")
    _check_folders(config, folder)
    if not config.checkpoint.folder:  # one for all runs of the job
        checkpoint = dataclasses.replace(config.checkpoint, folder=str(folder / CHECKPOINTS))
        config = dataclasses.replace(config, checkpoint=checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(dump_run_config(config))
    (folder / SCRIPT).write_text(script)
    try:
        return submit(folder / SCRIPT)
    except ValueError:
        shutil.rmtree(folder)  # it was empty, and another try is to have it
        raise
