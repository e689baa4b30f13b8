"""`spare logs`, `spare cancel`: a job of Slurm by its folder."""

from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.errors import explained_errors

Folder = Annotated[Path, typer.Argument(help="The folder that `spare submit` printed.")]


def logs(
    folder: Folder,
    group: Annotated[int | None, typer.Argument(help="The group; the job's own log when absent.")] = None,
    lines: Annotated[int, typer.Option(help="Last lines of each file to print.", min=1)] = 40,
) -> None:
    """Print the end of a job's log, or of the logs of a group's ranks in the newest run."""
    from spare_megatron.slurm.commands import tasks_of
    from spare_megatron.slurm.job import LOG

    with explained_errors("logs"):
        if tasks := tasks_of(folder):
            raise ValueError(f"{folder} is that of a job array: name one of {', '.join(tasks)} in it")
        if group is None:
            files = [folder / LOG]
            if not files[0].exists():
                raise ValueError(f"{files[0]} is not there: the job has not started; see `spare status {folder}`")
        else:
            newest = max(folder.glob("attempt-*"), default=folder)
            files = sorted(newest.glob(f"logs/group-{group:04d}-rank-*.log"))
            if not files:
                raise ValueError(
                    f"{newest} holds no log of group {group}: it has not started, or there is no such group"
                )
        for file in files:
            if len(files) > 1:
                typer.echo(f"==> {file} <==")
            for line in file.read_text(errors="replace").splitlines()[-lines:]:
                typer.echo(line)


def cancel(folder: Folder) -> None:
    """End a job. What it has committed and saved stays."""
    from spare_megatron.slurm.commands import cancel as end
    from spare_megatron.slurm.commands import job_of

    with explained_errors("cancel"):
        job_id = job_of(folder)
        end(job_id)
    typer.echo(f"job {job_id} is cancelled; its runs are in {folder}")
