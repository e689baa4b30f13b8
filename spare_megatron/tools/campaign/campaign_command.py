"""`spare campaign`: a training run under many injected faults, and whether it survived all of them."""

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spare_megatron.cli.command import explained_errors
from spare_megatron.cli.console import RunConsole
from spare_megatron.cli.folders import check_folders
from spare_megatron.cli.preset import HELP, OverridesOption
from spare_megatron.cli.printing import message, say_json
from spare_megatron.cli.running import (
    RunDirectory,
    choose_run_dir,
    load_runnable,
    reported_interruption,
    run_and_show,
)
from spare_megatron.machine.standard_streams import outlasting

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.journal.state.summary import Summary
    from spare_megatron.tools.campaign.campaign_figures import FaultCount
    from spare_megatron.tools.campaign.process_watch import ProcessReport
    from spare_megatron.tools.campaign.trace_replay import ReplayedAbsences


@outlasting()
def campaign(
    config: Annotated[Path, typer.Argument(help=f"{HELP} It sets faults.trace or faults.mean_steps, or --trace is.")],
    minutes: Annotated[
        float | None,
        typer.Option(
            help="End the run after this many minutes, whatever train.steps is. [default: train.max_minutes, else "
            "with --trace two more than its days take]"
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Suspend nodes as machines were away in this file: seconds,machine,repair_s[,cause]."),
    ] = None,
    days: Annotated[
        tuple[float, float] | None,
        typer.Option(help="First day of --trace that is replayed, and its end. [default: 0 7]"),
    ] = None,
    day: Annotated[
        str | None, typer.Option(help="How long a day of --trace takes, such as 30s. [default: 60s]")
    ] = None,
    overrides: OverridesOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the new run, empty or absent. [default: runs/NAME-TIME]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, progress on stderr.")] = False,
) -> None:
    """Train under injected faults and check that all were masked.

    Examples: `spare campaign campaign_cpu --minutes 10`,
    `spare campaign campaign_trace_cpu --trace losses.csv --days 40 60 --day 30s`

    Exit codes:

    - 0: the journal is valid, every due fault struck, no process outlived the run or grew
    - 1: at least one of these does not hold
    - 2: the configuration cannot run
    - 130: interrupted
    """
    from spare_megatron.formats.output import NotWritten, whole_file
    from spare_megatron.journal.files import read_journal
    from spare_megatron.tools.campaign.campaign_figures import campaign_figures, print_campaign
    from spare_megatron.tools.campaign.process_watch import process_problems

    console = RunConsole(stderr=as_json)
    times = [] if minutes is None else [f"train.max_minutes={minutes}"]
    with explained_errors("campaign"):
        loaded = load_runnable("campaign", config, [*(overrides or ()), *times])
        if trace is None:
            _refuse_without_trace(days, day)
            _refuse_a_run_without_faults(loaded)
            replay = None
        else:
            loaded, replay = _replayed(loaded, trace, days or (0.0, 7.0), day or "60s")
        directory = RunDirectory(choose_run_dir(loaded, run_dir))
        check_folders(loaded, directory.path)
        summary, processes, outside = _train(loaded, directory, console, replay)
        folder = directory.path
        try:
            figures = campaign_figures(read_journal(folder), summary, outside)
        except (OSError, ValueError) as error:  # not exit code 2: the run has begun
            message("campaign", f"the journal cannot be read: {error}")
            raise typer.Exit(1) from error
    problems = [*figures.problems(summary), *process_problems(processes, loaded.layout.num_groups)]
    traced = {} if replay is None else {"trace": asdict(replay)}

    def result() -> dict[str, Any]:
        known = {"run_dir": str(folder), "is_passed": not problems, "problems": problems}
        return {**known, **asdict(figures), "processes": asdict(processes), **traced, **asdict(summary)}

    try:
        with whole_file("--run-dir", folder / "campaign.json") as file:
            file.write_text(json.dumps(result()) + "\n")
    except NotWritten as error:  # hours have gone into the figures: they are shown all the same
        problems.append(f"campaign.json could not be written: {error.reason}")
    print_campaign(summary, figures, processes, problems, folder, console)
    if as_json:
        say_json(result())
    raise typer.Exit(1 if problems else 0)


def _train(
    config: "RunConfig", directory: RunDirectory, console: RunConsole, replay: "ReplayedAbsences | None"
) -> "tuple[Summary, ProcessReport, dict[str, FaultCount]]":
    """The run, its processes, and the faults that its journal does not know: absences of nodes."""
    from spare_megatron.tools.campaign.process_watch import ProcessWatch
    from spare_megatron.tools.campaign.trace_replay import TraceReplay

    with contextlib.ExitStack() as around:
        around.enter_context(reported_interruption("campaign", directory))
        watch = around.enter_context(ProcessWatch())
        if replay is None:
            summary, outside = run_and_show(config, directory, console, watch.on_event), {}
        else:
            console.line(replay.text())
            replayed = around.enter_context(TraceReplay(replay))
            summary = run_and_show(config, directory, console, watch.on_event, replayed.on_event)
            outside = {"absence": replayed.count()}
    return summary, watch.report(), outside


def _replayed(
    config: "RunConfig", trace: Path, days: tuple[float, float], day: str
) -> "tuple[RunConfig, ReplayedAbsences]":
    """The run, which ends after the days that it replays, and their absences. Raises ValueError for options and runs
    that do not fit each other.
    """
    from spare_megatron.formats.quantities import parse_duration_s
    from spare_megatron.tools.campaign.trace_replay import replay_of
    from spare_megatron.tools.simulate.traces import read_trace

    nodes, launcher = config.cluster.num_nodes, config.cluster.launcher
    if nodes < 2 or launcher != "local":
        raise ValueError(
            f"--trace suspends nodes that all run on this machine, but cluster.num_nodes={nodes} and cluster.launcher="
            f"{launcher}; set at least 2, and local"
        )
    if config.faults.trace or config.faults.mean_steps is not None:
        raise ValueError("--trace is the only source of faults; remove faults.trace and faults.mean_steps")
    replay = replay_of(read_trace(trace), nodes, days, parse_duration_s("--day", day))
    if config.train.max_minutes is None:
        config = replace(config, train=replace(config.train, max_minutes=replay.minutes))
    return config, replay


def _refuse_without_trace(days: tuple[float, float] | None, day: str | None) -> None:
    if days is not None:
        raise ValueError(f"--days {days[0]:g} {days[1]:g} are those of --trace; give that, or leave it out")
    if day is not None:
        raise ValueError(f"--day {day} is how long a day of --trace takes; give that, or leave it out")


def _refuse_a_run_without_faults(config: "RunConfig") -> None:
    """Raises ValueError where the run could only end with the finding that no fault struck."""
    from spare_megatron.driver.planned_faults import draw_faults

    faults = config.faults
    if faults.trace:
        return
    if faults.mean_steps is None:
        raise ValueError("faults.trace is empty and faults.mean_steps absent: no fault would strike; set one of them")
    if not draw_faults(config):
        raise ValueError(
            f"faults.mean_steps={faults.mean_steps} draws no fault that redundancy can mask in train.steps="
            f"{config.train.steps}, of which the last faults.recovery_steps={faults.recovery_steps} are spared; lower "
            f"faults.mean_steps or faults.recovery_steps, or raise train.steps or spare.redundancy"
        )
