"""`spare submit`: a run as a job of Slurm."""

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.config import fitting_machine
from spare_megatron.cli.folders import check_writable
from spare_megatron.cli.preset import HELP, OverridesOption, load_without_problems
from spare_megatron.cli.printing import message, say, say_json, write_exactly
from spare_megatron.cli.running import choose_run_dir, is_to_be_made, make_demo_corpus
from spare_megatron.machine.interrupts import deferred

if TYPE_CHECKING:
    from spare_megatron.config.checks.validate import MachineResources
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.driver.slurm.slurm_commands import JobId


def submit(
    config: Annotated[Path, typer.Option(help=HELP)],
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster preset; its values override those of the run preset.")
    ] = None,
    overrides: OverridesOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the new job, on shared storage. [default: runs/NAME-TIME]")
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(metavar="KEY=V1,V2,...", help="Submit a job array with one job for each value of a setting."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script without writing or submitting it.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the job to end, and exit with its exit code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print job id and folder as JSON.")] = False,
) -> None:
    """Submit a training to Slurm.

    The job returns to the queue after a wipe-out and before its time limit. Each start is a new run in the job's
    folder, which continues from the newest checkpoint.

    Example: `spare submit --config gpt_7b_h100 --set slurm.account=ACCOUNT --dry-run`

    Exit codes: 0 submitted, 2 not submitted; with --wait those of `spare train`.
    """
    from spare_megatron.driver.slurm.slurm_commands import wait_for

    varied = _varied(array)
    loaded = _load_all(config, cluster, overrides or (), varied)
    folder = choose_run_dir(loaded[0], run_dir).absolute()
    script = _script_of_all(loaded, folder, is_array=bool(varied))
    if dry_run:
        write_exactly(script)
        return
    if any(is_to_be_made(one.data) for one in loaded):
        make_demo_corpus("submit")
    with deferred():  # a job that Slurm takes is noted
        job_id = _hand_over(loaded, varied, folder, script)
    if as_json:
        say_json({"job_id": job_id, "folder": str(folder)})
    else:
        say(f"job {job_id} is submitted; its folder is {folder}", f"  spare status {folder}")
        for home, setting in zip(_homes(folder, len(varied)), varied or [""], strict=True):
            say(f"  spare logs {home}" + (f"    # {setting}" if setting else ""))
    if wait:
        raise typer.Exit(wait_for(_jobs(job_id, len(varied))))


def _jobs(job_id: int, num_tasks: int) -> "list[JobId]":
    return [f"{job_id}_{index}" for index in range(num_tasks)] if num_tasks else [job_id]


def _homes(folder: Path, num_tasks: int) -> list[Path]:
    from spare_megatron.driver.slurm.batch_script import task_folders

    return [folder / task for task in task_folders(num_tasks)] or [folder]


def _varied(array: str | None) -> list[str]:
    """The settings of which each task of an array has one; empty without an array. ValueError: malformed option."""
    if array is None:
        return []
    key, _, text = array.partition("=")
    values = text.split(",")
    if not key or not all(values) or len({*values}) < len(values):
        raise ValueError(f"--array {array} is not of the form KEY=V1,V2,... with different values: correct it")
    return [f"{key}={value}" for value in values]


def _load_all(path: Path, cluster: Path | None, overrides: Sequence[str], varied: Sequence[str]) -> "list[RunConfig]":
    """The configuration of each task, or of the job. ValueError: one cannot run, or two share checkpoints."""
    configs = [_load(path, cluster, [*overrides, *setting]) for setting in [[one] for one in varied] or [[]]]
    folders = [config.checkpoint.folder for config in configs if config.checkpoint.folder]
    if len({*folders}) < len(folders):
        raise ValueError(
            f"checkpoint.folder={folders[0]} would be that of several jobs of --array; remove it, and each has its own"
        )
    return configs


def _script_of_all(configs: "Sequence[RunConfig]", folder: Path, *, is_array: bool) -> str:
    from spare_megatron.driver.slurm.batch_script import job_script

    num_tasks = len(configs) if is_array else 0
    python = Path(sys.executable)
    script, *others = [
        job_script(config, folder=folder, working_folder=Path.cwd(), python=python, num_tasks=num_tasks)
        for config in configs
    ]
    if any(other != script for other in others):
        raise ValueError(
            "--array varies what the batch script depends on (name, layout, nodes or slurm), and all jobs of an array "
            "have one script; submit these one by one"
        )
    return script


def _load(path: Path, cluster: Path | None, overrides: Sequence[str]) -> "RunConfig":
    """The configuration as the job will have it; prints warnings. ValueError: it cannot run on the cluster; the text
    has every reason that can be seen from here.
    """
    from spare_megatron.config.checks.validate import warnings

    config, _ = load_without_problems(
        path, overrides, _cluster_for, cluster=cluster, restrict=_by_srun, where=" as a job"
    )
    for text in warnings(config, _cluster_for(config)):
        message("submit", f"warning: {text}")
    return config


