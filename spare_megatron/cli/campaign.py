"""`spare campaign`: a training under many faults, and whether it stood them all."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spare_megatron.cli.detached_view import RunConsole, outlasting_output
from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.folders import check_folders
from spare_megatron.cli.running import choose_run_dir, load_runnable, reported_interruption, run_and_show
from spare_megatron.driver.process_watch import Holdings, ProcessReport
from spare_megatron.journal.campaign import CampaignFigures
from spare_megatron.journal.goodput import Goodput
from spare_megatron.journal.quantities import format_duration
from spare_megatron.journal.summary import Summary

if TYPE_CHECKING:
    from spare_megatron.config.schema import RunConfig


def campaign(
    config: Annotated[Path, typer.Argument(help="The run preset, a TOML file whose [faults] has a trace or a rate.")],
    minutes: Annotated[
        float | None, typer.Option(help="End the run after this time, committed steps or not (train.max_minutes).")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Overrides one setting, as in train.steps=100; repeatable."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run; runs/NAME-TIME when absent. Never an existing run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and progress on stderr.")] = False,
) -> None:
    """Train under many faults, and say whether all were masked and nothing was left behind.

    Exit codes: 0 the journal is valid, every fault that was due struck, no process outlived the run and none grew;
    1 something of that is not so; 2 the configuration cannot run; 130 interrupted.
    """
    from spare_megatron.driver.process_watch import ProcessWatch, process_problems
    from spare_megatron.journal.campaign import campaign_figures
    from spare_megatron.journal.files import read_journal
    from spare_megatron.journal.output import NotWritten, whole_file

    console = RunConsole(stderr=as_json)
    times = [] if minutes is None else [f"train.max_minutes={minutes}"]
    with explained_errors("campaign"):
        loaded = load_runnable("campaign", config, [*(overrides or ()), *times])
        _refuse_a_run_without_faults(loaded)
        folder = choose_run_dir(loaded, run_dir)
        check_folders(loaded, folder)
        with reported_interruption("campaign", folder), ProcessWatch() as watch:
            summary = run_and_show(loaded, folder, console, watch.take)
        figures = campaign_figures(read_journal(folder), summary)
    processes = watch.report()
    problems = [*figures.problems(summary), *process_problems(processes, loaded.layout.num_groups)]

    def result() -> str:
        known = {"run_dir": str(folder), "is_passed": not problems, "problems": problems}
        return json.dumps({**known, **asdict(figures), "processes": asdict(processes), **asdict(summary)})

    try:
        with whole_file("--run-dir", folder / "campaign.json") as file:
            file.write_text(result() + "\n")
    except NotWritten as error:  # hours have gone into the figures: they are shown all the same
        problems.append(f"campaign.json could not be written: {error.reason}")
    with outlasting_output(console.file):
        print_campaign(summary, figures, processes, problems, folder, console)
    with outlasting_output(sys.stdout):
        if as_json:
            sys.stdout.write(result() + "\n")
        sys.stdout.flush()
    raise typer.Exit(1 if problems else 0)


def _refuse_a_run_without_faults(config: "RunConfig") -> None:
    """Raises ValueError where the run could only end with the finding that no fault struck."""
    from spare_megatron.faults.rates import draw_faults

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


def print_campaign(
    summary: Summary,
    figures: CampaignFigures,
    processes: ProcessReport,
    problems: Sequence[str],
    run_dir: Path,
    console: Console,
) -> None:
    """The tables of a campaign, and what keeps it from having passed."""
    console.print(_fault_table(figures))
    if figures.goodput is not None:
        console.print(_two_columns("wall time", _time_rows(figures.goodput)))
    console.print(_two_columns("campaign", _rows(summary, figures, processes, run_dir)))
    console.print("FAILED" if problems else "passed", style="bold red" if problems else "bold green")
    for problem in problems:
        console.print(Text(f"  {problem}"))


def _fault_table(figures: CampaignFigures) -> Table:
    table = Table(title="faults", box=box.SIMPLE)
    columns = ("planned", "due", "fired", "masked")
    table.add_column("kind")
    for name in columns:
        table.add_column(name, justify="right")
    for kind, count in figures.faults.items():
        table.add_row(kind, *(str(getattr(count, name)) for name in columns))
    totals = [sum(getattr(count, name) for count in figures.faults.values()) for name in columns]
    table.add_row("all", *map(str, totals), style="bold")
    return table


def _time_rows(goodput: Goodput) -> Iterator[tuple[str, str]]:
    yield "useful", _share(goodput.useful_s, goodput)
    for cause, seconds in sorted(goodput.lost_s.items(), key=lambda item: -item[1]):
        yield cause.replace("_", " "), _share(seconds, goodput)
    yield "all", format_duration(goodput.wall_s)


def _share(seconds: float, goodput: Goodput) -> str:
    return f"{format_duration(seconds)} ({seconds / goodput.wall_s:.1%})"


def _rows(
    summary: Summary, figures: CampaignFigures, processes: ProcessReport, run_dir: Path
) -> Iterator[tuple[str, str]]:
    yield "outcome", summary.outcome + (f": {summary.outcome_reason}" if summary.outcome_reason else "")
    yield "spare check", summary.verdict
    yield "steps committed", str(summary.steps_committed)
    yield "losses of groups, taken in again", f"{figures.losses}, {figures.admissions}"
    yield "microbatches recomputed", str(summary.microbatches_recomputed)
    if figures.recovery_p50_s is not None and figures.recovery_p99_s is not None:
        yield (
            "recovery, median and p99",
            f"{format_duration(figures.recovery_p50_s)}, {format_duration(figures.recovery_p99_s)}",
        )
    if figures.goodput is not None:
        goodput = figures.goodput
        yield "step, longest pause", f"{format_duration(goodput.step_s)}, {format_duration(goodput.longest_pause_s)}"
        yield "goodput", f"{goodput.goodput:.1%}"
    yield "most that a process grew by", _held(processes.growth)
    yield "most that a process held", _held(processes.largest)
    yield "processes, orphans", f"{processes.num_processes}, {len(processes.orphans)}"
    yield "run directory", str(run_dir)


def _held(holdings: Holdings) -> str:
    return (
        f"{holdings.memory_bytes / 2**20:.1f} MiB, {holdings.threads} threads, "
        f"{holdings.file_descriptors} file descriptors"
    )


def _two_columns(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, box=box.SIMPLE)
    for row in rows:
        table.add_row(*row)
    return table
