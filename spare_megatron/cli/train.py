"""`spare train`: one run on this machine."""

import dataclasses
import inspect
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spare_megatron.cli import resuming
from spare_megatron.cli.command import explained_errors
from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.preset import OverridesOption, PresetArgument, PresetOption, one_preset
from spare_megatron.cli.printing import message, say_json
from spare_megatron.cli.resuming import go_back, report_finished
from spare_megatron.cli.running import load_runnable, reported_interruption, run_and_show, run_directory
from spare_megatron.journal.records import MEANINGS, exit_code
from spare_megatron.machine.standard_streams import outlasting

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.journal.state.summary import Summary
    from spare_megatron.supervisor.remote_supervisor import Launcher


@outlasting()
def train(
    preset: PresetArgument = None,
    config: PresetOption = None,
    overrides: OverridesOption = None,
    program: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="Custom program, as --set program.file=FILE.py; see check-program."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the new run, empty or absent. [default: runs/NAME-TIME]")
    ] = None,
    site: Annotated[
        int | None, typer.Option(min=0, help="Number of this site, as --set sites.site=N; see docs/sites.md.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Start from the newest checkpoint in checkpoint.folder, if there is one; without that setting from "
            "that of the run in --run-dir, and write into a new directory beside it.",
        ),
    ] = False,
    restart_from: Annotated[
        Literal["newest", "audited"],
        typer.Option(
            help="With --resume: from the newest checkpoint, or the newest that audits have shown to be clean."
        ),
    ] = "newest",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, progress on stderr.")] = False,
) -> None:
    """Train a GPT and mask lost groups.

    Example: `spare train demo_cpu --set train.steps=100`

    SIGTERM to this process or any supervisor, or to all processes at once, ends the run after the step under way, with
    a checkpoint, within control.end_grace_s; so do SIGHUP, SIGQUIT and SIGUSR2, and without a limit SIGUSR1. Ctrl-C
    or a second SIGTERM ends it at once, as does SIGTERM during the start. The journal is proven at the end; if that
    takes more than 60 s, run `spare check` instead.

    Exit codes:

    EXIT_CODES
    """
    from spare_megatron.machine import end_signal

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    console = RunConsole(stderr=as_json)
    # Before anything is imported that starts threads, as numpy does: one that lets the signal through would swallow it.
    with end_signal.blocked(), explained_errors("train"):
        settings = [*(overrides or ()), *([f"program.file={program}"] if program else [])]
        settings += [f"sites.site={site}"] if site is not None else []
        loaded = load_runnable("train", one_preset(preset, config, "train"), settings)
        if restart_from == "audited":
            go_back(loaded, is_resumed=resume)
        if resume:
            resumption = resuming.resume(loaded, run_dir)
            loaded, run_dir = resumption.config, resumption.run_dir
            if resumption.finished is not None:
                report_finished(resumption.finished, loaded, as_json=as_json)
                return
        directory = run_directory("train", loaded, run_dir)
        with reported_interruption("train", directory), elsewhere(loaded, directory.path) as (loaded, launcher):
            summary = run_and_show(loaded, directory, console, launcher=launcher, takes_requests=True)
    raise typer.Exit(_report(summary, loaded, directory.path, console, as_json=as_json))


assert train.__doc__ is not None, "its help is its docstring"
train.__doc__ = inspect.cleandoc(train.__doc__).replace(  # as Python 3.13 compiles it
    "EXIT_CODES", "\n".join(f"- {code}: {text}" for code, text in MEANINGS.items())
)


def _report(summary: "Summary", config: "RunConfig", folder: Path, console: RunConsole, *, as_json: bool) -> int:
    """Prints how the run has ended. Returns the exit code."""
    from spare_megatron.cli.progress import print_summary

    unsaved = unsaved_end(config, folder, summary)
    print_summary(summary, folder, console)
    if unsaved:
        message("train", unsaved)
    if as_json:
        say_json({"run_dir": str(folder), **asdict(summary)})
    return exit_code(summary.outcome, summary.verdict) or bool(unsaved)


def unsaved_end(config: "RunConfig", run_dir: Path, summary: "Summary") -> str:
    """Why the last state of a run that has finished is in no checkpoint, though it was to be; empty where it is."""
    from spare_megatron.config.training.terms import step_of
    from spare_megatron.state.checkpoint.checkpoint_folder import all_checkpoints, folder_of
    from spare_megatron.state.checkpoint.verification import is_usable

    last = config.train.steps - summary.steps_left
    is_saved = summary.outcome == "stopped" or (summary.outcome == "finished" and config.checkpoint.is_wanted)
    if not is_saved or not summary.steps_committed:
        return ""
    folder = folder_of(config.checkpoint, run_dir)
    try:
        steps = [step_of(path) for path in all_checkpoints(folder) if is_usable(path)]
    except OSError as error:
        return f"whether a checkpoint of the last of {last} steps was saved is unknown: {error}"
    if last in steps:
        return ""
    newest = f"the newest is of {max(steps)} steps" if steps else "there is none"
    return (
        f"no valid checkpoint of the last of {last} steps was saved in {folder}, {newest}: its writer was lost, could "
        f"not write, had no time or had wrong state (spare status {run_dir}); to train the rest start a run with --set "
        f"checkpoint.load={folder}"
    )


@contextmanager
def elsewhere(config: "RunConfig", run_dir: Path) -> Iterator[tuple["RunConfig", "Launcher | None"]]:
    """In a job of Slurm, what starts supervisors, and the configuration with the job's own etcd."""
    if config.cluster.launcher != "srun":
        yield config, None
        return
    from spare_megatron.driver.slurm.allocation import (
        SrunLauncher,
        find_racks,
        nodes_for_run,
        shared_racks,
        spread,
        this_job,
    )
    from spare_megatron.driver.slurm.etcd import etcd_of_the_job

    job_id, racks = this_job(), find_racks()
    nodes = nodes_for_run(job_id, config, racks)
    used = nodes[: config.cluster.num_nodes]
    if warning := shared_racks(config.spare, config.parallel, used, racks):
        message("train", f"warning: {warning}")
    launcher = SrunLauncher(job_id=job_id, slurm=config.slurm, nodes=used)
    control = config.control
    if control.store == "embedded" or control.endpoints:
        yield config, launcher
        return
    token = f"{job_id}-{run_dir.name}"
    folder = run_dir.with_name(f"etcd-{run_dir.name}").absolute()
    with etcd_of_the_job(spread(nodes, racks), control, config.slurm.etcd_port, token, folder) as control:
        yield dataclasses.replace(config, control=control), launcher