def _by_srun(config: "RunConfig") -> "RunConfig":
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, launcher="srun"))


def _cluster_for(config: "RunConfig") -> "MachineResources":
    """As much as it asks for; the corpus is seen from here."""
    from spare_megatron.config.training.corpus import judge_corpus

    corpus, failure = judge_corpus(config.data, lambda what: message("submit", what))
    machine = fitting_machine(config)
    return dataclasses.replace(
        machine,
        num_cores=machine.num_cores * config.cluster.threads_per_rank,
        has_corpus=corpus is not None or is_to_be_made(config.data),
        corpus_failure=failure,
        corpus=corpus,
        can_isolate=False,
    )


def _check_folders(configs: "Sequence[RunConfig]", folder: Path) -> None:
    """Refuses what the job would only find when it runs, and warns of what may delay it. ValueError: A folder cannot be
    written, or is that of a job. FileExistsError: the job's folder holds something.
    """
    from spare_megatron.driver.slurm.slurm_commands import JOB_FILE, job_fields, job_of
    from spare_megatron.machine.lock import LOCK, Locked, locked

    if (folder / JOB_FILE).exists():
        job_id = job_of(folder)
        state = job_fields(job_id).get("JobState", "unknown to Slurm")
        raise ValueError(
            f"--run-dir {folder} is that of job {job_id}, which is {state}: see `spare status {folder}`; choose "
            f"another, and checkpoint.folder={folder}/checkpoints to go on from there"
        )
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; a job never overwrites another: choose another --run-dir")
    check_writable("--run-dir", folder)
    for checkpoints in [Path(config.checkpoint.folder).absolute() for config in configs if config.checkpoint.folder]:
        check_writable("checkpoint.folder", checkpoints)
        try:
            with locked(checkpoints) if (checkpoints / LOCK).exists() else nullcontext():
                pass
        except Locked as error:
            message("submit", f"warning: checkpoint.folder: {error}; the job cannot run before")


def _check_partition(config: "RunConfig") -> None:
    """Refuses a job that would wait forever, and warns of one that may. Without facts from Slurm only sbatch judges.
    ValueError: the partition has too few nodes.
    """
    from spare_megatron.driver.slurm.slurm_commands import may_not_fit, never_fits, partitions_of

    num_nodes = config.cluster.num_nodes + config.slurm.num_spare_nodes
    partitions = []
    with suppress(ValueError):
        partitions = partitions_of(config.slurm)
    if reason := never_fits(num_nodes, partitions):
        raise ValueError(reason)
    for text in may_not_fit(config.slurm, num_nodes, partitions):
        message("submit", f"warning: {text}")


def _hand_over(configs: "Sequence[RunConfig]", varied: Sequence[str], folder: Path, script: str) -> int:
    """Writes the job's folder and submits it; returns the job's number. A job that Slurm refuses leaves nothing."""
    from spare_megatron.config.loader import write_with_exports
    from spare_megatron.driver.slurm.batch_script import SCRIPT
    from spare_megatron.driver.slurm.slurm_commands import Unanswered, note_job, require, submit
    from spare_megatron.formats.output import named_errors

    require("sbatch")
    _check_folders(configs, folder)
    _check_partition(configs[0])
    is_new = not folder.exists()
    homes = _homes(folder, len(varied))
    with named_errors("--run-dir", folder):
        for config, home in zip(configs, homes, strict=True):
            _write_config(config, home)
        write_with_exports(folder / SCRIPT, script, configs[0])
    try:
        job_id = submit(folder / SCRIPT)
    except Unanswered as error:
        raise Unanswered(
            f"{error}\n  the job may be in the queue all the same, see `squeue --me`; its folder {folder} is left there"
        ) from None
    except ValueError:  # another try is to have the folder
        shutil.rmtree(folder)
        if not is_new:
            folder.mkdir()
        raise
    for home, job in zip(homes, _jobs(job_id, len(varied)), strict=True):
        note_job(home, job)
    if varied:
        note_job(folder, job_id, dict(zip((home.name for home in homes), varied, strict=True)))
    return job_id


def _write_config(config: "RunConfig", home: Path) -> None:
    from spare_megatron.config.loader import dump_run_config, write_with_exports
    from spare_megatron.driver.slurm.batch_script import CHECKPOINTS, CONFIG

    if not config.checkpoint.folder:  # one for all runs of the job
        checkpoint = dataclasses.replace(config.checkpoint, folder=str(home / CHECKPOINTS))
        config = dataclasses.replace(config, checkpoint=checkpoint)
    home.mkdir(parents=True, exist_ok=True)
    write_with_exports(home / CONFIG, dump_run_config(config), config)
