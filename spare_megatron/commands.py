"""The `spare` command line: registers the commands, those of the tools included."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from spare_megatron.cli import check, checkpoint, config, job, status, submit, train
from spare_megatron.cli.command import SpareCommand, SpareGroup, explained
from spare_megatron.cli.printing import say
from spare_megatron.tools.bench import bench
from spare_megatron.tools.campaign import campaign_command as campaign
from spare_megatron.tools.convert import convert_command
from spare_megatron.tools.doctor import check_program, doctor
from spare_megatron.tools.plan import plan_command as plan
from spare_megatron.tools.plan import show_command
from spare_megatron.tools.replay import data_command
from spare_megatron.tools.replay import replay_command as replay
from spare_megatron.tools.report import report_commands
from spare_megatron.tools.simulate import import_trace
from spare_megatron.tools.simulate import simulate_command as simulate
from spare_megatron.tools.text import preprocess
from spare_megatron.tools.text import tokenizer_command as tokenizer
from spare_megatron.tools.weights import weights_commands
from spare_megatron.version import __version__

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

_COMMANDS: Mapping[Callable[..., None], tuple[str, Sequence[str]]] = {
    plan.plan: (_BEFORE, ("group", "shard", "host", "wipe-out")),
    simulate.simulate: (_BEFORE, ("group", "shard", "host", "wipe-out")),
    import_trace.import_trace: (_BEFORE, ()),
    preprocess.preprocess: (_BEFORE, ()),
    convert_command.convert: (_BEFORE, ("group", "shard", "microbatch")),
    doctor.doctor: (_BEFORE, ()),
    check_program.check_program: (_BEFORE, ("microbatch", "group")),
    train.train: (_RUN, ("step", "group", "load", "incarnation", "scatter")),
    job.supervise: (_RUN, ()),
    submit.submit: (_RUN, ()),
    campaign.campaign: (_RUN, ("step", "group", "load")),
    status.status: (_RUN, ("step", "group", "load", "incarnation", "scatter")),
    job.logs: (_RUN, ("group", "incarnation")),
    job.drain: (_RUN, ("group", "drain", "place")),
    job.grow: (_RUN, ("group", "place")),
    report_commands.serve: (_RUN, ("step", "load", "patch", "scatter")),
    job.cancel: (_RUN, ()),
    check.check: (_AFTER, ("step", "attempt", "epoch", "fence")),
    check.audit: (_AFTER, ("step", "attempt", "audit")),
    replay.replay: (_AFTER, ("step", "microbatch", "group")),
    data_command.data: (_AFTER, ("step", "microbatch", "shard")),
    report_commands.report: (_AFTER, ("step", "load", "patch", "scatter")),
    report_commands.timeline: (_AFTER, ("step", "attempt", "incarnation")),
}
"""For each command its heading, and the terms that its help explains."""

for _command, (_panel, _terms) in _COMMANDS.items():
    _name = _command.__name__.replace("_", "-")
    app.command(_name, cls=SpareCommand, epilog=explained(*_terms), rich_help_panel=_panel)(_command)
app.add_typer(tokenizer.app, name="tokenizer", rich_help_panel=_BEFORE)
app.add_typer(config.app, name="config", rich_help_panel=_BEFORE)
_terms = ("group", "shard", "lane", "host", "wipe-out")
config.app.command("show", cls=SpareCommand, epilog=explained(*_terms))(show_command.show)
app.add_typer(bench.app, name="bench", rich_help_panel=_BEFORE)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=_AFTER)
checkpoint.app.command("export", cls=SpareCommand)(weights_commands.export_weights)
checkpoint.app.command("import", cls=SpareCommand)(weights_commands.import_weights)
