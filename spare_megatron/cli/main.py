"""The `spare` command line."""

if __name__ == "__main__":  # before the imports below, which take time
    from spare_megatron.cli.entry import main

    main()

from typing import Annotated

import typer

from spare_megatron import __version__
from spare_megatron.cli import (
    audit,
    bench,
    campaign,
    check,
    check_program,
    checkpoint,
    config,
    doctor,
    job,
    membership,
    plan,
    preprocess,
    replay,
    report,
    serve,
    simulate,
    status,
    submit,
    timeline,
    tokenizer,
    train,
)
from spare_megatron.cli.command import SpareCommand, SpareGroup
from spare_megatron.cli.printing import say

app = typer.Typer(
    name="spare",
    help="GPT pretraining on megatron-core that masks the loss of data-parallel groups.",
    no_args_is_help=True,
    cls=SpareGroup,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        say(f"spare_megatron {__version__}")
        raise typer.Exit


@app.callback()
def _spare(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GPT pretraining on megatron-core that masks the loss of data-parallel groups."""


_BEFORE, _RUN, _AFTER = "Before a run", "Runs and jobs", "After a run"

app.command("plan", cls=SpareCommand, rich_help_panel=_BEFORE)(plan.plan)
app.command("simulate", cls=SpareCommand, rich_help_panel=_BEFORE)(simulate.simulate)
app.command("preprocess", cls=SpareCommand, rich_help_panel=_BEFORE)(preprocess.preprocess)
app.add_typer(tokenizer.app, name="tokenizer", rich_help_panel=_BEFORE)
app.add_typer(config.app, name="config", rich_help_panel=_BEFORE)
app.command("doctor", cls=SpareCommand, rich_help_panel=_BEFORE)(doctor.doctor)
app.command("check-program", cls=SpareCommand, rich_help_panel=_BEFORE)(check_program.check_program)
app.add_typer(bench.app, name="bench", rich_help_panel=_BEFORE)
app.command("train", cls=SpareCommand, rich_help_panel=_RUN)(train.train)
app.command("supervise", cls=SpareCommand, rich_help_panel=_RUN)(job.supervise)
app.command("submit", cls=SpareCommand, rich_help_panel=_RUN)(submit.submit)
app.command("campaign", cls=SpareCommand, rich_help_panel=_RUN)(campaign.campaign)
app.command("status", cls=SpareCommand, rich_help_panel=_RUN)(status.status)
app.command("logs", cls=SpareCommand, rich_help_panel=_RUN)(job.logs)
app.command("drain", cls=SpareCommand, rich_help_panel=_RUN)(membership.drain)
app.command("grow", cls=SpareCommand, rich_help_panel=_RUN)(membership.grow)
app.command("serve", cls=SpareCommand, rich_help_panel=_RUN)(serve.serve)
app.command("cancel", cls=SpareCommand, rich_help_panel=_RUN)(job.cancel)
app.command("check", cls=SpareCommand, rich_help_panel=_AFTER)(check.check)
app.command("audit", cls=SpareCommand, rich_help_panel=_AFTER)(audit.audit)
app.command("replay", cls=SpareCommand, rich_help_panel=_AFTER)(replay.replay)
app.command("report", cls=SpareCommand, rich_help_panel=_AFTER)(report.report)
app.command("timeline", cls=SpareCommand, rich_help_panel=_AFTER)(timeline.timeline)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=_AFTER)
