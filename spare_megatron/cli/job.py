"""`spare logs`, `spare cancel`: a run or a job of Slurm by its folder."""

from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.folders import is_run_dir

_MOST_LOGS = 10


def logs(
    folder: Annotated[Path, typer.Argument(help="A run's directory, or the folder that `spare submit` printed.")],
    group: Annotated[
        int | None, typer.Argument(help="A group; when absent a job's own log, or of a run the logs last written to.")
    ] = None,
    lines: Annotated[int, typer.Option(help="Last lines of each file to print.", min=1)] = 40,
) -> None:
    """Print the end of the logs of a run, or of a job and its newest run.

    A run has a log for each supervisor and for each life of each rank, which hold what these print: nothing, unless
    something is wrong. What happened in the run `spare status` tells.
    """
    with explained_errors("logs"):
        files = _logs_of_run(folder, group) if is_run_dir(folder) else _logs_of_job(folder, group)
        if not files:
            typer.echo(f"all logs in {folder / 'logs'} are empty; see `spare status {folder}`", err=True)
        for file in files:
            if len(files) > 1:
                typer.echo(f"==> {file} <==")
            for line in file.read_text(errors="replace").splitlines()[-lines:]:
                typer.echo(line)


def _logs_of_job(folder: Path, group: int | None) -> list[Path]:
    from spare_megatron.slurm.commands import tasks_of
    from spare_megatron.slurm.job import LOG

    if tasks := tasks_of(folder):
        raise ValueError(f"{folder} is that of a job array: name one of {', '.join(tasks)} in it")
    if group is not None:
        return _logs_of_run(max(folder.glob("attempt-*"), default=folder), group)
    if not (folder / LOG).exists():
        raise ValueError(f"{folder / LOG} is not there: the job has not started; see `spare status {folder}`")
    return [folder / LOG]


def _logs_of_run(run_dir: Path, group: int | None) -> list[Path]:
    """The logs of a group's ranks; or of all those that hold something the last ones, in the order of their times."""
    if group is None:
        written = [file for file in (run_dir / "logs").glob("*.log") if file.stat().st_size]
        return sorted(written, key=lambda file: file.stat().st_mtime)[-_MOST_LOGS:]
    files = sorted(run_dir.glob(f"logs/group-{group:04d}-rank-*.log"))
    if not files:
        raise ValueError(f"{run_dir} holds no log of group {group}: it has not started, or there is no such group")
    return files


def cancel(
    folder: Annotated[Path, typer.Argument(help="The folder that `spare submit` printed.")],
) -> None:
    """End a job. What it has committed and saved stays."""
    from spare_megatron.slurm.commands import cancel as end
    from spare_megatron.slurm.commands import job_of

    with explained_errors("cancel"):
        job_id = job_of(folder)
        end(job_id)
    typer.echo(f"job {job_id} is cancelled; its runs are in {folder}")
