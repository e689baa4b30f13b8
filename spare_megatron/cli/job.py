"""`spare status`, `spare logs`, `spare cancel`: a job of Slurm by its folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from spare_megatron.cli.errors import explained_errors

Folder = Annotated[Path, typer.Argument(help="The folder that `spare submit` printed.")]


def status(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Say how a job stands: its state in Slurm, and each run's committed steps, last loss and lost groups."""
    from spare_megatron.journal.files import read_journal
    from spare_megatron.journal.summary import summarize
    from spare_megatron.slurm.commands import job_fields, job_of

    with explained_errors("status"):
        job_id = job_of(folder)
        fields = job_fields(job_id)
        runs = {}
        for run_dir in sorted(folder.glob("attempt-*")):
            if any(run_dir.glob("journal/*.jsonl")):
                summary = summarize(read_journal(run_dir))
                runs[run_dir.name] = {name: getattr(summary, name) for name in _FIGURES}
    state = {name: fields.get(key, "") for name, key in _STATE.items()}
    if as_json:
        typer.echo(json.dumps({"job_id": job_id, **state, "runs": runs}))
        return
    told = [f"{name} {state[name]}" for name in ("reason", "nodes") if state[name] not in ("", "None", "(null)")]
    typer.echo(", ".join((f"job {job_id}: {state['state'] or 'forgotten by Slurm'}", *told)))
    for name, run in runs.items():
        typer.echo(f"  {name}: {_describe(run)}")


_STATE = {"state": "JobState", "reason": "Reason", "nodes": "NodeList"}
_FIGURES = ("outcome", "outcome_reason", "steps_committed", "final_loss", "groups_lost", "groups_rejoined")


def _describe(run: Mapping[str, Any]) -> str:
    """A run in a line."""
    outcome = "going on" if run["outcome"] == "unknown" else run["outcome"]
    loss = "none" if run["final_loss"] is None else f"{run['final_loss']:.4f}"
    reason = f": {run['outcome_reason']}" if outcome not in ("going on", "finished") else ""
    return (
        f"{outcome}, {run['steps_committed']} steps committed, loss {loss}, groups lost {run['groups_lost']}, "
        f"rejoined {run['groups_rejoined']}{reason}"
    )


def logs(
    folder: Folder,
    group: Annotated[int | None, typer.Argument(help="The group; the job's own log when absent.")] = None,
    lines: Annotated[int, typer.Option(help="Last lines of each file to print.", min=1)] = 40,
) -> None:
    """Print the end of a job's log, or of the logs of a group's ranks in the newest run."""
    from spare_megatron.slurm.job import LOG

    with explained_errors("logs"):
        if group is None:
            files = [folder / LOG]
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
