"""`spare drain`, `spare grow`: ask groups of a run to leave it, or to take part again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.printing import say

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.journal.state.run_state import RunState

RunDirArgument = Annotated[Path, typer.Argument(help="Directory of the run.")]
WHICH = typer.Argument(metavar="WHICH...", help="Groups by their numbers, node:N or machine:N for those of one.")


def drain(run_dir: RunDirArgument, which: Annotated[list[str], WHICH]) -> None:
    """Have groups leave a run at the end of a step.

    Example: `spare drain runs/mine 3 machine:2`

    No step is computed again. What other groups lack of the state is copied to them first; a checkpoint that a group is
    writing, or has just written, is completed and compared first. The groups stay away, also from restarts of their
    machines, until `spare grow`; only after a wipe-out all groups are started again. `spare status` shows when they
    have left: D. machine:N stands for the machine that began as node N, or its replacement, wherever it is now.
    """
    with explained_errors("drain"):
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
    run_dir: RunDirArgument,
    which: Annotated[list[str] | None, WHICH] = None,
    to: Annotated[int | None, typer.Option(min=1, help="Number of groups to have.")] = None,
    by: Annotated[int | None, typer.Option(min=1, help="Number of groups to add.")] = None,
) -> None:
    """Have groups join a run: drained ones, or further ones.

    Examples: `spare grow runs/mine 3 node:2`, `spare grow runs/mine --to 6`

    Further ones have ids from layout.num_groups to layout.max_groups - 1. Their supervisors start them; each is
    admitted at the end of the step in which it is up. By number the lowest are asked.
    """
    with explained_errors("grow"):
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
    from spare_megatron.cli.folders import is_run_dir
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.journal.state.follow import read_run_state

    if not is_run_dir(run_dir):
        raise ValueError(f"{run_dir} is the folder of a job: name the directory of its run, attempt-N in it")
    run_state = read_run_state(run_dir)
    if run_state.end is not None:
        raise ValueError(f"the run in {run_dir} has ended: {run_state.outcome}")
    return load_run_config(run_dir / "config.toml").config, run_state
