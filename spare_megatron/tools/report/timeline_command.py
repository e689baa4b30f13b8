"""`spare timeline`: what all ranks did around a loss, for a trace viewer."""

import json
from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.folders import check_output_file, is_run_dir
from spare_megatron.cli.printing import say

DEFAULT_NAME = "timeline.json"


def timeline(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")],
    step: Annotated[
        int | None,
        typer.Option(help="Write only this step and its neighbours. [default: all events and the last steps]"),
    ] = None,
    margin: Annotated[int, typer.Option(help="Number of neighbours on each side of --step.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: timeline.json in the run's directory]")
    ] = None,
) -> None:
    """Write a trace of all ranks around losses and rejoins.

    Open it at ui.perfetto.dev or chrome://tracing. It has forward and backward passes of each microbatch, transfers
    between stages, reductions, votes, updates and recoveries, for all ranks on one time axis; for a lost rank also the
    operation that it did not finish. Prints the path of the file.
    """
    from spare_megatron.formats.output import whole_file
    from spare_megatron.journal.files import read_journal
    from spare_megatron.journal.spans import read_spans_of
    from spare_megatron.tools.report.trace import trace_of

    with explained_errors("timeline"):
        if margin < 0:
            raise ValueError(f"--margin {margin} must be at least 0")
        if not is_run_dir(run_dir):
            raise ValueError(f"{run_dir} is the folder of a job; name one of its runs, attempt-NNN in it")
        target = out or run_dir / DEFAULT_NAME
        check_output_file("--out", target)
        steps = None if step is None else range(step - margin, step + margin + 1)
        trace = trace_of(read_spans_of(run_dir), read_journal(run_dir), steps)
        with whole_file("--out", target) as file:
            file.write_text(json.dumps(trace))
    say(str(target))
