"""`spare check`: what the journal of a run proves."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from spare_megatron.cli.errors import explained_errors
from spare_megatron.cli.printing import say, say_json
from spare_megatron.formats.quantities import format_steps

_EXIT_CODES = {"valid": 0, "invalid": 1, "unknown": 3}


def check(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Prove a run from its journal.

    The proof: every committed step counted each microbatch exactly once, and all groups kept the same parameters.

    Exit codes: 0 valid, 1 invalid, 2 no journal, 3 unknown (the journal lacks records that the proof needs).
    """
    from spare_megatron.config.training.run_terms import terms_in
    from spare_megatron.journal.journal_index import JournalIndex
    from spare_megatron.journal.proofs.proof import check as check_view

    with explained_errors("check"):
        verdict = check_view(JournalIndex(run_dir, settings=terms_in(run_dir)))
    if as_json:
        say_json(asdict(verdict))
    else:
        say(f"{verdict.verdict}: {format_steps(verdict.steps_committed)} committed")
        for reason in verdict.reasons:
            say(f"  {reason}")
    raise typer.Exit(_EXIT_CODES[verdict.verdict])
