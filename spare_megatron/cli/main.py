"""The `spare` command line."""

from typing import Annotated

import typer

from spare_megatron import __version__
from spare_megatron.cli import (
    bench,
    campaign,
    check,
    checkpoint,
    config,
    doctor,
    job,
    plan,
    preprocess,
    report,
    serve,
    simulate,
    status,
    submit,
    supervise,
    timeline,
    train,
)

app = typer.Typer(
    name="spare",
    help="GPT pretraining on megatron-core that masks the loss of data-parallel groups.",
    no_args_is_help=True,
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


app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("preprocess")(preprocess.preprocess)
app.command("train")(train.train)
app.command("supervise")(supervise.supervise)
app.command("doctor")(doctor.doctor)
app.command("submit")(submit.submit)
app.command("status")(status.status)
app.command("logs")(job.logs)
app.command("cancel")(job.cancel)
app.command("campaign")(campaign.campaign)
app.command("check")(check.check)
app.command("report")(report.report)
app.command("serve")(serve.serve)
app.command("timeline")(timeline.timeline)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")

if __name__ == "__main__":
    app()
