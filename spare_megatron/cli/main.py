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

app = typer.Typer(
    name="spare",
    help="GPT pretraining on megatron-core that masks the loss of data-parallel groups.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # rewraps paragraphs; rich markup would drop [faults]
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"spare_megatron {__version__}")
        raise typer.Exit


@app.callback()
def _spare(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GPT pretraining on megatron-core that masks the loss of data-parallel groups."""


_BEFORE, _RUN, _AFTER = "Before a run", "Runs and jobs", "After a run"

app.command("plan", rich_help_panel=_BEFORE)(plan.plan)
app.command("simulate", rich_help_panel=_BEFORE)(simulate.simulate)
app.command("preprocess", rich_help_panel=_BEFORE)(preprocess.preprocess)
app.add_typer(tokenizer.app, name="tokenizer", rich_help_panel=_BEFORE)
app.add_typer(config.app, name="config", rich_help_panel=_BEFORE)
app.command("doctor", rich_help_panel=_BEFORE)(doctor.doctor)
app.command("check-program", rich_help_panel=_BEFORE)(check_program.check_program)
app.add_typer(bench.app, name="bench", rich_help_panel=_BEFORE)
app.command("train", rich_help_panel=_RUN)(train.train)
app.command("supervise", rich_help_panel=_RUN)(job.supervise)
app.command("submit", rich_help_panel=_RUN)(submit.submit)
app.command("campaign", rich_help_panel=_RUN)(campaign.campaign)
app.command("status", rich_help_panel=_RUN)(status.status)
app.command("logs", rich_help_panel=_RUN)(job.logs)
app.command("drain", rich_help_panel=_RUN)(membership.drain)
app.command("grow", rich_help_panel=_RUN)(membership.grow)
app.command("serve", rich_help_panel=_RUN)(serve.serve)
app.command("cancel", rich_help_panel=_RUN)(job.cancel)
app.command("check", rich_help_panel=_AFTER)(check.check)
app.command("audit", rich_help_panel=_AFTER)(audit.audit)
app.command("replay", rich_help_panel=_AFTER)(replay.replay)
app.command("report", rich_help_panel=_AFTER)(report.report)
app.command("timeline", rich_help_panel=_AFTER)(timeline.timeline)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=_AFTER)
