"""`spare train`: one run on this machine."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.running import INTERRUPTED, choose_run_dir, load_runnable, run_and_show, told_interruption

EXIT_CODES = {"finished": 0, "wipe_out": 3, "halted": 4, "failed": 1, "interrupted": INTERRUPTED}


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
    from spare_megatron.cli.progress import print_summary

    console = Console(stderr=as_json)
    with explained_errors("train"):
        loaded = load_runnable("train", config, overrides or ())
        folder = choose_run_dir(loaded, run_dir)
        with told_interruption("train", folder):
            summary = run_and_show(loaded, folder, console)
    print_summary(summary, folder, console)
    if as_json:
        sys.stdout.write(json.dumps({"run_dir": str(folder), **asdict(summary)}) + "\n")
    is_proven = summary.verdict == "valid"
    raise typer.Exit(EXIT_CODES[summary.outcome] or (0 if is_proven else 1))
