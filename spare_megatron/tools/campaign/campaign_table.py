"""The summary that `spare campaign` prints at its end."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.formats.quantities import format_duration
from spare_megatron.journal.state.goodput import Goodput
from spare_megatron.journal.state.summary import Summary
from spare_megatron.tools.campaign.campaign_figures import CampaignFigures
from spare_megatron.tools.campaign.process_watch import Holdings, ProcessReport


def print_campaign(
    summary: Summary,
    figures: CampaignFigures,
    processes: ProcessReport,
    problems: Sequence[str],
    run_dir: Path,
    console: RunConsole,
) -> None:
    """The tables of a campaign, and what keeps it from having passed."""
    tables = [_fault_table(figures)]
    if figures.goodput is not None:
        tables.append(Table(title="wall time", rows=list(_time_rows(figures.goodput))))
    console.tables(*tables, Table(title="campaign", rows=list(_rows(summary, figures, processes, run_dir))))
    console.line("FAILED" if problems else "passed", style="bold red" if problems else "bold green")
    for problem in problems:
        console.line(f"  {problem}")


def _fault_table(figures: CampaignFigures) -> Table:
    columns = ("planned", "due", "fired", "masked")
    counts = {kind: [getattr(count, name) for name in columns] for kind, count in figures.faults.items()}
    counts["all"] = [sum(getattr(count, name) for count in figures.faults.values()) for name in columns]
    rows = [(kind, *map(str, count)) for kind, count in counts.items()]
    return Table(title="faults", columns=("kind", *columns), rows=rows, has_numbers=True, bold_row=len(rows) - 1)


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
