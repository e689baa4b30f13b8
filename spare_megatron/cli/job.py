"""Commands for a run that goes on, or a job of Slurm, by its folder: logs, cancel, supervise, drain and grow."""

from collections import deque
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli import merged_logs
from spare_megatron.cli.folders import is_run_dir
from spare_megatron.cli.printing import say

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.journal.state.run_state import RunState

_RunDir = Annotated[Path, typer.Argument(help="Directory of the run.")]
_WHICH = typer.Argument(metavar="WHICH...", help="Groups by their numbers, node:N or machine:N for those of one.")


def logs(
    folder: Annotated[Path, typer.Argument(help="Directory of a run, or folder of a job.")],
    group: Annotated[
        int | None,
        typer.Argument(help="Print the logs of this group's ranks. [default: a job's own log, or all of a run]"),
    ] = None,
    lines: Annotated[int, typer.Option(help="Number of lines to print from the end; 0 prints all.", min=0)] = 200,
    severity: Annotated[str, typer.Option(help="Least severity: info, warning or error.")] = "info",
    steps: Annotated[
        str | None, typer.Option(metavar="N[..M]", help="Print what was printed in these steps. [default: all]")
    ] = None,
) -> None:
    """Print the logs of a run or job, merged by time.

    Each supervisor, and each incarnation of each rank, has a log of what it prints: nothing unless something is wrong,
    so that a run without problems has nothing to show here. For a job with a GROUP or --steps, the logs are those of
    its newest run. A line without a time belongs to the one before it. `spare status` shows what happened in a run.

    Example: `spare logs runs/mine 3 --severity warning --steps 120..125`
    """
    is_run = is_run_dir(folder)
    if not is_run and (group is not None or steps is not None):
        folder, is_run = _run_of_job(folder), True
    files = _logs_of_run(folder, group) if is_run else _log_of_job(folder)
    if not files:
        whose = f"of {folder}" if group is None else f"of group {group} of {folder}"
        say(f"nothing to show: all logs {whose} are empty; see `spare status {folder}`", err=True)
    found = merged_logs.chosen(folder, files, severity, steps)
    has_none = bool(files)
    for at_s, source, _, text in deque(found, maxlen=lines) if lines else found:
        has_none = False
        head = f"{datetime.fromtimestamp(at_s):%m-%d %H:%M:%S.%f}"[:-3] + f" {source}: "
        say(f"{head if len(files) > 1 else ''}{text.expandtabs()}")
    if has_none:
        say("nothing to show: no line is of that severity in these steps; lower --severity, or widen --steps", err=True)


def _run_of_job(folder: Path) -> Path:
    """The newest run."""
    from spare_megatron.driver.slurm.slurm_commands import tasks_of

    if tasks := tasks_of(folder):
        raise ValueError(f"{folder} is that of a job array: name one of {', '.join(tasks)} in it")
    return max(folder.glob("attempt-*"), default=folder)


def _log_of_job(folder: Path) -> list[Path]:
    from spare_megatron.driver.slurm.batch_script import LOG

    _run_of_job(folder)
    if not (folder / LOG).exists():
        raise ValueError(f"{folder / LOG} is not there: the job has not started; see `spare status {folder}`")
    return [folder / LOG]


def _logs_of_run(run_dir: Path, group: int | None) -> list[Path]:
    """The logs that hold something, of all processes or of a group's ranks."""
    name = "*" if group is None else f"group-{group:04d}-rank-*"
    files = sorted(run_dir.glob(f"logs/{name}.log"))
    if not files and group is not None:
        there = sorted({int(file.name[6:10]) for file in run_dir.glob("logs/group-*.log")})
        others = f"there are those of groups {', '.join(map(str, there))}" if there else "no group has one yet"
        raise ValueError(
            f"{run_dir} holds no log of group {group}: it has not started, or there is no such group; {others}"
        )
    return [file for file in files if file.stat().st_size]


