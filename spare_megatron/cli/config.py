"""`spare config`: what a configuration says, where each value comes from, and the sizes that follow."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spare_megatron.cli.command import SpareCommand
from spare_megatron.cli.console import RunConsole, Table
from spare_megatron.cli.preset import HELP, OverridesOption, load_without_problems, refusal
from spare_megatron.cli.printing import say, say_json
from spare_megatron.cli.running import this_machine
from spare_megatron.cli.terms import explained
from spare_megatron.formats.quantities import format_bytes, format_count, format_large

if TYPE_CHECKING:
    from spare_megatron.config.checks.validate import MachineResources
    from spare_megatron.config.loader import LoadedConfig
    from spare_megatron.config.schema import RunConfig
    from spare_megatron.config.training.run_sizes import RunSizes

app = typer.Typer(help="List presets; show or check a configuration.", no_args_is_help=True)

_Preset = Annotated[Path, typer.Argument(help=HELP)]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list", cls=SpareCommand)
def list_presets(as_json: _AsJson = False) -> None:
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


@app.command("show", cls=SpareCommand, epilog=explained("group", "shard", "lane", "host"))
def show(preset: _Preset, overrides: OverridesOption = None, as_json: _AsJson = False) -> None:
    """Print every setting with its origin, and the resulting sizes.

    Sizes: ranks, parameters, global batch, memory of the fullest rank, a checkpoint. Needs no corpus, so a preset of a
    model can be shown, too.
    """
    from spare_megatron.config.checks.validate import on_device
    from spare_megatron.config.training.run_sizes import run_sizes

    _, loaded = load_without_problems(
        preset, overrides or (), fitting_machine, restrict=_with_some_corpus, where=_alone(preset)
    )
    config = loaded.config
    facts = run_sizes(on_device(config, fitting_machine(config)))
    endured = _endured_losses(config)
    if as_json:
        table = {
            key: {"value": value, "origin": loaded.provenance.get(key, "default")}
            for key, value in every_setting(config)
        }
        say_json({"settings": table, **dataclasses.asdict(facts), "endured_losses": endured})
        return
    print_config(loaded, facts, endured)


@app.command("check", cls=SpareCommand)
def check(
    preset: _Preset,
    overrides: OverridesOption = None,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="Assume a machine with the GPUs and data that the configuration needs.")
    ] = False,
    as_json: _AsJson = False,
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


def _endured_losses(config: "RunConfig") -> float:
    """Expected losses before a wipe-out of shards; where every group reads all data, the last group is enough."""
    from spare_megatron.core.saves.endurance import endured_losses

    if config.data.access == "shared":
        return config.layout.num_groups - 1
    return endured_losses(config.layout.num_groups, config.spare.redundancy)


def _alone(preset: Path) -> str:
    """What a preset of a cluster lacks, if it is one that ships."""
    from spare_megatron.config.loader import preset_file

    if preset_file(preset).parent.name != "cluster":
        return ""
    return f" alone, as {preset} is a preset of a cluster: add the groups that fill it, as --set layout.num_groups=8"


def _with_some_corpus(config: "RunConfig") -> "RunConfig":
    """The configuration, with a corpus in the place of a missing one; a blend is one."""
    if config.data.corpora:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, corpus="any"))


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


def print_config(loaded: "LoadedConfig", facts: "RunSizes", endured_losses: float) -> None:
    """Every setting, its value, and the file or argument that set it; and the sizes that follow."""
    rows = [(key, _text(value), loaded.provenance.get(key, "")) for key, value in every_setting(loaded.config)]
    RunConsole().tables(
        Table(columns=("setting", "value", "from"), rows=rows), Table(rows=list(_rows(facts, endured_losses)))
    )


def every_setting(config: "RunConfig") -> Iterator[tuple[str, Any]]:
    """Every setting, those in samples, too, whether or not they were given."""
    from spare_megatron.config.batch_size import sequences_per_microbatch
    from spare_megatron.config.resolved import settings

    each, ramp = sequences_per_microbatch(config), config.spare.ramp
    grows = [ramp.start * each, ramp.increment * each, ramp.before(ramp.steps) * each] if ramp.steps else None
    in_samples = {"train.global_batch_size": ramp.largest * each, "train.rampup_batch_size": grows}
    return ((key, in_samples.get(key, value)) for key, value in settings(config))


def _rows(facts: "RunSizes", endured_losses: float) -> Iterator[tuple[str, str]]:
    memory = facts.memory
    lanes = f", {facts.lanes_per_group} lanes" if facts.lanes_per_group > 1 else ""
    yield "ranks", f"{facts.num_ranks}, {facts.ranks_per_group} in each group{lanes}"
    yield "parameters", format_large(facts.num_parameters)
    if facts.num_active_parameters != facts.num_parameters:
        yield "  active for a token", format_large(facts.num_active_parameters)
    batch = f"{facts.microbatches_per_step} microbatches, {facts.sequences_per_step} sequences"
    yield "global batch", f"{batch}, {format_large(facts.tokens_per_step)} tokens"
    yield "tokens of the run", format_large(facts.tokens)
    yield "losses endured", f"{format_count(endured_losses)} on average, without rejoins"
    yield "gradient bucket", f"{facts.bucket_mib:g} MiB"
    if facts.nvlink_traffic > 1:
        yield "tensor-parallel sums", f"{facts.nvlink_traffic:.2g} times the bytes of NVLink SHARP, which is off here"
    yield "memory of the fullest rank", f"{format_bytes(memory.total_bytes)}, plus libraries"
    for name, size in (
        ("parameters", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("reduction", memory.reduction_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations, at most about", memory.activations_bytes),
        ("NCCL between groups, about", memory.communicators_bytes),
    ):
        yield f"  {name}", format_bytes(size)
    yield "a checkpoint", format_bytes(facts.checkpoint_bytes)


def _text(value: Any) -> str:
    if value is None:
        return "absent"
    return str(value).lower() if isinstance(value, bool) else str(value)
