"""`spare report`: one page of what happened in a run, or in two."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.folders import check_output_file
from spare_megatron.cli.printing import say

if TYPE_CHECKING:
    from spare_megatron.journal.state.run_state import RunState

DEFAULT_NAME = "report.html"
PROOF_S = 10.0
"""For which the journal of a page is looked at for the verdict."""


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Directory of a run, or of two runs to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: report.html in the first directory]")
    ] = None,
) -> None:
    """Write an HTML report of a run, or of two runs side by side.

    The page is one file and needs no network. For a run that goes on it shows what has happened so far. Prints the
    path of the file.
    """
    from spare_megatron.formats.output import whole_file
    from spare_megatron.journal.state.follow import read_run_state
    from spare_megatron.tools.report.history import history_of
    from spare_megatron.tools.report.page import comparison
    from spare_megatron.tools.report.page import report as page_of

    with explained_errors("report"):
        if len(run_dirs) > 2:
            raise ValueError(f"{len(run_dirs)} directories: a page holds one run, or two to compare")
        target = out or run_dirs[0] / DEFAULT_NAME
        if out is not None or run_dirs[0].is_dir():  # else that is what is wrong
            check_output_file("--out", target)
        is_pair = len(run_dirs) == 2
        standings = [(folder, read_run_state(folder, with_params=is_pair)) for folder in run_dirs]
        now_s = time.time()
        histories = [history_of(run_state, verdict_of(folder, run_state), now_s) for folder, run_state in standings]
        if is_pair:
            page = comparison({str(folder): history for folder, history in zip(run_dirs, histories, strict=True)})
        else:
            page = page_of(histories[0], config_of(run_dirs[0]))
        with whole_file("--out", target) as file:
            file.write_text(page)
    say(str(target))


def config_of(run_dir: Path) -> str:
    """The resolved configuration as text, without what it exports; empty where there is none to be read."""
    from spare_megatron.config.resolved import without_exports

    try:
        return without_exports((run_dir / "config.toml").read_text())
    except (FileNotFoundError, PermissionError):  # a simulated run has none; another user's may be private
        return ""


def verdict_of(run_dir: Path, run_state: "RunState") -> str:
    """What is known of the proof from the journal: as the run's summary has it, or found now if soon."""
    from spare_megatron.config.training.run_terms import terms_in
    from spare_megatron.formats.whole_files import json_object
    from spare_megatron.journal.journal_index import JournalIndex
    from spare_megatron.journal.proofs.proof import check

    summary = run_dir / "summary.json"
    if run_state.end is not None and summary.exists():
        found = json_object(summary)
        return "; ".join((found["verdict"], *found["reasons"]))
    try:
        until_s = time.monotonic() + PROOF_S
        verdict = check(JournalIndex(run_dir, until_s=until_s, settings=terms_in(run_dir)))
    except TimeoutError:
        return f"not run, it takes more than {PROOF_S:.0f} s: spare check {run_dir}"
    return "; ".join((verdict.verdict, *verdict.reasons))
