"""`spare report`: one page of what happened in a run, or in two."""

from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.errors import explained_errors

DEFAULT_NAME = "report.html"


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Directory of a run, or of two to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; report.html in the (first) directory when absent.")
    ] = None,
) -> None:
    """Write one HTML page: what happened in a run and what it cost. It needs no network, and takes two runs, too.

    A run that is still going on gives a page as well, of what has happened so far.
    """
    from spare_megatron.journal.files import read_journal
    from spare_megatron.report.history import history_of
    from spare_megatron.report.page import comparison
    from spare_megatron.report.page import report as page_of

    with explained_errors("report"):
        if len(run_dirs) > 2:
            raise ValueError(f"{len(run_dirs)} directories: a page holds one run, or two to compare")
        histories = [history_of(read_journal(folder)) for folder in run_dirs]
        if len(histories) == 1:
            config = run_dirs[0] / "config.toml"
            page = page_of(histories[0], config.read_text() if config.exists() else "")
        else:
            page = comparison({str(folder): history for folder, history in zip(run_dirs, histories, strict=True)})
        target = out or run_dirs[0] / DEFAULT_NAME
        target.write_text(page)
    typer.echo(str(target))
