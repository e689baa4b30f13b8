"""`spare import-trace`: records of faults of machines become a trace for the simulator."""

import csv
from collections import Counter
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument

from spare_megatron.cli.command import option, with_options
from spare_megatron.cli.printing import say
from spare_megatron.formats.output import whole_file
from spare_megatron.formats.quantities import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportTraceOptions:
    """Options of `spare import-trace` as the user wrote them."""

    records: Annotated[Path, Argument(help="Table or events of Slurm, Kubernetes or InfiniteHBD.", metavar="FILE")]
    out: Path = option("File of the trace, for `spare simulate --trace`.", default=MISSING)
    ignore: list[str] | None = option(
        "Faults with this text in their cause stop no machine. Repeatable.", metavar="TEXT", shown="all stop it"
    )


@with_options(ImportTraceOptions)
def import_trace(given: ImportTraceOptions) -> None:
    """Convert records of machines' faults to a trace.

    FILE is `sacctmgr show event event=node start=... --parsable2`, `sacct --format=End,State,FailedNode --parsable2`,
    `kubectl get events -o json`, events as JSON lines, or a table node,start_day,end_day,level,class, as of
    InfiniteHBD's trace. Overlapping faults of a machine are merged.

    Example: `spare import-trace events.txt --ignore maintenance --out trace.csv`
    """
    from spare_megatron.tools.simulate.trace_imports import faults_in
    from spare_megatron.tools.simulate.traces import end_of, machines_away, merged

    faults = faults_in(given.records)
    causes = Counter(fault.cause for fault in faults)
    ignored = set[str]()
    for text in given.ignore or ():
        if not (found := {cause for cause in causes if text.lower() in cause.lower()}):
            raise ValueError(f"--ignore {text}: no fault has that cause; known: {', '.join(causes)}")
        ignored |= found
    losses = merged(fault for fault in faults if fault.cause not in ignored)
    if not losses:
        raise ValueError(f"{given.records} holds no faults that stop a machine")
    with whole_file("--out", given.out) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("seconds", "machine", "repair_s", "cause"))
        for loss in losses:
            repair_s = "" if loss.repair_s is None else round(loss.repair_s, 3)
            rows.writerow((round(loss.at_s, 3), loss.machine, repair_s, loss.cause))
    for cause, count in causes.most_common():
        say(f"{count:7} {cause}{' (ignored)' if cause in ignored else ''}")
    if num_unknown := sum(loss.repair_s is None for loss in losses):
        away = f"machines away not known, as the ends of {num_unknown} are not"
    else:
        mean, most = machines_away(losses)
        away = f"{mean:.1f} machines away on average, {most} at most"
    say(
        f"{len(losses)} absences of {len({loss.machine for loss in losses})} machines in "
        f"{format_duration(max(map(end_of, losses)))}: {away}; trace in {given.out}"
    )
