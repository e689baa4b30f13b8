"""`spare train`: one run on this machine."""

import datetime
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from spare_megatron.cli.errors import explained_errors

EXIT_CODES = {"finished": 0, "wipe_out": 3, "halted": 4, "failed": 1, "interrupted": 130}
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def train(
    config: Annotated[Path, typer.Option(help="The run preset, a TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides one setting; repeatable.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run; runs/NAME-TIME when absent. Never an existing run's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and progress on stderr.")] = False,
) -> None:
    """Train a GPT, going on through lost groups.

    Exit codes: 0 all steps committed and the journal valid, 1 the run failed or its journal does not prove it,
    2 the configuration cannot run, 3 wipe-out, 4 halted because groups disagreed or the training diverged,
    130 interrupted.
    """
    from spare_megatron.cli.progress import RunProgress, print_summary
    from spare_megatron.config.loader import load_run_config
    from spare_megatron.config.validate import problems, warnings
    from spare_megatron.runtime.run import look_at_machine, start_run

    console = Console(stderr=as_json)
    with explained_errors("train"):
        loaded = load_run_config(config, overrides or ()).config
        machine = look_at_machine(loaded)
        found = problems(loaded, machine)
        if found:
            raise ValueError("this configuration cannot run:\n" + "\n".join(f"  - {text}" for text in found))
        for text in warnings(loaded, machine):
            typer.echo(f"spare train: warning: {text}", err=True)
        folder = run_dir or Path("runs") / f"{loaded.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        for number in _ENDING_SIGNALS:
            signal.signal(number, _interrupt)
        try:
            with RunProgress(loaded, console) as progress:
                summary = start_run(loaded, folder, progress.take)
        except KeyboardInterrupt:
            where = f"the run so far is in {folder}" if folder.exists() else "the run had not begun"
            typer.echo(f"spare train: interrupted; all processes are ended, {where}", err=True)
            raise typer.Exit(EXIT_CODES["interrupted"]) from None
    print_summary(summary, folder, console)
    if as_json:
        sys.stdout.write(json.dumps({"run_dir": str(folder), **asdict(summary)}) + "\n")
    is_proven = summary.verdict == "valid"
    raise typer.Exit(EXIT_CODES[summary.outcome] or (0 if is_proven else 1))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does. Once it is ending, no further signal may leave processes behind."""
    for number in _ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
