"""The summary that `spare campaign` prints at its end."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spare_megatron.driver.process_watch import Holdings, ProcessReport
from spare_megatron.journal.campaign import CampaignFigures
from spare_megatron.journal.goodput import Goodput
from spare_megatron.journal.quantities import format_duration
from spare_megatron.journal.summary import Summary

if TYPE_CHECKING:
    pass


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
    yield "losses, admissions of groups", f"{figures.losses}, {figures.admissions}"
    yield "microbatches computed again", str(summary.microbatches_recomputed)
    if figures.recovery_p50_s is not None and figures.recovery_p99_s is not None:
        yield (
            "recovery, median and p99",
            f"{format_duration(figures.recovery_p50_s)}, {format_duration(figures.recovery_p99_s)}",
        )
    if figures.goodput is not None:
        goodput = figures.goodput
        yield "step, longest pause", f"{format_duration(goodput.step_s)}, {format_duration(goodput.longest_pause_s)}"
        yield "goodput", f"{goodput.goodput:.1%}"
    yield "largest growth of a process", _held(processes.growth)
    yield "largest process", _held(processes.largest)
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
