"""`spare drain`, `spare grow`: ask groups of a run to leave it, or to take part again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.errors import explained_errors

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.journal.run_state import RunState

RunDirArgument = Annotated[Path, typer.Argument(help="Directory of the run.")]
WhichArgument = Annotated[
    list[str], typer.Argument(metavar="WHICH...", help="Groups by their numbers, or node:N for those of a node.")
]


def drain(run_dir: RunDirArgument, which: WhichArgument) -> None:
    """Have groups leave a run at the end of a step.

    Example: `spare drain runs/mine 3 node:2`

    No step is computed again. What other groups lack of the state is copied to them first; a checkpoint that a group is
    writing, or has just written, is completed and compared first. The groups stay away, also from restarts of their
    machines, until `spare grow`; only after a wipe-out all groups are started again. `spare status` shows when they
    have left: D.
    """
    with explained_errors("drain"):
        from spare_megatron.journal.events import groups_named
        from spare_megatron.process.requests import asked_to_leave, groups_of, request, why_not_drained

        config, run_state = _running(run_dir)
        groups = groups_of(which, config)
        members = run_state.folding.members if run_state.folding else range(config.layout.num_groups)
        if reason := why_not_drained(groups, config, members, asked_to_leave(run_dir)):
            raise ValueError(reason)
        request(run_dir, groups, "drain")
    typer.echo(f"asked {groups_named(groups)} to leave at the end of a step; see `spare status {run_dir}`")


def grow(run_dir: RunDirArgument, which: WhichArgument) -> None:
    """Have groups join a run: drained ones, or further ones.

    Example: `spare grow runs/mine 3 node:2`

    Further ones have ids from layout.num_groups to layout.max_groups - 1. Their supervisors start them; each is
    admitted at the end of the step in which it is up.
    """
    with explained_errors("grow"):
        from spare_megatron.journal.events import groups_named
        from spare_megatron.process.requests import groups_of, request

        config, _ = _running(run_dir)
        groups = groups_of(which, config)
        request(run_dir, groups, "grow")
    typer.echo(f"asked {groups_named(groups)} to take part; see `spare status {run_dir}`")


def _running(run_dir: Path) -> tuple["RunConfig", "RunState"]:
    """A run's configuration and state; raises ValueError if it is none, or has ended."""
    from spare_megatron.cli.folders import is_run_dir
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.journal.follow import read_run_state

    if not is_run_dir(run_dir):
        raise ValueError(f"{run_dir} is the folder of a job: name the directory of its run, attempt-N in it")
    run_state = read_run_state(run_dir)
    if run_state.end is not None:
        raise ValueError(f"the run in {run_dir} has ended: {run_state.outcome}")
    return load_run_config(run_dir / "config.toml").config, run_state