def cancel(folder: Annotated[Path, typer.Argument(help="Folder of the job, as `spare submit` printed it.")]) -> None:
    """Cancel a Slurm job. Its runs and checkpoints stay."""
    from spare_megatron.driver.slurm.slurm_commands import cancel as end
    from spare_megatron.driver.slurm.slurm_commands import job_of

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

    from spare_megatron.machine import end_signal

    end_signal.block()
    from spare_megatron.driver.slurm.allocation import end_orphaned_job
    from spare_megatron.journal.records import exit_code
    from spare_megatron.supervisor.node_process import look_after_node

    code, concluded = 0, look_after_node(run_dir, node, wait_s)
    if concluded is not None:
        summary, config = concluded
        if summary is None:
            code = 1
        elif summary.outcome != "stopped" or summary.verdict == "invalid":  # a node without steps to do is done
            code = exit_code(summary.outcome, summary.verdict)
        if summary is not None and config.cluster.launcher == "srun":
            # It has mostly failed as the driver's machine had the store. Should it fail again, a driver decides.
            end_orphaned_job(wants_more=summary.outcome in ("stopped", "wipe_out", "failed"))
    os._exit(code)  # a thread may be waiting for a store that does not answer


def drain(run_dir: _RunDir, which: Annotated[list[str], _WHICH]) -> None:
    """Have groups leave a run at the end of a step.

    Example: `spare drain runs/mine 3 machine:2`

    No step is computed again. What other groups lack of the state is copied to them first; a checkpoint that a group is
    writing, or has just written, is completed and compared first. The groups stay away, also from restarts of their
    machines, until `spare grow`; only after a wipe-out all groups are started again. `spare status` shows when they
    have left: D. machine:N stands for the machine that began as node N, or its replacement, wherever it is now.
    """
    from spare_megatron.journal.event_texts import groups_named
    from spare_megatron.process.requests import asked_to_leave, groups_of, request, why_not_drained

    config, run_state = _running(run_dir)
    groups = groups_of(which, config, run_state.holdings)
    members = run_state.folding.members if run_state.folding else range(config.layout.num_groups)
    if reason := why_not_drained(groups, config, members, asked_to_leave(run_dir)):
        raise ValueError(reason)
    request(run_dir, groups, "drain")
    say(f"asked {groups_named(groups)} to leave at the end of a step; see `spare status {run_dir}`")


def grow(
    run_dir: _RunDir,
    which: Annotated[list[str] | None, _WHICH] = None,
    to: Annotated[int | None, typer.Option(min=1, help="Number of groups to have.")] = None,
    by: Annotated[int | None, typer.Option(min=1, help="Number of groups to add.")] = None,
) -> None:
    """Have groups join a run: drained ones, or further ones.

    Examples: `spare grow runs/mine 3 node:2`, `spare grow runs/mine --to 6`

    Further ones have ids from layout.num_groups to layout.max_groups - 1. Their supervisors start them; each is
    admitted at the end of the step in which it is up. By number the lowest are asked.
    """
    from spare_megatron.journal.event_texts import groups_named
    from spare_megatron.process.requests import asked_to_leave, groups_of, groups_to_grow, request

    if bool(which) + (to is not None) + (by is not None) != 1:
        raise ValueError("name groups, or give their number by --to or --by")
    config, run_state = _running(run_dir)
    if which:
        groups = groups_of(which, config, run_state.holdings)
    else:
        away = asked_to_leave(run_dir, config.parallel.further_groups)
        lost = {group for group, status in enumerate(run_state.groups()) if status in ("lost", "given up")}
        groups = groups_to_grow(config, set(range(config.layout.most_groups)) - away - lost, away, to=to, by=by)
    request(run_dir, groups, "grow")
    asked = f"asked {groups_named(groups)} to take part" if groups else f"the run has {to} groups already"
    say(f"{asked}; see `spare status {run_dir}`")


def _running(run_dir: Path) -> tuple["RunConfig", "RunState"]:
    """A run's configuration and state; raises ValueError if it is none, or has ended."""
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.journal.state.follow import read_run_state

    if not is_run_dir(run_dir):
        raise ValueError(f"{run_dir} is the folder of a job: name the directory of its run, attempt-N in it")
    run_state = read_run_state(run_dir)
    if run_state.end is not None:
        raise ValueError(f"the run in {run_dir} has ended: {run_state.outcome}")
    return load_run_config(run_dir / "config.toml").config, run_state
