"""Figures of a run under many faults, from its journal alone, and the tables of them."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.formats.quantities import format_duration
from spare_megatron.journal.files import Journal
from spare_megatron.journal.fold import Fold
from spare_megatron.journal.proofs.proof import fold_journal, is_due
from spare_megatron.journal.records import FaultRecord
from spare_megatron.journal.run_record import RunRecord
from spare_megatron.journal.state.follow import run_state_of
from spare_megatron.journal.state.goodput import Goodput
from spare_megatron.journal.state.summary import Summary
from spare_megatron.tools.campaign.process_watch import Holdings, ProcessReport


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCount:
    """Faults of one kind: `due` if the run reached their moment and group, `masked` if their step was committed."""

    planned: int
    due: int
    fired: int
    masked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignFigures:
    """Figures beyond `summary.json`; recovery times are None without a recovery. `losses` counts fences."""

    faults: Mapping[str, FaultCount]
    losses: int
    admissions: int
    recovery_p50_s: float | None
    recovery_p99_s: float | None
    goodput: Goodput | None

    def problems(self, summary: Summary) -> list[str]:
        """Why the run did not withstand its faults; empty if it did."""
        found = [f"spare check: {reason}" for reason in summary.reasons]
        if summary.verdict != "valid" and not found:
            found.append(f"spare check: {summary.verdict}")
        if summary.outcome != "finished":
            found.append(f"the run ended as {summary.outcome}: {summary.outcome_reason}")
        for kind, count in self.faults.items():
            if count.fired < count.due:
                found.append(f"{kind}: {count.fired} of {count.due} faults that were due struck")
            if count.masked < count.fired:
                found.append(f"{kind}: {count.masked} of {count.fired} faults that struck were masked")
        if not any(count.fired for count in self.faults.values()):
            found.append("no fault struck; set faults.mean_steps lower, or train longer")
        return found


def campaign_figures(
    journal: Journal, summary: Summary, from_outside: Mapping[str, FaultCount] | None = None
) -> CampaignFigures:
    """Figures of an ended run, with faults that its journal does not know; raises ValueError unless the journal has
    exactly one run record.
    """
    runs = journal.of(RunRecord)
    if len(runs) != 1:
        raise ValueError(f"the journal has {len(runs)} run records, expected 1; is it that of one run?")
    fold = fold_journal(journal, runs[0])
    fences = [entry for entry in fold.entries.values() if entry["entry"] == "fence"]
    run_state = run_state_of(journal)
    recoveries_s = [recovery.total_s for recovery in summary.recoveries]
    p50_s, p99_s = np.percentile(recoveries_s, [50, 99]) if recoveries_s else (None, None)
    members = [frozenset(range(runs[0].num_groups)), *(commit.members for commit in fold.kept_commits)]
    return CampaignFigures(
        faults={**_count_faults(journal, runs[0], fold), **(from_outside or {})},
        losses=len({(entry["group"], entry.get("incarnation", 0)) for entry in fences}),
        admissions=sum(len(after - before) for before, after in itertools.pairwise(members)),
        recovery_p50_s=None if p50_s is None else float(p50_s),
        recovery_p99_s=None if p99_s is None else float(p99_s),
        goodput=None if run_state.end is None else run_state.goodput(now_s=0.0),
    )


def _count_faults(journal: Journal, run: RunRecord, fold: Fold) -> dict[str, FaultCount]:
    struck = {(r.step, r.group, r.rank, r.phase, r.kind) for r in journal.of(FaultRecord)}
    committed = {commit.step for commit in fold.kept_commits}
    planned, due, fired, masked = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for fault in run.faults:
        kind, step = fault["kind"], fault["step"]
        has_fired = (step, fault["group"], fault["rank"], fault["phase"], kind) in struck
        planned[kind] += 1
        due[kind] += has_fired or is_due(fault, fold)
        fired[kind] += has_fired
        masked[kind] += has_fired and step in committed
    return {
        kind: FaultCount(planned=planned[kind], due=due[kind], fired=fired[kind], masked=masked[kind])
        for kind in sorted(planned)
    }


def print_campaign(
    summary: Summary,
    figures: CampaignFigures,
    processes: ProcessReport,
    problems: Sequence[str],
    run_dir: Path,
    console: RunConsole,
) -> None:
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
