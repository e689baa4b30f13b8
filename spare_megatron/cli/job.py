"""`spare logs`, `spare cancel`: a run or a job of Slurm by its folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.folders import is_run_dir
from spare_megatron.cli.printing import say

_MOST_LOGS = 10


def logs(
    folder: Annotated[Path, typer.Argument(help="Directory of a run, or folder of a job.")],
    group: Annotated[
        int | None,
        typer.Argument(
            help="Print the logs of this group's ranks. [default: a job's own log; of a run the logs written last]"
        ),
    ] = None,
    lines: Annotated[int, typer.Option(help="Number of lines to print from the end of each file.", min=1)] = 40,
) -> None:
    """Print the end of the logs of a run or job.

    Each supervisor, and each incarnation of each rank, has a log of what it prints: nothing unless something is wrong,
    so that a run without problems has nothing to show here. For a job with a GROUP, the logs are those of its newest
    run. `spare status` shows what happened in a run.
    """
    with explained_errors("logs"):
        files = _logs_of_run(folder, group) if is_run_dir(folder) else _logs_of_job(folder, group)
        if not files:
            whose = f"of {folder}" if group is None else f"of group {group} of {folder}"
            say(f"nothing to show: all logs {whose} are empty; see `spare status {folder}`", err=True)
        for file in files:
            if len(files) > 1:
                say(f"==> {file} <==")
            for line in file.read_text(errors="replace").splitlines()[-lines:]:
                say(line.expandtabs())


def _logs_of_job(folder: Path, group: int | None) -> list[Path]:
    from spare_megatron.driver.slurm.batch_script import LOG
    from spare_megatron.driver.slurm.slurm_commands import tasks_of

    if tasks := tasks_of(folder):
        raise ValueError(f"{folder} is that of a job array: name one of {', '.join(tasks)} in it")
    if group is not None:
        return _logs_of_run(max(folder.glob("attempt-*"), default=folder), group)
    if not (folder / LOG).exists():
        raise ValueError(f"{folder / LOG} is not there: the job has not started; see `spare status {folder}`")
    return [folder / LOG]


def _logs_of_run(run_dir: Path, group: int | None) -> list[Path]:
    """The logs that hold something: those of a group's ranks, or the last ones in the order of their times."""
    if group is None:
        return sorted(_written((run_dir / "logs").glob("*.log")), key=lambda file: file.stat().st_mtime)[-_MOST_LOGS:]
    files = sorted(run_dir.glob(f"logs/group-{group:04d}-rank-*.log"))
    if not files:
        raise ValueError(f"{run_dir} holds no log of group {group}: it has not started, or there is no such group")
    return _written(files)


def _written(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if file.stat().st_size]


def cancel(
    folder: Annotated[Path, typer.Argument(help="Folder of the job, as `spare submit` printed it.")],
) -> None:
    """Cancel a Slurm job. Its runs and checkpoints stay."""
    from spare_megatron.driver.slurm.slurm_commands import cancel as end
    from spare_megatron.driver.slurm.slurm_commands import job_of

    with explained_errors("cancel"):
        job_id = job_of(folder)
        end(job_id)
    say(f"job {job_id} is cancelled; its runs are in {folder}")


def supervise(
    run_dir: Annotated[Path, typer.Argument(help="Directory of the run, on shared storage.")],
    node: Annotated[int, typer.Option(help="Number of this node, below cluster.num_nodes.", min=0)],
    wait_s: Annotated[float, typer.Option(help="Longest wait for the driver, in seconds.", min=0)] = 300.0,
) -> None:
    """Run one node of a training whose driver is elsewhere.

    For runs with cluster.launcher=hand; `spare train` runs on node 0. Example for node 1:
    `spare supervise /shared/runs/mine --node 1`

    The node continues if the driver is lost. Exit codes: 0 the node is done, 2 no driver expects it; without a driver
    that of `spare train` if the run has failed, or its proof.
    """
    import os

    with explained_errors("supervise"):
        from spare_megatron.machine import end_signal

        end_signal.block()
        from spare_megatron.driver.slurm.steps import end_orphaned_job
        from spare_megatron.journal.outcomes import exit_code
        from spare_megatron.supervisor.node_process import look_after_node

        code, concluded = 0, look_after_node(run_dir, node, wait_s)
        if concluded is not None:
            summary, config = concluded
            if summary.outcome != "stopped" or summary.verdict == "invalid":  # a node without steps to do is done
                code = exit_code(summary.outcome, summary.verdict)
        if concluded is not None and config.cluster.launcher == "srun":
            end_orphaned_job(wants_more=summary.outcome in ("stopped", "wipe_out"))
    os._exit(code)  # a thread may be waiting for a store that does not answer
