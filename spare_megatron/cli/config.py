"""`spare config`: presets, and whether a configuration can run."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spare_megatron.cli.command import SpareCommand
from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.cli.preset import HELP, OverridesOption, refusal
from spare_megatron.cli.printing import say, say_json
from spare_megatron.cli.running import this_machine

if TYPE_CHECKING:
    from spare_megatron.config.checks.validate import MachineResources
    from spare_megatron.config.schema import RunConfig

app = typer.Typer(help="List presets; show or check a configuration.", no_args_is_help=True)

Preset = Annotated[Path, typer.Argument(help=HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list", cls=SpareCommand)
def list_presets(as_json: AsJson = False) -> None:
    """List the presets that ship with the package.

    A command takes the name of one wherever it takes a preset file, and so does `include` in a preset. Presets of runs
    are complete but for your corpus; those of models and clusters are for `include`, and `spare submit --cluster`.
    """
    from spare_megatron.config.loader import description, shipped_presets

    presets = {
        name: {"kind": file.parent.name, "description": description(file), "file": str(file)}
        for name, file in shipped_presets().items()
    }
    if as_json:
        say_json(presets)
    else:
        print_presets(presets)


@app.command("check", cls=SpareCommand)
def check(
    preset: Preset,
    overrides: OverridesOption = None,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="Assume a machine with the GPUs and data that the configuration needs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Report whether a configuration can run here.

    Prints every problem, and warnings about settings that may be mistakes. Exit codes: 0 it can run, 2 it cannot.
    """
    from spare_megatron.config.checks.validate import beyond_limits, problems, warnings
    from spare_megatron.config.loader import load_and_judge

    machine_of = fitting_machine if elsewhere else partial(this_machine, "config check")
    loaded, found = load_and_judge(preset, overrides or (), lambda config: problems(config, machine_of(config)))
    config = loaded.config
    machine = machine_of(config)
    found = found or _megatron_problems(config, machine) or beyond_limits(config, machine)
    doubts = [] if found else warnings(config, machine)
    if as_json:
        say_json({"problems": found, "warnings": doubts})
        raise typer.Exit(2 if found else 0)
    if found:
        raise ValueError(refusal(found))
    for text in doubts:
        say(f"warning: {text}")
    say(f"{preset} can run {'on a fitting machine' if elsewhere else 'here'}")


def _megatron_problems(config: "RunConfig", machine: "MachineResources") -> list[str]:
    """Why megatron-core would refuse the fields of `[megatron]`, which it alone knows."""
    if not config.megatron:
        return []
    import torch

    from spare_megatron.config.checks.validate import resolve_device
    from spare_megatron.machine.gpus import name_in_torch
    from spare_megatron.mcore.model.transformer import transformer_config

    device = torch.device(name_in_torch(resolve_device(config, machine)))
    try:
        transformer_config(config, device)
    except ValueError as error:
        return [str(error)]
    return []


def fitting_machine(config: "RunConfig") -> "MachineResources":
    """A machine of which only the configuration itself can ask too much."""
    from spare_megatron.config.checks.validate import MachineResources
    from spare_megatron.config.program_file import judge_program

    num_ranks = max(0, config.parallel.num_ranks)
    program, failure = judge_program(config.program)
    return MachineResources(
        num_gpus=num_ranks,
        num_cores=num_ranks,
        has_corpus=True,
        can_isolate=True,
        program=program,
        program_failure=failure,
    )


def print_presets(presets: Mapping[str, Mapping[str, str]]) -> None:
    rows = [(name, preset["kind"], preset["description"]) for name, preset in presets.items()]
    RunConsole().tables(Table(columns=("preset", "kind", "description"), rows=rows))
